"""Which columns of a file are which fields of steps: by the names that libraries use, or as the caller says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlstore.engine.calls import did_you_mean
from rlstore.engine.rows.schema import Path
from rlstore.errors import InvalidInputError
from rlstore.replay.loading.names import TERMINATED, TRUNCATED

# By field the name of a column; for observations with names a dict of them; None for a field that no column is.
GivenColumns = Mapping[str, "str | Mapping[str, str] | None"]
# The column of each field. A path begins with the name of the field; a part of nested observations has a longer one.
Layout = Mapping[Path, str]

# Columns that tell about steps and are none of their fields; no field of a user has such a path.
DONE, EPISODE, NUMBER = ("", "dones"), ("", "episodes"), ("", "steps")
FLAGS: tuple[Path, ...] = (("terminated",), ("truncated",), DONE)

_NAMES: dict[str, tuple[str, ...]] = {
    "observations": ("observations", "observation", "obs", "states", "state"),
    "next_observations": ("next_observations", "next_observation", "next_obs", "next_states", "next_state"),
    "actions": ("actions", "action"),
    "rewards": ("rewards", "reward", "next.reward"),
    "terminated": (*TERMINATED, "next.terminated"),
    "truncated": (*TRUNCATED, "next.truncated"),
    "dones": ("dones", "done", "next.done"),
    # A number or a name for each episode, and the number of a step in its episode.
    "episodes": ("episode_index", "episode_id", "episodes", "episode"),
    "steps": ("frame_index",),
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names}
_NESTED = ("observations", "next_observations")
_ABOUT = {path[1]: path for path in (DONE, EPISODE, NUMBER)}


def leaves(layout: Mapping[Path, str], field: str) -> dict[Path, str]:
    """The columns of the leaves of a field, by their paths in it."""
    return {path[1:]: column for path, column in layout.items() if path[0] == field}


def checked_columns(columns: Any) -> GivenColumns:
    """The columns that a caller named, by field."""
    if columns is not None and not isinstance(columns, Mapping):
        raise InvalidInputError(
            f"columns is {columns!r}; give a dict, as {{'observations': 'obs'}}, or None. Nothing was read."
        )
    return columns or {}


def find_layout(present: Iterable[str], given: GivenColumns | None, origin: str) -> Layout:
    """The columns of a file by their names.

    Args:
        present: The names of all its columns.
        given: The columns that the caller named, by field; others are found by their names.
        origin: The file, for errors.

    Raises:
        InvalidInputError: If the caller named a column that is not there, or one that is needed is not found.
    """
    known = list(present)
    layout: dict[Path, str] = {}
    named = {_FIELDS.get(name, name): column for name, column in checked_columns(given).items()}
    for field, column in named.items():
        if column is not None:
            layout.update(_given(field, column, known, origin))
    for field in _NAMES:
        if field not in named:
            layout.update(_found(field, known))
    layout = {_ABOUT.get(str(path[0]), path): column for path, column in layout.items()}
    for field in ("observations", "actions"):
        if not leaves(layout, field):
            raise InvalidInputError(
                f"{origin} has no column that is known to be its {field}; it has {known}. Name it: "
                f"columns={{{field!r}: ...}}. Nothing was read."
            )
    now, following = (leaves(layout, field) for field in _NESTED)
    if following and following.keys() != now.keys():
        raise InvalidInputError(
            f"{origin} has the observations {list(now.values())} and the next observations {list(following.values())}; "
            "each needs one. Name both in columns. Nothing was read."
        )
    return layout


def _given(field: str, column: object, present: list[str], origin: str) -> dict[Path, str]:
    parts = column if field in _NESTED and isinstance(column, Mapping) and column else {"": column}
    layout: dict[Path, str] = {}
    for key, part in parts.items():
        if not isinstance(part, str):
            raise InvalidInputError(
                f"columns[{field!r}] is {column!r}; give the name of a column, or for observations with names a dict "
                "of them. Nothing was read."
            )
        if part not in present:
            raise InvalidInputError(
                f"{origin} has no column {part!r}.{did_you_mean(part, present)} It has {present}. Nothing was read."
            )
        layout[(field, str(key)) if key else (field,)] = part
    return layout


def _found(field: str, present: list[str]) -> dict[Path, str]:
    """The column of a field, or the columns of its parts: ``observations/camera``, ``observation.state``."""
    for name in _NAMES[field]:
        if name in present:
            return {(field,): name}
        if field not in _NESTED:
            continue
        slashed = [column for column in present if column.startswith(f"{name}/")]
        if slashed:
            return {(field, *column.split("/")[1:]): column for column in slashed}
        dotted = [column for column in present if column.startswith(f"{name}.")]
        if dotted:  # as LeRobot names them; the only one is mostly observation.state
            return {(field, *([column[len(name) + 1 :]] if len(dotted) > 1 else [])): column for column in dotted}
    return {}
