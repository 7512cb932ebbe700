"""Steps in a table, one row each, as most files have them: read in chunks, and cut into episodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from rlstore.data.columns import DONE, EPISODE, FLAGS, NUMBER, Layout, leaves
from rlstore.data.source import Array, EpisodeSource, GivenEpisode, nested
from rlstore.engine.checks import check_number
from rlstore.engine.rows.schema import Path
from rlstore.errors import InvalidInputError
from rlstore.replay.loading.forms import action_space_of, observation_space_of

# What is read at once, of all columns together.
CHUNK_BYTES = 4 << 20
# How an episode ended of which a file only tells where.
Ends = Literal["terminated", "truncated"]
Rows = dict[str, Array]


class Table(Protocol):
    """Rows of columns with names.

    Attributes:
        origin: What errors call it.
        columns: The names of its columns.
        num_rows: How many rows there are.
    """

    origin: str
    columns: Sequence[str]
    num_rows: int

    def require(self, layout: Layout) -> None:
        """Refuse a layout with columns that cannot be read, by their names."""
        ...

    def read(self, columns: Collection[str]) -> Iterator[Rows]:
        """Some columns of all rows, in chunks of about :data:`CHUNK_BYTES`: each an array ``[rows, ...]``."""
        ...


@dataclass(frozen=True)
class Finals:
    """The final observations of episodes, apart from their steps.

    Attributes:
        table: A table with a row for each episode that has one, in their order.
        layout: The column of each leaf of the observations, by its path in them, and of the number of the episode.
    """

    table: Table
    layout: Layout

    def __iter__(self) -> Iterator[tuple[int, dict[Path, Array]]]:
        leaves = {path: column for path, column in self.layout.items() if path != EPISODE}
        for rows in self.table.read(set(self.layout.values())):
            for place, number in enumerate(rows[self.layout[EPISODE]].tolist()):
                yield number, {path: rows[column][place, ...] for path, column in leaves.items()}


class TableSource(EpisodeSource):
    """The episodes of a table.

    Args:
        table: The table.
        layout: Which of its columns are what.
        finals: The final observations; None if they are not known, or in ``next_observations``.
        spaces: The spaces of observations and actions; None for those to be taken from the values.
        ends: How an episode ended of which it only tells where.
        rewards: The reward of each step, where it has none.
    """

    def __init__(
        self,
        table: Table,
        layout: Layout,
        finals: Finals | None,
        spaces: tuple[Any, Any],
        ends: Ends,
        rewards: float | None,
    ) -> None:
        if ends not in ("terminated", "truncated"):
            raise InvalidInputError(f"ends is {ends!r}; it has to be 'terminated' or 'truncated'. Nothing was read.")
        if rewards is not None:
            check_number("the source of episodes", rewards=rewards)
        if ("rewards",) not in layout and rewards is None:
            raise InvalidInputError(
                f"{table.origin} has no column of rewards. Name it, columns={{'rewards': ...}}; or, of demonstrations "
                "without rewards, give the reward of every step: rewards=0.0. Nothing was read."
            )
        self._following = leaves(layout, "next_observations")
        if not self._following and not any(path in layout for path in (EPISODE, *FLAGS)):
            raise InvalidInputError(
                f"{table.origin} has no column that tells where episodes end; it has {list(table.columns)}. Name one: "
                "columns={'terminated': ...}, or with a number for each episode columns={'episodes': ...}. "
                "Nothing was read."
            )
        if not table.num_rows:
            raise InvalidInputError(f"{table.origin} has no steps. Nothing was read.")
        self.origin, self.num_steps = table.origin, table.num_rows
        self._table, self._layout, self._finals, self._spaces = table, layout, finals, spaces
        self._ends, self._rewards = ends, rewards

    @cached_property
    def observation_space(self) -> Any:
        """The space of its observations: as the file has it, else one that holds all values of their dtype."""
        known = self._spaces[0]
        return observation_space_of(next(iter(self))["observations"]) if known is None else known

    @cached_property
    def action_space(self) -> Any:
        """The space of its actions, likewise; of whole numbers one that holds those in the file."""
        known, column = self._spaces[1], self._layout[("actions",)]
        return action_space_of(rows[column] for rows in self._table.read((column,))) if known is None else known

    @cached_property
    def num_episodes(self) -> int:
        """How many episodes it has."""
        if EPISODE in self._layout:
            columns = {self._layout[EPISODE]}
        else:
            columns = {self._layout[path] for path in FLAGS if path in self._layout}
            if self._following:
                columns |= {*leaves(self._layout, "observations").values(), *self._following.values()}
        return sum(1 for _ in self._runs(columns))

    def __iter__(self) -> Iterator[GivenEpisode]:
        finals = iter(self._finals or ())
        last, final = next(finals, (None, {}))
        seen: set[Any] = set()
        begin = 0
        for number, rows in enumerate(self._runs(set(self._layout.values()))):
            self._check_run(rows, begin, seen)
            begin += _count(rows)
            yield self._episode(rows, final if number == last else {})
            if number == last:
                last, final = next(finals, (None, {}))
        if last is not None:
            raise InvalidInputError(
                f"{self.origin} is damaged: it has a final observation of episode {last}, and no such episode after "
                "those before it. Write or copy it again"
            )

    # ------------------------------------------------------------------------------------------------ boundaries

    def _runs(self, columns: Collection[str]) -> Iterator[Rows]:
        """The rows of each episode."""
        pieces: list[Rows] = []
        before: Rows | None = None
        for rows in self._table.read(columns):
            begins = np.flatnonzero(self._begins(rows, before)).tolist()
            for place, (start, stop) in enumerate(pairwise([0, *begins, _count(rows)])):
                if place and pieces:
                    yield _joined(pieces)
                    pieces = []
                if stop > start:
                    pieces.append({name: column[start:stop] for name, column in rows.items()})
            before = {name: column[-1:] for name, column in rows.items()}
        if pieces:
            yield _joined(pieces)

    def _begins(self, rows: Rows, before: Rows | None) -> Array:
        """Which rows are the first of an episode, given the row before them."""
        layout, count = self._layout, _count(rows)

        def moved(column: str) -> Array:
            first = rows[column][:1] if before is None else before[column]
            return np.concatenate([first, rows[column][:-1]])

        if EPISODE in layout:
            column = layout[EPISODE]
            self._check_one_each(column, rows[column])
            begins = np.asarray(rows[column] != moved(column))
        else:
            begins = np.zeros(count, np.bool_)
            for column in (layout[path] for path in FLAGS if path in layout):
                begins |= self._flags(moved(column), column)
            for path, column in self._following.items():
                differs = rows[layout[("observations", *path)]] != moved(column)
                begins |= differs.reshape(count, -1).any(1)
        begins[0] |= before is None
        return begins

    def _check_one_each(self, column: str, values: Array) -> None:
        """Refuse a column that has not one number or name for each row."""
        if values.ndim != 1 or (values.dtype.kind == "f" and np.isnan(values).any()):
            raise InvalidInputError(
                f"{column} of {self.origin} holds {values.dtype} {values.shape[1:]}, or nan; one number or name is "
                "needed for each step"
            )

    def _flags(self, values: Array, column: str) -> Array:
        if values.dtype.kind not in "biuf" or values.size != len(values) or (values != values).any():
            raise InvalidInputError(
                f"{column} of {self.origin} holds {values.dtype} {values.shape[1:]}, or nan; a flag is 0 or 1"
            )
        return np.asarray(values.reshape(-1) != 0)

    def _check_run(self, rows: Rows, begin: int, seen: set[Any]) -> None:
        """Refuse rows that are not all of an episode, in their order."""
        layout = self._layout
        if NUMBER in layout:
            column = layout[NUMBER]
            self._check_one_each(column, rows[column])
            wrong = np.flatnonzero(np.diff(rows[column]) != 1)
            if len(wrong):
                at = int(wrong[0])
                raise InvalidInputError(
                    f"{column} of {self.origin} is {rows[column][at + 1]} in row {begin + at + 1}, after "
                    f"{rows[column][at]}; the steps of an episode have to follow one another. Sort the rows"
                )
        if EPISODE not in layout:
            return
        column = layout[EPISODE]
        name = rows[column][0].item()
        if name in seen:
            raise InvalidInputError(
                f"{column} of {self.origin} is {name} again in row {begin}, after another; the rows of an episode have "
                "to follow one another. Sort them"
            )
        seen.add(name)
        for flag in (layout[(field,)] for field in ("terminated", "truncated") if (field,) in layout):
            early = np.flatnonzero(self._flags(rows[flag], flag)[:-1])
            if len(early):
                raise InvalidInputError(
                    f"{flag} of {self.origin} is set in row {begin + int(early[0])}, after which {column} says that "
                    f"episode {name} goes on. One of them is wrong"
                )

    # ------------------------------------------------------------------------------------------------ one episode

    def _episode(self, rows: Rows, final: Mapping[Path, Array]) -> GivenEpisode:
        """The arrays of an episode."""
        steps = {
            path: rows[column] for path, column in self._layout.items() if path[0] not in ("", "next_observations")
        }
        if self._rewards is not None and ("rewards",) not in steps:
            steps[("rewards",)] = np.full(_count(rows), self._rewards, np.float32)
        steps[("terminated",)], steps[("truncated",)] = self._ends_of(rows)
        if self._following:
            final = {path: rows[column][-1, ...] for path, column in self._following.items()}
        finals = {("final_observations", *path): leaf for path, leaf in final.items()}
        return nested({**steps, **finals})  # type: ignore[no-any-return]

    def _ends_of(self, rows: Rows) -> tuple[Array, Array]:
        """Whether each step terminated, and whether it truncated, the episode."""
        layout, count = self._layout, _count(rows)
        ends = {"terminated": np.zeros(count, np.bool_), "truncated": np.zeros(count, np.bool_)}
        told = [name for name in ends if (name,) in layout]
        for name in told:
            ends[name] = self._flags(rows[layout[(name,)]], layout[(name,)])
        if not told and DONE in layout:
            column = layout[DONE]
            ends[self._ends][-1] = self._flags(rows[column], column)[-1]
        elif not told and EPISODE in layout:
            ends[self._ends][-1] = True
        return ends["terminated"], ends["truncated"]


def common_length(counts: Mapping[str, int], origin: str) -> int:
    """The number of entries that all columns have.

    Raises:
        InvalidInputError: If they differ in it.
    """
    if len(set(counts.values())) > 1:
        raise InvalidInputError(
            f"the arrays of {origin} differ in length: {dict(counts)}. Each needs one entry for each step. "
            "Nothing was read."
        )
    return next(iter(counts.values()))


def _count(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def _joined(pieces: list[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
