"""The launcher: what it hands to a compiled kernel, and when it leaves the launch to Triton."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from rlstore.kernels.cuda import launch
from rlstore.kernels.cuda.launch import Launcher

STREAM = 77


class Kernel:
    """Stands for what ``triton.jit`` gives: it notes the ordinary launches, and those of what it was compiled to."""

    def __init__(self, *missing: str) -> None:
        self.ordinary: list[tuple] = []
        self.bound: list[tuple] = []
        parts = {"run": lambda *given: self.bound.append(given), "function": "function", "packed_metadata": "metadata"}
        self.compiled = SimpleNamespace(**{name: part for name, part in parts.items() if name not in missing})

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.ordinary.append((grid, arguments, options))
            return self.compiled

        return run


@pytest.fixture
def cuda(monkeypatch) -> torch.device:
    """A device of which the launcher asks no more than its number and its stream."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    return torch.device("cuda", 0)


def aligned(count: int = 8) -> torch.Tensor:
    tensor = torch.zeros(count)
    assert tensor.data_ptr() % 16 == 0
    return tensor


def test_the_first_launch_is_ordinary_and_the_next_ones_hand_over_addresses(cuda):
    kernel = Kernel()
    launcher = Launcher(kernel, (4, (1, 2)), num_warps=2)
    first, second, third = aligned(), aligned(), aligned()
    launcher((3, 2, 1), cuda, first, (second, third), 5, 0.5)
    assert kernel.ordinary == [((3, 2, 1), (first, (second, third), 5, 0.5, 4, (1, 2)), {"num_warps": 2})]
    assert kernel.bound == []
    other = aligned()
    launcher((7, 1, 1), cuda, other, (third, second), 6, 0.25)
    addresses = other.data_ptr(), (third.data_ptr(), second.data_ptr()), 6, 0.25
    assert kernel.bound == [
        (7, 1, 1, STREAM, "function", "metadata", None, None, None, *addresses, 4, (1, 2)),
    ]
    assert len(kernel.ordinary) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_memory_that_begins_at_an_odd_place_is_left_to_triton(cuda, place):
    """What was compiled for one alignment must not meet another, before it is bound and after."""
    kernel = Kernel()
    launcher = Launcher(kernel)
    good = aligned()
    odd = [good, good]
    odd[place] = good[1:]
    for _ in range(2):
        launcher((1, 1, 1), cuda, odd[0], (odd[1],))
    assert len(kernel.ordinary) == 2
    assert kernel.bound == []
    for _ in range(2):
        launcher((1, 1, 1), cuda, good, (good,))
    assert (len(kernel.ordinary), len(kernel.bound)) == (3, 1)
    launcher((1, 1, 1), cuda, odd[0], (odd[1],))
    assert (len(kernel.ordinary), len(kernel.bound)) == (4, 1)


@pytest.mark.parametrize("missing", launch._NEEDED)
def test_where_triton_is_not_as_we_know_it_every_launch_is_ordinary(cuda, missing):
    kernel = Kernel(missing)
    launcher = Launcher(kernel)
    for _ in range(3):
        launcher((1, 1, 1), cuda, aligned())
    assert len(kernel.ordinary) == 3


def test_each_device_has_what_was_compiled_for_it(cuda, monkeypatch):
    kernel = Kernel()
    launcher = Launcher(kernel)
    entered: list[int] = []

    class Entered:
        def __init__(self, index):
            self._index = index

        def __enter__(self):
            entered.append(self._index)
            monkeypatch.setattr(torch.cuda, "current_device", lambda: self._index)

        def __exit__(self, *_):
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    monkeypatch.setattr(torch.cuda, "device", Entered)
    for _ in range(2):
        launcher((1, 1, 1), cuda, aligned())
        launcher((1, 1, 1), torch.device("cuda", 1), aligned())
    assert entered == [1, 1]
    assert len(kernel.ordinary) == 2
    assert [given[3] for given in kernel.bound] == [STREAM, STREAM + 1]


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_no_program_is_no_launch(cuda, grid):
    kernel = Kernel()
    Launcher(kernel)(grid, cuda, aligned())
    assert kernel.ordinary == kernel.bound == []


@triton.jit(do_not_specialize=["count", "factor"])
def _scale(sources, targets, count: tl.int64, factor: tl.float64, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    for f in tl.static_range(len(sources)):
        x = tl.load(sources[f] + i, mask=i < count, other=0)
        tl.store(targets[f] + i, (x * factor).to(x.dtype), mask=i < count)


@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "not aligned"])
def test_a_kernel_gives_the_same_however_it_is_launched(device, first):
    launcher = Launcher(_scale, (16,))
    for count, factor in ((40, 2.0), (41, 1.0), (1, -0.5), (16, 2.0)):
        sources = tuple(torch.arange(50.0, device=device)[first:] + place for place in range(2))
        targets = tuple(torch.full((60,), -1.0, device=device)[first:] for _ in range(2))
        launcher((-(-count // 16), 1, 1), device, sources, targets, count, factor)
        for place, target in enumerate(targets):
            expected = [(first + i + place) * factor for i in range(count)]
            assert target.tolist() == expected + [-1.0] * (60 - first - count)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_device_the_later_launches_are_bound():
    launcher, device = Launcher(_scale, (16,)), torch.device("cuda", 0)
    source, target = torch.arange(16.0, device=device), torch.zeros(16, device=device)
    launcher((1, 1, 1), device, (source,), (target,), 16, 1.0)
    assert list(launcher._bound) == [0], "the installed Triton is not as launch.py knows it"
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launcher((1, 1, 1), device, (source,), (target,), 16, 3.0)
    stream.synchronize()
    assert target.tolist() == [3.0 * i for i in range(16)]
