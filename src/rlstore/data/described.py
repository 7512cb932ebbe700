"""What files of our own hold besides arrays, as JSON: the spaces, and which column is what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlstore.data.columns import Layout, leaves
from rlstore.data.source import nested
from rlstore.engine.disk.space_json import from_json, to_json
from rlstore.errors import InvalidInputError, SnapshotError

_VERSION = 1
_NEEDED = ("observations", "actions", "rewards")
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError, SnapshotError)


@dataclass(frozen=True)
class Description:
    """What a file of our own says of itself.

    Attributes:
        spaces: The spaces of observations and actions; None for those that are not known.
        layout: The column of each field.
        finals: The column of each leaf of final observations; empty if there are none.
        shapes: By column the shape of a step, where the file itself does not tell.
    """

    spaces: tuple[Any, Any]
    layout: Layout
    finals: Layout
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def as_json(self) -> str:
        """The description, for :meth:`of`."""
        content = {
            "version": _VERSION,
            "observation_space": to_json(self.spaces[0], "observation_space"),
            "action_space": to_json(self.spaces[1], "action_space"),
            "columns": [[list(path), column] for path, column in self.layout.items()],
            "shapes": {column: list(shape) for column, shape in self.shapes.items()},
            "final_observations": [[list(path), column] for path, column in self.finals.items()],
        }
        return json.dumps(content)

    @classmethod
    def of(cls, text: str, origin: str) -> Description:
        """The description that was written.

        Raises:
            InvalidInputError: If it is none, or of a newer version.
        """
        try:
            content = json.loads(text)
            if content["version"] != _VERSION:
                raise InvalidInputError(
                    f"{origin} was written by a newer version of rlstore (format {content['version']}, and this one "
                    f"reads {_VERSION}). Update rlstore"
                )
            spaces = (from_json(content["observation_space"]), from_json(content["action_space"]))
            shapes = {column: tuple(map(int, shape)) for column, shape in content["shapes"].items()}
            layout, finals = (
                {tuple(path): str(column) for path, column in content[name]}
                for name in ("columns", "final_observations")
            )
            missing = [field for field in _NEEDED if not leaves(layout, field)]
            if missing:
                raise LookupError(f"it has no column of {missing}")
            nested(layout), nested(finals)  # which refuses paths that are none
        except _DAMAGED as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"{origin} is damaged: its description cannot be read ({error})") from error
        return cls(spaces, layout, finals, shapes)
