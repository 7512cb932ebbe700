"""manifest.json: what a folder written by rlstore holds.

Snapshots, mapped storages and episodes have the same kind of manifest, with one version number for all of them:

    "format"    "rlstore snapshot", "rlstore mapped storage" or "rlstore episodes"
    "version"   1; a larger number is refused
    "crc32"     last, the checksum of the text without it; older manifests have none

and the fields documented in snapshot.py, mapped.py and episode_files.py. A reader ignores fields it does not know.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.json_text import parse_json
from rlstore.errors import InvalidInputError, SnapshotError
from rlstore.kernels import crc32

NAME = "manifest.json"
VERSION = 1
MOST_BYTES = 256 << 20
_CHECKSUM, _END = b',\n "crc32": ', "\n}"
# By name the type of each field, or the fields of an object.
Fields = dict[str, Any]
_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false"}


def write_manifest(folder: Directory, kind: str, content: Mapping[str, Any], name: str = NAME) -> None:
    """Replace the manifest of a folder atomically.

    Args:
        folder: The folder.
        kind: "snapshot", "mapped storage" or "episodes".
        content: The fields of this kind, as JSON.
        name: The name of the file.
    """
    manifest = {"format": f"rlstore {kind}", "version": VERSION, **content}
    text = json.dumps(manifest, indent=1, allow_nan=False).removesuffix(_END).encode()
    whole = text + _CHECKSUM + str(_checksum(text)).encode() + _END.encode()
    if len(whole) > MOST_BYTES:
        raise InvalidInputError(f"the {name} of this {kind} would have {len(whole):,} bytes; {MOST_BYTES:,} are read")
    folder.write_whole(name, whole)


def read_manifest(folder: Directory, kind: str, fields: Fields, name: str = NAME) -> dict[str, Any]:
    """The manifest of a folder.

    Args:
        folder: The folder.
        kind: The kind that it must be.
        fields: The fields that it must have.
        name: The name of the file.

    Raises:
        SnapshotError: If there is none, or it is damaged, of another kind, or of a newer version.
    """
    path = folder.path / name
    try:
        text = folder.read(name, MOST_BYTES)
    except FileNotFoundError as error:
        raise SnapshotError(f"there is no {kind} in {folder.path}: it has no {name}") from error
    manifest = parse_json(text, str(path))
    if manifest.get("format") != f"rlstore {kind}":
        found = reprlib.repr(manifest.get("format"))
        raise SnapshotError(f'{path} is not the manifest of a {kind}: "format" is {found}, not "rlstore {kind}"')
    check_fields(path, manifest, {"version": int})
    if manifest["version"] > VERSION:
        raise newer_version(path, "version", manifest["version"], VERSION)
    checksum = manifest.pop("crc32", None)
    if checksum is not None and checksum != _checksum(text.rpartition(_CHECKSUM)[0]):
        raise SnapshotError(
            f'{path} is damaged: "crc32" is {checksum!r}, which is not the checksum of the rest. If it was edited on '
            'purpose, remove its "crc32".'
        )
    check_fields(path, manifest, fields)
    return manifest


def newer_version(path: Path, field: str, found: object, known: object) -> SnapshotError:
    """The error for a manifest that only a newer version of rlstore can read."""
    return SnapshotError(
        f'{path} was written by a newer rlstore: "{field}" is {found!r}, and this version reads {known!r}. '
        "Update rlstore."
    )


def check_fields(path: Path, part: Mapping[str, Any], fields: Fields, where: str = "") -> None:
    """Refuse a part of a manifest that lacks a field, or has one of another type."""
    for name, kind in fields.items():
        field, expected = where + name, dict if isinstance(kind, dict) else kind
        if name not in part:
            raise SnapshotError(f'{path} is damaged: "{field}" is missing')
        if type(part[name]) is not expected:
            found = reprlib.repr(part[name])  # short, however long or deep it is
            raise SnapshotError(f'{path} is damaged: "{field}" is {found}, not {_JSON_TYPES[expected]}')
        if isinstance(kind, dict):
            check_fields(path, part[name], kind, f"{field}.")


def _checksum(text: bytes) -> int:
    return crc32(text + _END.encode())
