"""The steps of the episodes that can be opened in the page: which those are, and how their numbers are written."""

from __future__ import annotations

import base64
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlstore.engine.rows.layout import Leaf
from rlstore.episodes import Episode
from rlstore.errors import RowNotHeldError
from rlstore.look.frames import frames_of
from rlstore.look.numbers import Array, labels_of
from rlstore.look.subject import Subject
from rlstore.look.summary import NOT_FIELDS, FieldSeen, Summary, array_of, leaves_of, named_leaves

MOST_TEXT = 7_500_000  # bytes of all episodes in the page
MOST_EXCERPTS = 1_000
_MOST_STEPS = 5_000  # of an episode
_MOST_PIXELS = 24_000_000  # bytes of an episode's frames
_MOST_ENTRIES = 512
_MOST_READ = 2_000_000_000  # bytes of observations and the like, for all episodes
_LARGEST = 5  # episodes at least find room
_MISSES = 8  # episodes that do not fit any more, before the others are not tried

Json = dict[str, Any]


def excerpts(summary: Summary) -> dict[int, str]:
    """Episodes as JSON, by their place in the list: as many as there is room for, those of most interest first."""
    found: dict[int, str] = {}
    room, misses, row_bytes = MOST_TEXT, 0, sum(field.nbytes for field in summary.fields)
    left = _MOST_READ
    for place in itertools.islice(in_order_of_interest(summary), 4 * MOST_EXCERPTS):
        try:
            text = excerpt(summary, summary.episodes.listing[place])
        except RowNotHeldError:  # it was overwritten meanwhile
            continue
        if len(text) <= room:
            found[place], room = text, room - len(text)
        else:
            misses += 1
        left -= row_bytes * min(int(summary.episodes.length[place]), _MOST_STEPS)
        if misses > _MISSES or len(found) == MOST_EXCERPTS or left < 0:
            break
    return found


def in_order_of_interest(summary: Summary) -> Iterator[int]:
    """The places of all episodes: the newest, the best, the worst, middling ones and others in turn."""
    totals, count = summary.episodes.total, len(summary.episodes.total)
    ranked = np.argsort(np.nan_to_num(totals), kind="stable")
    broken = np.flatnonzero(~np.isfinite(totals))
    middle = sorted(range(count), key=lambda place: abs(place - count // 2))
    # Half of what is left each time: from the first on they are spread over all.
    spread = sorted(range(count), key=lambda place: f"{place:032b}"[::-1])
    arrays = (np.arange(count)[::-1], ranked[::-1], ranked, broken, ranked[middle])
    kinds: list[list[int]] = [*(array.tolist() for array in arrays), spread]
    seen = set()
    for place in itertools.chain.from_iterable(itertools.zip_longest(*kinds)):
        if place is not None and place not in seen:
            seen.add(place)
            yield place


def excerpt(summary: Summary, episode: Episode) -> str:
    """An episode as JSON: all of it, or as many of its last steps as are shown of one."""
    leaves = summary.subject.leaves
    steps = min(episode.length, _MOST_STEPS, *(_most_steps(field, leaves.get(field.name)) for field in summary.fields))
    while True:
        text = json.dumps(_excerpt(summary, episode, steps), separators=(",", ":"), allow_nan=False)
        text = text.replace("<", "\\u003c")
        if len(text) <= MOST_TEXT // _LARGEST or steps == 1:
            return text
        steps = max(steps // 2, 1)


def _most_steps(field: FieldSeen, leaf: Leaf | None) -> int:
    frame = field.nbytes // (1 if leaf is None else leaf.stack)
    return max(_MOST_PIXELS // max(frame, 1), 1) if field.is_image else _MOST_STEPS


def _excerpt(summary: Summary, episode: Episode, steps: int) -> Json:
    subject, first = summary.subject, episode.length - steps
    rows, fields = episode.rows[first:], {field.name: field for field in summary.fields}
    shown = []
    final = episode.final_observations
    for name in episode.names:
        if name in NOT_FIELDS or name.startswith("hidden_states"):
            continue
        leaves = leaves_of(subject.steps, rows, name)
        after = named_leaves(final, name) if name == "observations" and final is not None else {}
        for leaf, value in leaves.items():
            parts = [array_of(value), *([array_of(after[leaf])[np.newaxis]] if after else [])]
            shown.append(_field(fields[leaf], parts, subject, name))
    notes = [] if first == 0 else [f"The last {steps:,} of {episode.length:,} steps are shown."]
    notes += [] if episode.is_whole else ["Its first steps are not held any more; those that are held are counted."]
    before = 0.0
    if first and summary.episodes.listing.returns.dim() == 1:
        before = float(subject.steps.read(episode.rows[:first], ("rewards",))["rewards"].double().sum())
    return {
        "first": first,
        "steps": steps,
        "final": final is not None,
        "before": before if math.isfinite(before) else None,
        "note": " ".join(notes),
        "fields": shown,
        "windows": _windows(subject, rows),
    }


_ROLES = {"observations": "observation", "actions": "action", "rewards": "reward"}


def _field(field: FieldSeen, parts: Sequence[Array], subject: Subject, name: str) -> Json:
    """A field of an episode ``[steps, ...]``, in parts one after another."""
    told = {"role": _ROLES.get(name, "other"), "name": field.name, "count": sum(map(len, parts))}
    if field.is_image:
        leaf = subject.leaves.get(field.name)
        pictures, abouts = zip(*(frames_of(part, leaf, field.numbers) for part in parts), strict=True)
        pixels = np.concatenate(pictures)
        _, height, width, channels = pixels.shape
        form = {"kind": "frames", "height": height, "width": width, "channels": channels, "about": abouts[0]}
        return {**told, **form, "data": packed_frames(pixels)}
    values = np.concatenate(parts)
    columns, labels = values.reshape(len(values), -1).T[:_MOST_ENTRIES], labels_of(field.shape)[:_MOST_ENTRIES]
    form = {"kind": "numbers", "entries": len(columns), "labels": labels, "is_whole": values.dtype.kind in "iub"}
    return {**told, **form, "data": packed(columns)}


def _windows(subject: Subject, rows: torch.Tensor) -> Json | None:
    """The windows that begin in these rows."""
    windows = subject.windows
    if windows is None:
        return None
    begins = torch.isin(rows, windows.starts).nonzero().flatten()
    priorities: list[float | None] = [None] * len(begins)
    if windows.is_weighted and subject.priorities is not None:
        priorities = subject.priorities(rows[begins]).tolist()
    found = [
        {"start": start, "stop": min(start + windows.length, len(rows)), "priority": priority}
        for start, priority in zip(begins.tolist(), priorities, strict=True)
    ]
    return {"burn_in": windows.burn_in, "list": found} if found else None


# ---------------------------------------------------------------------------------------------------- arrays


def packed(values: Array) -> Mapping[str, str]:
    """An array for the page: the first bytes of all numbers, then the second ones and so on; deflated, in base64."""
    narrow = np.ascontiguousarray(_narrowed(values))
    planes = narrow.reshape(-1).view(np.uint8).reshape(-1, narrow.itemsize).T
    return {"type": f"{narrow.dtype.kind}{narrow.itemsize}", "data": _deflated(planes.tobytes())}


def packed_frames(pixels: Array) -> Mapping[str, str]:
    """Frames ``[n, ...]`` of bytes for the page: each but the first as its difference from the one before."""
    differences = pixels.copy()
    differences[1:] -= pixels[:-1]
    return {"type": "u1", "data": _deflated(differences.tobytes())}


def _narrowed(values: Array) -> Array:
    """The numbers in the narrowest type that holds them: of fractions float32, if none becomes infinite or 0."""
    if values.dtype == np.bool_:
        return values.astype(np.uint8)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore", under="ignore"):
            narrow = values.astype(np.float32)
        is_lost = (np.isinf(narrow) & np.isfinite(values)) | ((narrow == 0) & (values != 0))
        return values if is_lost.any() else narrow
    kinds = (np.uint8, np.int8, np.int16, np.int32)
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    fitting = (kind for kind in kinds if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max)
    return values.astype(next(fitting, np.float64))


def _deflated(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 6)).decode()
