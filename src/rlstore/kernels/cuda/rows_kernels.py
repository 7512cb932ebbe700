"""The device's side of the writer of rows."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row"])
def write_row(
    values,
    blocks,
    row: tl.int64,
    COUNTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    STRIDES: tl.constexpr,
    LEADS: tl.constexpr,
    FLAGS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FIRSTS: tl.constexpr,
):
    """``blocks[f][row + LEADS[f]] = values[f]`` for every field f.

    A value is plain memory; or, where STRIDES[f] is not -1, WIDTHS[f] entries of plain memory every STRIDES[f] entries.
    A program copies ENTRIES[f] of the COUNTS[f] entries of one field: those from FIRSTS[f] to FIRSTS[f + 1] field f.
    """
    program = tl.program_id(0)
    for f in tl.static_range(len(COUNTS)):
        if (program >= FIRSTS[f]) & (program < FIRSTS[f + 1]):
            begin = program - FIRSTS[f]
            # Short numbers, unless the value or the memory that it is spread over is too long for them.
            if (COUNTS[f] >= 2**31) | (COUNTS[f] // WIDTHS[f] * STRIDES[f] >= 2**31):
                begin = begin.to(tl.int64)
            begin = begin * ENTRIES[f]
            entry = tl.arange(0, ENTRIES[f])
            inside = entry < COUNTS[f] - begin
            if STRIDES[f] == -1:
                source = values[f] + begin + entry
            else:
                source = values[f] + (begin + entry) // WIDTHS[f] * STRIDES[f] + (begin + entry) % WIDTHS[f]
            value = tl.load(source, mask=inside, other=0)
            target = blocks[f] + (row + LEADS[f]) * COUNTS[f] + begin + entry
            if FLAGS[f]:
                tl.store(target, (value != 0).to(blocks[f].dtype.element_ty), mask=inside)
            else:
                tl.store(target, value, mask=inside)
