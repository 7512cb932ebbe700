"""Compiles the kernels of replay for an H100, on any machine, as compile_program.py does those of rollouts."""

from __future__ import annotations

import numpy as np
import torch
from compile_program import NoDevice, compile_only
from device_rings import Layout, Leaf, Memory, Steps
from test_replay_draws import PriorityMemory, WindowMemory
from test_replay_gather import requests_of
from triton.runtime import driver

from rlstore.kernels.cuda import launch
from rlstore.kernels.cuda.replay_gather import ReplayGather
from rlstore.kernels.cuda.replay_priorities import Priorities
from rlstore.kernels.cuda.replay_ring import EpisodeRing
from rlstore.kernels.cuda.replay_windows import WindowIndex

LEAVES = {
    "vectors": (Leaf(torch.float32, 1, 1, 48),),
    "stacks": (Leaf(torch.uint8, 4, 1, 7056), Leaf(torch.bool, 1, 1, 1)),
    "odd": (Leaf(torch.uint16, 2, 3, 1), Leaf(torch.bfloat16, 1, 1, 2)),
}


def ring_of(name: str, lanes: int, steps: int, resets: int) -> Memory:
    """A ring with a slot for each row, and one step in it."""
    layout = Layout(lanes, steps, LEAVES[name], torch.int32, (), resets, 0, seed=0)
    memory = Memory(layout, EpisodeRing)
    for _ in range(steps):
        memory.grow()
    memory.make_starts()
    assert memory.ring.write(Steps(layout, np.random.default_rng(0)).next()) == -1
    return memory


def draw_and_gather(memory: Memory, n_step: int) -> None:
    generator, rows = torch.zeros(2, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    memory.ring.draw(generator, rows)
    gather = ReplayGather(memory.ring, requests_of(memory.layout), n_step, 0.9)
    gather.sample(generator, 64)
    gather.gather(rows, None)
    priorities = PriorityMemory(memory, Priorities).tree
    priorities.follow()
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
    for index, (name, lanes, steps) in enumerate([("vectors", 40, 30), ("stacks", 1, 6), ("odd", 3, 5)]):
        made = ring_of(name, lanes, steps, resets=index)
        draw_and_gather(made, n_step=index + 1)
        draw_windows(made, across=index == 1)
