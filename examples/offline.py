"""TD3+BC on Pendulum from a dataset, with or without experience of its own.

The dataset is what an agent of examples/sac.py has seen while it learned: ``python examples/sac.py --steps 20000
--dataset pendulum.npz`` writes one, and without ``--dataset`` it is made first. It becomes a ReplayStorage, from which
the agent learns without an environment. With ``--online-share 0.5`` it also acts, and half of each batch is what it
experienced itself. ``python examples/offline.py --out out`` takes two minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import gymnasium as gym
import numpy as np
import sac
import torch
from common import Array, Result, Run, arguments, follow, make_envs, mlp, report
from torch import Tensor, nn

from rlstore import MixedReplay, ReplayBatch, ReplayStorage
from rlstore.data import read_npz

DATASET_STEPS = 20_000  # of the agent that made it, from its first random actions on
BATCH_SIZE = 256
GAMMA = 0.99
LEARNING_RATE = 1e-3
TARGET_RATE = 0.02
BC_WEIGHT = 0.1  # of imitation against the value of the actions
TARGET_NOISE, NOISE_BOUND = 0.2, 0.5  # of target actions, in units of the bounds
ACT_NOISE = 0.1  # of the agent's own actions
POLICY_DELAY = 2  # updates of the critics for one of the actor
NUM_ENVS = 4  # online
SHOWN_EVERY, SHOWN = 500, 10  # updates between evaluations, and episodes in each
EVALUATED = 100  # episodes after the last update


class Actor(nn.Module):
    """An action within the bounds for each observation."""

    def __init__(self, num_obs: int, action_space: gym.spaces.Box) -> None:
        super().__init__()
        self.layers = mlp(num_obs, 128, 128, action_space.shape[0])
        self.scale = torch.from_numpy((action_space.high - action_space.low) / 2)
        self.centre = torch.from_numpy((action_space.high + action_space.low) / 2)

    def forward(self, obs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Actions (B, A), with noise in units of the bounds."""
        actions: Tensor = (self.layers(obs).tanh() + noise).clamp(-1.0, 1.0) * self.scale + self.centre
        return actions


class Critics(nn.Module):
    """Two estimates of the value of an action.

    Layers are normalized, because nothing that the agent tries corrects a value that is too high.
    """

    def __init__(self, num_obs: int, num_actions: int) -> None:
        super().__init__()
        self.first = self._layers(num_obs + num_actions)
        self.second = self._layers(num_obs + num_actions)

    @staticmethod
    def _layers(inputs: int) -> nn.Sequential:
        hidden = (
            nn.Linear(inputs, 128),
            nn.LayerNorm(128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.LayerNorm(128),
            nn.ReLU(),
        )
        return nn.Sequential(*hidden, nn.Linear(128, 1))

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Both values, each (B, 1)."""
        both = torch.cat([obs, actions], dim=-1)
        return self.first(both), self.second(both)


class Agent:
    """Actor and critics, and their update."""

    def __init__(self, num_obs: int, action_space: gym.spaces.Box) -> None:
        self.actor = Actor(num_obs, action_space)
        self.critics = Critics(num_obs, action_space.shape[0])
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=LEARNING_RATE)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=LEARNING_RATE)

    def update_critics(self, batch: ReplayBatch) -> float:
        """One step towards the target of TD3; returns the loss."""
        with torch.no_grad():
            noise = (torch.randn_like(batch.actions) * TARGET_NOISE).clamp(-NOISE_BOUND, NOISE_BOUND)
            next_actions = self.target_actor(batch.next_observations, noise)
            next_values = torch.min(*self.target_critics(batch.next_observations, next_actions))
            wanted = batch.rewards + batch.discounts * next_values
        first, second = self.critics(batch.observations, batch.actions)
        loss: Tensor = (first - wanted).pow(2).mean() + (second - wanted).pow(2).mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        return loss.item()

    def update_actor(self, batch: ReplayBatch) -> None:
        """One step towards actions of a higher value that stay near those of the batch."""
        actions = self.actor(batch.observations)
        values, _ = self.critics(batch.observations, actions)
        distance = ((actions - batch.actions) / self.actor.scale).pow(2).mean()
        loss = BC_WEIGHT * distance - values.mean() / values.abs().mean().detach()
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        follow(self.target_actor, self.actor, TARGET_RATE)
        follow(self.target_critics, self.critics, TARGET_RATE)


class Collector:
    """Steps environments with the agent's own, noisy actions."""

    def __init__(self, seed: int) -> None:
        self.envs = make_envs(NUM_ENVS, "Pendulum-v1")
        self.obs, _ = self.envs.reset(seed=seed)

    def step(self, agent: Agent, storage: ReplayStorage, run: Run) -> None:
        """Take one step in each environment."""
        obs = torch.from_numpy(self.obs)
        with torch.inference_mode():
            actions = agent.actor(obs, ACT_NOISE * torch.randn(NUM_ENVS, 1)).numpy()
        next_obs, rewards, terminated, truncated, infos = self.envs.step(actions)
        with run.storage_watch:
            storage.add(self.obs, actions, rewards, terminated, truncated, infos, next_obs)
        self.obs = next_obs


def evaluate(act: Callable[[Tensor], Tensor], episodes: int, seed: int) -> Array:
    """The returns of new episodes, which all take as long as the time limit lets them."""
    envs = make_envs(episodes, "Pendulum-v1")
    obs, _ = envs.reset(seed=seed)
    returns, over = np.zeros(episodes), False
    while not over:
        with torch.inference_mode():
            actions = act(torch.from_numpy(obs)).numpy()
        obs, rewards, _, truncated, _ = envs.step(actions)
        returns, over = returns + rewards, bool(truncated.all())
    envs.close()
    return returns


def train(updates: int, seed: int = 0, online_share: float = 0.0, dataset: Path | None = None) -> Result:
    """Learn from a dataset and, with an ``online_share``, from as large a part of own experience in each batch."""
    with TemporaryDirectory() as folder:
        if dataset is None:
            dataset = Path(folder) / "pendulum.npz"
            sac.train(DATASET_STEPS, seed, dataset=dataset)
        offline = ReplayStorage.from_episodes(read_npz(dataset), batch_size=BATCH_SIZE, discount=GAMMA, seed=seed)
    torch.manual_seed(seed)
    obs_space, action_space = offline.observation_space, offline.action_space
    assert isinstance(obs_space, gym.spaces.Box)
    assert isinstance(action_space, gym.spaces.Box)
    agent = Agent(obs_space.shape[0], action_space)
    source: ReplayStorage | MixedReplay[ReplayBatch] = offline
    if online_share:
        online = ReplayStorage(obs_space, action_space, num_envs=NUM_ENVS, discount=GAMMA, seed=seed)
        source = MixedReplay(online, offline, share=online_share, batch_size=BATCH_SIZE)
        collector = Collector(seed)
    run = Run("offline", NUM_ENVS, updates, unit="updates")

    for update in range(1, updates + 1):
        if online_share:
            collector.step(agent, online, run)
        with run.storage_watch:
            batch = source.sample()
        loss = agent.update_critics(batch)
        if update % POLICY_DELAY == 0:
            agent.update_actor(batch)
        is_shown = update % SHOWN_EVERY == 0 and update < updates
        run.note(1, evaluate(agent.actor, SHOWN, seed + update) if is_shown else ())
        run.show(loss)
    run.note(0, evaluate(agent.actor, EVALUATED, seed + updates))
    return run.finish(transitions_in_the_dataset=len(offline), percent_own=100 * online_share)


def main() -> None:
    """Read the command line, train, and report."""
    parser = arguments(__doc__, steps=8_000)
    made = "file (.npz) that examples/sac.py wrote; without it one is made first, which takes most of the time"
    parser.add_argument("--dataset", type=Path, help=made)
    parser.add_argument("--online-share", type=float, default=0.0, help="of each batch (default: %(default)s)")
    options = parser.parse_args()
    report(train(options.steps, options.seed, options.online_share, options.dataset), options.out)


if __name__ == "__main__":
    main()
