"""Where steps come from: flat arrays, or episodes of lists, generators, readers of files and other storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol

import numpy as np

from rlstore.engine.rows.step_fields import StepFields
from rlstore.episodes import Episode
from rlstore.errors import InvalidInputError
from rlstore.replay.loading.forms import Space, action_space_of, observation_space_of
from rlstore.replay.loading.given import Given, size_of
from rlstore.replay.loading.names import NOTHING, by_name, told_of
from rlstore.replay.loading.steps import as_numpy

_ARRAYS = "arrays"
_NO_STEPS = f"there are no episodes. {NOTHING}"


class Source(Protocol):
    """Steps that a caller gives.

    Attributes:
        is_repeatable: Whether all can be looked at before any of them is stored.
        count: The number of parts; 0 if it is not known.
    """

    is_repeatable: bool
    count: int

    def given(self, fields: StepFields, *, checked: bool) -> Iterator[Given]:
        """All parts, for a storage with these fields; with ``checked`` each after its values were."""
        ...

    def spaces(self) -> tuple[Any, Any]:
        """The spaces of observations and actions: those that it names, or that of its values."""
        ...

    def steps(self) -> int:
        """The steps of all episodes."""
        ...

    def lengths(self) -> Iterable[int]:
        """The steps of each episode."""
        ...


class Arrays:
    """The arrays of many episodes, one after another.

    Args:
        arrays: A mapping of arrays ``[steps, ...]``.
    """

    is_repeatable, count = True, 1

    def __init__(self, arrays: Any) -> None:
        with told_of(_ARRAYS):
            self._arrays = by_name(arrays, None)
            if not size_of(self._arrays["rewards"]):
                raise InvalidInputError(f"rewards have no steps; arrays are [steps, ...]. {NOTHING}")
        self._given: Given | None = None

    def given(self, fields: StepFields, *, checked: bool) -> Iterator[Given]:
        """The arrays, for a storage with these fields."""
        with told_of(_ARRAYS):
            if self._given is None:
                self._given = Given(by_name(self._arrays, fields), fields, is_episode=False)
            if checked:
                self._given.check()
        yield self._given

    def spaces(self) -> tuple[Space, Space]:
        """The spaces of their values."""
        with told_of(_ARRAYS):
            return observation_space_of(self._arrays["observations"]), action_space_of([self._arrays["actions"]])

    def steps(self) -> int:
        """The steps of all episodes."""
        return len(self._arrays["rewards"])

    def lengths(self) -> Iterable[int]:
        """The steps of each episode."""
        given = (self._arrays.get(name) for name in ("terminated", "truncated"))
        ended = np.logical_or.reduce([as_numpy(flags).reshape(-1) != 0 for flags in given if flags is not None])
        stops = np.unique(np.r_[np.flatnonzero(ended) + 1, len(ended)])
        lengths: list[int] = np.diff(stops, prepend=0).tolist()
        return lengths


class EpisodeList:
    """Episodes, one after another.

    Args:
        episodes: An iterable of mappings and of :class:`~rlstore.Episode`. A reader of a file has
            ``observation_space``, ``action_space``, ``num_steps`` and ``num_episodes`` as well.
        what: Who takes them, for errors.
    """

    def __init__(self, episodes: Any, what: str) -> None:
        if isinstance(episodes, Mapping) or not isinstance(episodes, (Iterable, PathLike)):
            flat = " Arrays with many episodes one after another are for from_arrays()."
            raise InvalidInputError(
                f"{what} got a {type(episodes).__name__}; give a list of episodes, each a dict of arrays."
                f"{flat if isinstance(episodes, Mapping) else ''} {NOTHING}"
            )
        if isinstance(episodes, (str, PathLike)):
            raise InvalidInputError(
                f"{what} got {str(episodes)!r}; open a file with a reader of rlstore.data first, as read_npz(path). "
                f"{NOTHING}"
            )
        self._episodes: Iterable[Any] = episodes
        self._what, self.is_repeatable = what, not isinstance(episodes, Iterator)
        is_held = isinstance(episodes, (list, tuple)) and not any(isinstance(part, Episode) for part in episodes)
        self._known: list[Given] | None = [] if is_held else None  # of what the caller has in memory anyway
        self.count = int(getattr(episodes, "num_episodes", 0))
        if isinstance(episodes, Sequence):
            self.count = len(episodes)

    def given(self, fields: StepFields, *, checked: bool) -> Iterator[Given]:
        """The episodes, for a storage with these fields."""
        if self._known:
            yield from self._known
            return
        for index, episode in enumerate(self._episodes):
            with told_of(f"episode {index}"):
                # What a storage holds was accepted once.
                is_new, values = not isinstance(episode, Episode), by_name(_as_mapping(episode), fields)
                given = Given(values, fields, is_episode=True, refuses_nan=is_new)
                if checked:
                    given.check()
            if self._known is not None:
                self._known.append(given)
            yield given

    def spaces(self) -> tuple[Any, Any]:
        """The spaces that it names, or those of its values."""
        named = [getattr(self._episodes, name, None) for name in ("observation_space", "action_space")]
        if named[0] is None:
            named[0] = observation_space_of(next(self._named())["observations"])
        if named[1] is None:
            named[1] = action_space_of(episode["actions"] for episode in self._named())
        return named[0], named[1]

    def steps(self) -> int:
        """The steps of all episodes."""
        steps = getattr(self._episodes, "num_steps", None)
        return sum(self.lengths()) if steps is None else int(steps)

    def lengths(self) -> Iterable[int]:
        """The steps of each episode."""
        for episode in self._named():
            yield len(episode["rewards"])

    def _named(self) -> Iterator[dict[str, Any]]:
        """The values of each episode by name."""
        if not self.is_repeatable:
            raise InvalidInputError(
                f"{self._what} got a {type(self._episodes).__name__}, which can be read only once: give "
                f"observation_space, action_space and storage_size, too. {NOTHING}"
            )
        index = -1
        for index, episode in enumerate(self._episodes):
            with told_of(f"episode {index}"):
                named = by_name(_as_mapping(episode), None)
            yield named
        if index < 0:
            raise InvalidInputError(_NO_STEPS)


def _as_mapping(episode: Any) -> Any:
    if not isinstance(episode, Episode):
        return episode
    flags = {"terminated": episode.terminated, "truncated": episode.truncated}
    fields = {name: episode[name] for name in episode.names if name not in ("next_observations", *flags)}
    return {**fields, **flags, "final_observations": episode.final_observations}


def fitting_size(lengths: Iterable[int], lanes: int) -> int:
    """The size of the smallest storage of so many environments that holds episodes of these lengths."""
    rows = [0] * lanes
    for length in lengths:
        rows[rows.index(min(rows))] += length
    return max(rows) * lanes
