"""Which writer appends to which lanes: the lanes of a writer belong to it alone."""

from __future__ import annotations

import time
from typing import NamedTuple, NoReturn

from rlstore.errors import InvalidInputError, NotReadyError


class Place(NamedTuple):
    """The lanes ``[first, stop)`` of a shard; ``whole`` if the shard has no others.

    Of two places that overlap, the one with the higher ``ticket`` was assigned later and is the valid one.
    """

    shard: int
    first: int
    stop: int
    whole: bool
    ticket: int = 0

    def overlaps(self, other: Place) -> bool:
        """True if two places of one shard have lanes in common."""
        return self.whole or other.whole or (self.first < other.stop and other.first < self.stop)


class Places:
    """The places of all writers.

    Args:
        shards: The number of shards.
        patience: Seconds without a heartbeat after which the place of a writer is reclaimed if another one needs it.
    """

    def __init__(self, shards: int, patience: float) -> None:
        self.given: dict[str, Place] = {}
        self._tickets = 0
        self._heartbeats: dict[str, float] = {}
        self._lanes: list[int | None] = [None] * shards
        self._splits = [False] * shards
        self._patience = patience

    def __len__(self) -> int:
        return len(self.given)

    def describe(self, shard: int, lanes: int | None, splits: bool) -> None:
        """Set the lanes of a shard.

        Args:
            shard: Which shard.
            lanes: How many it has; None if its first sample decides.
            splits: Whether several writers can share them.
        """
        if lanes is not None or not self._of(shard):
            self._lanes[shard] = lanes
        self._splits[shard] = splits

    def restore(self, given: dict[str, Place]) -> None:
        """Resume with the places that an earlier ledger assigned."""
        self.given = dict(given)
        self._tickets = max((place.ticket for place in given.values()), default=0)
        self._heartbeats = dict.fromkeys(given, time.monotonic())
        for place in given.values():
            if place.whole:
                self._lanes[place.shard] = place.stop

    def heartbeat(self, writer: str) -> bool:
        """Record that a writer is alive; False if it has no place any more."""
        if writer not in self.given:
            return False
        self._heartbeats[writer] = time.monotonic()
        return True

    def leave(self, writer: str) -> None:
        """Release the place of a writer."""
        self.given.pop(writer, None)
        self._heartbeats.pop(writer, None)

    def give(self, writer: str, num_envs: int | None) -> Place:
        """A place for a writer, on the shard with the fewest writers, then with the most free lanes.

        Args:
            writer: The name of the writer.
            num_envs: The number of lanes; None for all of a shard without writers.
        """
        place = self._find(num_envs)
        if place is None:
            now = time.monotonic()
            for dead in [name for name, last in self._heartbeats.items() if now - last > self._patience]:
                self.leave(dead)
            place = self._find(num_envs)
        if place is None:
            self._refuse(num_envs)
        self._tickets += 1
        place = place._replace(ticket=self._tickets)
        self.given[writer] = place
        self._heartbeats[writer] = time.monotonic()
        if self._lanes[place.shard] is None:
            self._lanes[place.shard] = place.stop
        return place

    def _find(self, num_envs: int | None) -> Place | None:
        found: list[tuple[int, int, Place]] = []
        for shard in range(len(self._lanes)):
            place = self._fit(shard, num_envs)
            if place is not None:
                taken = self._of(shard)
                free = (self._lanes[shard] or 0) - sum(other.stop - other.first for other in taken)
                found.append((len(taken), -free, place))
        return min(found)[2] if found else None

    def _fit(self, shard: int, num_envs: int | None) -> Place | None:
        lanes, taken = self._lanes[shard], sorted(self._of(shard))
        if not taken and (lanes is None or num_envs in (None, lanes)):
            # With neither known, the first sample of the writer decides.
            return Place(shard, 0, lanes or num_envs or 0, True)
        if lanes is None or num_envs is None or not self._splits[shard]:
            return None
        first = 0
        for other in [*taken, Place(shard, lanes, lanes, False)]:
            if other.first - first >= num_envs:
                return Place(shard, first, first + num_envs, False)
            first = other.stop
        return None

    def _of(self, shard: int) -> list[Place]:
        return [place for place in self.given.values() if place.shard == shard]

    def _refuse(self, num_envs: int | None) -> NoReturn:
        wanted = "a whole shard" if num_envs is None else f"{num_envs} environments"
        having = [
            f"shard {shard}: {lanes if lanes is not None else 'unknown'} environments, "
            f"{len(self._of(shard))} writers{'' if self._splits[shard] else ', which cannot share it'}"
            for shard, lanes in enumerate(self._lanes)
        ]
        error = NotReadyError if self.given else InvalidInputError
        raise error(
            f"no shard has room for a writer of {wanted} ({'; '.join(having)}). Give the factory a larger num_envs "
            "(the environments of one shard), make more shards, or close a writer"
        )
