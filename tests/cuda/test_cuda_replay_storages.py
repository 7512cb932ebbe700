"""Whole replay storages on the kernels in Triton serve what they serve on the CPU's own."""

from __future__ import annotations

import pytest
import replay_play
import torch
from replay_play import flat, make, play

from rlstore import kernels
from rlstore.kernels import cuda

# The rest of them are compared on a GPU, in tests/test_cuda.py.
NAMES = ["frame stacks", "prioritized", "sequences by priority", "hindsight"]


@pytest.fixture
def on_triton(monkeypatch, device):
    """A function after which the CPU has the kernels of a GPU; gives the device of the storages."""
    monkeypatch.setattr(replay_play, "STEPS", 22)

    def switch() -> str:
        made = {name: {"cpu": cuda.OPERATIONS[name]} if name in cuda.OPERATIONS else {} for name in kernels.OPERATIONS}
        monkeypatch.setattr(kernels, "_TABLE", made)
        return device.type

    return switch


def assert_same(mine: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for ours, expected in zip(mine, truth, strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_everything_held_are_the_same(name, on_triton):
    truth = make(name, "cpu")
    expected, whole = play(name, truth), flat(truth.get_all_buffer_data())
    storage = make(name, on_triton())
    mine = play(name, storage)
    assert type(storage._ring_of().kernel) is cuda.OPERATIONS["EpisodeRing"]
    assert len(mine) > 3
    for ours, batch in zip(mine, expected, strict=True):
        assert_same(ours, batch)
    assert_same(flat(storage.get_all_buffer_data()), whole)
