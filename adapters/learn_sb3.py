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
LATE = 2 / 3  # episodes that ended after this part of the training count


class Task(NamedTuple):
    """An algorithm with its arguments and the option that takes our buffer."""

    algorithm: Any
    env: str
    n_envs: int
    steps: int
    ours: dict[str, Any]
    arguments: dict[str, Any]


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
    ),
    "SAC, Pendulum-v1": Task(
        SAC,
        "Pendulum-v1",
        1,
        5_000,
        {"replay_buffer_class": ReplayBuffer},
        {"learning_rate": 1e-3, "policy_kwargs": {"net_arch": [64, 64]}},
    ),
    "PPO, CartPole-v1": Task(
        PPO,
        "CartPole-v1",
        8,
        60_000,
        {"rollout_buffer_class": RolloutBuffer},
        {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "learning_rate": 1e-3},
    ),
}


class Run(NamedTuple):
    """What came of one training."""

    score: float
    cpu_seconds: float
    wall_seconds: float


def train(task: Task, seed: int, buffer: dict[str, Any]) -> Run:
    """Train once."""
    env = make_vec_env(task.env, task.n_envs, seed=seed)
    model = task.algorithm("MlpPolicy", env, seed=seed, device="cpu", **task.arguments, **buffer)
    cpu, wall = time.process_time(), time.perf_counter()
    model.learn(task.steps)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Run(late_return(env, LATE * task.steps / task.n_envs), cpu, wall)


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


def is_as_good(own: list[Run], ours: list[Run]) -> bool:
    """Whether the median score with ours is lower by no more than the seeds differ."""
    scores = [[run.score for run in runs] for runs in (own, ours)]
    spread = max(max(part) - min(part) for part in scores)
    return statistics.median(scores[1]) >= statistics.median(scores[0]) - spread


def row(name: str, own: list[Run], ours: list[Run]) -> str:
    """A line of the table."""
    scores = [" / ".join(f"{run.score:.0f}" for run in runs) for runs in (own, ours)]
    medians = [statistics.median(run.score for run in runs) for runs in (own, ours)]
    seconds = [statistics.median(run.cpu_seconds for run in runs) for runs in (own, ours)]
    return (
        f"| {name} | {scores[0]} | {scores[1]} | {medians[0]:.0f} | {medians[1]:.0f} | "
        f"{seconds[0]:.1f} s | {seconds[1]:.1f} s | {seconds[1] / seconds[0]:.2f} |"
    )


HEAD = """| | returns of the seeds, own buffer | rlstore | median, own | rlstore | CPU time, own | rlstore | ratio |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    """All tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[Run]]] = {}
    for name, task in TASKS.items():
        runs: dict[str, list[Run]] = {"own": [], "rlstore": []}
        for seed in SEEDS:
            for kind, buffer in (("own", {}), ("rlstore", task.ours)):
                runs[kind].append(train(task, seed, buffer))
                print(name, seed, kind, runs[kind][-1], flush=True)
        results[name] = runs
    table = HEAD + "\n".join(row(name, *runs.values()) for name, runs in results.items()) + "\n"
    (out / "sb3.md").write_text(table)
    named = {name: {k: [run._asdict() for run in part] for k, part in runs.items()} for name, runs in results.items()}
    (out / "sb3.json").write_text(json.dumps(named, indent=1) + "\n")
    print(table)
    sys.exit(not all(is_as_good(*runs.values()) for runs in results.values()))


if __name__ == "__main__":
    main()
