"""Serving a storage from a Ray cluster."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from rlstore.engine.checks import check_device, check_positive, check_seed
from rlstore.engine.processes.limiter import RateLimit
from rlstore.errors import InvalidInputError, NotReadyError
from rlstore.ray.calls import answer, answers, check_seconds, on_this_node
from rlstore.ray.connection import Connection
from rlstore.ray.learner import ServedLearner
from rlstore.ray.ledger import NAMESPACE, Ledger, ShardCounts, ledger_name, shard_name
from rlstore.ray.reports import ServedReport, ShardReport
from rlstore.ray.shard import Shard, packed_factory
from rlstore.ray.writer import ServedWriter
from rlstore.storage import Storage

# A shard is restarted wherever there is room; as good as no CPU is reserved for it, so that there always is. (Ray
# spreads only actors that ask for something.) No call is repeated behind our back: its steps might be stored twice.
_SHARD_OPTIONS: Mapping[str, Any] = {
    "num_cpus": 0.001,
    "max_restarts": -1,
    "max_task_retries": 0,
    "scheduling_strategy": "SPREAD",
}
_LEDGER_OPTIONS: Mapping[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": 10_000,
}

# Processes that begin import torch first: no deadline that is meant for data should cut them off.
_START_SECONDS = 120.0


def serve(
    factory: Callable[..., Storage],
    shards: int = 1,
    rate_limit: RateLimit | None = None,
    snapshot_dir: str | os.PathLike[str] | None = None,
    snapshot_every: int | None = None,
    deadline: float = 60.0,
    actor_options: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
) -> ServedStorage:
    """Host storages on the Ray cluster that this process is connected to, and share the experience out among them.

    A shard that is lost is started again by Ray on a node that lives, restored from its newest snapshot if it has one;
    the others serve on, and what was lost is counted. The actors end with the process that called this, or by
    :meth:`ServedStorage.shutdown`.

    Args:
        factory: What ``create_factory`` of a storage gives. Its size and ``num_envs`` are those of one shard; the
            writers of a shard share its environments.
        shards: Storages, each in an actor of its own, spread over the nodes.
        rate_limit: Samples for each insert, held over all writers and learners; None for no limit.
        snapshot_dir: Where the shards keep snapshots: a folder that every node can see. What is there is restored.
        snapshot_every: Transitions inserted into a shard between its snapshots; None for those of ``save()`` alone.
        deadline: Seconds after which any wait ends with an error that says what was waited for.
        actor_options: Options of Ray for the shards' actors, as ``{"num_cpus": 1, "resources": {"big": 1}}``.
        seed: Of everything that the shards draw; None draws one from torch's own generator.

    Returns:
        A handle that can be sent to any task or actor.
    """
    check_positive("serve()", shards=shards)
    check_seconds("serve()", deadline=deadline)
    if snapshot_every is not None:
        check_positive("serve()", snapshot_every=snapshot_every)
        if snapshot_dir is None:
            raise InvalidInputError("snapshot_every is given without a snapshot_dir; say where snapshots go")
    if not callable(factory):
        raise InvalidInputError(f"factory is {factory!r}; serve() needs what create_factory() of a storage gives")
    if not ray.is_initialized():
        raise NotReadyError("this process is not connected to a Ray cluster; call ray.init() first")
    folder = None if snapshot_dir is None else str(Path(snapshot_dir).absolute())
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    name, root = f"rlstore-{uuid.uuid4().hex[:8]}", check_seed("serve()", seed)
    ledger_class: Any = ray.remote(Ledger)
    ledger = ledger_class.options(
        **_LEDGER_OPTIONS, name=ledger_name(name), namespace=NAMESPACE, scheduling_strategy=on_this_node()
    ).remote(name, shards, rate_limit, folder, deadline)
    make_class: Any = ray.remote(concurrency_groups={"draw": 2})  # type: ignore[call-overload]
    shard_class = make_class(Shard)
    options = {**_SHARD_OPTIONS, **(actor_options or {}), "namespace": NAMESPACE}
    packed = packed_factory(factory)
    handles = tuple(
        shard_class.options(**options, name=shard_name(name, index)).remote(
            index, packed, name, root, folder, snapshot_every
        )
        for index in range(shards)
    )
    try:
        seconds = max(deadline, _START_SECONDS)
        facts = [
            answer(handle.ready.remote(), f"shard {index} of {name}, which is being started", seconds)
            for index, handle in enumerate(handles)
        ]
    except BaseException:
        for actor in (*handles, ledger):
            ray.kill(actor)
        raise
    return ServedStorage(Connection(name, ledger, handles, tuple(fact.where for fact in facts), deadline))


class ServedStorage:
    """A storage that is served from a Ray cluster; made by :func:`serve`, and picklable.

    Args:
        connection: Its actors.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self._connection.shards)

    def writer(self, num_envs: int | None = None, batch_steps: int = 32, max_in_flight: int = 4) -> ServedWriter:
        """A writer for some environments of one shard.

        Args:
            num_envs: The environments in each of its samples; None for all of a shard's. Several writers can share the
                environments of a replay storage; other storages take one writer a shard.
            batch_steps: Steps sent in one call.
            max_in_flight: Calls that may be open before ``add`` waits.
        """
        check_positive("writer()", batch_steps=batch_steps, max_in_flight=max_in_flight)
        if num_envs is not None:
            check_positive("writer()", num_envs=num_envs)
        return ServedWriter(self._connection, num_envs, batch_steps, max_in_flight)

    def learner(
        self,
        batch_size: int,
        prefetch: int = 2,
        device: str | torch.device = "cpu",
        *,
        seed: int | None = None,
    ) -> ServedLearner:
        """Batches drawn across all shards.

        Args:
            batch_size: Rows (or sequences) in a batch.
            prefetch: Batches under way.
            device: Where batches are served.
            seed: Of the splits between the shards.
        """
        check_positive("learner()", batch_size=batch_size, prefetch=prefetch)
        return ServedLearner(self._connection, batch_size, prefetch, check_device("learner()", device), seed)

    def each(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every shard's storage, as ``each("before_gradients", actor)``; all must answer."""
        served = self._connection
        refs = [shard.each.remote(method, args, kwargs) for shard in served.shards]
        return [answer(ref, served.who(index), served.deadline) for index, ref in enumerate(refs)]

    def set_rate_limit(self, rate_limit: RateLimit | None) -> None:
        """Change the limit; whoever waits looks again."""
        self._connection.ask_ledger("set_rate_limit", rate_limit)

    def save(self) -> None:
        """Write a snapshot of every shard, and the limiter's counts; all must answer."""
        served = self._connection
        refs = [shard.save.remote() for shard in served.shards]
        for index, ref in enumerate(refs):
            answer(ref, served.who(index), served.deadline)
        served.ask_ledger("save")

    def report(self) -> ServedReport:
        """What was inserted, sampled, held and lost; shards that do not answer are told as they were last heard of."""
        served = self._connection
        told = answers(
            [shard.describe.remote() for shard in served.shards],
            [served.who(index) for index in range(len(served.shards))],
            served.patience,
        )
        known = served.ask_ledger("report")
        shards = []
        for counts, answered in zip(known.pop("shards"), told, strict=True):
            shards.append(_report(counts, answered))
            if not isinstance(answered, Exception) and answered[0].generation == counts.facts.generation:
                known["limiter_inserted"] += answered[0].free_inserted - counts.facts.free_inserted
                known["limiter_sampled"] += answered[0].free_sampled - counts.facts.free_sampled
        return ServedReport(shards=tuple(shards), **known)

    def shutdown(self) -> None:
        """End all actors. Data that are in no snapshot are gone."""
        for actor in (*self._connection.shards, self._connection.ledger):
            ray.kill(actor)

    def __repr__(self) -> str:
        return f"ServedStorage({self._connection.name}: {self.num_shards} shards)"


def _report(counts: ShardCounts, told: Any) -> ShardReport:
    """What is known of a shard: its own word, where it gave it."""
    answers_now, late, snapshots = not isinstance(told, Exception), 0, 0
    if answers_now:
        facts, late, snapshots = told
        if facts.generation == counts.facts.generation:
            counts = replace(
                counts,
                inserted=counts.inserted + facts.inserted - counts.facts.inserted,
                sampled=counts.sampled + facts.sampled - counts.facts.sampled,
                facts=facts,
            )
    facts = counts.facts
    return ShardReport(
        shard=facts.shard,
        where=facts.where,
        answers=answers_now,
        generation=facts.generation,
        restarts=max(counts.births - 1, 0),
        inserted=counts.inserted,
        held=facts.held,
        sampled=counts.sampled,
        restored=facts.restored,
        lost=counts.lost,
        stale_updates=late,
        snapshots=snapshots,
        said=facts.said,
    )
