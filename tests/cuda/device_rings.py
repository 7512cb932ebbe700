"""The ring of the tests of kernels twice: in Triton on the device, and the portable version on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from replay_rings import Layout, Leaf, Memory, Steps, as_bytes

from rlstore.kernels.cuda.ring import EpisodeRing
from rlstore.kernels.portable import OPERATIONS as PORTABLE

# One plain leaf of an odd number of lanes; stacks of every kind beside each other; a single lane; a wide frame.
LAYOUTS = {
    "plain": Layout(5, 6, (Leaf(torch.float32, 1, 1, 3),), torch.int64, (), 0, 0, seed=0),
    "always reset": Layout(3, 4, (Leaf(torch.float64, 1, 1, 2),), torch.float32, (2,), 1, 3, seed=1),
    "never reset": Layout(2, 1, (Leaf(torch.bfloat16, 1, 1, 2),), torch.bool, (1,), 2, 0, seed=2),
    "report": Layout(3, 5, (Leaf(torch.int16, 1, 1, 2),), torch.int64, (2,), 3, 0, seed=2, trouble=(0.5, 0.0, 0.1, 0)),
    "stacks": Layout(
        3,
        7,
        (Leaf(torch.uint8, 3, 2, 2), Leaf(torch.float16, 2, 1, 3), Leaf(torch.int16, 1, 1, 1)),
        torch.uint8,
        (),
        0,
        3,
        seed=3,
        trouble=(0.3, 0.1, 0.1, 0.4),
    ),
    "one lane": Layout(1, 9, (Leaf(torch.bool, 4, 1, 3),), torch.int32, (), 0, 0, seed=4, trouble=(0.3, 0.1, 0.0, 0.3)),
    # Wider than a tile, which is smaller where Triton's interpreter runs: see conftest.py.
    "wide": Layout(
        2, 3, (Leaf(torch.uint8, 2, 3, 401 if torch.cuda.is_available() else 13),), torch.int64, (), 0, 0, seed=5
    ),
}


def as_given(values: tuple, device: torch.device, flags: tuple[int, ...]) -> tuple:
    """The values on the device. On a GPU flags are of one dtype: each other one is a kernel more to compile."""
    on_gpu = device.type == "cuda"
    return tuple(
        None if value is None else (value != 0 if on_gpu and index in flags else value).to(device)
        for index, value in enumerate(values)
    )


class DeviceTwins:
    """The same ring twice, under the same steps.

    Args:
        layout: What it is like.
        device: Where the one in Triton is.
        deep: Slots a lane that both have from the beginning; None for as many as are ever needed.
    """

    def __init__(self, layout: Layout, device: torch.device, deep: int | None = None) -> None:
        self.layout, self.device = layout, device
        self.mine = Memory(layout, EpisodeRing, device)
        self.truth = Memory(layout, PORTABLE["EpisodeRing"])
        self.both = (self.mine, self.truth)
        for memory in self.both:
            for _ in range((layout.steps + 1 if deep is None else deep) - 1):
                memory.grow()
            memory.make_starts()
        self.rng = np.random.default_rng(layout.seed)
        self.steps = Steps(layout, self.rng)
        self.broken = self.repeats = 0

    def write(self, count: int = 1) -> None:
        for _ in range(count):
            values = self.steps.next()
            flags = 2 * len(self.layout.leaves) + 2  # behind two columns
            last = len(values) - 1
            self.mine.write(as_given(values, self.device, (flags, flags + 1, flags + 2, last)))
            outcome = self.truth.write(values)[-1]
            self.broken += outcome == -4
            self.repeats = max(self.repeats, self.truth.ring.repeated() + 1)

    def assert_same(self) -> None:
        for mine, truth in zip(self.mine.tensors(), self.truth.tensors(), strict=True):
            assert torch.equal(as_bytes(mine.cpu()), as_bytes(truth))

    def clear(self) -> None:
        for memory in self.both:
            counters, deep = memory.counters, len(memory.free_slots)
            counters[1], counters[2:4], counters[4] = counters[0], -1, deep
            order = torch.arange(deep * self.layout.lanes, dtype=torch.int32).reshape(deep, self.layout.lanes)
            memory.free_slots.copy_(order.flip(0))
            memory._bind()

    def some_rows(self, count: int) -> torch.Tensor:
        """Rows that are held, and some of -1."""
        held = self.truth.held()
        rows = held[torch.from_numpy(self.rng.integers(len(held), size=count))]
        rows[torch.from_numpy(self.rng.random(count) < 0.15)] = -1
        return rows
