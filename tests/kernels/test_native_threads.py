"""Native kernels in several threads: gathers of one source, different rings, slots handed over."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from kernel_inputs import native
from replay_rings import Layout, Leaf, Memory, Steps, Twins, as_bytes

from rlstore.kernels import Limiter, SlotTable, kernel
from rlstore.kernels.portable import OPERATIONS as PORTABLE

THREADS = 4
LAYOUT = Layout(
    lanes=3,
    steps=60,
    leaves=(Leaf(torch.float32, 1, 1, 3), Leaf(torch.uint8, 3, 2, 2)),
    action=torch.int64,
    reward_shape=(),
    resets=0,
    gap=0,
    seed=5,
)
REQUESTS = (
    *((part, k, k == 1, leaf.shape) for part in (0, 1) for k, leaf in enumerate(LAYOUT.leaves)),
    (2, 0, False, (2,)),
    (3, 0, False, ()),
    *((part, 0, False, ()) for part in (4, 5, 6, 7, 8)),
)


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """Run work(0), work(1), ... at the same time; what one of them raises is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def filled(steps: int = 200) -> Twins:
    twins = Twins(LAYOUT)
    for _ in range(steps):
        twins.write()
    return twins


def test_gathers_of_one_ring_run_at_the_same_time():
    twins = filled()
    held = twins.native.held()
    gatherer = kernel("ReplayGather", "cpu")(twins.native.ring, REQUESTS, 3, 0.9)
    portable = PORTABLE["ReplayGather"](twins.portable.ring, REQUESTS, 3, 0.9)
    batches = [held[torch.from_numpy(np.random.default_rng(n).integers(len(held), size=400))] for n in range(THREADS)]
    expected = [[tensor.clone() for tensor in portable.gather(rows, None)] for rows in batches]

    def gather(number: int) -> None:
        outs = tuple(torch.zeros_like(tensor) for tensor in expected[number])
        for turn in range(30):
            found = gatherer.gather(batches[number], outs if turn % 2 else None)
            for mine, truth in zip(found, expected[number], strict=True):
                assert torch.equal(as_bytes(mine), as_bytes(truth))

    in_threads(gather)


def test_samples_of_one_ring_run_at_the_same_time():
    """Each thread draws with a generator of its own: what is drawn depends on that alone."""
    twins = filled()
    gatherer = kernel("ReplayGather", "cpu")(twins.native.ring, REQUESTS, 1, 0.9)

    def draws(number: int) -> list[torch.Tensor]:
        generator = torch.tensor([number, 0])
        return [gatherer.sample(generator, 100)[0] for _ in range(20)]

    expected = [draws(number) for number in range(THREADS)]
    found: dict[int, list[torch.Tensor]] = {}
    in_threads(lambda number: found.update({number: draws(number)}))
    for number in range(THREADS):
        assert torch.equal(as_bytes(torch.stack(found[number])), as_bytes(torch.stack(expected[number])))


def fill_alone(number: int) -> list[torch.Tensor]:
    """A ring, its windows and its priorities under the steps of one seed: every tensor that they leave behind."""
    steps = Steps(LAYOUT, np.random.default_rng(number))
    memory = Memory(LAYOUT, kernel("EpisodeRing", "cpu"))
    lanes, rows = LAYOUT.lanes, LAYOUT.lanes * LAYOUT.steps
    queues = (torch.zeros(lanes, LAYOUT.steps, dtype=torch.int64), *torch.zeros(4, lanes, dtype=torch.int64))
    leaves = -(-rows // 16) * 16
    above = sum(kernel("Priorities", "cpu").level_sizes(leaves))
    tree_memory = (
        torch.zeros(leaves),
        torch.zeros(above, dtype=torch.float64),
        torch.zeros(above),
        torch.zeros(lanes, dtype=torch.int64),
    )
    index = kernel("WindowIndex", "cpu")(memory.ring, 5, 2, False, queues)
    tree = kernel("Priorities", "cpu")(memory.ring, tree_memory)
    generator, drawn, weights = torch.tensor([number, 0]), torch.zeros(16, dtype=torch.int64), torch.zeros(16)
    for turn in range(80):
        memory.write(steps.next())
        index.follow()
        tree.follow_windows(index)
        if index.count() and turn % 3 == 0:
            assert tree.draw(generator, 0.5, drawn, weights)
            assert tree.update(drawn, weights, 0.6, index)[0] == 0
    return [*memory.tensors(), *queues, *tree_memory, generator]


def test_different_rings_are_filled_at_the_same_time():
    expected = [fill_alone(number) for number in range(THREADS)]
    found: dict[int, list[torch.Tensor]] = {}
    in_threads(lambda number: found.update({number: fill_alone(number)}))
    for number in range(THREADS):
        for mine, truth in zip(found[number], expected[number], strict=True):
            assert torch.equal(as_bytes(mine), as_bytes(truth))


def test_gathers_of_one_rollout_run_at_the_same_time():
    source, slots = torch.arange(600.0).view(10, 20, 3), torch.arange(600).view(10, 20, 3)

    def gather(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(50):
            rows, out = torch.from_numpy(rng.integers(200, size=500)), torch.zeros(500, 3)
            native("gather")((source,), rows, (out,))
            assert torch.equal(out, source.flatten(0, 1)[rows])
            chosen, joined = torch.from_numpy(rng.integers(10, size=30)), torch.zeros(20, 30, 3, dtype=torch.int64)
            native("gather_slots")((slots,), chosen, (joined,))
            assert torch.equal(joined, slots[chosen].transpose(0, 1))

    in_threads(gather)


def test_slots_are_handed_from_thread_to_thread():
    """Two threads write slots, two read them: every rollout arrives once, and whole."""
    words, block = torch.zeros(8 + 3, dtype=torch.int64), torch.zeros(3, 1, 50, dtype=torch.int64)
    table, each, arrived = SlotTable(words), 100, []

    def work(number: int) -> None:
        out, owner = torch.zeros(1, 1, 50, dtype=torch.int64), number + 1
        for i in range(each):
            writes = number < 2
            slot = table.take(0 if writes else 2, 1 if writes else 3, owner, 60.0)
            assert slot >= 0
            if writes:
                writer = native("RowWriter")([(block[slot], 0, False, False)])
                assert writer.write(0, (torch.full((50,), number * each + i),)) == -1
                assert table.give(slot, 1, 2, owner)
            else:
                native("gather_slots")((block,), torch.tensor([slot]), (out,))
                assert len(set(out.flatten().tolist())) == 1
                arrived.append(int(out[0, 0, 0]))
                assert table.give(slot, 3, 0, owner)

    in_threads(work)
    assert sorted(arrived) == list(range(2 * each))


def test_the_limiter_counts_every_thread():
    """One sample for each insert, at most 30 inserts ahead: all finish, and each is counted once."""
    memory = torch.zeros(8, dtype=torch.int64)
    memory.view(torch.float64)[2:6] = torch.tensor([1.0, 1.0, 10.0, 20.0], dtype=torch.float64)
    limiter = Limiter(memory)

    def work(number: int) -> None:
        for _ in range(200):
            assert limiter.acquire_insert(1, 60.0) if number < 2 else limiter.acquire_sample(1, 60.0)

    in_threads(work)
    assert memory[:2].tolist() == [400, 400]
