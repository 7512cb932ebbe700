"""The ring of episodes in Triton against the portable version, in every byte of its memory."""

from __future__ import annotations

import pytest
import torch
from device_rings import LAYOUTS, DeviceTwins, Layout, Leaf

from rlstore.kernels.cuda import memory
from rlstore.kernels.cuda import ring as ring_on_cuda
from rlstore.kernels.cuda.launch import Launcher
from rlstore.kernels.cuda.replay_gather import ReplayGather
from rlstore.kernels.cuda.rules import Counts
from rlstore.kernels.cuda.watch import Watch
from rlstore.kernels.portable import OPERATIONS as PORTABLE


def assert_told(twins: DeviceTwins) -> None:
    """What is told of all lanes: rows, whether they hold the same times, from when on, and slots."""
    written, begun = twins.truth.counters[:2]
    oldest = torch.maximum(begun, written - twins.layout.steps)
    ends = (written - oldest).cumsum(0)
    told = dict(zip(("total", "alike", "oldest", "free"), twins.mine.ring.words.tolist(), strict=False))
    assert told["alike"] == bool((written == written[0]).all() and (oldest == oldest[0]).all())
    assert (told["total"], told["free"]) == (int(ends[-1]), int(twins.truth.counters[4].min()))
    if told["alike"]:
        assert told["oldest"] == int(oldest[0])
    else:
        assert twins.mine.ring.ends.tolist() == ends.tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_writes_agree_in_every_byte(name, device):
    twins = DeviceTwins(LAYOUTS[name], device)
    for write in range(16):
        twins.write()
        twins.assert_same()
        assert_told(twins)
        if write == 7:
            twins.clear()
    assert (int(twins.mine.ring.words[4]) > 0) == (twins.broken > 0)
    if twins.broken == 0:  # else a break may have hidden a repeat
        assert int(twins.mine.ring.words[7]) == twins.repeats


def test_lanes_of_several_programs_agree(device):
    twins = DeviceTwins(Layout(37, 3, (Leaf(torch.float32, 1, 1, 3),), torch.int64, (), 0, 0, seed=6), device)
    twins.write(8)
    twins.assert_same()
    assert_told(twins)


def test_slots_are_made_before_they_are_needed_and_rows_stay_as_they_are(device):
    """Short episodes in a ring that begins with one slot a lane: the tables grow, and nothing that is held is lost."""
    layout = Layout(3, 40, (Leaf(torch.float32, 1, 1, 1),), torch.int64, (), 2, 0, seed=8, trouble=(0.4, 0.1, 0.2, 0.0))
    twins = DeviceTwins(layout, device, deep=1)
    requests = ((0, 0, False, (1,)), (1, 0, False, (1,)), (3, 0, False, (1,)), (4, 0, False, (1,)), (7, 0, False, ()))
    twins.write(30)
    rows = twins.truth.held()
    mine = ReplayGather(twins.mine.ring, requests, 3, 0.9).gather(rows, None)
    truth = PORTABLE["ReplayGather"](twins.truth.ring, requests, 3, 0.9).gather(rows, None)
    for result, expected in zip(mine, truth, strict=True):
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert len(twins.mine.free_slots) > 8
    assert bool((twins.mine.counters[4] >= 0).all())


def test_that_an_episode_broke_off_is_told_once_by_a_later_write(device):
    layout = Layout(2, 9, (Leaf(torch.float32, 1, 1, 1),), torch.int64, (), 2, 0, seed=0)
    twins = DeviceTwins(layout, device)
    no = torch.zeros(2, dtype=torch.bool, device=device)
    outcomes = []
    for time in range(40 if device.type == "cuda" else 14):
        shown = torch.full((2, 1), 1.0 * time + (time == 3), device=device)
        action, reward = torch.zeros(2, 2, dtype=torch.int64, device=device), torch.ones(2, device=device)
        outcomes += twins.mine.write((shown, shown * 0 + time + 1.0, action, reward, no, no, None, None, None))
        if device.type == "cuda":
            torch.cuda.synchronize()
    assert outcomes.count(-4) == 1
    assert outcomes.index(-4) > 3


@pytest.mark.parametrize(
    ("resets", "reward", "told"), [(0, 0.0, 0), (0, 0.5, 1), (1, 0.5, 0), (2, 0.5, 0), (3, 0.0, 1)]
)
def test_that_a_step_repeats_a_final_observation_is_told_once_by_a_later_write(device, resets, reward, told):
    """Lane 1 ends with its first step, and with its sixth: the step after that begins with the final observation."""
    layout = Layout(2, 9, (Leaf(torch.float32, 1, 1, 1),), torch.int64, (), resets, 0, seed=0)
    twins = DeviceTwins(layout, device)
    outcomes = []
    for time in range(40 if device.type == "cuda" else 14):
        shown = torch.full((2, 1), float(time), device=device)
        action = torch.zeros(2, 2, dtype=torch.int64, device=device)
        given = torch.tensor([1.0, reward if time in (1, 6) else 1.0], device=device)
        ended = torch.tensor([False, time in (0, 5)], device=device)
        outcomes += twins.mine.write((shown, shown + 1, action, given, ended, ended & False, None, None, None))
        if device.type == "cuda":
            torch.cuda.synchronize()
    assert outcomes.count(-7) == told
    # The first look is taken after some writes, and shows the newest: of lane 1, the row after its second end.
    assert twins.mine.ring.repeated() == (6 * 2 + 1 if told else -1)


def test_where_the_compiler_fails_larger_tiles_are_written(device, monkeypatch):
    made = []

    class Fails(Launcher):
        def __call__(self, grid, place, *arguments):
            made.append(grid)
            if len(made) == 1:
                raise RuntimeError("PassManager::run failed")
            super().__call__(grid, place, *arguments)

    layout = Layout(5, 4, (Leaf(torch.float32, 1, 1, 300),), torch.int64, (), 0, 0, seed=3)
    monkeypatch.setattr(memory, "_WIDEST_TILE", 1024)
    twins = DeviceTwins(layout, device)
    monkeypatch.setattr(ring_on_cuda, "Launcher", Fails)
    twins.write(3)
    twins.assert_same()
    assert [grid[0] for grid in made[:2]] == [3, 2]


def test_writes_since_a_look_count_against_what_it_showed(monkeypatch):
    """A copy that takes three writes to finish: the bound of free episode indices is less by those three."""

    class Event:
        is_done = True

        def record(self, stream):
            pass

        def query(self):
            return self.is_done

        synchronize = query

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    words = torch.tensor([0, 0, 0, 20, 0, 0, 0, 0])
    watch = Watch(words)
    watch._event = Event()
    assert not watch.is_short(20)  # the first look
    for _ in range(7):
        watch.count_write()
    words[3], Event.is_done = 9, False
    watch.count_write()  # the eighth write looks again
    for _ in range(3):
        watch.count_write()
        assert not watch.has_broken()
    assert watch._free == 20 - 11
    words[4], Event.is_done = 1, True
    assert not watch.has_broken()
    assert watch._free == 9 - 3


def test_without_room_nothing_is_written(device):
    twins = DeviceTwins(LAYOUTS["one lane"], device)
    twins.write()
    for twin in twins.both:
        twin.ring.allow(0)
    twins.write()
    assert int(twins.mine.counters[0].sum()) == int(twins.truth.counters[0].sum()) == 1
    twins.assert_same()
    for twin in twins.both:
        twin.ring.allow(1)
    twins.write(2)
    assert int(twins.mine.counters[0].sum()) == 2
    twins.assert_same()


@pytest.mark.parametrize("is_replay", [True, False])
def test_a_capture_that_adds_is_refused_with_what_to_do(is_replay, monkeypatch):
    class Event:
        def query(self):
            raise RuntimeError("operation not permitted when stream is capturing")

    counts = Watch(torch.zeros(8, dtype=torch.int64)) if is_replay else Counts(torch.device("cpu"))
    counts._event, counts._looking = Event(), True
    look = counts.look if isinstance(counts, Counts) else counts.has_broken
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"adding .* cannot be captured in a CUDA graph. Add before the capture"):
        look()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(RuntimeError, match="operation not permitted"):
        look()
