"""Compiles the kernels for an H100, on any machine: the interpreter permits what the compiler refuses.

Run by test_compiles.py in a process of its own, in which Triton does not interpret. Prints the kernels' names.
"""

from __future__ import annotations

import numpy as np
import torch
from device_rings import Layout, Leaf, Memory, Steps
from test_replay_draws import PriorityMemory, WindowMemory
from test_replay_gather import requests_of
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from rlstore.kernels.cuda import gather, launch, rows, scans, segments
from rlstore.kernels.cuda.priorities import Priorities
from rlstore.kernels.cuda.replay_gather import ReplayGather
from rlstore.kernels.cuda.ring import EpisodeRing
from rlstore.kernels.cuda.windows import WindowIndex


class NoDevice:
    """What Triton asks of a driver while it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(self, grid, device, *arguments):
    """In the place of a launch."""
    compiled = self._kernel.warmup(*launch.expanded(arguments), *self._constants, grid=grid, num_warps=self._num_warps)
    assert compiled.asm["cubin"]
    print(self._kernel.__name__)


def write_rows() -> None:
    kinds = [((64, 48), torch.float32, 0, False), ((64, 1), torch.uint8, 0, True), ((64, 3), torch.bool, 0, False)]
    kinds += [((2, 64, 8), torch.float16, 0, False), ((64,), torch.float32, 1, True), ((64, 2), torch.uint32, 1, False)]
    targets = [(torch.zeros((3, *shape), dtype=dtype), lead, is_flag, False) for shape, dtype, lead, is_flag in kinds]
    values = [torch.zeros(shape, dtype=torch.bool if is_flag else dtype) for shape, dtype, _, is_flag in kinds]
    assert rows.RowWriter(targets).write(0, tuple(values)) == -1


def scan(dtype: torch.dtype, steps: int) -> None:
    rewards, values, out, other = (torch.zeros(steps, 32, dtype=dtype) for _ in range(4))
    flags, last = torch.zeros(steps, 32, dtype=torch.uint8), torch.zeros(32, dtype=dtype)
    inputs = (rewards, values, last, flags)
    scans.fill_gae(*inputs, None, None, True, 0.9, 0.9, 1e-8, out, other)
    scans.fill_gae(*inputs, flags.float(), values, True, 0.9, 0.9, None, out, other)
    scans.discounted_returns(rewards, last, flags, flags.bool(), values, 0.9, out)
    scans.n_step_returns(*inputs, flags, None, 0.9, 3, out)
    scans.vtrace(*inputs, flags, values, rewards, 0.9, 0.9, 1.0, 1.0, 1.0, out, other)
    scans.normalize(out, 1e-5)


def gather_rows() -> None:
    gather.permutation(torch.zeros(2, dtype=torch.int64), 98304, torch.zeros(2, 64, dtype=torch.int64))
    ids = torch.zeros(64, dtype=torch.int64)
    sources = tuple(torch.zeros(4, 16, width) for width in (48, 1))
    gather.gather_batches(sources, ids, (0, 0), [[torch.zeros(8000) for _ in range(4)]])
    pixels, mask = torch.zeros(4, 16, 28224, dtype=torch.uint8), torch.zeros(4, 16, 3, dtype=torch.bool)
    half = torch.zeros(4, 16, 8, dtype=torch.bfloat16)
    served = torch.zeros(64, 28224), torch.zeros(64, 3), torch.zeros(64, 8, dtype=torch.bfloat16)
    gather.gather((pixels, mask, half), ids, served)


def pad_trajectories() -> None:
    table, totals = torch.zeros(3, 64 * 24, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    segments.tabulate_trajectories(torch.zeros(24, 64, 1, dtype=torch.uint8), 16, table, totals)

    def of(width: int, dtype: torch.dtype = torch.float32, lanes: int = 64) -> torch.Tensor:
        return torch.zeros(24, lanes, width, dtype=dtype)

    padded, copied = (of(48), of(100, torch.uint8)), (of(12), of(1, torch.bool))
    states = torch.zeros(24, 2, 64, 256), torch.zeros(24, 1, 64, 32, dtype=torch.float16)
    targets = (of(48, lanes=40), of(100, torch.uint8, 40), torch.zeros(2, 40, 256))
    targets = (*targets, torch.zeros(1, 40, 32, dtype=torch.float16), of(12, lanes=16), of(1, torch.bool, 16))
    mask = torch.zeros(24, 40, dtype=torch.bool)
    segments.fill_trajectories(padded, states, copied, table, totals, 1, 16, targets, mask)


LEAVES = {
    "vectors": (Leaf(torch.float32, 1, 1, 48),),
    "stacks": (Leaf(torch.uint8, 4, 1, 7056), Leaf(torch.bool, 1, 1, 1)),
}


def ring_of(name: str, lanes: int, steps: int, resets: int) -> Memory:
    """A ring with an episode index for each row, and one step in it."""
    layout = Layout(lanes, steps, LEAVES[name], torch.int32, (), resets, 0, seed=0)
    memory = Memory(layout, EpisodeRing)
    for _ in range(steps):
        memory.grow()
    memory.make_starts()
    assert memory.ring.write(Steps(layout, np.random.default_rng(0)).next()) == -1
    return memory


def gather_batches(memory: Memory, n_step: int) -> ReplayGather:
    gather = ReplayGather(memory.ring, requests_of(memory.layout), n_step, 0.9)
    gather.gather(torch.zeros(64, dtype=torch.int64), None)
    return gather


def draw_and_gather(memory: Memory) -> None:
    generator, rows = torch.zeros(2, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    memory.ring.draw(generator, rows)
    gather = gather_batches(memory, 1)
    gather.sample(generator, 64)
    priorities = PriorityMemory(memory, Priorities).tree
    priorities.follow()
    lanes = memory.layout.lanes
    priorities.begin(torch.zeros(lanes, dtype=torch.int64), torch.zeros(lanes), 0.6)
    priorities.update(rows, torch.zeros(64), 0.6, None)
    priorities.draw(generator, 0.5, rows, torch.zeros(64))
    gather.sample_by_priority(priorities, generator, 0.5, 64)


def draw_windows(memory: Memory, across: bool) -> None:
    windows = WindowMemory(memory, WindowIndex, 3, 2, across).index
    windows.follow()
    windows.keep_priorities(torch.zeros(memory.layout.lanes * memory.layout.steps))
    windows.follow()
    windows.rebuild()
    windows.draw(torch.zeros(2, dtype=torch.int64), torch.zeros(64, dtype=torch.int64))


if __name__ == "__main__":
    driver.set_active(NoDevice())
    launch.Launcher.__call__ = compile_only
    write_rows()
    scan(torch.float32, 8)
    gather_rows()
    pad_trajectories()
    vectors = ring_of("vectors", 40, 30, resets=0)
    draw_and_gather(vectors)
    draw_windows(vectors, across=False)
    gather_batches(ring_of("stacks", 1, 6, resets=1), n_step=3)
