"""What a storage holds, seen as episodes: a listing of all of them, and of each its fields, read when they are used."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from operator import index as as_index
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from rlstore.engine.calls import did_you_mean
from rlstore.engine.rows.schema import as_tensor, dtype_name
from rlstore.errors import InvalidInputError, RowNotHeldError

_NEXT = "next_observations"


class Listing(NamedTuple):
    """The episodes that are held, oldest first: tensors ``[episodes]`` on the CPU, as :class:`Episodes` has them.

    The rows of an episode are ``first_rows + lanes * arange(lengths)``.
    """

    first_rows: Tensor
    envs: Tensor
    lengths: Tensor
    returns: Tensor  # [episodes, *reward_shape]
    terminated: Tensor
    truncated: Tensor
    is_over: Tensor
    is_whole: Tensor


class HeldSteps(Protocol):
    """The steps that are held, as episodes and datasets read them; each family of storages has one implementation."""

    @property
    def lanes(self) -> int:
        """How far apart the ids of rows that follow one another are: the number of environments."""
        ...

    @property
    def device(self) -> torch.device:
        """Where what is read is."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """What :meth:`read` reads, by the names of :mod:`rlstore.storage`."""
        ...

    @property
    def scalars(self) -> frozenset[str]:
        """Which of these are one number a step, and read as ``[..., 1]``."""
        ...

    def read(self, rows: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Copies of some fields of rows, ``[*rows.shape, ...]`` each, where the storage serves batches.

        Args:
            rows: Row ids, int64.
            names: Some of :attr:`names`.

        Raises:
            RowNotHeldError: (an IndexError) if any of the rows is not held now; then nothing is returned.
        """
        ...

    def final_observations(self, row: Tensor, is_over: bool) -> Any:
        """The observation after a row, without leading axes; None if it is not known.

        Args:
            row: The last of an episode, int64 ``[]``.
            is_over: Whether the episode is over, and this is the observation in which it ended.

        Raises:
            RowNotHeldError: (an IndexError) if the row is not held now.
        """
        ...

    def rows(self) -> Tensor:
        """The rows that are held, oldest first, int64 on the CPU."""
        ...

    def listing(self) -> Listing:
        """The episodes that are held."""
        ...


class NoSteps:
    """The steps of a storage that waits for its first sample: none, and nothing is known of their fields.

    Args:
        owner: The storage's class name, for errors.
    """

    lanes, names, scalars, device = 1, (), frozenset[str](), torch.device("cpu")

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def read(self, rows: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Refuse any row."""
        raise RowNotHeldError(f"this {self._owner} holds no rows: it waits for its first sample. Nothing was read.")

    def final_observations(self, row: Tensor, is_over: bool) -> Any:
        """Refuse any row."""
        self.read(row, ())

    def rows(self) -> Tensor:
        """None."""
        return torch.empty(0, dtype=torch.int64)

    def listing(self) -> Listing:
        """None."""
        rows, flags = self.rows(), torch.empty(0, dtype=torch.bool)
        return Listing(rows, rows, rows, rows.double(), flags, flags, flags, flags)


class Episodes(Sequence["Episode"]):
    """All episodes that a storage held at one moment, from :meth:`Storage.episodes <rlstore.Storage.episodes>`.

    It is a sequence, oldest first: by the step of the first row that is held, then by environment. The listing holds no
    observations, and does not change when the storage does. Slices, masks and lists of indices of it are
    :class:`Episodes` again, so ``episodes[episodes.returns > 100]`` are the good ones.

    Attributes:
        envs: The environment of each episode, int64 ``[len]`` on the CPU, as all of these.
        lengths: How many of its steps are held, int64.
        returns: The sum of their rewards, not discounted, float64 ``[len, *reward_shape]``.
        terminated: It ended in a terminal state, bool.
        truncated: It was cut off, for instance by a time limit, bool.
        is_over: False while it goes on. An episode that is over and neither terminated nor truncated was broken off:
            its next step did not continue it.
        is_whole: Its first step is held, bool; else its beginning was overwritten.
    """

    def __init__(self, steps: HeldSteps, listing: Listing) -> None:
        self._steps, self._listing = steps, listing
        self.envs, self.lengths, self.returns = listing.envs, listing.lengths, listing.returns
        self.terminated, self.truncated = listing.terminated, listing.truncated
        self.is_over, self.is_whole = listing.is_over, listing.is_whole

    @property
    def rows(self) -> Tensor:
        """The ids of all their rows, episode after episode, int64 on the CPU."""
        lengths = self.lengths
        steps = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        rows: Tensor = self._listing.first_rows.repeat_interleave(lengths) + steps * self._steps.lanes
        return rows

    def __len__(self) -> int:
        return len(self.envs)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice | Tensor | Sequence[int] | Sequence[bool]) -> Episodes: ...

    def __getitem__(self, index: Any) -> Episode | Episodes:
        if isinstance(index, slice):
            index = torch.tensor(range(len(self))[index], dtype=torch.int64)
        elif hasattr(index, "__index__") and not getattr(index, "shape", ()):
            return self._episode(index)
        return Episodes(self._steps, Listing(*(column[self._places(index)] for column in self._listing)))

    def _episode(self, index: Any) -> Episode:
        try:
            place = as_index(index)
        except TypeError:
            raise self._no_index(repr(index)) from None
        if not -len(self) <= place < len(self):
            raise IndexError(f"episode {place} of {len(self)}")
        return Episode(self._steps, Listing(*(column[place] for column in self._listing)))

    def _places(self, given: Any) -> Tensor:
        """Some of the episodes, as one of their columns is indexed."""
        try:
            index = as_tensor(given, "the index").cpu()
        except InvalidInputError:
            raise self._no_index(reprlib.repr(given)) from None
        if index.dim() == 1 and not len(index):
            return index.long()
        if index.dim() != 1 or index.dtype not in (torch.bool, torch.int64):
            raise self._no_index(f"{dtype_name(index.dtype)} {tuple(index.shape)}")
        if index.dtype == torch.bool and len(index) != len(self):
            raise self._no_index(f"a mask of {len(index)}")
        return index

    def _no_index(self, given: str) -> InvalidInputError:
        return InvalidInputError(
            f"{given} is no index of {len(self)} episodes; give a number, a slice, a mask (a bool for each episode) or "
            "a list of whole numbers"
        )

    def __repr__(self) -> str:
        over = int(self.is_over.sum())
        return (
            f"Episodes({len(self):,}: {over:,} over, {len(self) - over:,} going on; {int(self.lengths.sum()):,} steps)"
        )


class Episode:
    """One episode of :class:`Episodes`, as far as it is held: its steps in order.

    What it was at the time of the listing are plain attributes. Its fields are read from the storage when they are
    used, and each use reads them again::

        episode = storage.episodes()[-1]
        episode.observations  # [length, ...], in the dtype in which they are stored
        episode["costs"]      # an extra field

    Raises:
        RowNotHeldError: (an IndexError) when a field is read and steps of the episode were overwritten, or removed,
            since the listing was made.

    Attributes:
        env: Its environment.
        length: How many of its steps are held, which ``len()`` is too.
        total_return: The sum of their rewards, not discounted; a list of them where ``reward_shape`` is not ``()``.
        terminated: It ended in a terminal state.
        truncated: It was cut off, for instance by a time limit.
        is_over: False if it went on.
        is_whole: Its first step is held.
    """

    def __init__(self, steps: HeldSteps, listed: Listing) -> None:
        self._steps = steps
        numbers: list[Any] = [column.tolist() for column in listed]
        self._first, env, length, total, terminated, truncated, is_over, is_whole = numbers
        self.env: int = env
        self.length: int = length
        self.total_return: Any = total
        self.terminated: bool = terminated
        self.truncated: bool = truncated
        self.is_over: bool = is_over
        self.is_whole: bool = is_whole

    def __len__(self) -> int:
        return self.length

    @property
    def rows(self) -> Tensor:
        """The ids of its rows, int64 ``[length]`` on the CPU, as in ``rows`` of batches."""
        rows: Tensor = torch.arange(self.length) * self._steps.lanes + self._first
        return rows

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its fields, for ``episode[name]``."""
        return self._steps.names

    def __getitem__(self, name: str) -> Any:
        """A field, ``[length, ...]``: a tensor, or for nested observations a TensorDict or a tuple of tensors."""
        check_names((name,), self.names)
        value = self._steps.read(self.rows, (name,))[name]
        return value.squeeze(-1) if name in self._steps.scalars else value

    @property
    def observations(self) -> Any:
        """What the agent observed before each step, ``[length, ...]``."""
        return self["observations"]

    @property
    def actions(self) -> Tensor:
        """The actions taken, ``[length, ...]``."""
        actions: Tensor = self["actions"]
        return actions

    @property
    def rewards(self) -> Tensor:
        """The rewards received, ``[length, *reward_shape]``."""
        rewards: Tensor = self["rewards"]
        return rewards

    @property
    def final_observations(self) -> Any:
        """The one observation after the last step, without an axis of time; None if the storage does not keep it.

        Of an episode that goes on it is what the agent observes next.
        """
        return self._steps.final_observations(self.rows[-1], self.is_over)

    def __repr__(self) -> str:
        ends = [name for name in ("terminated", "truncated") if getattr(self, name)]
        how = " and ".join(ends) or ("broken off" if self.is_over else "goes on")
        part, steps = "" if self.is_whole else "the last ", "step" if self.length == 1 else "steps"
        return f"Episode(env {self.env}, {part}{self.length:,} {steps}, return {self.total_return}, {how})"


def read_together(episodes: Iterable[Episode]) -> Iterator[tuple[list[Episode], dict[str, Any]]]:
    """All fields of some episodes, those of one storage in one read: of short ones much faster than each for itself.

    Args:
        episodes: The episodes.

    Yields:
        Episodes of one storage, and their fields as ``episode[name]`` has them, of one episode after another. If
        ``final_observations`` are among them, they have one entry for each episode.
    """
    for steps, of_one in groupby(episodes, attrgetter("_steps")):
        group = list(of_one)
        rows = torch.cat([episode.rows for episode in group])
        fields = steps.read(rows, [name for name in steps.names if name not in (_NEXT, "terminated", "truncated")])
        fields = {name: value.squeeze(-1) if name in steps.scalars else value for name, value in fields.items()}
        if _NEXT in steps.names:
            last = rows[torch.tensor([len(episode) for episode in group]).cumsum(0) - 1]
            fields["final_observations"] = steps.read(last, (_NEXT,))[_NEXT]
        yield group, fields


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names of fields that are not among those that can be read."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidInputError(f"names is {reprlib.repr(names)}; give a list of names, each of a whole field")
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known)
            raise InvalidInputError(f"steps of this storage have no field {name!r}; they have {list(known)}.{meant}")


def row_ids(given: Any, owner: str) -> Tensor:
    """Row ids as a caller gave them, int64 of any shape, which are not looked at.

    Raises:
        InvalidInputError: If they are no whole numbers.
    """
    try:
        rows = as_tensor(given, "rows")
    except InvalidInputError:
        raise _no_rows(reprlib.repr(given), owner) from None
    if rows.numel() == 0:
        return rows.long()
    if rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype == torch.bool:
        raise _no_rows(f"{dtype_name(rows.dtype)} {tuple(rows.shape)}", owner)
    return rows.long()


def _no_rows(given: str, owner: str) -> InvalidInputError:
    return InvalidInputError(
        f"{owner} needs whole numbers, the ids of rows: one, a list, an array or a tensor. It got {given}. "
        "The rows of a batch are batch.rows, those of an episode episode.rows, and all of them held_rows()."
    )
