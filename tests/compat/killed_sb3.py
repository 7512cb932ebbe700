"""DQN in an environment in which nothing moves and no episode ends, so that only rewards tell the steps apart.

    python tests/compat/killed_sb3.py KIND FOLDER

learns there and is killed in its step KILLED.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

from rlstore import Journal
from rlstore.sb3 import ReplayBuffer

COMMITTED, KILLED = 20, 30


class Still(gym.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

    def __init__(self, reward: float) -> None:
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), self.reward, False, False, {}


def options(kind: str, folder: Path) -> dict[str, Any]:
    """Of a replay buffer that is on disk; its journal commits when it is asked to."""
    kept = {"memory": "mapped", "path": folder / "rows"}
    return {"n_steps": 3, "gamma": 1.0} | (
        kept if kind == "mapped" else {"journal": Journal(folder / "journal", interval=1000)}
    )


def model(env: gym.Env, kept: dict[str, Any], **arguments: Any) -> DQN:
    return DQN(
        "MlpPolicy",
        env,
        replay_buffer_class=ReplayBuffer,
        replay_buffer_kwargs=kept,
        buffer_size=100,
        learning_starts=1000,
        train_freq=1,
        device="cpu",
        **arguments,
    )


class Killed(BaseCallback):
    """Saves the model after COMMITTED steps, and ends the process in step KILLED, which is not stored yet."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def _on_step(self) -> bool:
        storage = self.model.replay_buffer.storage
        if self.n_calls == COMMITTED + 1:
            self.model.save(self.folder / "model.zip")
            if storage.journal is not None:
                storage.journal.commit()
        if self.n_calls == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return True


if __name__ == "__main__":
    place = Path(sys.argv[2])
    model(Still(1.0), options(sys.argv[1], place)).learn(1000, callback=Killed(place))
