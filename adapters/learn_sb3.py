"""Whether Stable-Baselines3's DQN, SAC and PPO learn as well, and as fast, with our buffers as with their own.

``python -m adapters.learn_sb3 --out FOLDER`` trains each on three seeds with both buffers, in turns, and writes
``sb3.json`` and ``sb3.md``. It takes about 10 minutes on one core. The exit status is 1 if a median return is lower
with our buffers than with theirs by more than the spread of the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from rlstore.sb3 import ReplayBuffer, RolloutBuffer

SEEDS = (0, 1, 2)
TURNS = 20
LATE = 2 / 3  # episodes that ended after this part of the training count


class Task(NamedTuple):
    """An algorithm with its arguments and the option that takes our buffer."""

    algorithm: Any
    env: str
    n_envs: int
    steps: int
    ours: dict[str, Any]
    arguments: dict[str, Any]
    timed: int  # steps in each turn when CPU time is compared


TASKS = {
    "DQN, CartPole-v1": Task(
        DQN,
        "CartPole-v1",
        1,
        30_000,
        {"replay_buffer_class": ReplayBuffer},
        {
            "learning_rate": 1e-3,
            "batch_size": 64,
            "buffer_size": 30_000,
            "learning_starts": 1000,
            "target_update_interval": 250,
            "exploration_fraction": 0.2,
        },
        1000,
    ),
    "SAC, Pendulum-v1": Task(
        SAC,
        "Pendulum-v1",
        1,
        5_000,
        {"replay_buffer_class": ReplayBuffer},
        {"learning_rate": 1e-3, "policy_kwargs": {"net_arch": [64, 64]}},
        100,
    ),
    "PPO, CartPole-v1": Task(
        PPO,
        "CartPole-v1",
        8,
        60_000,
        {"rollout_buffer_class": RolloutBuffer},
        {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "learning_rate": 1e-3},
        2048,
    ),
}


def made(task: Task, seed: int, buffer: dict[str, Any]) -> Any:
    """A model that has learnt nothing yet."""
    env = make_vec_env(task.env, task.n_envs, seed=seed)
    return task.algorithm("MlpPolicy", env, seed=seed, device="cpu", **task.arguments, **buffer)


def score(task: Task, seed: int, buffer: dict[str, Any]) -> float:
    """Train once; the mean return of late episodes."""
    model = made(task, seed, buffer).learn(task.steps)
    return late_return(model.env, LATE * task.steps / task.n_envs)


def cpu_ratio(task: Task) -> float:
    """The CPU time of training with our buffer over that with theirs: the median of many short turns.

    The two take turns in changing order, because the speed of a machine varies more from minute to minute than they do.
    """
    models = [made(task, 0, buffer).learn(2000) for buffer in ({}, task.ours)]
    ratios = []
    for turn in range(TURNS):
        seconds = [0.0, 0.0]
        for kind in (0, 1) if turn % 2 else (1, 0):
            start = time.process_time()
            models[kind].learn(task.timed, reset_num_timesteps=False)
            seconds[kind] = time.process_time() - start
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def late_return(env: VecEnv, after: float) -> float:
    """The mean return of the episodes that ended after so many steps of their environment."""
    returns, lengths = env.env_method("get_episode_rewards"), env.env_method("get_episode_lengths")
    late = [
        r
        for each, taken in zip(returns, lengths, strict=True)
        for r, end in zip(each, accumulate(taken), strict=True)
        if end > after
    ]
    return statistics.fmean(late)


def is_as_good(own: list[float], ours: list[float]) -> bool:
    """Whether the median score with ours is lower by no more than the seeds differ."""
    spread = max(max(scores) - min(scores) for scores in (own, ours))
    return statistics.median(ours) >= statistics.median(own) - spread


def row(name: str, own: list[float], ours: list[float], ratio: float) -> str:
    """A line of the table."""
    scores = [" / ".join(f"{score:.0f}" for score in part) for part in (own, ours)]
    medians = [f"{statistics.median(part):.0f}" for part in (own, ours)]
    return f"| {' | '.join([name, *scores, *medians])} | {ratio:.2f} |"


HEAD = """| | returns of the seeds, own buffer | rlstore | median, own | rlstore | CPU time, rlstore / own |
| --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    """All tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results = {}
    for name, task in TASKS.items():
        own, ours = ([score(task, seed, buffer) for seed in SEEDS] for buffer in ({}, task.ours))
        results[name] = own, ours, cpu_ratio(task)
        print(row(name, *results[name]), flush=True)
    (out / "sb3.md").write_text(HEAD + "\n".join(row(name, *found) for name, found in results.items()) + "\n")
    (out / "sb3.json").write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(not all(is_as_good(own, ours) for own, ours, _ in results.values()))


if __name__ == "__main__":
    main()
