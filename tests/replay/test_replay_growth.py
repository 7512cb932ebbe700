"""Memory is taken as rows come; where there is no more, an add is refused and everything held goes on being served."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import resource
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_work import in_child
from gymnasium.spaces import Box

from rlstore import (
    DoesNotFitError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
    Storage,
)
from rlstore.engine.memory import capacity, growth
from rlstore.engine.memory.backing import Backing

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*when it is full:RuntimeWarning")

SPACE = Box(-1e6, 1e6, (2,), np.float32)
ROW = 2 * 4 + 2 * 4 + 4 + 4  # bytes of an observation, an action, a reward and the index of the episode
ENTRY = 4 * 8 + 2 * 4  # of an episode and its final observation
SIZE = 1000
KINDS = {
    "replay": lambda **given: ReplayStorage(SPACE, SPACE, storage_size=SIZE, batch_size=16, seed=0, **given),
    "nstep": lambda **given: NStepReplayStorage(SPACE, SPACE, storage_size=SIZE, batch_size=16, seed=0, **given),
    "prioritized": lambda **given: PrioritizedReplayStorage(
        SPACE, SPACE, storage_size=SIZE, batch_size=16, seed=0, **given
    ),
    "sequence": lambda **given: SequenceReplayStorage(
        SPACE, SPACE, storage_size=SIZE, batch_size=16, sequence_length=3, alpha=0.5, seed=0, **given
    ),
}


class Machine:
    """A machine that has ``limit`` bytes for the rows of a storage, ``before`` there is one so many."""

    def __init__(self, limit: int) -> None:
        self.limit, self.before, self.storage = limit, 10**6, None

    def free_ram(self) -> tuple[int, str]:
        if self.storage is None:
            return self.before, "as the test says"
        written = self.storage._rows.counters[0]
        return self.limit - ROW * int((written + 1).sum()), "as the test says"


@pytest.fixture
def machine(monkeypatch) -> Machine:
    """With memory for 100 rows, of which 10 are taken at a time and 5 are left; pages have a byte."""
    made = Machine(100 * ROW)
    monkeypatch.setattr(growth, "STEP", 10 * ROW)
    monkeypatch.setattr(growth, "RESERVE", 5 * ROW)
    monkeypatch.setattr(capacity, "MUCH", 1)
    monkeypatch.setattr(capacity, "free_ram", made.free_ram)
    monkeypatch.setattr(Backing, "page", 1)
    return made


def add(storage, step: int, *, ends: bool = False, envs: int = 1) -> None:
    """Observation, action and reward of a step are its number."""
    values, yes = np.full((envs, 2), step, np.float32), np.full(envs, ends)
    storage.add(values, values, np.full(envs, step, np.float32), yes, ~yes & yes, {}, values + 1)


def fill(storage, first: int = 0) -> int:
    """Add steps until one is refused; returns its number."""
    for step in itertools.count(first):
        try:
            add(storage, step, ends=step % 9 == 8)
        except DoesNotFitError:
            return step
    raise AssertionError


def assert_holds(storage, steps: int, lane: int = 0) -> None:
    """Steps from 0 on, whole; and batches of them."""
    data = {name: value[:steps, lane] for name, value in storage.get_all_buffer_data().items()}
    expected = torch.arange(float(steps))
    assert torch.equal(data["rewards"].flatten(), expected)
    assert torch.equal(data["observations"], expected[:, None].expand(-1, 2))
    assert torch.equal(data["next_observations"], data["observations"] + 1)
    assert torch.equal(data["terminated"].flatten().bool(), expected % 9 == 8)
    batch = storage.sample()
    assert batch.observations.max() < steps
    assert torch.equal(batch.observations, batch.actions)


@pytest.mark.parametrize("memory", ["ram", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_is_served_and_saved_when_there_is_no_more_memory(kind, memory, machine, tmp_path):
    storage = machine.storage = KINDS[kind](memory=memory)
    steps = fill(storage)
    with pytest.raises(DoesNotFitError, match=r"Nothing was written. Everything that is held can still be sampled"):
        add(storage, steps)
    # Each step needs its row, what is kept beside it, and in shared memory room for an episode of its own.
    beside = {"replay": 0, "nstep": 0, "prioritized": 4, "sequence": 4 + 8}[kind] + ENTRY * (memory == "shared")
    assert steps + 1 == (machine.limit - growth.RESERVE - beside) // ROW
    for _ in range(2):
        assert_holds(storage, steps)
        assert fill(storage, steps) == steps
    storage.save(tmp_path / "saved")
    machine.limit += 20 * ROW
    more = fill(storage, steps)
    assert more == steps + 20
    assert_holds(storage, more)
    machine.storage, machine.limit = None, 100 * ROW
    again = machine.storage = Storage.load(tmp_path / "saved")
    assert_holds(again, steps)
    assert fill(again, steps) == steps


def test_of_a_slice_that_does_not_fit_nothing_is_inserted(machine):
    storage, other = KINDS["replay"](), KINDS["replay"]()
    for step in range(60):
        add(other, step, ends=step % 9 == 8)
    data = other.get_all_buffer_data()
    add(storage, -1, ends=True)
    machine.storage = storage
    # 60 rows after two; of the 16 entries that there are for episodes all but two, and perhaps one for each row.
    machine.limit = (2 + 60) * ROW + (14 + 60) * ENTRY + growth.RESERVE - 1
    with pytest.raises(
        DoesNotFitError, match=r"holds 1 of 1,000 transitions .* 60 more steps may need .* Nothing was writ"
    ):
        storage.insert_data_slice(data)
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == [-1]
    machine.limit += 1
    storage.insert_data_slice(data)
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == list(range(-1, 60))


def test_a_storage_that_has_all_its_memory_wraps_without_asking(machine, monkeypatch):
    storage = ReplayStorage(SPACE, SPACE, storage_size=20, batch_size=4)
    machine.storage = storage
    for step in range(20):
        add(storage, step)
    monkeypatch.setattr(capacity, "free_ram", lambda: (0, "nothing"))
    for step in range(20, 70):
        add(storage, step)
    storage.reset()
    add(storage, 0)
    assert len(storage) == 1


def test_lanes_take_memory_apart(machine):
    """One lane goes on alone: the other's rows are not taken until they are written."""
    storage = machine.storage = ReplayStorage(SPACE, SPACE, storage_size=2 * SIZE, num_envs=2, batch_size=4)
    machine.limit = 60 * ROW

    class Alone:
        def add(self, *step):
            both = [part if isinstance(part, dict) else np.repeat(part, 2, 0) for part in step]
            storage.add(*both, mask=np.array([True, False]))

    steps = fill(Alone())
    # The next step could be one of both lanes; the machine counts a row of the second lane, too.
    assert steps + 1 + 1 + 2 == (machine.limit - growth.RESERVE) // ROW + 1
    assert storage._rows.counters[0].tolist() == [steps, 0]


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_a_writer_is_refused_in_its_own_add(memory, machine):
    storage = machine.storage = ReplayStorage(
        SPACE, SPACE, storage_size=2 * SIZE, num_envs=2, batch_size=16, memory=memory
    )
    writer = storage.writer(1)
    steps = fill(writer)
    assert 70 < steps < 100
    assert_holds(storage, steps)
    machine.limit += 10 * ROW
    assert fill(writer, steps) == steps + 10
    assert_holds(storage, steps + 10)


def test_a_writer_in_another_process_is_refused_there(machine):
    storage = machine.storage = ReplayStorage(SPACE, SPACE, storage_size=SIZE, batch_size=16, memory="shared")
    writer = storage.writer()
    steps = in_child(lambda: (fill(writer), writer.close())[0])
    assert steps + 1 == (machine.limit - growth.RESERVE - ENTRY) // ROW
    assert_holds(storage, steps)
    storage.close()


def test_a_table_that_cannot_grow_refuses_the_step(machine, monkeypatch):
    wide = Box(-1e6, 1e6, (100,), np.float32)
    storage = ReplayStorage(wide, SPACE, storage_size=SIZE, batch_size=4)
    step = lambda i: (np.full((1, 100), i), np.zeros((1, 2)), [i], [True], [False], {}, np.full((1, 100), i))  # noqa: E731
    monkeypatch.setattr(capacity, "free_ram", lambda: (9000, "as the test says"))  # and 24 of 400 bytes are 9,600
    for i in range(16):
        storage.add(*step(i))
    before, ring = storage.get_all_buffer_data(), storage._rows
    for _ in range(2):
        with pytest.raises(
            DoesNotFitError, match=r"9,600 bytes\) for the table 'final observations' of 24 entries.*9,000"
        ):
            storage.add(*step(16))
    assert [len(table) for table in (ring.episodes, ring.free_slots, *ring.finals)] == [16, 16, 16]
    after = storage.get_all_buffer_data()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    storage.sample()
    monkeypatch.setattr(capacity, "free_ram", lambda: (9600 + growth.RESERVE, "as the test says"))
    storage.add(*step(16))
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == list(range(17))


# ---------------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_a_storage_that_would_not_fit_warns_of_it(memory, machine):
    machine.before = 20_000
    with pytest.warns(RuntimeWarning, match="when it is full") as told:
        KINDS["replay"](memory=memory)
    assert len(told) == 1
    assert told[0].filename == __file__
    message = str(told[0].message)
    rows = SIZE + 1 + (64 if memory == "shared" else 0)
    for words in (
        f"ReplayStorage takes 0.00 GB ({rows * ROW:,} bytes) when it is full, for 1,000 transitions",
        "(20,000 bytes) are free in RAM (as the test says). Memory is taken as rows come",
        "storage_size",
        "frame_stack",
        'memory="mapped"',
    ):
        assert words in message
    machine.before = rows * ROW
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage = KINDS["replay"](memory=memory)
        with pytest.raises(RuntimeWarning, match="for 1,100 transitions"):
            storage.update_storage_parameter("storage_size", 1100)
        assert storage.storage_size == SIZE
    storage.update_storage_parameter("storage_size", 1100)
    add(storage, 0)
    assert len(storage) == 1


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_a_snapshot_is_loaded_if_its_rows_fit(memory, machine, tmp_path):
    storage = KINDS["replay"](memory=memory)
    for step in range(50):
        add(storage, step, ends=step % 9 == 8)
    storage.save(tmp_path / "saved")
    machine.before = 51 * ROW - 1
    with pytest.raises(DoesNotFitError, match="for the 50 rows that it held" if memory == "ram" else "for 1,000 trans"):
        Storage.load(tmp_path / "saved")
    # In shared memory the indices of all episodes that there can be are written at once.
    machine.before = 51 * ROW if memory == "ram" else 20_000
    with pytest.warns(RuntimeWarning, match="when it is full"):
        again = Storage.load(tmp_path / "saved")
    assert_holds(again, 50)


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_address_space_that_the_process_may_not_have_is_refused(memory):
    def child() -> str:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), resource.RLIM_INFINITY))
        with pytest.raises(DoesNotFitError) as refused:
            ReplayStorage(SPACE, SPACE, storage_size=10**9, memory=memory)
        return str(refused.value) + str(size + (1 << 30) in [int(word.replace(",", "")) for word in _numbers(refused)])

    told = in_child(child)
    assert "limited to" in told
    assert "ulimit -v). Nothing was allocated. Give a smaller storage_size" in told
    assert told.endswith("True")


def _numbers(refused) -> list[str]:
    words = str(refused.value).replace("(", " ").split()
    return [word for word in words if word.replace(",", "").isdigit()]


# ---------------------------------------------------------------------------------------------------- measured

PIXELS = Box(0, 255, (128, 128), np.uint8)
FRAME = 128 * 128
MANY = 64 * 1024**3 // FRAME


def resident(field: str) -> int:
    """Bytes of this process that are in RAM: of its own, or shared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def add_frames(storage, first: int, last: int) -> None:
    no, action = np.zeros(1, bool), np.zeros((1, 2), np.float32)
    for step in range(first, last):
        frame = np.full((1, 128, 128), step % 251, np.uint8)
        storage.add(frame, action, np.full(1, step, np.float32), no, no, {}, np.full_like(frame, (step + 1) % 251))


@pytest.mark.parametrize(("memory", "field"), [("ram", "RssAnon"), ("shared", "RssShmem")])
def test_resident_memory_follows_the_rows(memory, field):
    def child() -> list[int]:
        capacity.free_ram = lambda: None
        told = [resident(field)]
        storage = PrioritizedReplayStorage(PIXELS, SPACE, storage_size=MANY, batch_size=4, memory=memory)
        told.append(resident(field))
        for first in (0, 1000, 2000):
            add_frames(storage, first, first + 1000)
            told.append(resident(field))
        storage.sample()
        told.append(len(pickle.dumps(storage._rows)))
        return told

    before, made, *after, pickled = in_child(child)
    # In shared memory 4 bytes for each episode index that is free.
    assert made - before < (4 * MANY if memory == "shared" else 0) + (16 << 20)
    for rows, now in zip((1000, 2000, 3000), after, strict=True):
        # A frame and a record of 20 bytes each, and of both blocks, of priorities, their sums and their maxima some
        # pages of 2 MiB that have begun; 4 MiB to spare, and 1 below: the system counts pages of each core apart.
        assert rows * FRAME - (1 << 20) <= now - made <= rows * (FRAME + 20) + (18 << 20)
    assert 3000 * FRAME < pickled < 3100 * FRAME


@pytest.mark.parametrize("kind", ["prioritized", "sequence"])
def test_priorities_take_no_memory_before_there_are_rows(kind):
    def child() -> list[int]:
        capacity.free_ram = lambda: None
        before = resident("VmHWM")
        if kind == "sequence":
            storage: Any = SequenceReplayStorage(SPACE, SPACE, storage_size=2**31, sequence_length=4, alpha=0.6)
        else:
            storage = PrioritizedReplayStorage(SPACE, SPACE, storage_size=2**31)
        made = resident("VmHWM")
        for step in range(20):
            add(storage, step, ends=step % 9 == 8)
        storage.update(storage.sample(4).rows, np.ones(4))
        storage.reset()
        return [made - before, resident("VmHWM") - before, len(storage)]

    made, used, held = in_child(child)
    assert made < 64 << 20  # the sums alone would be 1.6 GiB, and the leaves 8
    assert used < 128 << 20
    assert held == 0


@pytest.mark.parametrize("memory", ["ram", "shared"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))])
def test_a_copy_holds_what_was_held(memory, copied):
    storage = KINDS["replay"](memory=memory)
    for step in range(30):
        add(storage, step, ends=step % 9 == 8)
    other = copied(storage)
    assert_holds(other, 30)
    for step in range(30, 40):
        add(other, step, ends=step % 9 == 8)
    assert_holds(other, 40)
    assert_holds(storage, 30)


@pytest.fixture
def control_group():
    """A control group of 192 MiB, and a function that puts a process into it."""
    folder = Path("/sys/fs/cgroup/memory") / f"rlstore-test-{os.getpid()}"
    limit = "memory.limit_in_bytes"
    if not folder.parent.is_dir():
        folder, limit = folder.parents[1] / folder.name, "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(192 << 20))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    yield lambda: (folder / "cgroup.procs").write_text(str(os.getpid()))
    folder.rmdir()


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_a_control_group_that_is_full(memory, control_group, tmp_path):
    def child() -> tuple[int, int]:
        control_group()
        storage = ReplayStorage(PIXELS, SPACE, storage_size=1_000_000, batch_size=4, memory=memory)
        with pytest.raises(DoesNotFitError, match=r"the limit of the control group, 201,326,592 bytes"):
            add_frames(storage, 0, 20_000)
        held = len(storage)
        with pytest.raises(DoesNotFitError):
            add_frames(storage, held, held + 1)
        storage.save(tmp_path / "saved")
        for one in (storage, None):
            if one is None:
                del storage
                one = Storage.load(tmp_path / "saved")
            for _ in range(5):
                batch = one.sample()
                assert torch.equal(batch.observations[:, 5, 5].float(), batch.rewards.flatten() % 251)
        return held, len(one)

    held, loaded = in_child(child)
    assert held == loaded
    # 128 of the 192 MiB are left to everything else, and what the process itself takes meanwhile.
    assert (32 << 20) // FRAME < held < (64 << 20) // FRAME
