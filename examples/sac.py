"""Soft actor-critic on Pendulum, with ReplayStorage.

Episodes of Pendulum never terminate; a time limit truncates them after 200 steps. There the storage serves a discount
of gamma, not 0, and the final observation as the next observation. ``python examples/sac.py --out out`` takes a minute
or two. With ``--dataset FILE`` it leaves its experience behind, for examples/offline.py.
"""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path

import gymnasium as gym
import torch
from common import Result, Run, arguments, follow, make_envs, mlp, report
from torch import Tensor, nn

from rlstore import ReplayStorage
from rlstore.data import write_npz

NUM_ENVS = 4
UPDATES_PER_STEP = 2  # of all environments
STORAGE_SIZE = 100_000
BATCH_SIZE = 128
GAMMA = 0.99
LEARNING_RATE = 1e-3
TARGET_RATE = 0.005
LEARN_AFTER = 1_000  # environment steps, of random actions


class Actor(nn.Module):
    """A Gaussian, squashed by tanh into the bounds of the actions."""

    def __init__(self, num_obs: int, action_space: gym.spaces.Box) -> None:
        super().__init__()
        self.layers = mlp(num_obs, 128, 128, 2 * action_space.shape[0])
        self.scale = torch.from_numpy((action_space.high - action_space.low) / 2)
        self.centre = torch.from_numpy((action_space.high + action_space.low) / 2)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """An action (B, A) for each observation and its log-density (B, 1), in units of the bounds."""
        mean, log_std = self.layers(obs).chunk(2, dim=-1)
        log_std = log_std.clamp(-10, 2)
        noise = torch.randn_like(mean)
        raw = mean + noise * log_std.exp()
        log_prob = -0.5 * noise.pow(2) - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # of tanh
        return raw.tanh() * self.scale + self.centre, log_prob.sum(-1, keepdim=True)


class Critics(nn.Module):
    """Two estimates of the value of an action; using the lower one reduces overestimation."""

    def __init__(self, num_obs: int, num_actions: int) -> None:
        super().__init__()
        self.first = mlp(num_obs + num_actions, 128, 128, 1)
        self.second = mlp(num_obs + num_actions, 128, 128, 1)

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Both values, each (B, 1)."""
        both = torch.cat([obs, actions], dim=-1)
        return self.first(both), self.second(both)


class Agent:
    """Actor, critics and temperature, and their update."""

    def __init__(self, num_obs: int, action_space: gym.spaces.Box) -> None:
        num_actions = action_space.shape[0]
        self.actor = Actor(num_obs, action_space)
        self.critics = Critics(num_obs, num_actions)
        self.targets = deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.wanted_entropy = -num_actions
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=LEARNING_RATE)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=LEARNING_RATE)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=LEARNING_RATE)

    def update(self, storage: ReplayStorage, run: Run) -> float:
        """One step for each of the three; returns the critics' loss."""
        with run.storage_watch:
            batch = storage.sample()
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            next_actions, log_prob = self.actor(batch.next_observations)
            next_values = torch.min(*self.targets(batch.next_observations, next_actions)) - alpha * log_prob
            wanted = batch.rewards + batch.discounts * next_values
        first, second = self.critics(batch.observations, batch.actions)
        critic_loss: Tensor = (first - wanted).pow(2).mean() + (second - wanted).pow(2).mean()
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        actions, log_prob = self.actor(batch.observations)
        actor_loss = (alpha * log_prob - torch.min(*self.critics(batch.observations, actions))).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()

        alpha_loss = -(self.log_alpha.exp() * (log_prob.detach() + self.wanted_entropy)).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()
        follow(self.targets, self.critics, TARGET_RATE)
        return critic_loss.item()


def train(steps: int, seed: int = 0, threshold: float | None = None, dataset: Path | None = None) -> Result:
    """Train until the threshold is reached or the steps are used up; write the experience to ``dataset``, if given."""
    torch.manual_seed(seed)
    envs = make_envs(NUM_ENVS, "Pendulum-v1")
    envs.action_space.seed(seed)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    assert isinstance(obs_space, gym.spaces.Box)
    assert isinstance(action_space, gym.spaces.Box)
    agent = Agent(obs_space.shape[0], action_space)
    storage = ReplayStorage(
        obs_space,
        action_space,
        storage_size=STORAGE_SIZE,
        num_envs=NUM_ENVS,
        batch_size=BATCH_SIZE,
        discount=GAMMA,
        seed=seed,
    )
    run = Run("sac", NUM_ENVS, steps, threshold)
    obs, _ = envs.reset(seed=seed)

    while run.active:
        if run.env_steps < LEARN_AFTER:
            actions = envs.action_space.sample()
        else:
            with torch.inference_mode():
                actions = agent.actor(torch.from_numpy(obs))[0].numpy()
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        with run.storage_watch:
            storage.add(obs, actions, rewards, terminated, truncated, infos, next_obs)
        run.count(rewards, terminated | truncated)
        obs = next_obs
        if run.env_steps >= LEARN_AFTER:
            for _ in range(UPDATES_PER_STEP):
                loss = agent.update(storage, run)
            run.show(loss)

    envs.close()
    if dataset is not None:
        write_npz(storage, dataset)
    return run.finish()


def main() -> None:
    """Read the command line, train, and report."""
    parser = arguments(__doc__, steps=100_000, threshold=-200.0)
    parser.add_argument("--dataset", type=Path, help="file (.npz) to write the experience to")
    options = parser.parse_args()
    report(train(options.steps, options.seed, options.threshold, options.dataset), options.out)


if __name__ == "__main__":
    main()
