"""PPO on CartPole, with RolloutStorage.

Collect a rollout from several environments, compute returns and advantages, train on shuffled mini-batches, and repeat.
``python examples/ppo.py --out out`` takes some seconds.
"""

from __future__ import annotations

import gymnasium as gym
import torch
from common import Result, Run, arguments, report
from torch import Tensor, nn
from torch.distributions import Categorical

from rlstore import RolloutStorage

NUM_ENVS = 16
NUM_STEPS = 64
NUM_EPOCHS = 8
NUM_MINI_BATCHES = 4
LEARNING_RATE = 2e-3
GAMMA = 0.99
LAM = 0.95
CLIP = 0.2
ENTROPY_WEIGHT = 0.005
MAX_GRAD_NORM = 0.5


def mlp(inputs: int, outputs: int, scale: float) -> nn.Sequential:
    """Two hidden layers; the last layer is initialized with ``scale``, so that the first policy is almost uniform."""
    last = nn.Linear(64, outputs)
    nn.init.orthogonal_(last.weight, scale)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)


class ActorCritic(nn.Module):
    """A policy and a value function, each with its own network."""

    def __init__(self, num_obs: int = 4, num_actions: int = 2) -> None:
        super().__init__()
        self.actor = mlp(num_obs, num_actions, scale=0.01)
        self.critic = mlp(num_obs, 1, scale=1.0)

    def policy(self, obs: Tensor) -> Categorical:
        """The distribution over actions, from the observations (..., num_obs)."""
        return Categorical(logits=self.actor(obs), validate_args=False)

    def value(self, obs: Tensor) -> Tensor:
        """The values (...) of the observations (..., num_obs)."""
        values: Tensor = self.critic(obs)
        return values.squeeze(-1)


def update(agent: ActorCritic, optimizer: torch.optim.Optimizer, storage: RolloutStorage, run: Run) -> float:
    """Several epochs of PPO over the stored rollout; returns the last mini-batch's loss."""
    loss = torch.zeros(())
    batches = storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS)
    for batch in run.storage_watch.around(batches):
        policy = agent.policy(batch.observations)
        ratio = (policy.log_prob(batch.actions) - batch.old_actions_log_prob).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy_loss = -torch.min(ratio * batch.advantages, clipped * batch.advantages).mean()
        value_loss = (agent.value(batch.observations) - batch.returns).pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - ENTROPY_WEIGHT * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
        optimizer.step()
    return loss.item()


def train(steps: int, seed: int = 0, threshold: float | None = None, agent: ActorCritic | None = None) -> Result:
    """Train ``agent`` (a new one if none is given) until the threshold is reached or the steps are used up."""
    torch.manual_seed(seed)
    agent = agent or ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    envs = gym.make_vec("CartPole-v1", num_envs=NUM_ENVS)
    obs = torch.from_numpy(envs.reset(seed=seed)[0])
    spaces = envs.single_observation_space, envs.single_action_space
    storage = RolloutStorage.from_spaces(*spaces, NUM_ENVS, NUM_STEPS, seed=seed)
    run = Run("ppo", NUM_ENVS, steps, threshold)

    while run.active:
        with torch.inference_mode():
            for _ in range(NUM_STEPS):
                policy = agent.policy(obs)
                actions = policy.sample()
                next_obs, rewards, terminated, truncated, infos = envs.step(actions.numpy())
                values, log_probs = agent.value(obs), policy.log_prob(actions)
                with run.storage_watch:
                    storage.add(
                        observations=obs,
                        actions=actions,
                        rewards=rewards,
                        terminated=terminated,
                        truncated=truncated,
                        values=values,
                        log_probs=log_probs,
                        infos=infos,
                    )
                run.count(rewards, terminated | truncated)
                obs = torch.from_numpy(next_obs)
            last_values = agent.value(obs)
        with run.storage_watch:
            storage.compute_returns(last_values, GAMMA, LAM)
        run.show(update(agent, optimizer, storage, run))
        with run.storage_watch:
            storage.clear()

    envs.close()
    return run.finish()


def main() -> None:
    """Read the command line, train, and report."""
    options = arguments(__doc__, steps=300_000, threshold=475.0).parse_args()
    report(train(options.steps, options.seed, options.threshold), options.out)


if __name__ == "__main__":
    main()
