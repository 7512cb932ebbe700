"""JSON as it is on disk: read without surprises."""

from __future__ import annotations

import json
import re
import reprlib
from typing import Any, NoReturn

from rlstore.errors import SnapshotError

_PIECE_BYTES = 1 << 18
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_MOST_DEEP = 200


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
    _check_nesting(text, where)
    try:
        found = json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{where} is damaged: it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise SnapshotError(f"{where} is damaged: it is {reprlib.repr(found)}, not an object")
    return found


def _check_nesting(text: bytes, where: str) -> None:
    """Refuse what is nested too deeply for those who read it, or takes far more memory than its bytes."""
    # Objects, lists and names: an empty list has two bytes in a file and 56 in memory.
    parts, most = sum(map(text.count, b"[{:")), ((24 << 20) + 7 * len(text)) // 100
    if parts > most:
        raise SnapshotError(
            f"{where} is damaged: it has {parts:,} parts, and no more than {most:,} are read in {len(text):,} bytes"
        )
    plain = re.sub(rb"\\.", b"", text, flags=re.DOTALL) if b"\\" in text else text
    depth = is_inside = 0  # whether a string is open
    for begin in range(0, len(plain), _PIECE_BYTES):
        pieces = plain[begin : begin + _PIECE_BYTES].split(b'"')
        brackets = b"".join(pieces[is_inside::2]).translate(None, _NO_BRACKETS)
        is_inside ^= (len(pieces) - 1) & 1
        for bracket in brackets:
            depth += 1 if bracket in b"[{" else -1
            if depth > _MOST_DEEP:
                raise SnapshotError(f"{where} is damaged: it is not JSON of ours, but nested too deeply")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
