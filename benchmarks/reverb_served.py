"""Reverb as a contender that serves replay: ``python -m benchmarks.reverb_served`` in an environment with Reverb.

A server, two writers and a learner, each in a process of its own. The writers keep 64 items unconfirmed, with which
they are as fast as with more; the learner is a ``TrajectoryDataset`` that is 512 samples ahead.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.served_work import BATCH, WORKS, WRITERS, Order, Rows, Step, Work, episode, obey, repeat

_UNCONFIRMED = 64


def serve(pipe: Connection) -> None:
    """The process of the server: tells its port, and serves until it is killed."""
    import reverb

    server = reverb.Server([_table(name, work) for name, work in WORKS.items()], port=None)
    pipe.send(server.port)
    server.wait()


def _table(name: str, work: Work) -> Any:
    import reverb
    import tensorflow as tf

    kind = tf.float32 if work.dtype == "float32" else tf.int64
    observation = tf.TensorSpec(work.shape, tf.as_dtype(work.dtype))
    signature = {
        "observations": observation,
        "actions": tf.TensorSpec((work.actions,), kind),
        "rewards": tf.TensorSpec((), tf.float32),
        "discounts": tf.TensorSpec((), tf.float32),
        "next_observations": observation,
    }
    selectors = reverb.selectors
    sampler = selectors.Prioritized(0.6) if work.by_priority else selectors.Uniform()
    limiter = reverb.rate_limiters.MinSize(BATCH)
    return reverb.Table(name, sampler, selectors.Fifo(), work.capacity, limiter, signature=signature)


def write(pipe: Connection, address: str) -> None:
    """The process of a writer."""
    import reverb

    client = reverb.Client(address)
    kinds: dict[str, Callable[[Any, str], Callable[[], int]]] = {"": _trajectories, "structured": _structured}
    for order in _orders(pipe):
        pipe.send(repeat(kinds[order.writer](client, order.work), order))


def _entry(step: Step) -> dict[str, Any]:
    discount = np.float32(0.0 if step.ends else 0.99)
    return {
        "observations": step.observation,
        "actions": step.action,
        "rewards": step.reward,
        "discounts": discount,
    }


def _trajectories(client: Any, name: str) -> Callable[[], int]:
    """Adds one step with a TrajectoryWriter, each observation once."""
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    steps = cycle([(_entry(step), step) for step in episode(WORKS[name])])

    def create() -> None:
        history = writer.history
        trajectory = {key: history[key][-2] for key in ("observations", "actions", "rewards", "discounts")}
        trajectory["next_observations"] = history["observations"][-1]
        writer.create_item(name, priority=1.0, trajectory=trajectory)

    def add() -> int:
        entry, step = next(steps)
        writer.append(entry)
        if writer.episode_steps > 1:
            create()
        if step.ends:
            writer.append({"observations": step.next_observation})
            create()
            writer.end_episode()
        writer.flush(_UNCONFIRMED)
        return 1

    return add


def _structured(client: Any, name: str) -> Callable[[], int]:
    """Adds one step with a StructuredWriter, which makes the items itself."""
    from reverb import structured_writer

    steps = cycle([(_entry(step), step) for step in episode(WORKS[name])])
    entry = structured_writer.create_reference_step(_entry(episode(WORKS[name])[0]))
    pattern = {key: entry[key][-2] for key in ("observations", "actions", "rewards", "discounts")}
    pattern["next_observations"] = entry["observations"][-1]
    writer = client.structured_writer([structured_writer.create_config(pattern, name, [])])

    def add() -> int:
        entry, step = next(steps)
        writer.append(entry)
        if step.ends:
            writer.append(dict.fromkeys(entry) | {"observations": step.next_observation})
            writer.end_episode()
        writer.flush(_UNCONFIRMED)
        return 1

    return add


def learn(pipe: Connection, address: str) -> None:
    """The process of the learner."""
    import reverb

    client = reverb.Client(address)
    batches: dict[str, Iterator[Any]] = {}
    for order in _orders(pipe):
        if order.work not in batches:
            dataset = reverb.TrajectoryDataset.from_table_signature(
                address, order.work, max_in_flight_samples_per_worker=2 * BATCH
            )
            batches[order.work] = dataset.batch(BATCH, drop_remainder=True).prefetch(2).as_numpy_iterator()
        pipe.send(repeat(_taker(client, order.work, batches[order.work]), order))


def _taker(client: Any, name: str, batches: Iterator[Any]) -> Callable[[], int]:
    def take() -> int:
        batch = next(batches)
        if WORKS[name].by_priority:
            priorities = abs(batch.data["rewards"]) + 1e-3
            client.mutate_priorities(name, dict(zip(batch.info.key.tolist(), priorities.tolist(), strict=True)))
        return BATCH

    return take


def _orders(pipe: Connection) -> Iterator[Order]:
    while (order := pipe.recv()) is not None:
        yield order


def main() -> None:
    context = multiprocessing.get_context("spawn")

    def start(target: Callable[..., None], *args: Any) -> Connection:
        ours, theirs = context.Pipe()
        context.Process(target=target, args=(theirs, *args), daemon=True).start()
        return ours

    server = start(serve)
    address = f"localhost:{server.recv()}"
    writers = [start(write, address) for _ in range(WRITERS)]
    learner = start(learn, address)

    def work(order: Order) -> Rows:
        working = [*writers, learner] if order.learns else writers
        for pipe in working:
            pipe.send(order)
        rows = [pipe.recv() for pipe in working]
        return Rows(sum(rows[:WRITERS]), sum(rows[WRITERS:]))

    obey(work)


if __name__ == "__main__":
    main()
