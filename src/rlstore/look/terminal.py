"""What was seen of a storage, for a terminal: needs rich."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlstore.look.numbers import Array, Numbers
from rlstore.look.subject import size_text
from rlstore.look.summary import END_NAMES, FieldSeen, PrioritiesSeen, Summary
from rlstore.plain import plain

_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH, _NARROW = 24, 8  # of a histogram, and where there is little room
_LEAST_ROOM = 112  # characters in a line for all columns of fields
_END_COLORS = ("cyan", "yellow", "blue", "bright_black", "yellow")
_MOST_NAMED = 8  # entries of a field that are named because something is wrong with them


def rendered(summary: Summary, width: int) -> RenderableType:
    """What was seen, for a ``rich.console.Console`` of so many characters in a line."""
    subject = summary.subject
    about = plain(f"{subject.kind} · {subject.origin}")
    heading = Text.assemble((plain(subject.title), "bold"), "  ", (about, "dim"))
    parts: list[RenderableType] = [heading, Padding(_overview(summary), (1, 0, 1, 2))]
    if summary.fields:
        parts += [Rule("fields", align="left", style="dim"), _fields(summary, width), *_wrong_entries(summary)]
    if subject.settings:
        parts += [Rule("settings", align="left", style="dim"), Padding(_settings(subject.settings), (0, 0, 0, 2))]
    parts += [Text(plain(note), style="dim") for note in summary.notes]
    return Group(*parts)


def _overview(summary: Summary) -> Table:
    subject, episodes = summary.subject, summary.episodes
    table = Table.grid(padding=(0, 2))
    least, most = summary.held_by
    each = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    share = summary.held / max(subject.capacity, 1)
    table.add_row("transitions", f"{summary.held:,} of {subject.capacity:,}", f"{_meter(share)} {share:.0%}")
    table.add_row("environments", f"{subject.envs:,}", f"{each} steps of each")
    table.add_row("memory", size_text(subject.nbytes), subject.about_bytes)
    table.add_row("episodes", f"{episodes.count:,}", _ends(episodes.end))
    table.add_row("returns", _spread(episodes.totals), bars(episodes.totals))
    table.add_row("lengths", _spread(episodes.lengths), bars(episodes.lengths))
    for row in _priorities(summary.priorities):
        table.add_row(*row)
    return table


def _meter(share: float) -> str:
    full = round(share * _WIDTH)
    return f"[cyan]{'█' * full}[/cyan][dim]{'░' * (_WIDTH - full)}[/dim]"


def _ends(ends: Array) -> Text:
    counts = np.bincount(ends, minlength=len(END_NAMES))
    parts = [
        (f"{count:,} {name}", _END_COLORS[end])
        for end, (name, count) in enumerate(zip(END_NAMES, counts, strict=True))
        if count
    ]
    return Text(", ").join(Text(text, style=color) for text, color in parts)


def _priorities(seen: PrioritiesSeen | None) -> Iterator[tuple[RenderableType, ...]]:
    if seen is None:
        return
    zeros = f", {seen.zeros:,} are 0" if seen.zeros else ""
    yield "priorities", f"{_spread(seen.numbers)}{zeros}", bars(seen.numbers)
    medians = _blocks([age.median for age in seen.ages])
    yield "by age", f"of {seen.what}, newest first", Text(medians, style="cyan")


def _spread(numbers: Numbers) -> str:
    if numbers.median is None or numbers.least is None or numbers.most is None:
        return "none is finite" if numbers.count else "none"
    wrong = f", {numbers.nans + numbers.infs:,} not finite" if numbers.nans + numbers.infs else ""
    return f"{shown(numbers.least)} to {shown(numbers.most)}, median {shown(numbers.median)}{wrong}"


def bars(numbers: Numbers, width: int = _WIDTH) -> Text:
    """A histogram in one line."""
    counts = np.array(numbers.histogram)
    if len(counts) > width:
        counts = np.add.reduceat(counts, np.arange(0, len(counts), -(-len(counts) // width)))
    return Text(_blocks(counts.tolist()), style="cyan")


def _blocks(values: Sequence[float]) -> str:
    """Values of at least 0 as blocks: only 0 is blank."""
    most = max(values, default=0) or 1
    return "".join(_BLOCKS[0 if not value else max(1, round(value / most * 8))] for value in values)


def _fields(summary: Summary, width: int) -> Table:
    is_wide = width >= _LEAST_ROOM
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2 if is_wide else 1, 0, 0))
    table.add_column("field", overflow="fold", min_width=12)
    for name in ("shape", "dtype", "distribution" if is_wide else ""):
        table.add_column(name, no_wrap=True)
    for name in ("least", "mean", *(["deviation"] if is_wide else []), "most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for field in summary.fields:
        numbers = field.numbers
        shape = ", ".join(map(str, field.shape))
        told = (numbers.least, numbers.mean, *([numbers.std] if is_wide else []), numbers.most)
        histogram = bars(numbers, _WIDTH if is_wide else _NARROW)
        table.add_row(Text(plain(field.name)), shape, field.dtype, histogram, *map(shown, told), _marks(numbers))
    return table


def _marks(numbers: Numbers) -> Text:
    marks = [
        (f"{numbers.nans:,} NaN", "bold red", numbers.nans),
        (f"{numbers.infs:,} infinite", "bold red", numbers.infs),
    ]
    outliers = f"{numbers.outliers:,} outlier{'' if numbers.outliers == 1 else 's'}"
    marks.append((outliers, "yellow", numbers.outliers))
    return Text(" ").join(Text(text, style=style) for text, style, count in marks if count)


def _wrong_entries(summary: Summary) -> Iterator[RenderableType]:
    """The entries of fields with something wrong."""
    for field in summary.fields:
        wrong = [entry for entry in field.entries if entry.nans or entry.infs or entry.outliers]
        if wrong:
            yield Text.assemble("  ", *_named(field, wrong))


def _named(field: FieldSeen, wrong: Sequence[Numbers]) -> Iterator[Text]:
    for entry in wrong[:_MOST_NAMED]:
        yield Text.assemble(f"{plain(field.name)}[{entry.name}] ", _marks(entry), "  ")
    if len(wrong) > _MOST_NAMED:
        yield Text(f"and {len(wrong) - _MOST_NAMED} more entries")


def _settings(settings: Sequence[tuple[str, str]]) -> Text:
    parts = [Text.assemble((plain(name), "dim"), " ", plain(value)) for name, value in settings]
    return Text("   ").join(parts)


def shown(value: float | None) -> str:
    """A number with four digits."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"
