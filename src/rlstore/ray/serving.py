"""Serving a storage from a Ray cluster."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch

from rlstore.engine.checks import check_device, check_positive, check_seed
from rlstore.engine.disk.journal import Journal, as_journal
from rlstore.engine.measures import Measures, flat, joined, used
from rlstore.engine.processes.limiter import RateLimit
from rlstore.errors import InvalidInputError
from rlstore.ray.calls import Connection, answer, answers, check_connected, check_seconds, start_on_this_node
from rlstore.ray.counts import ShardCounts, check_shards
from rlstore.ray.learner import ServedLearner
from rlstore.ray.ledger import NAMESPACE, Ledger, ledger_name, shard_name
from rlstore.ray.saves import Saving
from rlstore.ray.shard import Shard, packed_factory
from rlstore.ray.writer import ServedWriter
from rlstore.storage import Storage

# A shard is restarted on any node: it reserves almost no CPU, so that there is always one. (Ray spreads only actors
# that reserve something.) Ray must not retry a call, whose steps would be stored twice.
_SHARD_OPTIONS: Mapping[str, Any] = {
    "num_cpus": 0.001,
    "max_restarts": -1,
    "max_task_retries": 0,
    "scheduling_strategy": "SPREAD",
}

# A new process imports torch first, which a short deadline for data should not interrupt.
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
    journal: str | os.PathLike[str] | Journal | None = None,
) -> ServedStorage:
    """Create storages on the Ray cluster that this process is connected to, and serve them as one.

    A shard that dies is restarted by Ray on another node and restored from its journal or its newest snapshot; the
    others continue, and what was lost is counted. The actors end with the process that called this, or with
    :meth:`ServedStorage.shutdown`.

    Args:
        factory: The result of ``create_factory`` of a storage. Its size and ``num_envs`` are those of one shard; the
            writers of a shard share its environments. Of several shards each uses the folder ``shard-N`` in a folder
            that the storage is given (``path``, ``snapshot_dir``); another function can do so if it takes the name of
            that folder as ``subfolder``.
        shards: The number of storages, each in an actor of its own, spread over the nodes.
        rate_limit: Samples per insert or a minimum size, over all writers and learners; None for no limit.
        snapshot_dir: The folder for the snapshots of the shards, which every node must see. What an earlier run with as
            many shards has saved in it is restored as a whole, with all counts.
        snapshot_every: Transitions inserted into a shard between its snapshots, which are written in the background;
            None for ``save()`` only.
        deadline: Seconds after which any wait ends with an error that names what was waited for.
        actor_options: Ray options of the shards' actors, as ``{"num_cpus": 1, "resources": {"big": 1}}``.
        seed: The seed of everything that the shards draw; None draws one from torch's own generator.
        journal: The folder, or the :class:`~rlstore.Journal`, in which each shard commits what it holds every few
            seconds; every node must see it. A shard that dies loses what came since its last commit. What an earlier
            run has left there is restored, as from ``snapshot_dir``.

    Returns:
        A handle that can be sent to any task or actor.

    Raises:
        InvalidInputError: (a ValueError) if an argument is refused, here or by the factory; also a folder that holds
            what another number of shards has saved.
        SnapshotError: (a RuntimeError) if what was saved cannot be read.
        NotReadyError: (a RuntimeError) if this process is not connected to a cluster.
    """
    check_positive("serve()", shards=shards)
    check_seconds("serve()", deadline=deadline)
    if snapshot_every is not None:
        check_positive("serve()", snapshot_every=snapshot_every)
        if snapshot_dir is None:
            raise InvalidInputError("snapshot_every is given without a snapshot_dir; say where snapshots go")
    if not callable(factory):
        raise InvalidInputError(f"factory is {factory!r}; serve() needs what create_factory() of a storage gives")
    check_connected()
    folder = None if snapshot_dir is None else str(Path(snapshot_dir).absolute())
    wanted = as_journal("serve()", journal)
    saving = Saving(shards, folder, snapshot_every)
    if wanted is not None:
        path = str(Path(wanted.path).absolute())
        saving = replace(saving, journal=path, interval=float(wanted.interval), fsync=wanted.fsync)
    for saved in saving.roots:
        Path(saved).mkdir(parents=True, exist_ok=True)
    check_shards(saving.roots, shards)
    name, root = f"rlstore-{uuid.uuid4().hex[:8]}", check_seed("serve()", seed)
    ledger = start_on_this_node(Ledger, name, rate_limit, saving, deadline, name=ledger_name(name), namespace=NAMESPACE)
    make_class: Any = ray.remote(concurrency_groups={"draw": 2, "save": 1})  # type: ignore[call-overload]
    shard_class = make_class(Shard).options
    options = {**_SHARD_OPTIONS, **(actor_options or {}), "namespace": NAMESPACE}
    arguments = (packed_factory(factory), name, root, saving)
    handles = tuple(
        shard_class(**options, name=shard_name(name, index)).remote(index, *arguments) for index in range(shards)
    )
    try:
        seconds = max(deadline, _START_SECONDS)
        states = [
            answer(handle.ready.remote(), f"shard {index} of {name}, which is being started", seconds)
            for index, handle in enumerate(handles)
        ]
    except BaseException:
        for actor in (*handles, ledger):
            ray.kill(actor)
        raise
    return ServedStorage(Connection(name, ledger, handles, tuple(state.where for state in states), deadline))


class ServedStorage:
    """A storage that is served from a Ray cluster; created by :func:`serve`, and picklable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self._connection.shards)

    def writer(self, num_envs: int | None = None, batch_steps: int = 32, max_in_flight: int = 4) -> ServedWriter:
        """A writer for some environments of one shard.

        Args:
            num_envs: The environments of each sample; None for all of a shard. Several writers can share the
                environments of a replay storage; other storages take one writer per shard.
            batch_steps: Steps sent in one call; up to eight times as many while the shard is busy.
            max_in_flight: Calls that may be open before ``add`` waits.

        Raises:
            NotReadyError: (a RuntimeError) if all lanes are taken by other writers.
            InvalidInputError: (a ValueError) if no shard has so many environments.
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
        """An iterator over batches drawn across all shards.

        Args:
            batch_size: Rows (or sequences) in a batch.
            prefetch: Batches in flight.
            device: The device of the batches.
            seed: The seed of the splits between the shards.
        """
        check_positive("learner()", batch_size=batch_size, prefetch=prefetch)
        return ServedLearner(self._connection, batch_size, prefetch, check_device("learner()", device), seed)

    def each(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the storage of every shard, as ``each("before_gradients", actor)``.

        Args:
            method: The name of the method.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The result of each shard.
        """
        return self._call_each("each", method, args, kwargs)

    def set_rate_limit(self, rate_limit: RateLimit | None) -> None:
        """Change the rate limit, also for those who wait now.

        Args:
            rate_limit: The new limit; None for none.
        """
        self._connection.ask_ledger("set_rate_limit", rate_limit)

    def save(self) -> None:
        """Write a snapshot of every shard, or commit its journal: what has come since. Then write all counts."""
        self._connection.ask_ledger("save", self._call_each("save"))

    def _call_each(self, method: str, *args: Any) -> list[Any]:
        served = self._connection
        refs = [getattr(shard, method).remote(*args) for shard in served.shards]
        return [answer(ref, served.who(index), served.deadline) for index, ref in enumerate(refs)]

    def report(self) -> ServedReport:
        """The transitions that were inserted, sampled, held and lost; for a dead shard its last known counts."""
        served = self._connection
        refs = [shard.describe.remote() for shard in served.shards]
        described = answers(refs, [served.who(index) for index in range(self.num_shards)], served.patience)
        known = served.ask_ledger("report")
        shards = []
        for counts, answered in zip(known.pop("shards"), described, strict=True):
            shards.append(_shard_report(counts, answered))
            if not isinstance(answered, Exception) and answered[0].generation == counts.state.generation:
                known["limiter_inserted"] += answered[0].inserted_freely - counts.state.inserted_freely
                known["limiter_sampled"] += answered[0].sampled_freely - counts.state.sampled_freely
        return ServedReport(shards=tuple(shards), **known)

    def stats(self) -> dict[str, int | float]:
        """Numbers of all shards that answer, as those of one storage; see :meth:`rlstore.Storage.stats`.

        Counts are sums, and means are over the rows, episodes and draws of all shards. ``inserts``, ``samples`` and
        ``stale_updates`` are those of :meth:`report`, over all generations of all shards, and with a rate limit the
        waits are those for its permits. There are also ``shards``, ``shards_down``, ``writers``, ``restarts``,
        ``lost_in_shards``, ``lost_in_flight`` and ``lost_updates``.
        """
        served, report = self._connection, self.report()
        refs = [shard.measure.remote() for shard in served.shards]
        found = answers(refs, [served.who(index) for index in range(self.num_shards)], served.patience)
        measured = joined(part for part in found if not isinstance(part, Exception))
        return flat({**measured, **_measured_report(report), **served.ask_ledger("measure")})

    def shutdown(self) -> None:
        """End all actors. What was not saved is lost; call :meth:`save` before."""
        for actor in (*self._connection.shards, self._connection.ledger):
            ray.kill(actor)

    def __repr__(self) -> str:
        return f"ServedStorage({self._connection.name}: {self.num_shards} shards)"


@dataclass(frozen=True)
class ShardReport:
    """The counts of one shard.

    Attributes:
        shard: Its number.
        where: Its node and process at its last heartbeat.
        answers: Whether it answered the request for this report.
        generation: The number of its current process: the third column of ``rows``.
        restarts: How often it was restarted.
        inserted: Transitions ever inserted, in all generations.
        held: Transitions held, as last known.
        sampled: Rows ever sampled.
        restored: Transitions that the current generation restored from what was saved.
        lost: Transitions lost with earlier generations: inserted since what was restored, and not overwritten.
        stale_updates: Priority updates that were dropped because their rows were overwritten or lost.
        snapshots: Snapshots written by the current generation.
        said: What went wrong when it was restored, or nothing.
    """

    shard: int
    where: str
    answers: bool
    generation: int
    restarts: int
    inserted: int
    held: int
    sampled: int
    restored: int
    lost: int
    stale_updates: int
    snapshots: int
    said: str


def _shard_report(counts: ShardCounts, described: Any) -> ShardReport:
    """The report of a shard from the ledger's counts and, if it answered, from its own newer state."""
    answered = not isinstance(described, Exception)
    state, stale, snapshots = described if answered else (counts.state, 0, 0)
    inserted, sampled = counts.inserted, counts.sampled
    if state.generation == counts.state.generation:
        inserted += state.inserted - counts.state.inserted
        sampled += state.sampled - counts.state.sampled
    else:
        state = counts.state  # the ledger has not counted the new generation yet
    return ShardReport(
        shard=state.shard,
        where=state.where,
        answers=answered,
        generation=state.generation,
        restarts=max(counts.starts - 1, 0),
        inserted=inserted,
        held=state.held,
        sampled=sampled,
        restored=state.restored,
        lost=counts.lost,
        stale_updates=stale,
        snapshots=snapshots,
        said=state.note,
    )


def _measured_report(report: ServedReport) -> Measures:
    names = ("writers", "restarts", "stale_updates", "lost_in_shards", "lost_in_flight", "lost_updates")
    counts: Measures = {name: getattr(report, name) for name in names}
    shards: Measures = {"shards": len(report.shards), "shards_down": sum(not shard.answers for shard in report.shards)}
    return {"transitions": report.held, **used(report.inserted, report.sampled), **shards, **counts}


@dataclass(frozen=True)
class ServedReport:
    """The counts of a served storage: ``inserted = held + overwritten + lost_in_shards``.

    Attributes:
        shards: Each shard.
        writers: Writers that have a place.
        lost_in_flight: Transitions that were sent to a shard and not stored.
        lost_updates: Priority updates that were sent to a dead shard.
        rate_limit: The current limit; None for none.
        limiter_inserted: Inserts that the rate limit has counted.
        limiter_sampled: Samples that the rate limit has counted.
        ledger_restarts: How often the ledger was restarted.
    """

    shards: tuple[ShardReport, ...]
    writers: int
    lost_in_flight: int
    lost_updates: int
    rate_limit: RateLimit | None
    limiter_inserted: int
    limiter_sampled: int
    ledger_restarts: int

    @property
    def inserted(self) -> int:
        """Transitions ever inserted."""
        return sum(shard.inserted for shard in self.shards)

    @property
    def held(self) -> int:
        """Transitions held by the shards that answer."""
        return sum(shard.held for shard in self.shards if shard.answers)

    @property
    def sampled(self) -> int:
        """Rows ever sampled."""
        return sum(shard.sampled for shard in self.shards)

    @property
    def lost_in_shards(self) -> int:
        """Transitions lost with dead shards."""
        return sum(shard.lost for shard in self.shards)

    @property
    def restarts(self) -> int:
        """How often shards were restarted."""
        return sum(shard.restarts for shard in self.shards)

    @property
    def stale_updates(self) -> int:
        """Priority updates that were dropped because their rows were overwritten or lost."""
        return sum(shard.stale_updates for shard in self.shards)

    def __str__(self) -> str:
        lines = [
            f"{len(self.shards)} shards, {self.writers} writers: {self.inserted} transitions inserted, {self.held} "
            f"held, {self.sampled} sampled",
            f"lost: {self.lost_in_shards} with shards ({self.restarts} restarts), {self.lost_in_flight} on the way, "
            f"{self.lost_updates} priorities on the way; {self.stale_updates} priorities too late",
        ]
        for shard in self.shards:
            if not shard.answers:
                lines.append(f"shard {shard.shard} does not answer; it was last on {shard.where}")
        for shard in self.shards:
            if shard.restarts or shard.restored or shard.lost:
                lines.append(
                    f"shard {shard.shard} was restarted {shard.restarts} times: {shard.lost} transitions lost, "
                    f"{shard.restored} restored{', ' + shard.said if shard.said else ''}; now on {shard.where}"
                )
        return "\n".join(lines)
