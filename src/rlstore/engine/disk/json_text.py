"""JSON as it is on disk: read without surprises."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from rlstore.errors import SnapshotError


def dump_json(value: Any) -> bytes:
    """A value as JSON without white space."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """The object that a text holds.

    Args:
        text: The text.
        where: What errors call it.

    Raises:
        SnapshotError: If it is not an object in JSON, is nested too deeply, or has a name twice.
    """
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{where} is damaged: it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise SnapshotError(f"{where} is damaged: it is {str(found)[:40]!r}, not an object")
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
