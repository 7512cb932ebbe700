"""Who writes where: each writer has lanes of one shard to itself."""

from __future__ import annotations

import time
from typing import NamedTuple

from rlstore.errors import InvalidInputError, NotReadyError


class Place(NamedTuple):
    """The lanes ``[first, stop)`` of a shard; ``whole`` if those are all that it has.

    Of two places that overlap, the one with the higher ``ticket`` was given later, and holds.
    """

    shard: int
    first: int
    stop: int
    whole: bool
    ticket: int = 0


class Places:
    """The places of all writers.

    Args:
        shards: How many shards there are.
        patience: Seconds after which a writer that was not heard of loses its place to one that asks for it.
    """

    def __init__(self, shards: int, patience: float) -> None:
        self.given: dict[str, Place] = {}
        self._tickets = 0
        self._heard: dict[str, float] = {}
        self._lanes: list[int | None] = [None] * shards
        self._splits = [False] * shards
        self._patience = patience

    def __len__(self) -> int:
        return len(self.given)

    def describe(self, shard: int, lanes: int | None, splits: bool) -> None:
        """A shard has so many lanes; None if its first sample will tell. ``splits``: several writers can share them."""
        if lanes is not None or not self._of(shard):
            self._lanes[shard] = lanes
        self._splits[shard] = splits

    def take(self, given: dict[str, Place]) -> None:
        """Go on from the places that were given before."""
        self.given = dict(given)
        self._tickets = max((place.ticket for place in given.values()), default=0)
        self._heard = dict.fromkeys(given, time.monotonic())
        for place in given.values():
            if place.whole:
                self._lanes[place.shard] = place.stop

    def touch(self, writer: str) -> bool:
        """A writer was heard of; False if it has no place any more."""
        if writer not in self.given:
            return False
        self._heard[writer] = time.monotonic()
        return True

    def leave(self, writer: str) -> None:
        """A writer gives its place back."""
        self.given.pop(writer, None)
        self._heard.pop(writer, None)

    def give(self, writer: str, num_envs: int | None) -> Place:
        """A place for a writer: on the shard with the fewest writers, and of those the one with the most room.

        Args:
            writer: Who asks.
            num_envs: How many lanes it needs; None for all of a shard that nobody writes to.
        """
        place = self._find(num_envs)
        if place is None:
            silent = [name for name, heard in self._heard.items() if time.monotonic() - heard > self._patience]
            for name in silent:
                self.leave(name)
            place = self._find(num_envs)
        if place is None:
            self._refuse(num_envs)
        assert place is not None
        self._tickets += 1
        place = place._replace(ticket=self._tickets)
        self.given[writer] = place
        self._heard[writer] = time.monotonic()
        if self._lanes[place.shard] is None:
            self._lanes[place.shard] = place.stop
        return place

    def _find(self, num_envs: int | None) -> Place | None:
        found: list[tuple[int, int, Place]] = []
        for shard in range(len(self._lanes)):
            place = self._fit(shard, num_envs)
            if place is not None:
                taken = self._of(shard)
                room = (self._lanes[shard] or 0) - sum(other.stop - other.first for other in taken)
                found.append((len(taken), -room, place))
        return min(found)[2] if found else None

    def _fit(self, shard: int, num_envs: int | None) -> Place | None:
        lanes, taken = self._lanes[shard], sorted(self._of(shard))
        if not taken and (lanes is None or num_envs in (None, lanes)):
            # With neither known, the writer's first sample tells.
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

    def _refuse(self, num_envs: int | None) -> None:
        wanted = "a whole shard" if num_envs is None else f"{num_envs} environments"
        having = [
            f"shard {shard}: {self._lanes[shard] if self._lanes[shard] is not None else 'unknown'} environments, "
            f"{len(self._of(shard))} writers{'' if self._splits[shard] else ', which cannot share it'}"
            for shard in range(len(self._lanes))
        ]
        error = NotReadyError if self.given else InvalidInputError
        raise error(
            f"no shard has room for a writer of {wanted} ({'; '.join(having)}). Give the factory a larger num_envs "
            "(the environments of one shard), make more shards, or close a writer"
        )
