"""Double DQN with n-step targets and prioritized replay, with PrioritizedReplayStorage.

``python examples/dqn.py --out out`` learns CartPole in about half a minute. ``--env MinAtar/Breakout-v1`` learns a
small Breakout from pixels in some minutes, if MinAtar is installed: ``pip install 'rlstore[minatar]'``.

The storage samples transitions in proportion to their TD errors, and computes n-step rewards when it samples.
``discounts`` is the factor of the value of the last state: gamma to the power of the number of steps, and 0 where the
episode terminated. An episode that a time limit truncated bootstraps from its final observation.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from common import Array, Result, Run, arguments, follow, make_envs, mlp, report
from torch import Tensor, nn

from rlstore import PrioritizedReplayStorage

NUM_ENVS = 8
STORAGE_SIZE = 100_000
BATCH_SIZE = 128
N_STEP = 3
GAMMA = 0.99
TARGET_RATE = 0.01
MAX_GRAD_NORM = 10.0
LEARN_AFTER = 1_000  # environment steps


@dataclass
class Task:
    """Settings of an environment: the threshold at which it is solved, and the exploration schedule."""

    threshold: float
    learning_rate: float
    explore_steps: int  # over which epsilon decreases from 1 to final_epsilon
    final_epsilon: float


CARTPOLE = Task(threshold=475.0, learning_rate=1e-3, explore_steps=10_000, final_epsilon=0.01)
MINATAR = Task(threshold=8.0, learning_rate=5e-4, explore_steps=100_000, final_epsilon=0.01)


class QNetwork(nn.Module):
    """The value of every action, from a vector or from the pixels (height, width, channels) of MinAtar."""

    def __init__(self, observation_space: gym.spaces.Box, num_actions: int) -> None:
        super().__init__()
        shape = observation_space.shape
        self.pixels = len(shape) == 3
        if self.pixels:
            height, width, channels = shape
            convolution = nn.Conv2d(channels, 16, kernel_size=3)
            features = 16 * (height - 2) * (width - 2)
            self.layers = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), *mlp(features, 128, num_actions))
        else:
            self.layers = mlp(shape[0], 128, 128, num_actions)

    def forward(self, obs: Tensor) -> Tensor:
        """The values (B, actions) of the observations (B, ...), of any dtype."""
        obs = obs.float()
        values: Tensor = self.layers(obs.permute(0, 3, 1, 2) if self.pixels else obs)
        return values


def task_of(env: str) -> Task:
    """The settings for the environment of this name."""
    return MINATAR if env.startswith("MinAtar/") else CARTPOLE


def register_minatar() -> None:
    """Register the MinAtar games with Gymnasium."""
    try:
        from minatar.gym import register_envs
    except ImportError:
        sys.exit("MinAtar is not installed. Install it with: pip install 'rlstore[minatar]'")
    register_envs()


def act(network: QNetwork, obs: Array, epsilon: float, rng: np.random.Generator) -> Array:
    """The greedy action, or with probability epsilon a random one."""
    with torch.inference_mode():
        values = network(torch.from_numpy(obs))
    anything = rng.integers(values.shape[1], size=len(obs))
    return np.where(rng.random(len(obs)) < epsilon, anything, values.argmax(1).numpy())


def update(
    network: QNetwork, target: QNetwork, optimizer: torch.optim.Optimizer, storage: PrioritizedReplayStorage, run: Run
) -> float:
    """One step of double DQN on a prioritized batch; the new TD errors become the priorities of its rows."""
    with run.storage_watch:
        batch = storage.sample()
    with torch.no_grad():
        best = network(batch.next_observations).argmax(1, keepdim=True)
        targets = batch.rewards + batch.discounts * target(batch.next_observations).gather(1, best)
    errors = network(batch.observations).gather(1, batch.actions.unsqueeze(1)) - targets
    loss: Tensor = (batch.weights * nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    follow(target, network, TARGET_RATE)
    with run.storage_watch:
        storage.update(batch.rows, errors.detach().abs() + 1e-3)
    return loss.item()


def train(steps: int, seed: int = 0, threshold: float | None = None, env: str = "CartPole-v1") -> Result:
    """Train until the threshold is reached or the steps are used up."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    task = task_of(env)
    if task is MINATAR:
        register_minatar()
    envs = make_envs(NUM_ENVS, env)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    assert isinstance(obs_space, gym.spaces.Box)
    assert isinstance(action_space, gym.spaces.Discrete)
    network = QNetwork(obs_space, int(action_space.n))
    target = deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=task.learning_rate)
    storage = PrioritizedReplayStorage(
        obs_space,
        action_space,
        storage_size=STORAGE_SIZE,
        num_envs=NUM_ENVS,
        batch_size=BATCH_SIZE,
        n_step=N_STEP,
        discount=GAMMA,
        seed=seed,
    )
    run = Run("dqn" if task is CARTPOLE else f"dqn_{env.split('/')[1]}", NUM_ENVS, steps, threshold)
    obs, _ = envs.reset(seed=seed)

    while run.active:
        epsilon = max(task.final_epsilon, 1 - run.env_steps / task.explore_steps)
        actions = act(network, obs, epsilon, rng)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        with run.storage_watch:
            storage.add(obs, actions, rewards, terminated, truncated, infos, next_obs)
        run.count(rewards, terminated | truncated)
        obs = next_obs
        if run.env_steps >= LEARN_AFTER:
            run.show(update(network, target, optimizer, storage, run))

    envs.close()
    return run.finish()


def main() -> None:
    """Read the command line, train, and report."""
    parser = arguments(__doc__, steps=500_000)
    parser.add_argument("--env", default="CartPole-v1", help="or MinAtar/Breakout-v1 (default: %(default)s)")
    parser.add_argument("--threshold", type=float, help="stop at this mean return (default: 475, in MinAtar 8)")
    options = parser.parse_args()
    threshold = task_of(options.env).threshold if options.threshold is None else options.threshold
    report(train(options.steps, options.seed, threshold, options.env), options.out)


if __name__ == "__main__":
    main()
