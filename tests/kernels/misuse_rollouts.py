"""Wrong calls of gather_slots, and a right one whose tensors end where the process's memory ends."""

from __future__ import annotations

import torch
from misuse import EDGES, OUT, at_the_edge, f32, freed, misuse, native, rows, strided

SLOTS = f32(5, 3, 2)  # five slots of three rows; two of them fill OUT[0]
for name, wrong in {"beyond the end": rows(0, 5), "negative": rows(0, -1), "far away": rows(2**62, 0)}.items():
    misuse(
        f"gather_slots: a slot {name}",
        "IndexError",
        lambda wrong=wrong: native.gather_slots((SLOTS,), wrong, (OUT[0],)),
    )
    misuse(
        f"gather_slots: a slot {name} of the smaller source",
        "IndexError",
        lambda wrong=wrong: native.gather_slots((f32(2**4, 3, 2), SLOTS), wrong, tuple(OUT)),
    )
for name, wrong in {
    "too small": f32(3, 3),
    "too large": f32(3, 5),
    "not contiguous": strided(3, 4),
    "of another dtype": torch.ones(3, 4, dtype=torch.int32),
}.items():
    misuse(
        f"gather_slots: a target {name}",
        "Exception",
        lambda wrong=wrong: native.gather_slots((SLOTS,), rows(0, 1), (wrong,)),
    )
for name, wrong in {
    "of one dimension": f32(12),
    "that was freed": freed(f32(5, 3, 2)),
    "whose slots are not contiguous": f32(5, 2, 3).transpose(1, 2),
    "whose slots overlap": f32(20).as_strided((5, 3, 2), (2, 2, 1)),
    "that runs backwards": f32(20).as_strided((5, 3, 2), (0, 2, 1)),
}.items():
    misuse(
        f"gather_slots: a source {name}",
        "Exception",
        lambda wrong=wrong: native.gather_slots((wrong,), rows(0, 1), (OUT[0],)),
    )
misuse("gather_slots: more targets", "Exception", lambda: native.gather_slots((SLOTS,), rows(0, 1), tuple(OUT)))
misuse("gather_slots: fewer targets", "Exception", lambda: native.gather_slots((SLOTS, SLOTS), rows(0, 1), (OUT[0],)))
misuse("gather_slots: a list of slots", "Exception", lambda: native.gather_slots((SLOTS,), [0, 1], (OUT[0],)))


def slots_at_the_edge() -> None:
    for width in (1, 2, 3, 4, 5, 8, 17, 48, 200, 1023, 1025, 20_001):
        source, out = at_the_edge((3, 9, width), torch.uint8).random_(0, 256), at_the_edge((9, 7, width), torch.uint8)
        slots = rows(2, 0, 1, 2, 2, 0, 1)
        native.gather_slots((source,), slots, (out,))
        assert torch.equal(out, source[slots].transpose(0, 1))


EDGES["slots"] = slots_at_the_edge
