"""Uniform replay of pixels, as for DQN: stacks of four frames of 84 x 84, 20,000 transitions, batches of 32 and 256."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.harness import Phase, Target, Workload
from benchmarks.replay_buffers import AddableBuffer, Cpprb, Loop, Rlstore, SavableBuffer, Sb3, Tianshou, TorchRl
from benchmarks.replay_contenders import Copies, Sampling, keep_freed_memory
from benchmarks.replay_data import PixelSource, check_batches

CAPACITY = 20_000
STACK = 4
DRAWS = {"sample 32": (32, 20), "sample 256": (256, 20)}
ADDS = 80
# Bytes of a transition as it is served: two stacks, an action, a reward and a discount.
SERVED = 2 * STACK * PixelSource.SIDE**2 + 8 + 4 + 4


def source(*, last: bool = False) -> PixelSource:
    return PixelSource(STACK, channels=1, actions=0, last=last)


class ChannelsLast(Rlstore):
    """Our storage with observations of 84 x 84 x 4."""

    def __init__(self, capacity: int) -> None:
        super().__init__(source(last=True), capacity, frame_stack=STACK)

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        batch = super().batch(drawn)
        return batch | {name: batch[name].movedim(-1, 1) for name in ("observations", "next_observations")}


BUFFERS: dict[str, Callable[[int], SavableBuffer]] = {
    "rlstore": partial(Rlstore, source(), frame_stack=STACK),
    "cpprb": partial(Cpprb, source(), compress=True),
    "SB3": partial(Sb3, source()),
    "TorchRL": partial(TorchRl, source()),
}
ALL_BUFFERS: dict[str, Callable[[int], AddableBuffer]] = {
    **BUFFERS,
    "rlstore, channels last": ChannelsLast,
    "rlstore, whole stacks": partial(Rlstore, source()),
    "tianshou": partial(Tianshou, source()),
}


class Pixels(Sampling):
    """A full buffer to which steps are appended, and from which batches are drawn."""

    def __init__(self, name: str, make: Callable[[int], AddableBuffer]) -> None:
        buffer = make(CAPACITY)
        super().__init__(name, lambda: buffer, DRAWS)
        self._add = buffer.adding(buffer.source.loop(), ADDS)

    def phases(self) -> Mapping[str, Loop]:
        return {"add": self._add, **super().phases()}


def workload() -> Workload:
    keep_freed_memory()
    sizes = {phase: (size * SERVED, calls) for phase, (size, calls) in DRAWS.items()}
    floor = Copies({"add": (SERVED, ADDS), **sizes})
    ours, whole, last = ("rlstore",), ("rlstore, whole stacks",), ("rlstore, channels last",)
    return Workload(
        name="replay_pixels",
        title="Replay of 20,000 transitions, observations 4 x 84 x 84 in uint8",
        phases=(
            Phase("add", "add of one environment", ADDS),
            *(Phase(phase, phase, calls) for phase, (_, calls) in DRAWS.items()),
        ),
        contenders={name: partial(Pixels, name, make) for name, make in ALL_BUFFERS.items()}
        | {"memcpy": lambda: floor},
        check=partial(check_batches, source(), (256,), 1),
        rounds=8,
        targets=(
            Target("sample 32", ratio=0.75, ours=ours, row="pixels 32"),
            Target("sample 32", ratio=0.75, ours=whole, row="pixels 32, whole stacks stored"),
            Target("sample 256", ratio=0.75, ours=ours, row="pixels 256"),
            Target("sample 256", ratio=0.75, ours=whole, row="pixels 256, whole stacks stored"),
            Target("sample 256", ours, 1.3, last, "channels last, sample 256"),
            Target("add", ours, 1.3, last, "channels last, add"),
        ),
    )
