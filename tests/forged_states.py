"""Snapshots whose tables and numbers were forged, one at a time, under right checksums."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from saved_folders import Saved
from torch import Tensor
from written_snapshots import GivenRows, write_snapshot

from rlstore import Storage
from rlstore.engine.disk.snapshot import SnapshotWriter
from rlstore.engine.disk.space_json import from_json

Tensors = dict[str, Tensor]
Forgery = tuple[str, dict[str, Any], Tensors]  # what was forged, and the numbers and the tensors
_WHOLE = (-1, -2, 0, 1, 2**31 - 1, 2**40, 2**62, 2**63 - 1, -(2**63))
_REAL = (float("nan"), float("inf"), -float("inf"), -1.0, 3e38, 0.0)
_PLAIN = (-1, 0, 2**31, 2**62, 2**63, 2**70, 1.5, float("nan"), float("inf"), None, True, "x", [], {}, [1, 2, 3])


class SavedState:
    """What a storage saves.

    Args:
        storage: The storage.

    Attributes:
        numbers: What is no tensor.
        tensors: By name; those of records by names that say which record.
    """

    def __init__(self, storage: Any) -> None:
        self._class_name, self._settings = f"rlstore.{type(storage).__name__}", storage._settings()
        with tempfile.TemporaryDirectory() as folder, SnapshotWriter("save()", folder) as writer:
            content, rows = storage._content(copy=True), storage._rows_for(writer)
            self.numbers, self.tensors = from_json(content.numbers), dict(content.tensors)
            if rows is None:
                return
            self.tensors.update(rows.tensors)
            for index, record in enumerate(rows.records()):
                self.tensors.update({f"record {index} {name}": tensor.clone() for name, tensor in record.items()})
            rows.close(None)

    def write(self, path: Path, numbers: Mapping[str, Any], tensors: Tensors) -> None:
        """Write a snapshot with other numbers and tensors."""
        records: dict[int, Tensors] = {}
        for name in [name for name in tensors if name.startswith("record ")]:
            _, index, part = name.split(" ", 2)
            records.setdefault(int(index), {})[part] = tensors[name]
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("record ")}
        rows = GivenRows([records[i] for i in sorted(records)], 3) if "episodes" in rest or records else None
        write_snapshot(path, self._class_name, "cpu", self._settings, numbers, rest, rows)


class ForgedState:
    """A snapshot with a forged state.

    Attributes:
        how: What was forged.
        saved: What it was made from.
        path: The folder.
        may_differ: True.
    """

    may_differ = True

    def __init__(self, saved: Saved, state: SavedState, forgery: Forgery, path: Path) -> None:
        self.how, self.saved, self.path = forgery[0], saved, path
        state.write(path, *forgery[1:])


class StateForger:
    """All forgeries of all snapshots.

    Args:
        saved: The folders; those that are no snapshots are left out.
    """

    def __init__(self, saved: list[Saved]) -> None:
        states = [(one, SavedState(Storage.load(one.path))) for one in saved if one.kind == "snapshot"]
        self._cases = [(one, state, forged) for one, state in states for forged in forgeries(state, random.Random(1))]

    def __len__(self) -> int:
        return len(self._cases)

    def __call__(self, number: int, scratch: Path, witness: Path) -> ForgedState:
        """The folder of a number."""
        return ForgedState(*self._cases[number], scratch / f"forged-{number}")

    def one_of_each(self, random_: random.Random) -> list[int]:
        """The number of one forgery of each kind: the same is done to the same, whatever the values and the storage."""
        kinds: dict[str, list[int]] = {}
        for number, (_, _, (how, _, _)) in enumerate(self._cases):
            kinds.setdefault(re.sub(r" = .*|\[.*?\]|all .*|[0-9]+", "", how), []).append(number)
        return [random_.choice(numbers) for numbers in kinds.values()]


def forgeries(state: SavedState, random_: random.Random) -> Iterator[Forgery]:
    """Every table and every number, in turn, as it cannot be."""
    numbers, tensors = state.numbers, state.tensors
    for path, value in _leaves(numbers):
        for plain in _PLAIN:
            if type(plain) is not type(value) or plain != value:
                yield f"{'.'.join(map(str, path))} = {plain!r}", _replaced(numbers, path, plain), tensors
    for name, tensor in tensors.items():
        if re.match("rollout [1-9]", name):  # which is as the first
            continue
        for how, forged in _forged(tensor, random_):
            yield f"{name}: {how}", numbers, {**tensors, name: forged}
        yield f"{name}: missing", numbers, {n: t for n, t in tensors.items() if n != name}


def _forged(tensor: Tensor, random_: random.Random) -> Iterator[tuple[str, Tensor]]:
    whole = not tensor.dtype.is_floating_point
    limit = None if not whole or tensor.dtype == torch.bool else torch.iinfo(tensor.dtype)
    for value in _WHOLE if whole else _REAL:
        if limit is not None:
            value = min(max(value, limit.min), limit.max)
        for place in {0, tensor.numel() - 1, random_.randrange(max(tensor.numel(), 1))} if tensor.numel() else ():
            forged = tensor.clone(memory_format=torch.contiguous_format)
            forged.view(-1)[place] = value
            yield f"[{place}] = {value}", forged
        yield f"all {value}", torch.full_like(tensor, value)
    if tensor.dim():
        order = torch.randperm(len(tensor), generator=torch.Generator().manual_seed(random_.randrange(99)))
        yield "rows in another order", tensor[order].clone()
        yield "a row less", tensor[:-1].clone()
        yield "a row more", torch.cat([tensor, tensor[:1]])
        yield "no rows", tensor[:0].clone()
        yield "flat", tensor.flatten()
    yield "a dimension more", tensor.unsqueeze(0).clone()
    yield "another dtype", tensor.to(torch.float64 if whole else torch.int64, copy=True)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value within a nest of plain values, the nests themselves included."""
    if path:
        yield path, value
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _leaves(part, (*path, key))


def _replaced(nest: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(nest) if isinstance(nest, Mapping) else list(nest)
    copy[path[0]] = _replaced(nest[path[0]], path[1:], value)
    return copy
