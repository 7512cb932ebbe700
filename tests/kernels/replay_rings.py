"""What the tests of the replay kernels share: the memory of a ring, and steps that make every kind of trouble."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from kernel_inputs import DTYPES

from rlstore.kernels import kernel
from rlstore.kernels.portable import OPERATIONS as PORTABLE

CPU = torch.device("cpu")
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Leaf:
    """Stacks of ``stack`` frames [outer, inner]; with outer 1 frames lie one after another."""

    dtype: torch.dtype
    stack: int
    outer: int
    inner: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.outer, self.stack * self.inner) if self.outer > 1 else (self.stack * self.inner,)

    @property
    def frame(self) -> tuple[int, ...]:
        return (self.outer, self.inner) if self.outer > 1 else (self.inner,)


@dataclass(frozen=True)
class Layout:
    """What a ring is like, and what happens to it."""

    lanes: int
    steps: int
    leaves: tuple[Leaf, ...]
    action: torch.dtype
    reward_shape: tuple[int, ...]
    resets: int
    gap: int  # elements between the rows of a block
    seed: int
    trouble: tuple[float, ...] = field(default=(0.2, 0.15, 0.15, 0.2))  # chances: end, break, sit out, odd padding

    @property
    def rows(self) -> int:
        return self.steps + max(leaf.stack for leaf in self.leaves)

    @property
    def columns(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [(self.action, (2,)), (torch.float32, self.reward_shape)]


leaf_layouts = st.builds(
    Leaf, st.sampled_from(DTYPES), st.sampled_from([1, 1, 2, 3, 4]), st.sampled_from([1, 1, 2, 3]), st.integers(1, 3)
)
layouts = st.builds(
    Layout,
    lanes=st.integers(1, 4),
    steps=st.integers(1, 9),
    leaves=st.lists(leaf_layouts, min_size=1, max_size=3).map(tuple),
    action=st.sampled_from(DTYPES),
    reward_shape=st.sampled_from([(), (1,), (2,)]),
    resets=st.integers(0, 3),
    gap=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 2**32),
    trouble=st.sampled_from(
        [(0.2, 0.15, 0.15, 0.2), (0.5, 0.0, 0.3, 0.5), (0.05, 0.02, 0.0, 0.0), (0.9, 0.3, 0.1, 0.3)]
    ),
)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


class Memory:
    """The tensors of a ring and a kernel on them, which grow as the engine lets them grow."""

    def __init__(self, layout: Layout, ring_class, device: torch.device = CPU) -> None:
        self.layout, self.device, lanes = layout, device, layout.lanes
        self.counters = torch.zeros(5, lanes, dtype=torch.int64, device=device)
        self.counters[2:4] = -1
        self.blocks = [self._block(leaf.frame, leaf.dtype) for leaf in layout.leaves]
        self.columns = [self._block(shape, dtype) for dtype, shape in layout.columns]
        self.episode_of = self._block((), torch.int32)
        self.episodes = torch.zeros(0, 4, dtype=torch.int64, device=device)
        self.free_slots = torch.zeros(0, lanes, dtype=torch.int32, device=device)
        self.finals = [torch.zeros(0, *leaf.frame, dtype=leaf.dtype, device=device) for leaf in layout.leaves]
        self.starts: list[torch.Tensor | None] = [None] * len(layout.leaves)
        self.ring = ring_class(
            layout.steps,
            tuple(self.counters),
            self.episode_of,
            tuple((b, leaf.shape, leaf.stack, leaf.outer) for b, leaf in zip(self.blocks, layout.leaves, strict=True)),
            tuple((b, shape) for b, (_, shape) in zip(self.columns, layout.columns, strict=True)),
            1,
            layout.resets,
            0,
        )
        self.ring.allow(1 << 62)
        self.grow()

    def _block(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        lanes, rows, size = self.layout.lanes, self.layout.rows, math.prod(shape) + self.layout.gap
        whole = torch.zeros(lanes * rows * size, dtype=dtype, device=self.device)
        inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return whole.as_strided((lanes, rows, *shape), (rows * size, size, *inner))

    def grow(self) -> None:
        lanes, deep = self.layout.lanes, len(self.free_slots)
        slots = (deep + 1) * lanes
        self.episodes, self.finals = _longer(self.episodes, slots), [_longer(table, slots) for table in self.finals]
        self.starts = [None if table is None else _longer(table, slots) for table in self.starts]
        self.free_slots = _longer(self.free_slots, deep + 1)
        for lane, count in enumerate(self.counters[4].tolist()):
            self.free_slots[count, lane] = deep * lanes + lane
        self.counters[4] += 1
        self._bind()

    def make_starts(self) -> None:
        slots = len(self.episodes)
        self.starts = [
            torch.zeros(slots, leaf.stack - 1, *leaf.frame, dtype=leaf.dtype, device=self.device)
            if leaf.stack > 1
            else None
            for leaf in self.layout.leaves
        ]
        self._bind()

    def _bind(self) -> None:
        self.ring.set_tables(self.episodes, self.free_slots, tuple(self.finals), tuple(self.starts))

    def write(self, values: tuple) -> list[int]:
        """Everything that write() returned until the step was written."""
        outcomes = [self.ring.write(values)]
        while outcomes[-1] in (-2, -3):
            self.grow() if outcomes[-1] == -2 else self.make_starts()
            outcomes.append(self.ring.write(values))
        return outcomes

    def tensors(self) -> list[torch.Tensor]:
        tables = [
            self.counters,
            self.episodes,
            self.free_slots,
            *self.finals,
            *(s for s in self.starts if s is not None),
        ]
        return [*tables, *self.blocks, *self.columns, self.episode_of]

    def held(self) -> torch.Tensor:
        """All rows that are held, in any order."""
        written, begun = self.counters[:2].tolist()
        lanes = self.layout.lanes
        rows = [
            time * lanes + lane
            for lane in range(lanes)
            for time in range(max(begun[lane], written[lane] - self.layout.steps), written[lane])
        ]
        return torch.tensor(rows, dtype=torch.int64)


def _longer(table: torch.Tensor, rows: int) -> torch.Tensor:
    longer = torch.zeros(rows, *table.shape[1:], dtype=table.dtype, device=table.device)
    longer.view(RAW[table.dtype.itemsize])[: len(table)] = table.view(RAW[table.dtype.itemsize])
    return longer


class Twins:
    """The same ring twice, native and portable, under the same steps."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.native = Memory(layout, kernel("EpisodeRing", "cpu"))
        self.portable = Memory(layout, PORTABLE["EpisodeRing"])
        self.both = (self.native, self.portable)
        self.rng = np.random.default_rng(layout.seed)
        self.steps = Steps(layout, self.rng)

    def write(self) -> list[int]:
        values = self.steps.next()
        outcomes, expected = (memory.write(values) for memory in self.both)
        assert outcomes == expected
        assert self.native.ring.repeated() == self.portable.ring.repeated()
        return outcomes

    def assert_same(self) -> None:
        for mine, truth in zip(self.native.tensors(), self.portable.tensors(), strict=True):
            assert torch.equal(as_bytes(mine), as_bytes(truth))

    def clear(self) -> None:
        """What the engine does on reset()."""
        for memory in self.both:
            counters, deep = memory.counters, len(memory.free_slots)
            counters[1], counters[2:4], counters[4] = counters[0], -1, deep
            order = torch.arange(deep * self.layout.lanes, dtype=torch.int32).reshape(deep, self.layout.lanes)
            memory.free_slots.copy_(order.flip(0))

    def some_rows(self, count: int) -> torch.Tensor:
        """Rows that are held, some of them following one another, and some of -1."""
        held = self.native.held()
        if len(held) == 0:
            return torch.full((count,), -1)
        rows = held[torch.from_numpy(self.rng.integers(len(held), size=count))]
        run = int(self.rng.integers(0, min(count, len(held)) + 1))
        rows[:run] = held[:run]
        rows[torch.from_numpy(self.rng.random(count) < 0.15)] = -1
        return rows


class Steps:
    """Steps of environments that end, sit out, jump, and pad their first stacks in different ways."""

    def __init__(self, layout: Layout, rng: np.random.Generator) -> None:
        self.layout, self.rng = layout, rng
        self.palettes = [_palette(leaf.dtype) for leaf in layout.leaves]
        self.state = [self._start() for _ in range(layout.lanes)]
        self.final: list[list[np.ndarray] | None] = [None] * layout.lanes  # to be shown once more

    def _frame(self, k: int) -> np.ndarray:
        leaf, palette = self.layout.leaves[k], self.palettes[k]
        return palette[self.rng.integers(len(palette), size=(leaf.outer, leaf.inner))]

    def _start(self) -> list[np.ndarray]:
        """The first stack [stack, outer, inner] of each leaf."""
        odd = self.rng.random() < self.layout.trouble[3]
        zeros = self.rng.random() < 0.5
        stacks = []
        for k, leaf in enumerate(self.layout.leaves):
            newest = self._frame(k)
            older = [self._frame(k) if odd else newest * (not zeros) for _ in range(leaf.stack - 1)]
            stacks.append(np.stack([*older, newest]).astype(newest.dtype))
        return stacks

    def _after(self, stacks: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([s[1:], self._frame(k)[None]]) for k, s in enumerate(stacks)]

    def next(self) -> tuple:
        """The values of one step, as the ring takes them."""
        layout, rng, lanes = self.layout, self.rng, self.layout.lanes
        end, jump, out, _ = layout.trouble
        observed, following, finals = [], [], []
        flags = np.zeros((3, lanes), bool)  # terminated, truncated, has a final observation
        mask, rewards = rng.random(lanes) >= out, _rewards(rng, (lanes, *layout.reward_shape))
        for lane in range(lanes):
            if mask[lane]:
                observation, after, final = self._move(lane, flags, rewards, end, jump)
            else:
                observation, after, final = self._start(), self._start(), self._start()
            observed.append(observation), following.append(after), finals.append(final)
        with_finals = bool(flags[2].any())
        has_final = None if flags[2].all() and rng.random() < 0.5 else torch.from_numpy(flags[2].copy())
        return (
            *self._tensors(observed),
            *self._tensors(following),
            self._action(),
            torch.from_numpy(rewards),
            *(torch.from_numpy(flags[i]).to(_flag_dtype(rng)) for i in (0, 1)),
            None if mask.all() and rng.random() < 0.5 else torch.from_numpy(mask),
            *(self._tensors(finals) if with_finals else [None] * len(layout.leaves)),
            has_final if with_finals else None,
        )

    def _move(self, lane: int, flags: np.ndarray, rewards: np.ndarray, end: float, jump: float):
        rng = self.rng
        if self.final[lane] is not None:  # a reset step, or what looks almost like one
            shown, self.final[lane] = self.final[lane], None
            rewards[lane] = 0 if rng.random() < 0.8 else 1
            return shown, self.state[lane], self._start()
        if rng.random() < jump:
            self.state[lane] = self._start()
        observation, after = self.state[lane], self._after(self.state[lane])
        self.state[lane], final = after, self._start()
        if rng.random() < end:
            flags[0 if rng.random() < 0.5 else 1, lane] = True
            flags[0, lane] |= rng.random() < 0.2
            new = self._start()
            if rng.random() < 0.5:  # the final observation comes apart, and the new episode at once
                flags[2, lane], final = True, after
                after = new
            elif rng.random() < 0.6:
                self.final[lane] = after
            self.state[lane] = new
        return observation, after, final

    def _tensors(self, stacks: list[list[np.ndarray]]) -> list[torch.Tensor]:
        made = []
        for k, leaf in enumerate(self.layout.leaves):
            whole = np.stack([lane[k] for lane in stacks]).transpose(0, 2, 1, 3)  # [lanes, outer, stack, inner]
            made.append(torch.from_numpy(np.ascontiguousarray(whole)).view(leaf.dtype).view(len(stacks), *leaf.shape))
        return made

    def _action(self) -> torch.Tensor:
        palette = _palette(self.layout.action)
        picked = palette[self.rng.integers(len(palette), size=(self.layout.lanes, 2))]
        return torch.from_numpy(picked).view(self.layout.action)


def _palette(dtype: torch.dtype) -> np.ndarray:
    """A few values of a dtype, as raw numbers: equal ones come often."""
    numbers = [0, 1] if dtype == torch.bool else [0, 1, 2, 100]
    if dtype.is_floating_point:
        numbers += [0.1, -0.0, math.nan]
    return torch.tensor(numbers).to(dtype).view(RAW[dtype.itemsize]).numpy()


def _rewards(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([0.0, 0.0, 1.0, -2.5, 0.1], size=shape).astype(np.float32)


def _flag_dtype(rng: np.random.Generator) -> torch.dtype:
    return [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64][rng.integers(5)]
