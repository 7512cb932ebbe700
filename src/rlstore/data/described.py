"""What files of our own hold besides arrays, as JSON: the spaces, and which column is what."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlstore.data.columns import EPISODE, GivenColumns, Layout, find_layout, leaves
from rlstore.data.source import nested
from rlstore.data.table import Ends, Finals, Table, TableSource
from rlstore.engine.disk.space_json import from_json, to_json
from rlstore.errors import InvalidInputError, SnapshotError

MOST_BYTES = 64 << 20  # of it in a file: bounds of spaces may be arrays
_VERSION = 1
_NEEDED = ("observations", "actions", "rewards")
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError, SnapshotError)


@dataclass(frozen=True)
class Description:
    """What a file of our own says of itself.

    Attributes:
        spaces: The spaces of observations and actions; None for those that are not known.
        layout: The column of each field.
        finals: The column of each leaf of final observations, and of the numbers of their episodes; empty if there are
            none.
        num_finals: How many there are.
        shapes: By column the shape of a step, where the file itself does not tell.
    """

    spaces: tuple[Any, Any]
    layout: Layout
    finals: Layout
    num_finals: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def final_columns(self) -> dict[str, str]:
        """The column of the final observations for each column of observations."""
        observed = leaves(self.layout, "observations")
        return {observed[leaf]: column for leaf, column in self.finals.items() if leaf in observed}

    def as_json(self) -> str:
        """The description, for :meth:`of`."""
        content = {
            "version": _VERSION,
            "observation_space": to_json(self.spaces[0], "observation_space"),
            "action_space": to_json(self.spaces[1], "action_space"),
            "columns": [[list(path), column] for path, column in self.layout.items()],
            "shapes": {column: list(shape) for column, shape in self.shapes.items()},
            "final_observations": [[list(path), column] for path, column in self.finals.items()],
            "num_final_observations": self.num_finals,
        }
        return json.dumps({**content, "crc32": _checksum(content)})

    @classmethod
    def of(cls, content: dict[str, Any], origin: str) -> Description:
        """The description that was written, read from JSON.

        Raises:
            InvalidInputError: If it is none, or of a newer version.
        """
        try:
            if content["version"] != _VERSION:
                raise InvalidInputError(
                    f"{origin} was written by a newer version of rlstore (format {content['version']}, and this one "
                    f"reads {_VERSION}). Update rlstore"
                )
            if content.pop("crc32") != _checksum(content):
                raise ValueError("its checksum is another one")
            spaces = (from_json(content["observation_space"]), from_json(content["action_space"]))
            shapes = {column: tuple(map(int, shape)) for column, shape in content["shapes"].items()}
            layout, finals = (
                {tuple(path): str(column) for path, column in content[name]}
                for name in ("columns", "final_observations")
            )
            missing = [field for field in _NEEDED if not leaves(layout, field)]
            if missing or (finals and EPISODE not in finals):
                raise LookupError(f"it has no column of {missing or EPISODE[1]}")
            nested(layout)  # which refuses paths that are none
            num_finals = int(content["num_final_observations"])
        except _DAMAGED as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"{origin} is damaged: its description cannot be read ({error})") from error
        return cls(spaces, layout, finals, num_finals, shapes)


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def source_of(
    table: Table,
    finals: Table | None,
    about: Description | None,
    columns: GivenColumns | None,
    ends: Ends,
    rewards: float | None,
) -> TableSource:
    """The episodes of a table.

    Args:
        table: The table.
        finals: Where the final observations are; None if there are none.
        about: What the table says of itself, if we wrote it.
        columns: What the caller says of it, which counts more.
        ends: See :class:`~rlstore.data.table.TableSource`.
        rewards: Likewise.

    Raises:
        InvalidInputError: If columns are missing or cannot be read.
    """
    if about is not None and columns is None:
        layout, spaces = about.layout, about.spaces
    else:
        layout, spaces = find_layout(table.columns, columns, table.origin), (None, None)
    table.require(layout)
    observed, ends_in = leaves(layout, "observations"), {} if about is None else about.final_columns
    if about is None or finals is None or any(column not in ends_in for column in observed.values()):
        return TableSource(table, layout, None, spaces, ends, rewards)
    known = {leaf: ends_in[column] for leaf, column in observed.items()} | {EPISODE: about.finals[EPISODE]}
    finals.require(known)
    return TableSource(table, layout, Finals(finals, known), spaces, ends, rewards)
