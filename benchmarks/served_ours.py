"""Our storages as contenders that serve replay: ``python -m benchmarks.served_ours ray`` or ``shared``."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from benchmarks.served_work import BATCH, WORKS, WRITERS, Order, Rows, Step, Work, episode, obey, repeat
from rlstore import PrioritizedReplayStorage, ReplayStorage

# Ray frees what is not used any more once a second: with a small store it has all processes collect garbage again and
# again. Its default is 30 % of the memory of the machine.
OBJECT_STORE = 2 << 30


def _kind(work: Work) -> tuple[type[Any], dict[str, Any]]:
    """The class of a storage, and its arguments."""
    if work.dtype == "uint8":
        spaces: tuple[Box, Any] = Box(0, 255, work.shape, np.uint8), Discrete(18)
    else:
        spaces = Box(-np.inf, np.inf, work.shape, np.float32), Box(-np.inf, np.inf, (work.actions,), np.float32)
    options: dict[str, Any] = {"observation_space": spaces[0], "action_space": spaces[1], "num_envs": WRITERS}
    options["autoreset"] = "Disabled"
    if work.dtype == "uint8":
        options["frame_stack"] = work.shape[0]
    return PrioritizedReplayStorage if work.by_priority else ReplayStorage, options


def _sample(work: Work, step: Step) -> dict[str, Any]:
    """A step of one environment as numpy arrays, ``[1, ...]``."""
    return {
        "observations": step.observation[None],
        "actions": step.action if work.dtype == "uint8" else step.action[None],
        "rewards": np.array([step.reward]),
        "terminated": np.array([step.ends]),
        "truncated": np.array([False]),
        "next_observations": step.next_observation[None],
    }


# ---------------------------------------------------------------------------------------------------- on Ray


class RayWriter:
    """A Ray actor that adds the steps of one environment."""

    def __init__(self, served: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._writers = {name: each.writer(num_envs=1) for name, each in served.items()}
        self._steps = {name: cycle([_sample(WORKS[name], step) for step in episode(WORKS[name])]) for name in served}

    def work(self, order: Order) -> int:
        """Add steps until the end of an order."""
        writer, steps = self._writers[order.work], self._steps[order.work]

        def add() -> int:
            writer.add(next(steps))
            return 1

        rows = repeat(add, order)
        writer.flush()
        return rows


def on_ray() -> Callable[[Order], Rows]:
    import ray

    from benchmarks.ray_replay import start_ray
    from rlstore.ray import serve

    start_ray(OBJECT_STORE)
    kinds = {name: _kind(work) for name, work in WORKS.items()}
    served = {
        name: serve(kind.create_factory(WORKS[name].capacity // WRITERS, **options), seed=0)
        for name, (kind, options) in kinds.items()
    }
    actor: Any = ray.remote(RayWriter)
    writers = [actor.options(num_cpus=0).remote(served) for _ in range(WRITERS)]
    learners = {name: each.learner(BATCH) for name, each in served.items()}

    def work(order: Order) -> Rows:
        learner = learners[order.work]

        def take() -> int:
            batch = next(learner)
            if WORKS[order.work].by_priority:
                learner.update(batch["rows"], batch["rewards"].abs() + 1e-3)
            return BATCH

        calls = [writer.work.remote(order) for writer in writers]
        drawn = repeat(take, order) if order.learns else 0
        return Rows(sum(ray.get(calls)), drawn)

    return work


# ---------------------------------------------------------------------------------------------------- in shared memory


def _write(pipe: Connection, writers: dict[str, Any]) -> None:
    """The process of a writer."""
    torch.set_num_threads(1)
    steps = {name: cycle([_sample(WORKS[name], step) for step in episode(WORKS[name])]) for name in writers}
    for order in _orders(pipe):
        pipe.send(repeat(_adder(writers[order.work], steps[order.work]), order))


def _adder(writer: Any, steps: Iterator[dict[str, Any]]) -> Callable[[], int]:
    def add() -> int:
        step = next(steps)
        observations, actions, rewards, terminated, truncated, following = step.values()
        writer.add(observations, actions, rewards, terminated, truncated, {}, following)
        return 1

    return add


def _orders(pipe: Connection) -> Iterator[Order]:
    while (order := pipe.recv()) is not None:
        yield order


def in_shared_memory() -> Callable[[Order], Rows]:
    kinds = {name: _kind(work) for name, work in WORKS.items()}
    storages = {
        name: kind(**options, storage_size=WORKS[name].capacity, batch_size=BATCH, memory="shared")
        for name, (kind, options) in kinds.items()
    }
    context = multiprocessing.get_context("spawn")
    pipes = []
    for _ in range(WRITERS):
        ours, theirs = context.Pipe()
        writers = {name: storage.writer(1) for name, storage in storages.items()}
        context.Process(target=_write, args=(theirs, writers), daemon=True).start()
        pipes.append(ours)

    def work(order: Order) -> Rows:
        storage = storages[order.work]

        def take() -> int:
            batch = storage.sample()
            if WORKS[order.work].by_priority:
                storage.update(batch.rows, batch.rewards.abs() + 1e-3)
            return BATCH

        for pipe in pipes:
            pipe.send(order)
        drawn = repeat(take, order) if order.learns else 0
        return Rows(sum(pipe.recv() for pipe in pipes), drawn)

    return work


def main() -> None:
    torch.set_num_threads(1)
    obey({"ray": on_ray, "shared": in_shared_memory}[sys.argv[1]]())


if __name__ == "__main__":
    main()
