"""Wrong calls of the native functions, and right ones whose tensors end where the process's memory ends.

misuse_program.py makes them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

from rlstore.kernels import _native as native

NAN = float("nan")
MISUSES: dict[str, tuple[str, Callable[[], None]]] = {}
EDGES: dict[str, Callable[[], None]] = {}


def misuse(name: str, expected: str, call: Callable[[], object]) -> None:
    MISUSES[name] = (expected, call)


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def f32(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def flags(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def strided(*shape: int) -> torch.Tensor:
    return torch.ones((*shape, 2))[..., 0]


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with a shape as before and no memory."""
    tensor.untyped_storage().resize_(0)
    return tensor


# What a refused call must have left alone.
OUT = [torch.full((3, 4), NAN) for _ in range(2)]
MASK = torch.full((3, 2), True)
FEW = [rows(-5, -5) for _ in range(3)]
OUTPUTS = [*OUT, *FEW]


# ---------------------------------------------------------------------------------------------------- scans

ROLLOUT = (f32(3, 4), f32(3, 4), f32(4), flags(3, 4), flags(3, 4), f32(3, 4))
NAMES = ("rewards", "values", "last_values", "terminated", "truncated", "final_values")


def scans_with(arguments: list) -> dict[str, Callable[[], None]]:
    rewards, _, *others = arguments
    return {
        "gae": lambda: native.gae(*arguments, 0.9, 0.9, *OUT),
        "fill_gae": lambda: native.fill_gae(*arguments, True, 0.9, 0.9, 1e-8, *OUT),
        "discounted_returns": lambda: native.discounted_returns(rewards, *others, 0.9, OUT[0]),
        "n_step_returns": lambda: native.n_step_returns(*arguments, 0.9, 2, OUT[0]),
        "vtrace": lambda: native.vtrace(*arguments, f32(3, 4), 0.9, 0.9, 1.0, 1.0, 1.0, *OUT),
    }


def with_argument(place: int, wrong: object) -> list:
    return [wrong if index == place else argument for index, argument in enumerate(ROLLOUT)]


for place, argument in enumerate(NAMES):
    width = () if argument == "last_values" else (3,)
    dtype = ROLLOUT[place].dtype
    wrongs = {
        "too small": torch.ones((*width, 3), dtype=dtype),
        "too large": torch.ones((*width, 5), dtype=dtype),
        "of another width": torch.ones((*width, 4), dtype=torch.float64 if dtype == torch.float32 else torch.int32),
        "not contiguous": torch.ones((*width, 4, 2), dtype=dtype)[..., 0],
        "freed": freed(torch.ones((*width, 4), dtype=dtype)),
        "no tensor": [1.0],
    }
    for how, wrong in wrongs.items():
        for operation, call in scans_with(with_argument(place, wrong)).items():
            if operation != "discounted_returns" or argument != "values":
                misuse(f"{operation}: {argument} {how}", "Exception", call)
for operation, call in scans_with(with_argument(1, None)).items():
    if operation != "discounted_returns":
        misuse(f"{operation}: values None", "Exception", call)
for operation, call in scans_with([torch.ones(3, 4, dtype=torch.int32), *ROLLOUT[1:]]).items():
    misuse(f"{operation}: rewards whole numbers", "Exception", call)
for operation, call in scans_with([f32(12), *ROLLOUT[1:]]).items():
    misuse(f"{operation}: rewards of one dimension", "Exception", call)

misuse("gae: output too small", "Exception", lambda: native.gae(*ROLLOUT, 0.9, 0.9, f32(3, 3), OUT[1]))
misuse("fill_gae: no number", "Exception", lambda: native.fill_gae(*ROLLOUT, True, 0.9, 0.9, "1", *OUT))
misuse("gae: output not contiguous", "Exception", lambda: native.gae(*ROLLOUT, 0.9, 0.9, OUT[0], strided(3, 4)))
misuse(
    "vtrace: log_rhos too small",
    "Exception",
    lambda: native.vtrace(*ROLLOUT, f32(3, 3), 0.9, 0.9, 1.0, 1.0, 1.0, *OUT),
)
misuse("n_step_returns: n of 0", "Exception", lambda: native.n_step_returns(*ROLLOUT, 0.9, 0, OUT[0]))
misuse("n_step_returns: n negative", "Exception", lambda: native.n_step_returns(*ROLLOUT, 0.9, -1, OUT[0]))
misuse("normalize: whole numbers", "Exception", lambda: native.normalize(rows(1, 2, 3), 1e-8))
misuse("normalize: float16", "Exception", lambda: native.normalize(f32(3).half(), 1e-8))
misuse("normalize: not contiguous", "Exception", lambda: native.normalize(strided(3), 1e-8))


# ---------------------------------------------------------------------------------------------------- gather

BLOCK = f32(2, 3, 4)
for name, wrong in {"beyond the end": rows(0, 6, 1), "negative": rows(0, -1, 1), "far away": rows(2**62, 0, 0)}.items():
    misuse(f"gather: a row {name}", "IndexError", lambda wrong=wrong: native.gather((BLOCK,), wrong, (OUT[0],)))
    misuse(
        f"gather: a row {name} of the smaller source",
        "IndexError",
        lambda wrong=wrong: native.gather((f32(9, 9, 4), BLOCK), wrong, (OUT[0], OUT[1])),
    )
for name, wrong in {
    "too small": f32(2, 4),
    "too large": f32(4, 4),
    "not contiguous": strided(3, 4),
    "of a dtype that is no float32": torch.ones(3, 4, dtype=torch.float64),
}.items():
    misuse(
        f"gather: a target {name}", "Exception", lambda wrong=wrong: native.gather((BLOCK,), rows(0, 1, 2), (wrong,))
    )
misuse("gather: fewer targets", "Exception", lambda: native.gather((BLOCK, BLOCK), rows(0, 1, 2), (OUT[0],)))
misuse("gather: more targets", "Exception", lambda: native.gather((BLOCK,), rows(0, 1, 2), tuple(OUT)))
misuse("gather: a strided source", "Exception", lambda: native.gather((strided(2, 3, 4),), rows(0, 1, 2), (OUT[0],)))
misuse("gather: a source of one dimension", "Exception", lambda: native.gather((f32(9),), rows(0), (f32(9),)))
misuse(
    "gather: rows of int32", "Exception", lambda: native.gather((BLOCK,), torch.zeros(3, dtype=torch.int32), (OUT[0],))
)
misuse("gather: strided rows", "Exception", lambda: native.gather((BLOCK,), torch.arange(6)[::2], (OUT[0],)))
misuse("gather: a list of rows", "Exception", lambda: native.gather((BLOCK,), [0, 1, 2], (OUT[0],)))


# ---------------------------------------------------------------------------------------------------- RowWriter


TARGET = (OUT[0], 0, False, False)


def write(target: tuple, row: int, value: object) -> None:
    native.RowWriter([target]).write(row, (value,))


def write_after_a_change_of_size() -> None:
    block = f32(3, 4)
    writer = native.RowWriter([TARGET, (block, 0, False, False)])
    block.resize_(2, 4)
    writer.write(0, (f32(4), f32(4)))


misuse("RowWriter: a row beyond the end", "IndexError", lambda: write(TARGET, 3, f32(4)))
misuse("RowWriter: a row beyond the end by its lead", "IndexError", lambda: write((OUT[0], 1, False, False), 2, f32(4)))
misuse("RowWriter: a negative row", "Exception", lambda: write(TARGET, -1, f32(4)))
misuse("RowWriter: a row that wraps", "Exception", lambda: write((OUT[0], 1, False, False), 2**64 - 1, f32(4)))
misuse("RowWriter: a row of a block of none", "IndexError", lambda: write((f32(0, 4), 0, False, False), 0, f32(4)))
misuse("RowWriter: a strided block", "ValueError", lambda: write((strided(3, 4), 0, False, False), 0, f32(4)))
misuse("RowWriter: a block without dimensions", "ValueError", lambda: write((f32(), 0, False, False), 0, f32()))
misuse("RowWriter: a block that has become smaller", "ValueError", write_after_a_change_of_size)
for name, (expected, target) in {
    "of one part": ("ValueError", (OUT[0],)),
    "of two parts": ("ValueError", (OUT[0], 0)),
    "of three parts": ("ValueError", (OUT[0], 0, False)),
    "of five parts": ("ValueError", (*TARGET, False)),
    "that is no tensor": ("Exception", ([1.0], 0, False, False)),
    "with a negative lead": ("Exception", (OUT[0], -1, False, False)),
    "of flags in int64": ("ValueError", (rows(1, 2), 0, True, False)),
}.items():
    misuse(f"RowWriter: a target {name}", expected, lambda target=target: native.RowWriter([target]))
misuse("RowWriter: a list of values", "Exception", lambda: native.RowWriter([TARGET]).write(0, [f32(4)]))
misuse("RowWriter: too few values", "ValueError", lambda: native.RowWriter([TARGET]).write(0, ()))
misuse("RowWriter: no targets", "TypeError", lambda: native.RowWriter())


# ---------------------------------------------------------------------------------------------------- segments

DONES = flags(3, 2)
misuse("count_segments: lanes beyond the end", "IndexError", lambda: native.count_segments(DONES, 0, 3))
misuse("count_segments: lanes the wrong way round", "IndexError", lambda: native.count_segments(DONES, 2, 1))
misuse("count_segments: a negative lane", "Exception", lambda: native.count_segments(DONES, -1, 2))
misuse("count_segments: dones as floats", "Exception", lambda: native.count_segments(f32(3, 2), 0, 2))
misuse("count_segments: one dimension", "Exception", lambda: native.count_segments(flags(3), 0, 2))
misuse("split_segments: too little room", "Exception", lambda: native.split_segments(DONES, 0, 2, *[rows(1)] * 3))
misuse("split_segments: too much room", "Exception", lambda: native.split_segments(DONES, 0, 2, *[rows(1, 1, 1)] * 3))
misuse("split_segments: lanes beyond the end", "IndexError", lambda: native.split_segments(DONES, 0, 3, *FEW))


def pad(sources: tuple, lanes: object, starts: object, lengths: object, targets: tuple, mask: object = MASK) -> None:
    native.pad_segments(sources, lanes, starts, lengths, targets, mask)


SOURCE, ZERO, TWO = f32(3, 2), rows(0, 0), (torch.full((3, 2), NAN),)
OUTPUTS.extend(TWO)
for name, (lanes, starts, lengths) in {
    "a lane beyond the end": (rows(0, 2), ZERO, ZERO),
    "a negative lane": (rows(-1, 0), ZERO, ZERO),
    "a start beyond the end": (ZERO, rows(3, 0), rows(1, 0)),
    "a negative start": (ZERO, rows(-1, 0), rows(1, 0)),
    "a length beyond the end": (ZERO, rows(1, 0), rows(3, 0)),
    "a negative length": (ZERO, ZERO, rows(-1, 0)),
    "a start that wraps": (ZERO, rows(2**63 - 1, 0), rows(1, 0)),
    "too few starts": (ZERO, rows(0), ZERO),
    "too few lengths": (ZERO, ZERO, rows(0)),
}.items():
    misuse(f"pad_segments: {name}", "Exception", lambda a=(lanes, starts, lengths): pad((SOURCE,), *a, TWO))
misuse("pad_segments: a target too small", "Exception", lambda: pad((SOURCE,), ZERO, ZERO, ZERO, (f32(2, 2),)))
misuse("pad_segments: a strided source", "Exception", lambda: pad((strided(3, 2),), ZERO, ZERO, ZERO, TWO))
misuse("pad_segments: a source of one dimension", "Exception", lambda: pad((f32(3),), ZERO, ZERO, ZERO, TWO))
# The size of the dimension that it no longer has is still in its memory, and would be taken for the number of lanes.
misuse(
    "pad_segments: a source of one dimension that had two",
    "ValueError",
    lambda: pad((f32(3, 1000).resize_(3),), rows(0, 999), ZERO, rows(1, 1), TWO),
)
misuse("pad_segments: a mask too small", "Exception", lambda: pad((SOURCE,), ZERO, ZERO, ZERO, TWO, MASK[:, :1]))
misuse("pad_segments: a mask without dimensions", "Exception", lambda: pad((SOURCE,), ZERO, ZERO, ZERO, TWO, flags()))
MANY = torch.zeros(2**22, dtype=torch.int64)  # times the steps of this mask it is 2^64, which wraps to 0
misuse(
    "pad_segments: a mask of a size that wraps",
    "ValueError",
    lambda: pad((), MANY, MANY, MANY, (), torch.empty(2**42, 0, dtype=torch.uint8)),
)
misuse("pad_segments: a freed source", "ValueError", lambda: pad((freed(f32(3, 2)),), ZERO, ZERO, ZERO, TWO))
misuse("pad_segments: fewer targets", "Exception", lambda: pad((SOURCE, SOURCE), ZERO, ZERO, ZERO, TWO))

LANES_OUT = torch.full((3, 2, 4), NAN)
OUTPUTS.append(LANES_OUT)
LANES_SOURCE = f32(3, 5, 4)
for name, (expected, sources, first, last, targets) in {
    "lanes beyond the end": ("IndexError", (LANES_SOURCE,), 4, 6, (LANES_OUT,)),
    "lanes far beyond the end": ("IndexError", (LANES_SOURCE,), 2**63, 2**63 + 2, (LANES_OUT,)),
    "lanes the wrong way round": ("IndexError", (LANES_SOURCE,), 3, 1, (LANES_OUT,)),
    "a negative lane": ("Exception", (LANES_SOURCE,), -1, 1, (LANES_OUT,)),
    "lanes that the first source alone has": (
        "IndexError",
        (f32(0, 9, 4), LANES_SOURCE),
        4,
        6,
        (f32(0, 2, 4), LANES_OUT),
    ),
    "a target too small": ("ValueError", (LANES_SOURCE,), 0, 2, (f32(3, 1, 4),)),
    "a target too large": ("ValueError", (LANES_SOURCE,), 0, 1, (LANES_OUT,)),
    "a target of another dtype": ("ValueError", (LANES_SOURCE,), 0, 2, (torch.ones(3, 2, 4, dtype=torch.int32),)),
    "a target that is strided": ("ValueError", (LANES_SOURCE,), 0, 2, (strided(3, 2, 4),)),
    "a target that is no tensor": ("Exception", (LANES_SOURCE,), 0, 2, ([1.0],)),
    "a strided source": ("ValueError", (strided(3, 5, 4),), 0, 2, (LANES_OUT,)),
    "a source of one dimension": ("ValueError", (f32(12),), 0, 2, (LANES_OUT,)),
    "a source of one dimension that had two": ("ValueError", (f32(3, 5).resize_(3),), 0, 2, (f32(3, 2),)),
    "fewer targets": ("ValueError", (LANES_SOURCE, LANES_SOURCE), 0, 2, (LANES_OUT,)),
    "more targets": ("ValueError", (LANES_SOURCE,), 0, 2, (LANES_OUT, LANES_OUT)),
    "a list of sources": ("TypeError", [LANES_SOURCE], 0, 2, (LANES_OUT,)),
}.items():
    misuse(
        f"copy_lanes: {name}",
        expected,
        lambda a=(sources, first, last, targets): native.copy_lanes(*a),
    )

STATES = f32(3, 1, 2, 4)
STATE_OUT = torch.full((1, 2, 4), NAN)
OUTPUTS.append(STATE_OUT)
for name, (states, lanes, starts, target) in {
    "a lane beyond the end": (STATES, rows(0, 2), ZERO, STATE_OUT),
    "a negative lane": (STATES, rows(0, -1), ZERO, STATE_OUT),
    "a start beyond the end": (STATES, ZERO, rows(0, 3), STATE_OUT),
    "a negative start": (STATES, ZERO, rows(0, -1), STATE_OUT),
    "too few starts": (STATES, ZERO, rows(0), STATE_OUT),
    "a target too small": (STATES, ZERO, ZERO, STATE_OUT[:, :1]),
    "states of three dimensions": (f32(3, 2, 4), ZERO, ZERO, STATE_OUT),
    "strided states": (strided(3, 1, 2, 4), ZERO, ZERO, STATE_OUT),
}.items():
    misuse(f"first_states: {name}", "Exception", lambda a=(states, lanes, starts, target): native.first_states(*a))


# ------------------------------------------------------------------------------------ right calls at memory's edge


def at_the_edge(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose last byte is the last before a page that nobody may touch."""
    size = torch.Size(shape).numel() * dtype.itemsize
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(first + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(
        memory, dtype=dtype, count=size // dtype.itemsize, offset=pages * mmap.PAGESIZE - size
    ).view(shape)


def gather_at_the_edge() -> None:
    for dtype in (torch.uint8, torch.int16, torch.float32, torch.float64):
        for width in (1, 2, 3, 5, 7, 8, 12, 17, 48, 200):
            source, out = at_the_edge((2, 9, width), dtype), at_the_edge((18, width), dtype)
            source.copy_(torch.arange(source.numel()).view(source.shape) % 251)
            native.gather((source,), torch.arange(17, -1, -1), (out,))
            assert torch.equal(out, source.flatten(0, 1).flip(0))
            floats = at_the_edge((18, width), torch.float32)
            native.gather((source,), torch.arange(17, -1, -1), (floats,))
            assert torch.equal(floats, out.float())


def scans_at_the_edge() -> None:
    for dtype in (torch.float32, torch.float64):
        for lanes in (1, 3, 7, 8, 17, 33):
            reals = [at_the_edge(shape, dtype).fill_(1) for shape in [(3, lanes), (3, lanes), (lanes,)]]
            ends = [at_the_edge((3, lanes), torch.uint8).fill_(k) for k in (0, 1)]
            final, log_rhos = at_the_edge((3, lanes), dtype).fill_(1), at_the_edge((3, lanes), dtype).fill_(0)
            outs = [at_the_edge((3, lanes), dtype) for _ in range(2)]
            arguments = (*reals, *ends, final)
            native.gae(*arguments, 0.5, 0.5, *outs)
            assert bool((outs[0] == 0.5).all())
            native.discounted_returns(arguments[0], *arguments[2:], 0.5, outs[0])
            native.n_step_returns(*arguments, 0.5, 2, outs[1])
            assert bool((outs[0] == 1.5).all())
            assert bool((outs[1] == 1.5).all())
            native.vtrace(*arguments, log_rhos, 0.5, 1.0, 1.0, 1.0, 1.0, *outs)
            assert bool((outs[0] == 1.5).all())
            native.normalize(outs[0].copy_(torch.arange(3 * lanes).view(3, lanes)), 1e-8)


def segments_at_the_edge() -> None:
    dones = at_the_edge((3, 5), torch.uint8).zero_()
    parts = [at_the_edge((5,), torch.int64) for _ in range(3)]
    assert native.count_segments(dones, 0, 5) == 5
    native.split_segments(dones, 0, 5, *parts)
    source = at_the_edge((3, 5, 7), torch.uint8).random_(0, 256)
    out, mask = at_the_edge((3, 5, 7), torch.uint8), at_the_edge((3, 5), torch.bool)
    native.pad_segments((source,), *parts, (out,), mask)
    assert torch.equal(out, source)
    lanes = at_the_edge((3, 2, 7), torch.uint8)
    native.copy_lanes((source,), 3, 5, (lanes,))
    assert torch.equal(lanes, source[:, 3:])
    states, first = at_the_edge((3, 2, 5, 3), torch.float32).normal_(), at_the_edge((2, 5, 3), torch.float32)
    native.first_states(states, parts[0], parts[1], first)
    assert torch.equal(first, states[0])


def writes_at_the_edge() -> None:
    block, values = at_the_edge((3, 5, 7), torch.float32), at_the_edge((5, 7), torch.float32).normal_()
    floats, marks = at_the_edge((4, 5), torch.float32), at_the_edge((5,), torch.bool).fill_(True)
    writer = native.RowWriter([(block, 0, False, False), (floats, 1, True, False)])
    assert writer.write(2, (values, marks)) == -1
    assert torch.equal(block[2], values)
    assert bool((floats[3] == 1).all())


def strided_writes_at_the_edge() -> None:
    for dtype in (torch.uint8, torch.float32):
        whole = at_the_edge((2, 5, 7), dtype).copy_(torch.arange(70).view(2, 5, 7))
        for value in (whole[1].t(), whole[1, ::2], whole[1, :, 3:], whole[:, -1], whole[1, -1:].expand(4, 7)):
            block = at_the_edge((2, *value.shape), dtype)
            assert native.RowWriter([(block, 0, False, False)]).write(1, (value,)) == -1
            assert torch.equal(block[1], value)


def large_writes_at_the_edge() -> None:
    """Rows that go past the cache: any length, and so any place of the target in its cache line."""
    for size in (131071, 131072, 131073, 131087, 131135, 131136, 140001):
        values, block = at_the_edge((size,), torch.uint8).random_(0, 256), at_the_edge((2, size), torch.uint8)
        writer = native.RowWriter([(block, 0, False, False)])
        for row in (0, 1):
            assert writer.write(row, (values,)) == -1
            assert torch.equal(block[row], values)


EDGES.update(
    {
        "gather": gather_at_the_edge,
        "scans": scans_at_the_edge,
        "segments": segments_at_the_edge,
        "writes": writes_at_the_edge,
        "strided writes": strided_writes_at_the_edge,
        "large writes": large_writes_at_the_edge,
    }
)
