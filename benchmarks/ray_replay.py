"""Replay served from a Ray cluster: a learner takes batches of 256, while two writers insert.

The learner takes batches back to back, without learning in between. For each batch a writer inserts 32 transitions,
whichever contender serves: the load is the same for all. The cluster is one machine. The wall clock is used.
"""

from __future__ import annotations

import logging
import os
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.harness import Contender, Phase, Target, Workload
from benchmarks.ray_actors import CallingWriter, Inserter, OneReplay, ReadyMade, StepWriter
from benchmarks.replay_contenders import Copies, keep_freed_memory
from benchmarks.replay_data import GAMMA, PixelSource, Source, VectorSource, check_batches

BATCH = 256
BATCHES = 10
SHARDS = WRITERS = 2
# Calls of the writers that may be in flight while batches are taken.
INSERTS = 4
OBJECT_STORE = 256 << 20

Batch = Mapping[str, Tensor]


class RayContender(Contender):
    """A contender that serves replay from the Ray cluster that all contenders share, and its writers."""

    _users: ClassVar[int] = 0

    def __init__(self, name: str, source: Source, capacity: int, prefetch: int) -> None:
        super().__init__(name)
        start_ray()
        RayContender._users += 1
        self.source, self.capacity, self.prefetch = source, capacity, prefetch
        self._inserts: deque[Any] = deque()
        self._batch: Batch = {}
        self._inserters: list[Any] = []

    def start_writers(self, make_writers: list[Callable[[], StepWriter]]) -> None:
        """Start the writers, which fill the buffers."""
        import ray

        inserter: Any = ray.remote(Inserter)
        self._inserters = [inserter.options(num_cpus=0).remote(self.source, make) for make in make_writers]
        ray.get([writer.fill.remote(self.capacity // WRITERS) for writer in self._inserters])
        self._turn = cycle(self._inserters)

    @abstractmethod
    def take(self) -> Batch:
        """The next batch."""

    def phases(self) -> Mapping[str, Callable[[], None]]:
        return {"batch": self._take_all}

    def _take_all(self) -> None:
        import ray

        for _ in range(BATCHES):
            if len(self._inserts) == INSERTS:
                ray.get(self._inserts.popleft())
            self._inserts.append(next(self._turn).insert.remote())
            self._batch = self.take()

    def evidence(self) -> Batch:
        return self._batch

    def rest(self) -> None:
        import ray

        ray.get(list(self._inserts))
        self._inserts.clear()
        ray.get([writer.flush.remote() for writer in self._inserters])

    def close(self) -> None:
        import ray

        RayContender._users -= 1
        if RayContender._users == 0:
            ray.shutdown()


def start_ray(object_store: int = OBJECT_STORE) -> None:
    """Start a cluster of this machine, unless there is one, with an object store of so many bytes."""
    import ray

    if ray.is_initialized():
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings of Ray
        ray.init(
            address="local",
            num_cpus=8,
            object_store_memory=object_store,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


class Rlstore(RayContender):
    """Our storage, served from two shards."""

    role = "ours"

    def __init__(self, name: str, source: Source, capacity: int, prefetch: int) -> None:
        super().__init__(name, source, capacity, prefetch)
        from rlstore import ReplayStorage
        from rlstore.ray import serve

        spaces = source.observation_space, source.action_space
        factory = ReplayStorage.create_factory(capacity // SHARDS, *spaces, 1, discount=GAMMA)
        self._served = serve(factory, SHARDS, seed=0)
        self.start_writers([partial(self._served.writer, num_envs=1)] * WRITERS)
        self._learner = self._served.learner(BATCH, prefetch=prefetch)

    def take(self) -> Batch:
        return next(self._learner)

    def evidence(self) -> Batch:
        flat = {name: self._batch[name].squeeze(-1) for name in ("rewards", "discounts")}
        return {**self._batch, **flat}

    def close(self) -> None:
        self._learner.close()
        self._served.shutdown()
        super().close()


class Own:
    """Copies arrays from Ray's object store into one of two sets of tensors, so that one batch can be kept."""

    def __init__(self) -> None:
        self._sets: deque[dict[str, Tensor]] = deque([{}, {}])

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
        self._sets.rotate()
        tensors = self._sets[0]
        for name, values in arrays.items():
            given = _as_tensor(values)
            tensors.setdefault(name, torch.empty_like(given)).copy_(given)
        return tensors


def _as_tensor(values: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the arrays are read-only and are not written
        return torch.from_numpy(values)


class Calls(RayContender):
    """Ray calls only: two actors return prepared batches, prefetched as far ahead as ours."""

    def __init__(self, name: str, source: Source, capacity: int, prefetch: int) -> None:
        super().__init__(name, source, capacity, prefetch)
        import ray

        actor: Any = ray.remote(ReadyMade)
        actors = [actor.options(num_cpus=0).remote(source, BATCH) for _ in range(SHARDS)]
        self.start_writers([partial(CallingWriter, each) for each in actors])
        self._actors, self._own = cycle(actors), Own()
        self._ahead: deque[Any] = deque()

    def take(self) -> Batch:
        import ray

        while len(self._ahead) < self.prefetch:
            self._ahead.append(next(self._actors).batch.remote())
        arrays = ray.get(self._ahead.popleft())
        self._ahead.append(next(self._actors).batch.remote())
        return self._own(arrays)


class OneActor(RayContender):
    """One actor with a replay buffer, which the learner calls when it needs a batch."""

    def __init__(self, name: str, source: Source, capacity: int, prefetch: int) -> None:
        super().__init__(name, source, capacity, prefetch)
        import ray

        actor: Any = ray.remote(OneReplay)
        self._actor = actor.options(num_cpus=0).remote(capacity)
        self.start_writers([partial(CallingWriter, self._actor)] * WRITERS)
        self._own = Own()

    def take(self) -> Batch:
        import ray

        return self._own(ray.get(self._actor.sample.remote(BATCH)))


CONTENDERS: dict[str, Callable[[str, Source, int, int], RayContender]] = {
    "rlstore": Rlstore,
    "Ray calls": Calls,
    "one actor": OneActor,
}


def _workload(name: str, title: str, source: Source, capacity: int, served: int, prefetch: int) -> Workload:
    keep_freed_memory()
    floor = Copies({"batch": (BATCH * served, BATCHES)})
    return Workload(
        name=name,
        title=f"Replay of {capacity:,} transitions served by Ray, {title}",
        phases=(Phase("batch", "batch of 256", BATCHES),),
        contenders={name: partial(make, name, source, capacity, prefetch) for name, make in CONTENDERS.items()}
        | {"memcpy": lambda: floor},
        check=partial(check_batches, source, (BATCH,), 1),
        rounds=8,
        targets=(Target("batch", ("Ray calls",), round(1 / 0.7, 2)), Target("batch", ("one actor",), round(1 / 3, 2))),
        clock="wall",
    )


def pixels() -> Workload:
    """Stacks of four frames, both stacks complete in each transition."""
    served = 2 * 4 * PixelSource.SIDE**2 + 8 + 4 + 4
    source = PixelSource(4, channels=1, actions=0)
    return _workload("ray_pixels", "observations 4 x 84 x 84 in uint8", source, 4_000, served, prefetch=2)


def vectors() -> Workload:
    """Small batches, where the overhead of calls dominates."""
    return _workload(
        "ray_vector", "observations 17, actions 6", VectorSource(), 20_000, 4 * (2 * 17 + 6 + 2), prefetch=8
    )
