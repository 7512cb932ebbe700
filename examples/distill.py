"""Distillation on CartPole, with RolloutStorage("distillation", ...).

A teacher that observes the full state is trained with PPO (see ppo.py). A student that does not observe the velocities
then acts in the environment, while the teacher labels every step with its own action (DAgger). The student has a GRU to
infer what it does not observe, and learns to predict the teacher's actions from the stored steps, in temporal order.
During training it samples its actions from its policy, to visit more than the few states of good play; in the final
evaluation both take their best action, on the same new episodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import ppo
import torch
from common import HideVelocities, Result, Run, arguments, make_envs, report
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy

from rlstore import RolloutStorage

NUM_ENVS = 16
NUM_STEPS = 64
NUM_EPOCHS = 2
UNROLL = 16  # steps between gradient steps; the length of truncated backpropagation through time
HIDDEN = 64
LEARNING_RATE = 2e-3
MAX_GRAD_NORM = 1.0
TEACHER_STEPS = 150_000
OBS_SCALE = torch.tensor([1 / 2.4, 1 / 0.21])  # scales the cart's position and the pole's angle to about [-1, 1]


class Student(nn.Module):
    """A recurrent policy that observes the cart's position and the pole's angle."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRUCell(2, HIDDEN)
        self.logits = nn.Linear(HIDDEN, 2)

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step: (B, 2) observations and (B, hidden) states in, (B, 2) logits and the next states out."""
        state = self.memory(obs * OBS_SCALE, state)
        return self.logits(state), state


def visible(obs: Tensor) -> Tensor:
    """The part of the full observations that the student observes."""
    return obs[:, HideVelocities.VISIBLE]


def update(
    student: Student, optimizer: torch.optim.Optimizer, storage: RolloutStorage, first: Tensor, run: Run
) -> float:
    """Train on the rollout in temporal order, from the initial states ``first``; returns the last loss."""
    loss = torch.zeros(())
    for _ in range(NUM_EPOCHS):
        state, errors = first, []
        for batch in run.storage_watch.around(storage.generator()):
            logits, state = student(batch.observations["policy"], state)
            errors.append(cross_entropy(logits, batch.privileged_actions.squeeze(-1).long()))
            state = state * (batch.dones == 0)
            if len(errors) == UNROLL:
                loss = torch.stack(errors).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(student.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                state, errors = state.detach(), []
    return loss.item()


def evaluate(act: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], seed: int, episodes: int = 100) -> float:
    """Mean return of one episode in each of many environments; ``act``: obs and state to logits and state."""
    envs = make_envs(episodes)
    obs, _ = envs.reset(seed=seed)
    state = torch.zeros(episodes, HIDDEN)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        with torch.inference_mode():
            logits, state = act(torch.from_numpy(obs), state)
        obs, rewards, terminated, truncated, _ = envs.step(logits.argmax(-1).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def train(steps: int, seed: int = 0, teacher_steps: int = TEACHER_STEPS) -> Result:
    """Train a teacher, distill it into a student, and evaluate both on the same new episodes."""
    torch.manual_seed(seed)
    teacher = ppo.ActorCritic()
    taught = ppo.train(teacher_steps, seed, threshold=475.0, agent=teacher)
    student = Student()
    optimizer = torch.optim.Adam(student.parameters(), lr=LEARNING_RATE)
    envs = make_envs(NUM_ENVS)
    obs = torch.from_numpy(envs.reset(seed=seed)[0])
    example = TensorDict({"policy": visible(obs)}, batch_size=[NUM_ENVS])
    storage = RolloutStorage("distillation", NUM_ENVS, NUM_STEPS, example, (1,), seed=seed)
    run = Run("distill", NUM_ENVS, steps)
    state = torch.zeros(NUM_ENVS, HIDDEN)

    while run.active:
        # Every rollout covers only a few states; a decaying learning rate averages over many rollouts.
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - run.env_steps / steps)
        first = state
        with torch.no_grad():
            for _ in range(NUM_STEPS):
                logits, state = student(visible(obs), state)
                actions = Categorical(logits=logits, validate_args=False).sample()
                next_obs, rewards, terminated, truncated, _ = envs.step(actions.numpy())
                ended = terminated | truncated

                transition = RolloutStorage.Transition()
                transition.observations = TensorDict({"policy": visible(obs)}, batch_size=[NUM_ENVS])
                transition.actions = actions.unsqueeze(-1)
                transition.privileged_actions = teacher.policy(obs).logits.argmax(-1, keepdim=True)
                transition.rewards = torch.from_numpy(rewards)
                transition.dones = torch.from_numpy(ended)
                with run.storage_watch:
                    storage.add_transition(transition)

                state = state * ~torch.from_numpy(ended).unsqueeze(-1)
                run.count(rewards, ended)
                obs = torch.from_numpy(next_obs)
        run.show(update(student, optimizer, storage, first, run))
        with run.storage_watch:
            storage.clear()

    envs.close()
    result = run.finish()
    teacher_return = evaluate(lambda obs, state: (teacher.actor(obs), state), seed + 1000)
    student_return = evaluate(lambda obs, state: student(visible(obs), state), seed + 1000)
    result.extra = {
        "teacher_steps": taught.env_steps,
        "teacher_return_best_action": teacher_return,
        "student_return_best_action": student_return,
        "student_in_percent_of_teacher": 100 * student_return / teacher_return,
    }
    return result


def main() -> None:
    """Read the command line, train, and report."""
    parser = arguments(__doc__, steps=120_000)
    parser.add_argument("--teacher-steps", type=int, default=TEACHER_STEPS, help="default: %(default)s")
    options = parser.parse_args()
    report(train(options.steps, options.seed, options.teacher_steps), options.out)


if __name__ == "__main__":
    main()
