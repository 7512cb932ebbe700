"""Uniform replay of pixels, as for DQN: stacks of four frames of 84 x 84, 20,000 transitions, batches of 32 and 256."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.harness import Phase, Target, Workload
from benchmarks.replay_buffers import Cpprb, Rlstore, SavableBuffer, Sb3, TorchRl
from benchmarks.replay_contenders import Copies, Sampling, keep_freed_memory
from benchmarks.replay_data import PixelSource, check_batches

CAPACITY = 20_000
STACK = 4
SAMPLES = 20
# Bytes of a transition as it is served: two stacks, an action, a reward and a discount.
SERVED = 2 * STACK * PixelSource.SIDE**2 + 8 + 4 + 4


def source() -> PixelSource:
    return PixelSource(STACK, channels=1, actions=0)


BUFFERS: dict[str, Callable[[int], SavableBuffer]] = {
    "rlstore": partial(Rlstore, source(), frame_stack=STACK),
    "cpprb": partial(Cpprb, source(), compress=True),
    "SB3": partial(Sb3, source()),
    "TorchRL": partial(TorchRl, source()),
}


def workload() -> Workload:
    keep_freed_memory()
    draws = {"sample 32": (32, SAMPLES), "sample 256": (256, SAMPLES)}
    floor = Copies({phase: (size * SERVED, calls) for phase, (size, calls) in draws.items()})
    return Workload(
        name="replay_pixels",
        title="Replay of 20,000 transitions, observations 4 x 84 x 84 in uint8",
        phases=tuple(Phase(phase, phase, calls) for phase, (_, calls) in draws.items()),
        contenders={name: partial(Sampling, name, partial(make, CAPACITY), draws) for name, make in BUFFERS.items()}
        | {"memcpy": lambda: floor},
        check=partial(check_batches, source(), (256,), 1),
        rounds=20,
        targets=(Target("sample 32", ("cpprb",), 0.70), Target("sample 256", ("cpprb",), 0.95)),
    )
