"""The page: one HTML file with everything in it, which loads nothing."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import math
import os
import tempfile
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from rlstore.engine.disk.files import replaceable
from rlstore.engine.memory.capacity import enough_memory
from rlstore.look.excerpts import excerpts, packed
from rlstore.look.numbers import Numbers
from rlstore.look.subject import Subject
from rlstore.look.summary import EpisodesSeen, FieldSeen, PrioritiesSeen, Summary, summarize

# One program, in this order.
_SCRIPTS = ("data", "elements", "chart", "overview", "film", "list", "tracks", "player", "main")


def write_page(subject: Subject, path: str | os.PathLike[str]) -> Summary:
    """Write the page of a subject to a file, which is replaced if it is there; returns what was seen.

    Raises:
        InvalidInputError: If there is something else than a file, or no folder for it. Nothing was written.
    """
    target = replaceable(path)
    with enough_memory(f"for a page of {subject.title}; nothing was written"):
        summary = summarize(subject)
        text = page(summary).encode(errors="backslashreplace")  # names of folders may be no text
    # Of each who writes, in the same folder, so that one page replaces another and none is a mixture.
    with tempfile.TemporaryDirectory(prefix=".rlstore.", dir=target.parent) as place:
        part = Path(place) / "page.html"
        part.write_bytes(text)
        os.replace(part, replaceable(target))
    return summary


def page(summary: Summary) -> str:
    """The page of what was seen."""
    chosen = excerpts(summary)
    files = resources.files(__package__) / "page"
    read = {name: (files / name).read_text(encoding="utf-8") for name in ("page.html", "page.css")}
    script = "\n".join((files / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f"'use strict';\n(() => {{\n{script}\n}})();\n"
    style = f"\n{read['page.css']}"
    episodes = "\n".join(
        f'<script type="application/json" id="episode-{place}">{text}</script>' for place, text in chosen.items()
    )
    storage = json.dumps(_data(summary, set(chosen)), separators=(",", ":"), allow_nan=False)
    return Template(read["page.html"]).substitute(
        title=html.escape(summary.subject.title),
        policy=_policy(script, style),
        style=style,
        script=script,
        storage=storage.replace("<", "\\u003c"),
        episodes=episodes,
    )


def _policy(script: str, style: str) -> str:
    """What a browser is to allow the page: its own program and style, and nothing from anywhere."""
    program, look = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (script, style))
    return f"default-src 'none'; script-src 'sha256-{program}'; style-src 'sha256-{look}'; img-src data:"


def _data(summary: Summary, opened: set[int]) -> dict[str, Any]:
    """What the page knows besides the steps of episodes; see overview.js and list.js."""
    subject = summary.subject
    notes = list(summary.notes)
    listed = len(summary.episodes.index)
    if len(opened) < listed:
        notes.append(
            f"The steps of {len(opened):,} of {listed:,} listed episodes are in this page: the newest, the best, the "
            "worst, middling ones, and some of the others."
        )
    return {
        "title": subject.title,
        "subtitle": " · ".join(part for part in (subject.kind, subject.origin) if part != subject.title),
        "kind": subject.kind,
        "held": summary.held,
        "capacity": subject.capacity,
        "envs": subject.envs,
        "about_envs": [_held_by(summary)],
        "bytes": subject.nbytes,
        "about_bytes": [subject.about_bytes],
        "looked": summary.looked,
        "notes": notes,
        "settings": subject.settings,
        "stats": list(subject.stats.items()),
        "about_fields": f"of {summary.looked:,} transitions looked at",
        "fields": [_field(field) for field in summary.fields],
        "episodes": _episodes(summary.episodes, opened),
        "priorities": None if summary.priorities is None else _priorities(summary.priorities),
    }


def _held_by(summary: Summary) -> str:
    least, most = summary.held_by
    return f"{most:,} steps of each" if least == most else f"{least:,} to {most:,} steps of each"


def _field(field: FieldSeen) -> dict[str, Any]:
    return {
        "name": field.name,
        "shape": f"[{', '.join(map(str, field.shape))}]" if field.shape else "",
        "dtype": field.dtype,
        "numbers": _numbers(field.numbers),
        "entries": [_numbers(entry) for entry in field.entries],
    }


def _numbers(numbers: Numbers) -> dict[str, Any]:
    """As JSON, which has no number that is not finite."""
    told = dataclasses.asdict(numbers)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in told.items()
    }


def _episodes(seen: EpisodesSeen, opened: set[int]) -> dict[str, Any]:
    is_opened = np.isin(np.arange(len(seen.index)), list(opened))
    arrays = {
        "index": seen.index,
        "env": seen.env,
        "length": seen.length,
        "return": seen.total,
        "end": seen.end,
        "whole": seen.whole,
        "opened": is_opened,
    }
    return {
        "listed": len(seen.index),
        "count": seen.count,
        "arrays": {name: packed(array) for name, array in arrays.items()},
        "returns": _numbers(seen.totals),
        "lengths": _numbers(seen.lengths),
    }


def _priorities(seen: PrioritiesSeen) -> dict[str, Any]:
    ages = [{"from": a.start, "to": a.stop, "low": a.low, "median": a.median, "high": a.high} for a in seen.ages]
    return {"what": seen.what, "numbers": _numbers(seen.numbers), "zeros": seen.zeros, "ages": ages}
