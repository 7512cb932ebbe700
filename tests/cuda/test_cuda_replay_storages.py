"""Whole replay storages on the kernels in Triton serve what they serve on the CPU's own."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import replay_play
import torch
from gymnasium import spaces
from replay_play import flat, make, play

from rlstore import ReplayStorage, RowNotHeldError, Storage, kernels
from rlstore.engine.rows import episode_ring
from rlstore.kernels import cuda

# The rest of them are compared on a GPU, in tests/test_cuda.py.
NAMES = ["frame stacks", "prioritized", "sequences by priority"]


@pytest.fixture
def on_triton(monkeypatch, device):
    """A function that gives the device of the storages; without a GPU the CPU has its kernels from then on."""
    monkeypatch.setattr(replay_play, "STEPS", 60 if torch.cuda.is_available() else 16)

    def switch() -> str:
        if device.type == "cpu":
            monkeypatch.setitem(kernels._VERSIONS, "cpu", cuda.OPERATIONS)
        return device.type

    return switch


def assert_same(mine: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for ours, expected in zip(mine, truth, strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)


def look(storage) -> list[torch.Tensor]:
    """Which rows and episodes there are, all rows, and the final observation of an episode."""
    rows, episodes = storage.held_rows(), storage.episodes()
    return [rows, *episodes._listing, *flat(storage[rows]), *flat(episodes[0].final_observations)]


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_everything_held_are_the_same(name, on_triton):
    truth = make(name, "cpu")
    expected, whole, seen = play(name, truth), flat(truth.get_all_buffer_data()), look(truth)
    storage = make(name, on_triton())
    mine = play(name, storage)
    assert type(storage._ring_of().kernel) is cuda.OPERATIONS["EpisodeRing"]
    assert len(mine) > 3
    for ours, batch in zip(mine, expected, strict=True):
        assert_same(ours, batch)
    assert_same(flat(storage.get_all_buffer_data()), whole)
    assert_same(look(storage), seen)
    rows = storage.held_rows()
    for row in (int(rows[0]) - storage.num_envs, int(rows[-1]) + storage.num_envs):  # for which kernels give zeros
        with pytest.raises(RowNotHeldError, match=f"row {row} "):
            storage[[int(rows[0]), row]]


@pytest.mark.parametrize(
    "name", ["prioritized", "sequences by priority", *(["sequences"] if torch.cuda.is_available() else [])]
)
def test_a_copy_and_a_saved_storage_go_on_as_the_storage_does(name, on_triton, monkeypatch, tmp_path):
    place = on_triton()
    if place == "cpu":
        monkeypatch.setattr(replay_play, "STEPS", 12)
    storage = make(name, place)
    play(name, storage)
    storage.save(tmp_path)
    others = [copy.deepcopy(storage), Storage.load(tmp_path), Storage.load(tmp_path, device="cpu")]
    if name != "sequences":
        total, leaves = storage.priority_total, storage._sampler.tree.leaves.cpu()
        for other in others:
            assert other.priority_total == pytest.approx(total)
            assert torch.equal(other._sampler.tree.leaves.cpu(), leaves)
    batch = flat(storage.sample())
    for other in others:
        assert_same(flat(other.sample()), batch)


def test_the_storage_itself_adds_on_after_its_writers(on_triton, monkeypatch):
    """A writer takes free episode indices, and the storage knows of it when it adds again."""
    monkeypatch.setattr(episode_ring, "_FIRST_SLOTS", 16)
    monkeypatch.setattr(episode_ring, "_FIRST_SLOTS_ON_DEVICE", 16)
    storage = ReplayStorage(
        spaces.Box(-1e6, 1e6, (1,)), spaces.Discrete(2), on_triton(), storage_size=50, num_envs=1, batch_size=4
    )
    yes, no = torch.tensor([True]), torch.tensor([False])

    def add(to, number, ended):
        seen = torch.tensor([[float(number)]])
        to.add(seen, torch.zeros(1, dtype=torch.int64), torch.ones(1), ended, no, {}, seen + 1)

    for number in range(14):
        add(storage, number, yes if number == 13 else no)
    with storage.writer(1) as writer:
        for number in range(100, 111):
            add(writer, number, yes)
    for number in range(200, 208):
        add(storage, number, yes)
    held = storage.get_all_buffer_data()["observations"].flatten().tolist()
    assert held == [*range(14), *range(100, 111), *range(200, 208)]


def test_everything_held_can_be_put_into_another_storage(on_triton):
    place = on_triton()
    first, second = make("n-step", place), make("n-step", place)
    play("n-step", first)
    data = first.get_all_buffer_data()
    second.insert_data_slice(data)
    assert_same(flat(second.get_all_buffer_data()), flat(data))
    assert len(second) == len(first)


def test_writers_of_this_process_add_what_the_storage_would(on_triton):
    place = on_triton()
    alone, written = make("uniform", place), make("uniform", place)
    writers = written.writer(2), written.writer(1)
    observations = torch.arange(6.0).reshape(3, 2)
    for step in range(5):
        ends = torch.tensor([step == 3, False, step == 4])
        following = observations + 10
        step_of = (observations, torch.arange(3), following[:, 0], ends, ends & False)
        alone.add(*step_of, {}, following)
        for writer, lanes in zip(writers, (slice(0, 2), slice(2, 3)), strict=True):
            writer.add(*(value[lanes] for value in step_of), {}, following[lanes])
        observations = following
        assert_same(flat(written.sample()), flat(alone.sample()))
    assert_same(flat(written.get_all_buffer_data()), flat(alone.get_all_buffer_data()))
    for writer in writers:
        writer.close()
    written.add(*step_of, {}, following)
    assert len(written) == 18


def test_episodes_are_loaded_as_by_the_cpu(on_triton):
    """Numbers, flags and vectors of one lane, some of whose terminated episodes lack their final observation."""
    ids = np.arange(12)
    arrays = {
        "observations": np.stack([ids, -ids], 1).astype(np.float32),
        "actions": ids % 3,
        "rewards": (ids / 4).astype(np.float32),
        "terminals": ids % 6 == 3,
        "timeouts": ids == 11,
    }
    made = []
    for device in ("cpu", on_triton()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the step that is left out
            made.append(ReplayStorage.from_arrays(arrays, device=device))
    assert type(made[1]._ring_of().kernel) is cuda.OPERATIONS["EpisodeRing"]
    assert_same(look(made[1]), look(made[0]))
