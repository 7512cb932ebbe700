"""The numbers of a look: how full it is, what fields hold, how episodes went, priorities. Large ones are sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.rows.schema import Structure, dtype_name
from rlstore.episodes import Episodes, HeldSteps
from rlstore.errors import InvalidInputError, RowNotHeldError
from rlstore.look.frames import is_image
from rlstore.look.numbers import Array, Numbers, entries_of, numbers_of, percentiles_of
from rlstore.look.subject import Subject

MOST_ROWS = 100_000  # that are looked at
MOST_VALUES = 8_000_000  # of one field
MOST_ENTRIES = 256  # of one field that are told apart
MOST_EPISODES = 50_000  # that are listed
_AGES = 24
# What is no field of its own: flags, which are told by how episodes end, and what another row has.
NOT_FIELDS = frozenset(
    (
        *("terminated", "truncated", "reset_steps", "masks", "rows"),
        *("next_observations", "final_observations", "final_values"),
    )
)
GOING_ON, TERMINATED, TRUNCATED, BROKEN_OFF, BOTH = range(5)  # how episodes end
END_NAMES = ("going on", "terminated", "truncated", "broken off", "both flags")

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class FieldSeen:
    """A field, as far as it was looked at.

    Attributes:
        name: Its name.
        shape: The shape of one.
        dtype: Its dtype.
        nbytes: Bytes of one.
        looked: Rows that were looked at.
        is_image: Whether it is to be shown as a picture.
        numbers: All its numbers.
        entries: The numbers of each entry, if there are a few.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    looked: int
    is_image: bool
    numbers: Numbers
    entries: list[Numbers]


@dataclass(frozen=True)
class EpisodesSeen:
    """The episodes, arrays ``[episodes]``.

    Attributes:
        listing: What they are from.
        index: The number of each among all.
        env: Its environment.
        length: Its steps that are held.
        total: Its return; where rewards have several entries, the sum of them.
        end: How it ended: one of the numbers above.
        whole: Whether its first step is held.
        count: How many episodes there are, which may be more than are listed.
        totals: What is to be said of returns.
        lengths: And of lengths.
    """

    listing: Episodes
    index: Array
    env: Array
    length: Array
    total: Array
    end: Array
    whole: Array
    count: int
    totals: Numbers
    lengths: Numbers


@dataclass(frozen=True)
class AgeSeen:
    """Priorities of rows of some age: that of one in ten, the median, and that of nine in ten."""

    start: float
    stop: float
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class PrioritiesSeen:
    """The priorities of rows or windows.

    Attributes:
        what: Of what they are.
        numbers: What is to be said of them.
        zeros: How many are 0.
        ages: How they depend on the age, in steps of the environment.
    """

    what: str
    numbers: Numbers
    zeros: int
    ages: list[AgeSeen]


@dataclass(frozen=True)
class Summary:
    """What was seen of a subject.

    Attributes:
        subject: What was looked at.
        held: Transitions that it holds.
        held_by: By environment the least and the most of them.
        looked: How many were looked at.
        fields: Its fields.
        episodes: Its episodes.
        priorities: Its priorities; None if it has none.
        notes: What was not looked at.
    """

    subject: Subject
    held: int
    held_by: tuple[int, int]
    looked: int
    fields: list[FieldSeen]
    episodes: EpisodesSeen
    priorities: PrioritiesSeen | None
    notes: list[str]


def summarize(subject: Subject) -> Summary:
    """Look at a subject. It may be used meanwhile: rows that are overwritten are left out."""
    rows = subject.steps.rows()
    looked = evenly(rows, MOST_ROWS)
    fields = [field for name in subject.steps.names for field in _fields_of(subject, name, looked)] if len(rows) else []
    listing = subject.episodes
    episodes = _episodes_of(listing)
    notes = [*subject.notes, *_notes(len(rows), len(looked), fields, episodes)]
    held_by = _held_by(listing, subject.envs)
    priorities = _priorities_of(subject, rows) if len(rows) else None
    return Summary(subject, len(rows), held_by, len(looked), fields, episodes, priorities, notes)


def _held_by(listing: Episodes, count: int) -> tuple[int, int]:
    envs, place = listing.envs.unique(return_inverse=True)
    held = torch.zeros(len(envs), dtype=torch.int64).index_add_(0, place, listing.lengths)
    least = int(held.min()) if 0 < len(envs) >= count else 0  # others hold nothing
    return least, int(held.max()) if len(envs) else 0


def evenly(rows: Tensor, most: int) -> Tensor:
    """At most so many of some rows, as far from one another as possible; the first and the last are among them."""
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, max(most, 1), dtype=torch.float64).round().long()]


def leaves_of(steps: HeldSteps, rows: Tensor, name: str) -> dict[str, Tensor]:
    """The tensors of a field of some rows, by their names, on the CPU; scalars are ``[rows]``."""
    leaves = named_leaves(steps.read(rows, (name,))[name], name)
    return {leaf: value.squeeze(-1) for leaf, value in leaves.items()} if name in steps.scalars else leaves


def named_leaves(value: Any, name: str) -> dict[str, Tensor]:
    """The tensors of a nest, on the CPU, by what each is called; what is None in it is left out."""
    structure = Structure.of(value, name)
    leaves = zip(structure.names, structure.leaves(value), strict=True)
    return {leaf: tensor.cpu() for leaf, tensor in leaves if tensor is not None}


def array_of(tensor: Tensor) -> Array:
    """A tensor as an array; what numpy does not have as float32."""
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    return (tensor.abs() if tensor.is_complex() else tensor).numpy()


def still_held(steps: HeldSteps, rows: Tensor, read: Callable[[Tensor], _Found]) -> _Found:
    """What is read of rows, or of those of them that are held by now."""
    while True:
        try:
            return read(rows)
        except (RowNotHeldError, InvalidInputError):
            held = rows[torch.isin(rows, steps.rows())]
            if len(held) in (0, len(rows)):
                raise
            rows = held


def _fields_of(subject: Subject, name: str, rows: Tensor) -> list[FieldSeen]:
    """The leaves of a field."""
    if name in NOT_FIELDS:
        return []
    forms = still_held(subject.steps, rows, lambda held: leaves_of(subject.steps, held[-1:], name))
    entries = max(sum(leaf[0].numel() for leaf in forms.values()), 1)
    few = evenly(rows, min(MOST_ROWS, MOST_VALUES // entries))
    leaves = still_held(subject.steps, few, lambda held: leaves_of(subject.steps, held, name))
    return [_field_of(leaf, value, subject) for leaf, value in leaves.items()]


def _field_of(name: str, value: Tensor, subject: Subject) -> FieldSeen:
    shape, values = tuple(value.shape[1:]), array_of(value)
    seen_as_image = name.startswith("observations") and is_image(shape, subject.leaves.get(name))
    is_split = not seen_as_image and 1 < value[0].numel() <= MOST_ENTRIES
    entries = entries_of(values, shape) if is_split else []
    # Where entries are told apart, each has outliers of its own.
    outliers = sum(entry.outliers for entry in entries) if entries else None
    numbers = numbers_of(values, outliers=outliers)
    nbytes = value[0].numel() * value.element_size()
    return FieldSeen(name, shape, dtype_name(value.dtype), nbytes, len(value), seen_as_image, numbers, entries)


def _episodes_of(listing: Episodes) -> EpisodesSeen:
    index = evenly(torch.arange(len(listing)), MOST_EPISODES)
    listed = listing[index]
    terminated, truncated, is_over = (flag.numpy() for flag in (listed.terminated, listed.truncated, listed.is_over))
    end = np.where(is_over, BROKEN_OFF, GOING_ON)
    end = np.select([terminated & truncated, terminated, truncated], [BOTH, TERMINATED, TRUNCATED], end)
    total = listed.returns.flatten(1).sum(1).numpy() if listed.returns.dim() > 1 else listed.returns.numpy()
    lengths = numbers_of(listed.lengths.numpy())
    arrays = (index.numpy(), listed.envs.numpy(), listed.lengths.numpy(), total, end, listed.is_whole.numpy())
    return EpisodesSeen(listed, *arrays, len(listing), numbers_of(total, has_outliers=False), lengths)


def _priorities_of(subject: Subject, rows: Tensor) -> PrioritiesSeen | None:
    of, windows = subject.priorities, subject.windows
    if of is None or (windows is not None and not len(windows.starts)):
        return None
    lanes = subject.steps.lanes
    newest = torch.zeros(lanes, dtype=torch.int64).scatter_reduce(0, rows % lanes, rows // lanes, "amax")
    chosen = evenly(rows if windows is None else windows.starts, MOST_ROWS)
    values = of(chosen).numpy()
    ages = (newest[chosen % lanes] - chosen // lanes).numpy()
    what = "transitions" if windows is None else "windows"
    return PrioritiesSeen(what, numbers_of(values, has_outliers=False), int((values == 0).sum()), _by_age(values, ages))


def _by_age(values: Array, ages: Array) -> list[AgeSeen]:
    edges = np.linspace(0, max(int(ages.max()), 1), _AGES + 1)
    place = np.clip(np.searchsorted(edges, ages, side="right") - 1, 0, _AGES - 1)
    found = []
    for at in range(_AGES):
        part = values[place == at]
        if len(part):
            low, median, high = percentiles_of(part, (10, 50, 90))
            found.append(AgeSeen(float(edges[at]), float(edges[at + 1]), low, median, high))
    return found


def _notes(held: int, looked: int, fields: list[FieldSeen], episodes: EpisodesSeen) -> list[str]:
    """What was not looked at."""
    notes = []
    if looked < held:
        notes.append(f"Of {held:,} transitions {looked:,} were looked at, evenly spaced.")
    less: dict[int, list[str]] = {}
    for field in fields:
        if field.looked < looked:
            less.setdefault(field.looked, []).append(field.name)
    notes += [f"Of {' and '.join(names)} {count:,} were looked at." for count, names in less.items()]
    if len(episodes.index) < episodes.count:
        notes.append(f"Of {episodes.count:,} episodes {len(episodes.index):,} are listed, evenly spaced.")
    return notes
