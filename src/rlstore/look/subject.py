"""What is looked at: a storage, or what a folder holds of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.batches.priorities import Priorities
from rlstore.engine.batches.select import Windows
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.layout import Leaf
from rlstore.engine.rows.schema import dtype_name
from rlstore.episodes import Episodes, HeldSteps


@dataclass(frozen=True)
class WindowsSeen:
    """The windows of a sequence storage.

    Attributes:
        starts: The first row of each, int64, in ascending order.
        length: Steps of each; the last of an episode may be shorter.
        burn_in: How many of them are not trained on.
        is_weighted: Whether they have priorities.
    """

    starts: Tensor
    length: int
    burn_in: int
    is_weighted: bool


@dataclass
class Subject:
    """What is looked at.

    Attributes:
        title: What it is called.
        kind: The class, or what kind of folder it is.
        origin: Where it is from.
        steps: Its rows and episodes.
        capacity: Transitions that there is room for.
        envs: Environments.
        nbytes: Bytes that it takes when it is full, in memory or on disk.
        settings: How it was created.
        stats: What its ``stats()`` are; empty if it has none.
        leaves: Of observations with stacked frames the leaves, by name.
        priorities: The priorities of rows, or of the windows that begin there; None if there are none.
        windows: Those of a sequence storage.
        notes: What is to be said about it.
        is_on_disk: Whether its bytes are those of files.
    """

    title: str
    kind: str
    origin: str
    steps: HeldSteps
    capacity: int
    envs: int
    nbytes: int
    settings: list[tuple[str, str]] = field(default_factory=list)
    stats: Mapping[str, int | float] = field(default_factory=dict)
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    priorities: Callable[[Tensor], Tensor] | None = None
    windows: WindowsSeen | None = None
    notes: list[str] = field(default_factory=list)
    is_on_disk: bool = False

    @property
    def about_bytes(self) -> str:
        """What is to be said of its bytes."""
        where = "on disk" if self.is_on_disk else "when it is full"
        return f"{where}; {size_text(self.nbytes / max(self.capacity, 1))} a transition"

    @property
    def episodes(self) -> Episodes:
        """A listing of the episodes."""
        return Episodes(self.steps, self.steps.listing())


def of_storage(storage: Any, title: str | None = None, origin: str = "a storage in memory") -> Subject:
    """A storage of any class that shows its rows and episodes."""
    kind, ring = type(storage).__name__, getattr(storage, "_rows", None)
    with storage._guarding():
        steps, stats = storage._held_steps(), _stats_of(storage)
        capacity = int(stats.get("capacity", storage.max_size * steps.lanes))
        subject = Subject(title or kind, kind, origin, steps, capacity, steps.lanes, int(stats.get("bytes", 0)))
        subject.settings, subject.stats = settings_of(storage), stats
        if isinstance(ring, EpisodeRing):
            sampler = storage._sampler
            windows, burn_in = getattr(sampler, "_windows", None), getattr(storage, "burn_in", 0)
            _add_ring(subject, ring, getattr(sampler, "tree", None), windows, burn_in)
    return subject


def of_mapped(ring: EpisodeRing, steps: HeldSteps, tree: Priorities | None, windows: Windows | None) -> Subject:
    """The rows of a mapped folder.

    Args:
        ring: The rows.
        steps: The same, as they are read.
        tree: Their priorities, or those of windows.
        windows: The windows of a sequence storage.
    """
    nbytes = ring.nbytes + (0 if tree is None else tree.nbytes)
    subject = Subject("", "mapped storage", "", steps, ring.steps * ring.lanes, ring.lanes, nbytes, is_on_disk=True)
    _add_ring(subject, ring, tree, windows, 0)
    return subject


def _add_ring(
    subject: Subject, ring: EpisodeRing, tree: Priorities | None, windows: Windows | None, burn_in: int
) -> None:
    """What is known of replay besides rows and episodes."""
    subject.leaves = {leaf.field.name: leaf for leaf in ring.leaves if leaf.stack > 1}
    if tree is not None:
        subject.priorities = lambda rows: tree.of(rows.to(ring.device)).cpu()
    if windows is not None:
        lanes = [windows.of_lane(lane)[0] * ring.lanes + lane for lane in range(ring.lanes)]
        starts = torch.cat(lanes).sort().values.cpu()
        subject.windows = WindowsSeen(starts, windows.length, burn_in, tree is not None)


def _stats_of(storage: Any) -> dict[str, int | float]:
    try:
        return dict(storage.stats())
    except NotImplementedError:
        return {}


def settings_of(storage: Any) -> list[tuple[str, str]]:
    """What a storage was created with, as texts; nothing if it cannot say."""
    try:
        settings = dict(storage._settings())
    except NotImplementedError:
        return []
    options = settings.pop("options", None) or {}
    for name in ("learnt", "obs", "fields"):  # which are told as fields
        settings.pop(name, None)
    return [(name, text) for name, value in {**settings, **options}.items() if (text := _text_of(value)) is not None]


def _text_of(value: Any) -> str | None:
    """A setting as a text; None for what is not worth showing."""
    if value is None or value == {} or value == ():
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, str):
        return ", ".join(map(str, value))
    text = str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


def size_text(nbytes: float) -> str:
    """Bytes with three digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
