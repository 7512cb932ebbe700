"""Recurrent PPO on CartPole with the velocities hidden, with RolloutStorage.

A single observation does not show in which direction the pole moves, so the policy needs a memory. A GRU (or, with
``--memory lstm``, an LSTM) provides it; ``--feedforward`` runs the same program without memory and scores poorly.

The storage saves the hidden state before every step. It splits the rollout into trajectories at the episode ends, pads
them to one length, and serves each with the hidden state at its start and a mask of the valid steps. The environments
use next-step autoreset: the step after an end only resets, and is part of no trajectory.
"""

from __future__ import annotations

import gymnasium as gym
import torch
from common import HideVelocities, Result, Run, arguments, report
from torch import Tensor, nn
from torch.distributions import Categorical

from rlstore import RolloutStorage

State = Tensor | tuple[Tensor, Tensor] | None

NUM_ENVS = 32
NUM_STEPS = 64
NUM_EPOCHS = 6
NUM_MINI_BATCHES = 2
HIDDEN = 64
LEARNING_RATE = 2e-3
GAMMA = 0.99
LAM = 0.95
CLIP = 0.2
ENTROPY_WEIGHT = 0.005
MAX_GRAD_NORM = 0.5
REWARD_SCALE = 1 - GAMMA  # scales the returns to [0, 1], which a critic on saturating features fits well
OBS_SCALE = torch.tensor([1 / 2.4, 1 / 0.21])  # scales the cart's position and the pole's angle to about [-1, 1]


class Network(nn.Module):
    """A recurrent network: [steps, sequences, 2] and a state in, [steps, sequences, outputs] and a state out."""

    def __init__(self, outputs: int, memory: str, scale: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, HIDDEN), nn.Tanh())
        self.memory = {"gru": nn.GRU, "lstm": nn.LSTM, "none": nn.Linear}[memory](HIDDEN, HIDDEN)
        self.output = nn.Linear(HIDDEN, outputs)
        nn.init.orthogonal_(self.output.weight, scale)

    def fresh_state(self, sequences: int) -> State:
        """The state before an episode's first step."""
        zeros = torch.zeros(1, sequences, HIDDEN)
        if isinstance(self.memory, nn.Linear):
            return None
        return (zeros, zeros) if isinstance(self.memory, nn.LSTM) else zeros

    def forward(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """Process whole sequences, starting from ``state``."""
        features = self.encoder(obs * OBS_SCALE)
        if isinstance(self.memory, nn.Linear):
            return self.output(self.memory(features).tanh()), None
        features, state = self.memory(features, state)
        return self.output(features), state


class ActorCritic(nn.Module):
    """A policy and a value function, each with its own recurrent network."""

    def __init__(self, memory: str = "gru") -> None:
        super().__init__()
        self.actor = Network(2, memory, scale=0.01)
        self.critic = Network(1, memory, scale=1.0)


def forget(state: State, reset: Tensor) -> State:
    """The state, reset to zero where an environment was."""
    if state is None:
        return None
    if isinstance(state, tuple):
        return state[0] * ~reset[:, None], state[1] * ~reset[:, None]
    return state * ~reset[:, None]


def valid(field: Tensor, masks: Tensor) -> Tensor:
    """The valid steps [rows, ...] of padded trajectories [steps, trajectories, ...], or of [steps, environments, ...].

    Both are in the same order: by environment, then by time.
    """
    return field.transpose(0, 1)[masks.transpose(0, 1)]


def update(agent: ActorCritic, optimizer: torch.optim.Optimizer, storage: RolloutStorage, run: Run) -> float:
    """Several epochs of PPO over the stored sequences; returns the last mini-batch's loss."""
    loss = torch.zeros(())
    batches = storage.recurrent_mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS)
    for batch in run.storage_watch.around(batches):
        actor_state, critic_state = batch.hidden_states
        longest = int(batch.masks.sum(0).max())
        masks, obs = batch.masks[:longest], batch.observations[:longest]
        policy = Categorical(logits=valid(agent.actor(obs, actor_state)[0], masks), validate_args=False)
        values = valid(agent.critic(obs, critic_state)[0], masks).squeeze(-1)

        steps = batch.step_masks  # False for reset steps
        actions, advantages, returns = (valid(x, steps) for x in (batch.actions, batch.advantages, batch.returns))
        ratio = (policy.log_prob(actions) - valid(batch.old_actions_log_prob, steps)).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        value_loss = (values - returns).pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - ENTROPY_WEIGHT * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.actor.parameters(), MAX_GRAD_NORM)
        nn.utils.clip_grad_norm_(agent.critic.parameters(), MAX_GRAD_NORM)
        optimizer.step()
    return loss.item()


def train(steps: int, seed: int = 0, threshold: float | None = None, memory: str = "gru") -> Result:
    """Train until the threshold is reached or the steps are used up; ``memory`` is "gru", "lstm" or "none"."""
    torch.manual_seed(seed)
    agent = ActorCritic(memory)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    envs = gym.vector.SyncVectorEnv([lambda: HideVelocities(gym.make("CartPole-v1"))] * NUM_ENVS)
    obs = torch.from_numpy(envs.reset(seed=seed)[0])
    spaces = envs.single_observation_space, envs.single_action_space
    storage = RolloutStorage.from_spaces(*spaces, NUM_ENVS, NUM_STEPS, seed=seed)
    run = Run(f"recurrent_ppo_{memory}", NUM_ENVS, steps, threshold)
    actor_state, critic_state = agent.actor.fresh_state(NUM_ENVS), agent.critic.fresh_state(NUM_ENVS)
    ended = torch.zeros(NUM_ENVS, dtype=torch.bool)

    while run.active:
        with torch.inference_mode():
            for _ in range(NUM_STEPS):
                hidden_states = (actor_state, critic_state)  # before this step
                logits, actor_state = agent.actor(obs.unsqueeze(0), actor_state)
                values, critic_state = agent.critic(obs.unsqueeze(0), critic_state)
                policy = Categorical(logits=logits.squeeze(0), validate_args=False)
                actions = policy.sample()
                next_obs, rewards, terminated, truncated, infos = envs.step(actions.numpy())
                log_probs = policy.log_prob(actions)
                with run.storage_watch:
                    storage.add(
                        observations=obs,
                        actions=actions,
                        rewards=rewards * REWARD_SCALE,
                        terminated=terminated,
                        truncated=truncated,
                        values=values.squeeze(0),
                        log_probs=log_probs,
                        infos=infos,
                        hidden_states=hidden_states,
                    )

                # Not where an episode ends, but after its reset step: that step gives the value of the final
                # observation, which the memory of the episode belongs to.
                actor_state, critic_state = forget(actor_state, ended), forget(critic_state, ended)
                ended = torch.from_numpy(terminated | truncated)
                run.count(rewards, terminated | truncated)
                obs = torch.from_numpy(next_obs)
            last_values = agent.critic(obs.unsqueeze(0), critic_state)[0].squeeze(0)
        with run.storage_watch:
            storage.compute_returns(last_values, GAMMA, LAM)
        run.show(update(agent, optimizer, storage, run))
        with run.storage_watch:
            storage.clear()

    envs.close()
    return run.finish()


def main() -> None:
    """Read the command line, train, and report."""
    parser = arguments(__doc__, steps=200_000, threshold=400.0)
    parser.add_argument("--memory", choices=["gru", "lstm"], default="gru", help="default: %(default)s")
    parser.add_argument("--feedforward", action="store_true", help="the same, without memory")
    options = parser.parse_args()
    memory = "none" if options.feedforward else options.memory
    report(train(options.steps, options.seed, options.threshold, memory), options.out)


if __name__ == "__main__":
    main()
