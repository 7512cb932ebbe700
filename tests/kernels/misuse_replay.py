"""Wrong calls of the replay kernels: tensors that do not fit, rows that are not held, counters gone mad."""

from __future__ import annotations

from collections.abc import Callable

import torch
from misuse import EDGES, NAN, OUTPUTS, at_the_edge, flags, freed, misuse, rows

from rlstore.kernels import _native as native

LANES, STEPS, ROWS, SLOTS = 2, 3, 5, 8  # of the ring that is misused: a leaf of stacks of 2 frames, one of none
ZEROS = (torch.zeros(LANES, 2, 2), torch.zeros(LANES, 3, dtype=torch.uint8))


class Ring:
    """A ring that works, unless it is told otherwise."""

    def __init__(self, make: Callable[..., torch.Tensor] = torch.zeros, **wrong: object) -> None:
        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return make(shape, dtype=dtype).zero_()

        self.counters = [zeros((LANES,), torch.int64) for _ in range(5)]
        self.counters[2][:], self.counters[3][:], self.counters[4][:] = -1, -1, SLOTS // LANES
        self.blocks = (zeros((LANES, ROWS, 1, 2), torch.float32), zeros((LANES, ROWS, 3), torch.uint8))
        self.action, self.reward = zeros((LANES, ROWS), torch.int64), zeros((LANES, ROWS), torch.float32)
        self.episode_of = zeros((LANES, ROWS), torch.int32)
        arguments = {
            "steps": STEPS,
            "counters": tuple(self.counters),
            "episode_of": self.episode_of,
            "leaves": ((self.blocks[0], (2, 2), 2, 1), (self.blocks[1], (3,), 1, 1)),
            "columns": ((self.action, ()), (self.reward, ())),
            "reward": 1,
            "resets": 0,
            "first": 0,
        }
        self.ring = native.EpisodeRing(*{**arguments, **wrong}.values())
        self.ring.allow(1 << 62)
        order = torch.arange(SLOTS, dtype=torch.int32).view(-1, LANES)
        self.tables: dict[str, object] = {
            "episodes": zeros((SLOTS, 4), torch.int64),
            "free_slots": zeros((SLOTS // LANES, LANES), torch.int32).copy_(order),
            "finals": (zeros((SLOTS, 1, 2), torch.float32), zeros((SLOTS, 3), torch.uint8)),
            "starts": (zeros((SLOTS, 1, 1, 2), torch.float32), None),
        }

    def bind(self, **wrong: object) -> Ring:
        self.ring.set_tables(*{**self.tables, **wrong}.values())
        return self

    def write(self, times: int = 1, observation: float = 0.0, done: bool = False) -> Ring:
        ends = torch.full((LANES,), done)
        values = (ZEROS[0] + observation, ZEROS[1], *ZEROS, torch.zeros(LANES, dtype=torch.int64), torch.ones(LANES))
        for _ in range(times):
            assert self.ring.write((*values, ends, ends, None, None, None, None)) in (-1, -4)
        return self


def raises(operation: str, calls: dict[str, Callable[[], object]], expected: str = "Exception") -> None:
    for name, call in calls.items():
        misuse(f"{operation}: {name}", expected, call)


# ---------------------------------------------------------------------------------------------------- EpisodeRing

GOOD = Ring().bind().write(7)
OUTPUTS.extend([*GOOD.counters, GOOD.episode_of, GOOD.reward, *GOOD.blocks, GOOD.tables["episodes"]])
BLOCKS, I64 = GOOD.blocks, torch.int64


def leaf(block: object = BLOCKS[0], shape: object = (2, 2), stack: int = 2, outer: int = 1) -> tuple:
    return ((block, shape, stack, outer), (BLOCKS[1], (3,), 1, 1))


def column(block: object, shape: object = ()) -> tuple:
    return ((block, shape), (GOOD.reward, ()))


raises(
    "EpisodeRing",
    {
        f"made with {name}": lambda wrong=wrong: Ring(**wrong)
        for name, wrong in {
            "no steps": {"steps": 0},
            "negative steps": {"steps": -1},
            "more steps than rows": {"steps": 4},
            "steps without end": {"steps": 2**63 - 1},
            "too few counters": {"counters": tuple(GOOD.counters[:4])},
            "counters of another size": {"counters": tuple(torch.zeros(3, dtype=I64) for _ in range(5))},
            "counters of int32": {"counters": tuple(torch.zeros(2, dtype=torch.int32) for _ in range(5))},
            "episode_of of int64": {"episode_of": torch.zeros(LANES, ROWS, dtype=I64)},
            "episode_of of float32": {"episode_of": torch.zeros(LANES, ROWS)},
            "episode_of of one dimension": {"episode_of": torch.zeros(ROWS, dtype=torch.int32)},
            "episode_of of more rows": {"episode_of": torch.zeros(LANES, 9, dtype=torch.int32)},
            "episode_of without lanes": {"episode_of": torch.zeros(0, ROWS, dtype=torch.int32)},
            "episode_of that is no tensor": {"episode_of": [[0]]},
            "no leaves": {"leaves": ()},
            "a leaf of three parts": {"leaves": ((BLOCKS[0], (2, 2), 2),)},
            "a leaf that is no tuple": {"leaves": (BLOCKS[0],)},
            "a leaf of fewer lanes": {"leaves": leaf(torch.zeros(1, ROWS, 1, 2))},
            "a leaf of fewer rows": {"leaves": leaf(torch.zeros(LANES, 4, 1, 2))},
            "a leaf of one dimension": {"leaves": leaf(torch.zeros(9))},
            "a leaf whose rows are strided": {"leaves": leaf(torch.zeros(LANES, ROWS, 1, 4)[..., ::2])},
            "a leaf that was freed": {"leaves": leaf(freed(torch.zeros(LANES, ROWS, 1, 2)))},
            "a leaf of a larger shape": {"leaves": leaf(shape=(2, 3))},
            "a leaf of a smaller shape": {"leaves": leaf(shape=(2, 1))},
            "a leaf of a shape that wraps": {"leaves": leaf(shape=(2**62, 4, 2, 2))},
            "a leaf of a negative shape": {"leaves": leaf(shape=(-2, -2))},
            "a leaf of no stack": {"leaves": leaf(stack=0)},
            "a leaf of a negative stack": {"leaves": leaf(stack=-1)},
            "a leaf of a larger stack": {"leaves": leaf(stack=3, shape=(3, 2))},
            "a leaf of no pieces": {"leaves": leaf(outer=0)},
            "a leaf of pieces that do not divide it": {"leaves": leaf(outer=3)},
            "a column of one part": {"columns": ((GOOD.action,), (GOOD.reward, ()))},
            "a column of fewer lanes": {"columns": column(torch.zeros(1, ROWS, dtype=I64))},
            "a column of fewer rows": {"columns": column(torch.zeros(LANES, 4, dtype=I64))},
            "a column of another shape": {"columns": column(GOOD.action, (2,))},
            "rewards of int64": {"reward": 0},
            "rewards that there are not": {"reward": 2},
            "a negative place of rewards": {"reward": -1},
            "resets of a kind that there is not": {"resets": 4},
        }.items()
    },
)
FINALS, STARTS = GOOD.tables["finals"], GOOD.tables["starts"]
raises(
    "EpisodeRing",
    {
        f"set_tables with {name}": lambda wrong=wrong: GOOD.bind(**wrong)
        for name, wrong in {
            "fewer episodes": {"episodes": torch.zeros(4, 4, dtype=I64)},
            "episodes that are not for every lane": {"episodes": torch.zeros(7, 4, dtype=I64)},
            "no episodes": {"episodes": torch.zeros(0, 4, dtype=I64)},
            "episodes of three numbers": {"episodes": torch.zeros(SLOTS, 3, dtype=I64)},
            "episodes without dimensions": {"episodes": torch.zeros((), dtype=I64)},
            "episodes of int32": {"episodes": torch.zeros(SLOTS, 4, dtype=torch.int32)},
            "episodes that were freed": {"episodes": freed(torch.zeros(SLOTS, 4, dtype=I64))},
            "fewer free slots": {"free_slots": torch.zeros(3, LANES, dtype=torch.int32)},
            "free slots of int64": {"free_slots": torch.zeros(4, LANES, dtype=I64)},
            "too few finals": {"finals": FINALS[:1]},
            "smaller finals": {"finals": (FINALS[0][:7], FINALS[1])},
            "finals that are missing": {"finals": (None, None)},
            "too few starts": {"starts": ()},
            "smaller starts": {"starts": (STARTS[0][:7], None)},
        }.items()
    },
)


def write_with(values: dict[int, object], ring: Ring = GOOD) -> None:
    whole = [*ZEROS, *ZEROS, rows(0, 0), torch.ones(LANES), *[flags(LANES)] * 2, None, None, None, None]
    for place, value in values.items():
        whole[place] = value
    ring.ring.write(tuple(whole))


def with_counter(counter: int, value: int, call: Callable[[Ring], object]) -> Callable[[], object]:
    def made() -> None:
        ring = Ring().bind().write(7)
        ring.counters[counter][1] = value
        call(ring)

    return made


raises("EpisodeRing", {"write without tables": lambda: write_with({}, Ring())})
raises("EpisodeRing", {"write too few values": lambda: GOOD.ring.write((*ZEROS, *ZEROS))}, "ValueError")
raises("EpisodeRing", {"write a list": lambda: GOOD.ring.write([1.0])}, "TypeError")
for name, counter, value in [
    ("written before it began", 0, -1),
    ("written without end", 0, 2**62),
    ("begun before 0", 1, -1),
    ("a slot beyond the table", 2, SLOTS),
    ("a slot far beyond the table", 3, 2**40),
    ("fewer free slots than none", 4, -1),
    ("more free slots than there are", 4, SLOTS),
]:
    wrong = with_counter(counter, value, lambda ring: write_with({}, ring))
    raises("EpisodeRing", {f"write with {name}": wrong}, "ValueError")


def write_into_a_strange_slot() -> None:
    ring = Ring().bind()
    ring.tables["free_slots"][-1, 0] = 2**30
    ring.write()


FIVE = torch.empty(5, dtype=I64)
OUTPUTS.append(FIVE.fill_(-5))
raises("EpisodeRing", {"write into a slot that there is not": write_into_a_strange_slot})
STATE = rows(3, 4)
OUTPUTS.append(STATE)
raises(
    "EpisodeRing",
    {
        "draw from nothing": lambda: Ring().bind().ring.draw(STATE, FIVE),
        "draw with a short generator": lambda: GOOD.ring.draw(rows(1), FIVE),
        "draw with a generator of floats": lambda: GOOD.ring.draw(torch.zeros(2, dtype=torch.float64), FIVE),
        "draw into int32": lambda: GOOD.ring.draw(STATE, torch.zeros(5, dtype=torch.int32)),
        "draw into strides": lambda: GOOD.ring.draw(STATE, torch.zeros(10, dtype=I64)[::2]),
        "draw with counters gone mad": with_counter(0, -3, lambda ring: ring.ring.draw(STATE, FIVE)),
        "bounds into too little": lambda: GOOD.ring.bounds(rows(8, 9), FIVE[:1], FIVE[:2]),
        "bounds without tables": lambda: Ring().ring.bounds(rows(0), FIVE[:1], FIVE[:1]),
        "windows into too little": lambda: GOOD.ring.windows(rows(8), 4, False, FIVE[:3]),
        "windows of a length that wraps": lambda: GOOD.ring.windows(rows(8, 9), 2**63, False, FIVE[:0]),
        "windows of a size that wraps": lambda: GOOD.ring.windows(rows(8).repeat(2**13), 2**51, False, FIVE[:0]),
        "windows of a negative length": lambda: GOOD.ring.windows(rows(8), -1, False, FIVE),
        "windows without tables": lambda: Ring().ring.windows(rows(0), 1, False, FIVE[:1]),
    },
)
for name, row in {
    "negative": -1,
    "gone": 7,
    "to come": 14,
    "far away": 2**62 + 1,
    "the last number": 2**63 - 1,
}.items():
    raises("EpisodeRing", {f"bounds of a row {name}": lambda row=row: GOOD.ring.bounds(rows(row), FIVE[:1], FIVE[1:2])})
    raises("EpisodeRing", {f"windows of a row {name}": lambda row=row: GOOD.ring.windows(rows(row), 5, False, FIVE)})


# ---------------------------------------------------------------------------------------------------- ReplayGather

OBSERVATION, COLUMN, REWARDS, DISCOUNTS, HELD = (0, 0, False, (2, 2)), (2, 0, False, ()), 3, 4, 8
GATHERED = torch.full((2, 2, 2), NAN)
OUTPUTS.append(GATHERED)


def gather(
    request: object = OBSERVATION, ids: object = None, outs: object = None, ring: Ring = GOOD, n: int = 1
) -> None:
    native.ReplayGather(ring.ring, (request,), n, 0.9).gather(rows(8, 9) if ids is None else ids, outs)


def gather_from(change: Callable[[Ring], object]) -> Callable[[], None]:
    """A gather from a ring whose tables are damaged."""

    def made() -> None:
        ring = Ring().bind().write(7, done=True)
        change(ring)
        gather((1, 0, False, (2, 2)), ring=ring)

    return made


raises(
    "ReplayGather",
    {
        "no ring": lambda: native.ReplayGather(None, (OBSERVATION,), 1, 0.9),
        "no steps": lambda: gather(n=0),
        "a request of three parts": lambda: gather((0, 0, False)),
        "a part that there is not": lambda: gather((9, 0, False, (1,))),
        "a negative part": lambda: gather((-1, 0, False, (1,))),
        "a leaf that there is not": lambda: gather((0, 2, False, (2, 2))),
        "a negative leaf": lambda: gather((0, -1, False, (2, 2))),
        "a column that there is not": lambda: gather((2, 2, False, ())),
        "a shape too small": lambda: gather((0, 0, False, (2,))),
        "a shape too large": lambda: gather((0, 0, False, (2, 3))),
        "a negative shape": lambda: gather((0, 0, False, (-2, -2))),
        "a shape that wraps": lambda: gather((0, 0, False, (2**32, 2**32, 2, 2))),
        "rewards of another width": lambda: gather((REWARDS, 0, False, (2,))),
        "discounts of another width": lambda: gather((DISCOUNTS, 0, False, (0,))),
        "flags of another width": lambda: gather((HELD, 0, False, (4,))),
        "rows of int32": lambda: gather(ids=torch.zeros(2, dtype=torch.int32)),
        "strided rows": lambda: gather(ids=torch.zeros(4, dtype=I64)[::2]),
        "a list of rows": lambda: gather(ids=[8, 9]),
        "an output too small": lambda: gather(outs=(GATHERED[:1],)),
        "an output of another dtype": lambda: gather(outs=(torch.zeros(2, 2, 2, dtype=torch.int32),)),
        "an output that is strided": lambda: gather(outs=(torch.zeros(2, 2, 4)[..., ::2],)),
        "fewer outputs": lambda: gather(outs=()),
        "more outputs": lambda: gather(outs=(GATHERED, GATHERED)),
        "a list of outputs": lambda: gather(outs=[GATHERED]),
        "a ring without tables": lambda: gather(ring=Ring()),
        "a slot that there is not": gather_from(lambda ring: ring.episode_of.fill_(2**30)),
        "a negative slot": gather_from(lambda ring: ring.episode_of.fill_(-7)),
        "an episode that begins later": gather_from(lambda ring: ring.tables["episodes"][:, 0].fill_(2**40)),
        "an episode that is over before": gather_from(lambda ring: ring.tables["episodes"][:, 1].fill_(1)),
    },
)
for name, row in {"gone": 7, "to come": 14, "far away": 2**62 + 1, "the last number": 2**63 - 1}.items():
    raises("ReplayGather", {f"a row {name}": lambda row=row: gather(ids=rows(8, row))}, "IndexError")


# ---------------------------------------------------------------------------------------------------- WindowIndex


def window_memory(**wrong: torch.Tensor) -> tuple:
    memory = {"starts": torch.zeros(LANES, STEPS, dtype=I64)}
    memory |= {name: torch.zeros(LANES, dtype=I64) for name in ("heads", "tails", "seen", "open")}
    return tuple({**memory, **wrong}.values())


def windows(length: int = 2, stride: int = 1, ring: Ring = GOOD, **wrong: torch.Tensor) -> native.WindowIndex:
    return native.WindowIndex(ring.ring, length, stride, False, window_memory(**wrong))


FOLLOWED = windows()
FOLLOWED.follow()
raises(
    "WindowIndex",
    {
        "no ring": lambda: native.WindowIndex(None, 2, 1, False, window_memory()),
        "no length": lambda: windows(length=0),
        "a length without end": lambda: windows(length=2**63 - 1),
        "no stride": lambda: windows(stride=0),
        "too little memory": lambda: native.WindowIndex(GOOD.ring, 2, 1, False, window_memory()[:4]),
        "a queue too short": lambda: windows(starts=torch.zeros(LANES, 2, dtype=I64)),
        "a queue of int32": lambda: windows(starts=torch.zeros(LANES, STEPS, dtype=torch.int32)),
        "heads of another size": lambda: windows(heads=rows(0)),
        "a negative head": lambda: windows(heads=rows(-4, 0)),
        "a head behind its tail": lambda: windows(heads=rows(1, 0)),
        "a tail beyond the queue": lambda: windows(tails=rows(4, 0)),
        "rows seen before the first": lambda: windows(seen=rows(-(2**62), 0)),
        "an open episode before the first": lambda: windows(open=rows(-(2**63), 0)),
        "follow without tables": lambda: windows(ring=Ring()).follow(),
        "rebuild without tables": lambda: windows(ring=Ring()).rebuild(),
        "draw from nothing": lambda: windows().draw(STATE, FIVE),
        "draw into int32": lambda: FOLLOWED.draw(STATE, torch.zeros(5, dtype=torch.int32)),
        "draw with a short generator": lambda: FOLLOWED.draw(rows(1), FIVE),
        "a row beyond 64 bits": lambda: FOLLOWED.contains(2**64),
    },
)


# ---------------------------------------------------------------------------------------------------- Priorities


def priority_memory(**wrong: torch.Tensor) -> tuple:
    memory = {"leaves": torch.zeros(16), "sums": torch.zeros(16, dtype=torch.float64), "maxima": torch.zeros(16)}
    return tuple({**memory, "seen": torch.zeros(LANES, dtype=I64), **wrong}.values())


MEMORY = priority_memory()
TREE = native.Priorities(GOOD.ring, MEMORY)
TREE.follow()
OUTPUTS.extend(MEMORY)
WEIGHTS = torch.full((5,), NAN)
OUTPUTS.append(WEIGHTS)
BEYOND = torch.zeros(16)
BEYOND[LANES * STEPS] = 1.0


OTHER_RING = Ring().bind()
GATHER, OTHER = (native.ReplayGather(ring.ring, (OBSERVATION,), 1, 0.9) for ring in (GOOD, OTHER_RING))


def priorities(**wrong: torch.Tensor) -> native.Priorities:
    return native.Priorities(GOOD.ring, priority_memory(**wrong))


raises(
    "Priorities",
    {
        "no ring": lambda: native.Priorities(None, priority_memory()),
        "too little memory": lambda: native.Priorities(GOOD.ring, priority_memory()[:3]),
        "fewer leaves": lambda: priorities(leaves=torch.zeros(6)),
        "leaves of float64": lambda: priorities(leaves=torch.zeros(16, dtype=torch.float64)),
        "a leaf beyond the last row": lambda: priorities(leaves=BEYOND),
        "fewer sums": lambda: priorities(sums=torch.zeros(8, dtype=torch.float64)),
        "sums of float32": lambda: priorities(sums=torch.zeros(16)),
        "fewer maxima": lambda: priorities(maxima=torch.zeros(8)),
        "rows seen of another size": lambda: priorities(seen=rows(0)),
        "rows seen before the first": lambda: priorities(seen=rows(0, -(2**62))),
        "levels of fewer leaves than none": lambda: native.Priorities.level_sizes(-1),
        "draw into too few weights": lambda: TREE.draw(STATE, 0.5, FIVE, WEIGHTS[:4]),
        "draw into rows of int32": lambda: TREE.draw(STATE, 0.5, torch.zeros(5, dtype=torch.int32), WEIGHTS),
        "draw with a short generator": lambda: TREE.draw(rows(1), 0.5, FIVE, WEIGHTS),
        "gather rows of another ring": lambda: OTHER.sample_by_priority(TREE, STATE, 0.5, 3),
        "gather fewer rows than none": lambda: GATHER.sample_by_priority(TREE, STATE, 0.5, -1),
        "gather windows of another ring": lambda: OTHER.sample_windows(FOLLOWED, None, STATE, 0.5, 3),
        "gather windows by priorities of another ring": lambda: GATHER.sample_windows(
            FOLLOWED, native.Priorities(OTHER_RING.ring, priority_memory()), STATE, 0.5, 3
        ),
        "gather fewer windows than none": lambda: GATHER.sample_windows(FOLLOWED, None, STATE, 0.5, -1),
        "gather windows with a short generator": lambda: GATHER.sample_windows(FOLLOWED, None, rows(1), 0.5, 3),
        "update without windows where some are meant": lambda: TREE.update(rows(8), torch.ones(1), 1.0, GOOD.ring),
        "follow the windows of nothing": lambda: TREE.follow_windows(None),
        "follow the windows of another ring": lambda: TREE.follow_windows(windows(ring=Ring().bind())),
    },
)
raises(
    "draw_units",
    {
        "a short generator": lambda: native.draw_units(rows(1), torch.zeros(2, dtype=torch.float64)),
        "a generator of floats": lambda: native.draw_units(torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        "into float32": lambda: native.draw_units(STATE, torch.zeros(2)),
        "into strides": lambda: native.draw_units(STATE, torch.zeros(4, dtype=torch.float64)[::2]),
        "into a list": lambda: native.draw_units(STATE, [0.0]),
    },
)


# ------------------------------------------------------------------------------------ right calls at memory's edge


def replay_at_the_edge() -> None:
    ring = Ring(make=at_the_edge).bind()
    requests = tuple((part, 0, as_float, (2, 2)) for part in (0, 1) for as_float in (False, True))
    requests += ((0, 1, False, (3,)), (1, 1, True, (3,)), (2, 0, False, ()), (3, 0, False, (1,)), (8, 0, False, (1,)))
    gatherer = native.ReplayGather(ring.ring, requests, 3, 0.9)
    for times in range(12):
        ring.write(observation=float(times % 3), done=times % 5 == 4)
        held = [t * LANES + lane for lane in range(LANES) for t in range(max(0, times + 1 - STEPS), times + 1)]
        ids = at_the_edge((len(held),), I64).copy_(rows(*held))
        assert bool(gatherer.gather(ids, None)[-1].all())
        ring.ring.draw(STATE.clone(), ids)
        ring.ring.windows(ids, 4, False, at_the_edge((len(held) * 4,), I64))


def draws_at_the_edge() -> None:
    ring = Ring(make=at_the_edge).bind()
    memory = [at_the_edge(tuple(tensor.shape), tensor.dtype).zero_() for tensor in window_memory()]
    index = native.WindowIndex(ring.ring, 2, 1, False, tuple(memory))
    leaves = [at_the_edge(tuple(tensor.shape), tensor.dtype).zero_() for tensor in priority_memory()]
    tree = native.Priorities(ring.ring, tuple(leaves))
    ids, weights = at_the_edge((5,), I64), at_the_edge((5,), torch.float32)
    for times in range(12):
        ring.write(observation=float(times % 3), done=times % 5 == 4)
        index.follow()
        tree.follow_windows(index)
        if index.count():
            index.draw(STATE.clone(), ids)
            tree.draw(STATE.clone(), 0.5, ids, weights)
            assert tree.update(ids, weights, 0.6, index)[0] == 0
    native.draw_units(STATE.clone(), at_the_edge((7,), torch.float64))
    for draw in (ring.ring.draw, index.draw):
        last = rows(3, 2**63 - 2)  # the counter of a generator goes on at the other end
        draw(last, ids)
        assert last.tolist() == [3, -(2**63) + 3]


def damaged_tables_at_the_edge() -> None:
    """A first row that was never written, or older frames that were never stored: the step begins an episode."""
    values = (*ZEROS, *ZEROS, rows(0, 0), torch.ones(LANES), *[flags(LANES)] * 2, None, None, None, None)
    for start in (3, 2**40, 2**63 - 1):
        for padding in (0, -1, -2, 7):
            ring = Ring(make=at_the_edge).bind().write(2)
            ring.tables["episodes"][:, 0], ring.tables["episodes"][:, 3] = start, padding
            assert ring.ring.write(values) == -4
    for padding in (0, 7):
        ring = Ring(make=at_the_edge).bind(starts=(None, None)).write(2)
        ring.tables["episodes"][:, 3] = padding
        assert ring.ring.write(values) == -4


def damaged_windows_at_the_edge() -> None:
    """Windows that begin where no row can be: they are dropped, and the windows of the newest row alone count."""
    for start in (-(2**63), -(2**62), -(2**61) + 12345, -(2**55) + 7, -1):
        ring = Ring().bind().write(7)
        index = windows(
            ring=ring, starts=torch.full((LANES, STEPS), start, dtype=I64), tails=rows(2, 2), seen=rows(6, 6)
        )
        tree = native.Priorities(ring.ring, tuple(at_the_edge(tuple(t.shape), t.dtype) for t in priority_memory()))
        index.follow()
        tree.follow_windows(index)
        assert tree.total() == LANES
    for start in (-(2**63), -1, 7, 2**63 - 1):  # no row of an episode is before it begins
        ring = Ring().bind().write(7)
        ring.tables["episodes"][:, 0] = start
        index = windows(ring=ring)
        index.follow()
        assert index.count() == 0


EDGES.update(
    {
        "replay": replay_at_the_edge,
        "draws": draws_at_the_edge,
        "damaged tables": damaged_tables_at_the_edge,
        "damaged windows": damaged_windows_at_the_edge,
    }
)
