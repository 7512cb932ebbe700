"""What is said of many numbers: how they are spread, and which of them are not finite or far from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BINS = 48
FAR = 6.0  # times the distance of the quartiles, from the nearer one: of 10^17 normal numbers one is farther away

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Numbers:
    """What is said of some numbers. What says something of finite ones is None if there are none.

    Attributes:
        name: Which they are, among several.
        count: How many there are.
        nans: How many are NaN.
        infs: How many are infinite.
        least: The least finite one.
        most: The largest one.
        mean: Their mean.
        std: Their standard deviation.
        q1: The lower quartile.
        median: The median.
        q3: The upper quartile.
        fences: Values outside of these are outliers; None if there is nothing to tell them by.
        outliers: How many there are.
        low: Where the histogram begins; outliers are not in it.
        high: Where it ends.
        histogram: How many there are in each of its bins, which are of the same width.
    """

    name: str
    count: int
    nans: int
    infs: int
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    std: float | None = None
    q1: float | None = None
    median: float | None = None
    q3: float | None = None
    fences: tuple[float, float] | None = None
    outliers: int = 0
    low: float | None = None
    high: float | None = None
    histogram: list[int] = field(default_factory=list)


def numbers_of(values: Array, name: str = "", outliers: int | None = None, *, has_outliers: bool = True) -> Numbers:
    """What is to be said of some numbers.

    An outlier is a floating-point number that is farther from the middle half of all numbers than six times the width
    of that half. Where half of the numbers are equal, none is.

    Args:
        values: The numbers, of any shape.
        name: Which they are.
        outliers: How many outliers they have, if that is known better.
        has_outliers: False for numbers of which none is an outlier, however far it is from the others.
    """
    values = values.reshape(-1)
    if values.dtype == np.bool_:
        values = values.view(np.uint8)
    is_floating = values.dtype.kind == "f"
    finite = values[np.isfinite(values)] if is_floating else values
    nans = int(np.isnan(values).sum()) if is_floating else 0
    infs = values.size - finite.size - nans
    if not finite.size:
        return Numbers(name, values.size, nans, infs)
    q1, median, q3 = (float(value) for value in np.percentile(finite, (25, 50, 75)))
    least, most = float(finite.min()), float(finite.max())
    reach = FAR * (q3 - q1)
    fences = (q1 - reach, q3 + reach) if is_floating and has_outliers and 0 < reach < np.inf else None
    inside = finite if fences is None else finite[(finite >= fences[0]) & (finite <= fences[1])]
    low, high, histogram = _histogram(inside, whole=not is_floating)
    wide = finite.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are almost infinite
        mean, std = float(wide.mean()), float(wide.std())
    return Numbers(
        name,
        values.size,
        nans,
        infs,
        least,
        most,
        mean,
        std,
        q1,
        median,
        q3,
        fences,
        finite.size - inside.size if outliers is None else outliers,
        low,
        high,
        histogram,
    )


def _histogram(values: Array, whole: bool) -> tuple[float, float, list[int]]:
    low, high, bins = float(values.min()), float(values.max()), BINS
    if low == high:  # one bar, with room to its sides
        room = 4.5 if whole else 0.5
        low, high, bins = low - room, high + room, 9
    elif whole and high - low < BINS:  # a bin for each number
        low, high, bins = low - 0.5, high + 0.5, int(high - low) + 1
    elif not np.isfinite(high - low):
        return low, high, []
    counts, _ = np.histogram(values.astype(np.float64), bins, (low, high))
    return low, high, [int(count) for count in counts]


def entries_of(values: Array, shape: Sequence[int]) -> list[Numbers]:
    """What is to be said of each entry of vectors ``[n, *shape]``."""
    columns = values.reshape(len(values), -1)
    return [numbers_of(columns[:, i], label) for i, label in enumerate(labels_of(shape))]


def labels_of(shape: Sequence[int]) -> list[str]:
    """What the entries of a field of this shape are called: ``"1,0"``; nothing, for a single number."""
    return [",".join(map(str, index)) for index in np.ndindex(*shape)]
