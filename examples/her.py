"""Hindsight experience replay on bit flipping, with HindsightReplayStorage and a DQN.

A row of bits must be turned into a goal row by flipping one bit at a time; only reaching the goal is rewarded. With
15 bits, a random agent reaches the goal once in about two thousand episodes, and plain DQN (``--plain``) has nothing to
learn from. With hindsight every episode has reached some goal: the storage relabels most transitions with a state that
was reached later in their episode as the goal, and computes the reward for it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from common import Array, Result, Run, arguments, follow, make_envs, mlp, report
from tensordict import TensorDict
from torch import Tensor, nn

from rlstore import HindsightReplayStorage

NUM_ENVS = 8
UPDATES_PER_STEP = 2  # of all environments
STORAGE_SIZE = 200_000
BATCH_SIZE = 128
RELABEL_FRACTION = 0.8
HIDDEN = 256
GAMMA = 0.95
LEARNING_RATE = 1e-3
TARGET_RATE = 0.01
EPSILON = 0.1
LEARN_AFTER = 1_000  # environment steps


def reached(achieved_goal: Tensor, desired_goal: Tensor, info: Any) -> Tensor:
    """The reward: 1 where all bits (..., bits) match the goal, else 0."""
    return (achieved_goal == desired_goal).all(-1).float()


class BitFlipping(gym.Env[dict[str, Any], np.int64]):
    """Flip one bit per step until all match the goal; there are as many steps as bits, which is always enough."""

    def __init__(self, bits: int) -> None:
        row = gym.spaces.MultiBinary(bits)
        self.observation_space = gym.spaces.Dict({"observation": row, "achieved_goal": row, "desired_goal": row})
        self.action_space = gym.spaces.Discrete(bits)
        self.bits = self.goal = np.zeros(bits, dtype=np.int8)
        self.steps_left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Array], Any]:
        """Draw a row of bits and a different one as the goal."""
        super().reset(seed=seed)
        self.bits = self.np_random.integers(2, size=self.bits.shape, dtype=np.int8)
        self.goal = self.bits
        while (self.goal == self.bits).all():
            self.goal = self.np_random.integers(2, size=self.bits.shape, dtype=np.int8)
        self.steps_left = len(self.bits)
        return self.observation(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Flip the bit with this index. Reaching the goal terminates the episode; running out of steps truncates it."""
        self.bits = self.bits.copy()
        self.bits[action] ^= 1
        self.steps_left -= 1
        done = bool((self.bits == self.goal).all())
        return self.observation(), float(done), done, self.steps_left == 0, {}

    def observation(self) -> dict[str, Array]:
        """The bits, the achieved goal (here the same) and the desired goal."""
        return {"observation": self.bits, "achieved_goal": self.bits, "desired_goal": self.goal}


class QNetwork(nn.Module):
    """The value of flipping each bit, from the bits and the goal."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.layers = mlp(2 * bits, HIDDEN, HIDDEN, bits)

    def forward(self, obs: dict[str, Tensor] | TensorDict) -> Tensor:
        """The values (B, bits) of the observations, each (B, bits)."""
        values: Tensor = self.layers(torch.cat([obs["observation"], obs["desired_goal"]], dim=-1).float())
        return values


def act(network: QNetwork, obs: dict[str, Array], rng: np.random.Generator) -> Array:
    """The greedy action, or with probability epsilon a random one."""
    with torch.inference_mode():
        values = network({name: torch.from_numpy(value) for name, value in obs.items()})
    anything = rng.integers(values.shape[1], size=len(values))
    return np.where(rng.random(len(values)) < EPSILON, anything, values.argmax(1).numpy())


def update(
    network: QNetwork, target: QNetwork, optimizer: torch.optim.Optimizer, storage: HindsightReplayStorage, run: Run
) -> float:
    """One step of double DQN on a batch with relabeled goals."""
    with run.storage_watch:
        batch = storage.sample()
    # Reaching its goal terminates an episode. For a relabeled goal the storage cannot know this: the episode continued.
    discounts = batch.discounts * (batch.rewards == 0)
    with torch.no_grad():
        best = network(batch.next_observations).argmax(1, keepdim=True)
        targets = batch.rewards + discounts * target(batch.next_observations).gather(1, best)
    values = network(batch.observations).gather(1, batch.actions.unsqueeze(1))
    loss: Tensor = (values - targets).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follow(target, network, TARGET_RATE)
    return loss.item()


def train(
    steps: int,
    seed: int = 0,
    threshold: float | None = None,
    bits: int = 15,
    relabel_fraction: float = RELABEL_FRACTION,
) -> Result:
    """Train until the threshold is reached or the steps are used up.

    An episode's return is 1 if it reached its goal and 0 if not, so the mean return is the success rate.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    envs = make_envs(NUM_ENVS, lambda: BitFlipping(bits))
    network = QNetwork(bits)
    target = deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    storage = HindsightReplayStorage(
        envs.single_observation_space,
        envs.single_action_space,
        storage_size=STORAGE_SIZE,
        num_envs=NUM_ENVS,
        batch_size=BATCH_SIZE,
        discount=GAMMA,
        compute_reward=reached,
        strategy="future",
        relabel_fraction=relabel_fraction,
        seed=seed,
    )
    run = Run("her" if relabel_fraction else "her_plain", NUM_ENVS, steps, threshold)
    obs, _ = envs.reset(seed=seed)

    while run.active:
        actions = act(network, obs, rng)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        with run.storage_watch:
            storage.add(obs, actions, rewards, terminated, truncated, infos, next_obs)
        run.count(rewards, terminated | truncated)
        obs = next_obs
        if run.env_steps >= LEARN_AFTER:
            for _ in range(UPDATES_PER_STEP):
                loss = update(network, target, optimizer, storage, run)
            run.show(loss)

    envs.close()
    return run.finish()


def main() -> None:
    """Read the command line, train, and report."""
    parser = arguments(__doc__, steps=200_000, threshold=0.9)
    parser.add_argument("--bits", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--plain", action="store_true", help="the same without hindsight, which learns nothing")
    options = parser.parse_args()
    relabel_fraction = 0.0 if options.plain else RELABEL_FRACTION
    report(train(options.steps, options.seed, options.threshold, options.bits, relabel_fraction), options.out)


if __name__ == "__main__":
    main()
