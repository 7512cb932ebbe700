"""Snapshots with forged tables and numbers under right checksums, loaded and used in forked processes."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rlstore import ReplayStorage, Storage
from rlstore.engine.disk.snapshot import SnapshotWriter
from rlstore.engine.disk.space_json import from_json
from rlstore.errors import StorageError

sys.path.insert(0, str(Path(__file__).parent / "golden"))

from programs import PROGRAMS, fill, ids, next_draws
from written_snapshots import GivenRows, write_snapshot

State = tuple[dict[str, Any], dict[str, Tensor]]
Forgery = tuple[str, dict[str, Any], dict[str, Tensor]]
_WHOLE = (-1, -2, 0, 1, 2**31 - 1, 2**40, 2**62, 2**63 - 1, -(2**63))
_REAL = (float("nan"), float("inf"), -float("inf"), -1.0, 3e38, 0.0)
_PLAIN = (-1, 0, 2**31, 2**62, 2**63, 2**70, 1.5, float("nan"), float("inf"), None, True, "x", [], {}, [1, 2, 3])
SECONDS = 20.0  # for one forgery, which takes some hundredths


# ---------------------------------------------------------------------------------------------------- storages


def _add_stacks(storage: Any, first: int, last: int) -> None:
    """Frame stacks of which the older frames of each first one are others; episodes of four steps."""
    for step in range(first, last):
        stack = torch.stack([ids(step + back) % 251 for back in (-2, -1, 0)], 1)
        if step % 4 == 0:
            stack[:, :2] = 252
        if step % 4 == 1:
            stack[:, 0] = 252
        follows = torch.cat([stack[:, 1:], ids(step + 1).unsqueeze(1) % 251], 1)
        ended = torch.full((3,), step % 4 == 3)
        stacks = stack.to(torch.uint8), follows.to(torch.uint8)
        storage.add(stacks[0], torch.arange(3) % 2, ids(step)[:, 0], ended, ~ended & ended, {}, stacks[1])


def _starts_program(storage: Any) -> Iterator[Any]:
    """Such frame stacks, the last episode of which has only begun."""
    _add_stacks(storage, 0, 29)
    for _ in range(2):
        yield storage.sample()


def _make_starts(device: str) -> Any:
    space = spaces.Box(0, 255, (3, 1), "uint8")
    return ReplayStorage(space, spaces.Discrete(2), device, storage_size=60, num_envs=3, batch_size=8, frame_stack=3)


FORGED = {**PROGRAMS, "frames, starts": (_make_starts, _starts_program)}


def use(name: str, storage: Any) -> None:
    """Count, draw, change priorities, write on until every row is overwritten, and draw again."""
    len(storage)
    if name == "frames, starts":
        _add_stacks(storage, 29, 31)  # they go on with the episode that is open
    next_draws(storage)
    if not hasattr(storage, "storage_size"):
        storage.reset()  # a rollout takes no more than fit into it
    if getattr(storage, "alpha", 0):
        batch = storage.sample()
        storage.update(batch.rows, torch.ones(len(batch.rows)))
    for _ in FORGED[name][1](storage):
        pass
    if FORGED[name][1] is FORGED["replay"][1]:
        fill(storage, 40, 90)
        storage.sample()
    storage.reset()


# ---------------------------------------------------------------------------------------------------- forgeries


def forgeries(state: State, random_: random.Random) -> Iterator[Forgery]:
    """Every table and every number, in turn, as it cannot be."""
    numbers, tensors = state
    for path, value in _leaves(numbers):
        for forged in _PLAIN:
            if type(forged) is not type(value) or forged != value:
                yield f"{path} = {forged!r}", _replaced(numbers, path, forged), tensors
    for name, tensor in tensors.items():
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


# ---------------------------------------------------------------------------------------------------- loading


def _saved_state(storage: Any) -> State:
    """What a storage saves; tensors of records by names that say which record."""
    with tempfile.TemporaryDirectory() as folder, SnapshotWriter("save()", folder) as writer:
        content, rows = storage._content(copy=True), storage._rows_for(writer)
        tensors = dict(content.tensors)
        if rows is not None:
            tensors.update(rows.tensors)
            for index, record in enumerate(rows.records()):
                tensors.update({f"record {index} {name}": tensor for name, tensor in record.items()})
            rows.close(None)
    return from_json(content.numbers), tensors


def _given_rows(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], GivenRows | None]:
    """The tensors apart from those of records, and the records."""
    records: dict[int, dict[str, Tensor]] = {}
    for name in [name for name in tensors if name.startswith("record ")]:
        _, index, part = name.split(" ", 2)
        records.setdefault(int(index), {})[part] = tensors[name]
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("record ")}
    return rest, GivenRows([records[i] for i in sorted(records)], 3) if "episodes" in rest or records else None


def judge(name: str, forge: Callable[[State], list[Forgery]]) -> dict[str, int]:
    """Load forged snapshots of a storage in forked processes, and use what was loaded.

    Args:
        name: One of FORGED.
        forge: From what the storage saves to what it is made to be.

    Returns:
        How many were refused with an error of rlstore, and how many could be used.

    Raises:
        AssertionError: If one ended in another error, in a crash or not at all.
    """
    make, run = FORGED[name]
    storage = make("cpu")
    for _ in run(storage):
        pass
    cases = forge(_saved_state(storage))
    saved = f"rlstore.{type(storage).__name__}", storage._settings()
    folder = Path(tempfile.mkdtemp())
    counts = {"refused": 0, "used": 0}
    try:
        while cases:
            cases = _judge_in_child(name, saved, cases, folder, counts)
    finally:
        shutil.rmtree(folder)
    return counts


def _judge_in_child(
    name: str, saved: tuple[str, Any], cases: list[Forgery], folder: Path, counts: dict[str, int]
) -> list[Forgery]:
    """Try cases in a child until one kills it; returns those that are left."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _try_all(name, saved, cases, folder, writing)
    os.close(writing)
    with os.fdopen(reading) as told:
        lines = told.read().splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for (label, _, _), line in zip(cases, lines, strict=False):
        assert line in counts, f"{name}, {label}: {line}"
        counts[line] += 1
    assert status == 0, f"{name}, {cases[len(lines)][0]}: ended with {status}"
    return cases[len(lines) :]


def _try_all(name: str, saved: tuple[str, Any], cases: list[Forgery], folder: Path, told: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.fsync = lambda descriptor: None  # it makes no difference here but time
    warnings.simplefilter("ignore")
    for _, numbers, tensors in cases:
        signal.alarm(int(SECONDS))
        path = folder / f"{time.monotonic_ns()}"
        try:
            rest, rows = _given_rows(tensors)
            write_snapshot(path, saved[0], "cpu", saved[1], numbers, rest, rows)
            result = _try(name, path)
        except BaseException as error:
            result = f"cannot be forged: {error!r}"
        os.write(told, f"{result}\n".encode())
        shutil.rmtree(path, ignore_errors=True)
    os._exit(0)


def _try(name: str, path: Path) -> str:
    try:
        loaded = Storage.load(path)
    except StorageError:
        return "refused"
    except BaseException as error:
        return " ".join(f"load: {error!r}".split())
    try:
        use(name, loaded)
    except StorageError:
        return "refused"
    except BaseException as error:
        return " ".join(f"use: {error!r}".split())
    return "used"
