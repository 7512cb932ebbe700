"""JSON as it is on disk: read without surprises."""

from __future__ import annotations

import json
import reprlib
from typing import Any, NoReturn

from rlstore.errors import SnapshotError

# Objects, lists and names: an empty list has two bytes in a file and 56 in memory. Ours have some thousand.
_MOST_PARTS = 1 << 19


def dump_json(value: Any) -> bytes:
    """A value as JSON without white space."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """The object that a text holds.

    Args:
        text: The text.
        where: What errors call it.

    Raises:
        SnapshotError: If it is not an object in JSON, is nested too deeply, has too many parts, or has a name twice.
    """
    if (parts := sum(map(text.count, b"[{:"))) > _MOST_PARTS:
        raise SnapshotError(f"{where} is damaged: it has {parts:,} parts, and no more than {_MOST_PARTS:,} are read")
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{where} is damaged: it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise SnapshotError(f"{where} is damaged: it is {reprlib.repr(found)}, not an object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
