"""The replay storages on the kernels in plain torch, which other devices run on, serve what they serve natively."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gymnasium import spaces
from replay_play import STORAGES, flat, make, play

from rlstore import NotReadyError, PrioritizedReplayStorage, SequenceReplayStorage, kernels
from rlstore.engine.batches import priorities
from rlstore.kernels.portable import OPERATIONS as PORTABLE


@pytest.fixture
def on_portable(monkeypatch):
    """A function after which every kernel for the CPU is the portable version."""

    def switch() -> None:
        monkeypatch.setitem(kernels._VERSIONS, "cpu", {})

    return switch


def assert_same(mine: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for ours, expected in zip(mine, truth, strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", STORAGES)
def test_batches_are_the_same(name, on_portable):
    truth = play(name, make(name, "cpu"))
    on_portable()
    storage = make(name, "cpu")
    mine = play(name, storage)
    assert type(storage._ring_of().kernel) is PORTABLE["EpisodeRing"]
    assert len(mine) > 30
    for ours, expected in zip(mine, truth, strict=True):
        assert_same(ours, expected)


@pytest.mark.parametrize("length", [None, 2], ids=["rows", "windows"])
def test_a_device_without_kernels_of_its_own_tells_that_every_priority_is_0(length, on_portable, monkeypatch):
    """What such a device holds is looked at anyway: it says what the CPU says, though it is another device."""
    on_portable()
    kind = {} if length is None else {"sequence_length": length}
    storage_class = PrioritizedReplayStorage if length is None else SequenceReplayStorage
    space = spaces.Box(0, 1, (1,))
    storage = storage_class(space, spaces.Discrete(2), storage_size=10, num_envs=2, alpha=0.5, **kind)
    for _ in range(3):
        storage.add(torch.zeros(2, 1), [0, 0], [0.0, 0.0], [False, False], [False, False], {}, torch.zeros(2, 1))
    storage.update(storage.sample(64).rows, torch.zeros(64))
    tree = storage._sampler.tree
    assert tree.total == 0
    monkeypatch.setattr(tree._ring, "device", SimpleNamespace(type="cuda"))
    empty = torch.empty
    monkeypatch.setattr(priorities.torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
    with pytest.raises(NotReadyError, match="every priority is 0"):
        tree.draw(4, 0.5, storage._random)


@pytest.mark.parametrize("name", [name for name in STORAGES if name != "in RAM, prepared ahead"])
def test_everything_held_is_the_same_and_goes_from_one_to_the_other(name, on_portable, tmp_path):
    native = make(name, "cpu")
    play(name, native)
    native.save(tmp_path / "native")
    whole, batch = flat(native.get_all_buffer_data()), flat(native.sample())
    on_portable()
    storage = make(name, "cpu")
    play(name, storage)
    assert_same(flat(storage.get_all_buffer_data()), whole)
    loaded = type(storage).load(tmp_path / "native")
    if name.startswith("hindsight"):
        loaded.compute_reward = storage.compute_reward
    assert_same(flat(loaded.sample()), batch)


@pytest.mark.parametrize(("kind", "lanes"), [(PrioritizedReplayStorage, 1), (SequenceReplayStorage, 2)])
def test_episodes_are_added_as_natively(kind, lanes, on_portable):
    options = {"sequence_length": 3, "alpha": 0.5} if kind is SequenceReplayStorage else {}
    box = spaces.Box(-1e9, 1e9, (2,), "float32")
    episodes = [
        {
            "observations": torch.arange(2.0 * length + 2).view(-1, 2) + 100 * length,
            "actions": torch.arange(length),
            "rewards": torch.arange(length) + 0.5 * length,
            "terminated": length % 2 == 0,
            "truncated": length % 3 == 0,
        }
        for length in (5, 9, 2, 7, 4, 12)
    ]

    def made():
        """Everything that is served."""
        sizes = {"storage_size": 30 * lanes, "num_envs": lanes, "batch_size": 9}
        storage = kind(box, spaces.Discrete(20), **sizes, seed=1, **options)
        storage.add_episodes(episodes)
        listed = storage.episodes()
        listing = [getattr(listed, name) for name in ("envs", "lengths", "terminated", "truncated", "is_over")]
        fields = [field for e in listed for field in (e.observations, e.actions, e.final_observations)]
        batches = [tensor for _ in range(3) for tensor in flat(storage.sample())]
        return type(storage._ring_of().kernel), [storage.held_rows(), *listing, *fields, *batches]

    _, truth = made()
    on_portable()
    version, mine = made()
    assert version is PORTABLE["EpisodeRing"]
    assert_same(mine, truth)
