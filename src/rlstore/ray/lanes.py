"""Writing into a storage, or into some of its lanes."""

from __future__ import annotations

from typing import Any

from rlstore.ray.places import Place
from rlstore.storage import Sample, Storage


def count_lanes(storage: Storage) -> int | None:
    """The environments of a storage; None if its first sample will tell."""
    lanes = getattr(storage, "num_envs", None)
    return lanes if isinstance(lanes, int) else None


def can_split(storage: Storage) -> bool:
    """True if several writers can have lanes of the storage each."""
    # A method: an attribute called writer may be anything, as a user's logger.
    return callable(getattr(type(storage), "writer", None)) and not getattr(storage, "save_snapshot", False)


class LaneWriter:
    """Writes the lanes of a place.

    Args:
        storage: The storage.
        place: Which lanes; all of them go to a storage itself that cannot split them, or does not know them yet.
    """

    def __init__(self, storage: Storage, place: Place) -> None:
        self._place, self._target = place, storage
        self._writer: Any = None
        lanes = count_lanes(storage)
        if can_split(storage) and lanes is not None:
            writer: Any = storage.writer  # type: ignore[attr-defined]
            self._writer = writer(range(lanes) if place.whole else range(place.first, place.stop))

    @property
    def ticket(self) -> int:
        """When the place was given: later ones have higher tickets."""
        return self._place.ticket

    def insert(self, sample: Sample) -> None:
        """Store one step of these lanes."""
        (self._writer or self._target).insert_transition(sample)

    def overlaps(self, place: Place) -> bool:
        """True if another place has some of these lanes."""
        return self._place.whole or place.whole or (self._place.first < place.stop and place.first < self._place.stop)

    def close(self) -> None:
        """Give the lanes back; episodes that go on are cut off."""
        if self._writer is not None:
            self._writer.close()
