"""What is said of many numbers: how they are spread, and which of them are not finite or far from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BINS = 48
FAR = 6.0  # times the distance of the quartiles, from the nearer one: of 10^17 normal numbers one is farther away

_MOST = float(np.finfo(np.float64).max)
_FAR_POWER = 500  # of two: the squares and the sums of smaller numbers are finite
_BLOCK = 1 << 16  # numbers that are counted at once, in the caches
_LEAST_ROOM = 2.0**-20  # beside a number, as a part of it: floats have less between two of them

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
    if is_floating:
        finite = finite.astype(np.float64)  # in which fences are
    q1, median, q3 = percentiles_of(finite, (25, 50, 75))
    least, most = float(finite.min()), float(finite.max())
    reach = FAR * (q3 - q1)
    # Beyond what floats hold there is no outlier.
    fences = (max(q1 - reach, -_MOST), min(q3 + reach, _MOST)) if is_floating and has_outliers and reach > 0 else None
    inside = finite if fences is None else finite[(finite >= fences[0]) & (finite <= fences[1])]
    low, high, histogram = _histogram(inside, whole=not is_floating)
    near, power = _brought_near(finite)
    mean, std = (float(np.ldexp(value, power)) for value in (near.mean(), near.std()))
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


def percentiles_of(values: Array, shares: Sequence[float]) -> list[float]:
    """Percentiles of finite numbers, which may be almost infinite."""
    near, power = _brought_near(values)
    return [float(value) for value in np.ldexp(np.percentile(near, shares), power)]


def _brought_near(values: Array) -> tuple[Array, int]:
    """Finite numbers divided by a power of two, and that power: sums and differences are finite."""
    if values.dtype.kind in "iu" and values.itemsize < 8:
        return values, 0
    wide = values.astype(np.float64, copy=False)
    power = int(np.frexp(max(-wide.min(), wide.max()))[1])
    return (np.ldexp(wide, -power), power) if abs(power) > _FAR_POWER else (wide, 0)


def _histogram(values: Array, whole: bool) -> tuple[float, float, list[int]]:
    low, high, bins = float(values.min()), float(values.max()), BINS
    if low == high:  # one bar, with room to its sides
        room = max(4.5 if whole else 0.5, abs(low) * _LEAST_ROOM)
        return max(low - room, -_MOST), min(high + room, _MOST), [0] * 4 + [len(values)] + [0] * 4
    if whole and high - low < BINS:  # a bin for each number
        low, high, bins = low - 0.5, high + 0.5, int(high - low) + 1
    elif not np.isfinite(high - low):
        return low, high, []
    counts, (_, power) = np.zeros(bins, np.int64), _brought_near(np.array([high - low]))
    for begin in range(0, len(values), _BLOCK):
        above = (
            np.ldexp(values[begin : begin + _BLOCK] - low, -power) if power else values[begin : begin + _BLOCK] - low
        )
        place = (above * (bins / np.ldexp(high - low, -power))).astype(np.int64)
        counts += np.bincount(np.minimum(place, bins - 1), minlength=bins)
    return low, high, counts.tolist()


def entries_of(values: Array, shape: Sequence[int]) -> list[Numbers]:
    """What is to be said of each entry of vectors ``[n, *shape]``."""
    columns = values.reshape(len(values), -1)
    return [numbers_of(columns[:, i], label) for i, label in enumerate(labels_of(shape))]


def labels_of(shape: Sequence[int]) -> list[str]:
    """What the entries of a field of this shape are called: ``"1,0"``; nothing, for a single number."""
    return [",".join(map(str, index)) for index in np.ndindex(*shape)]
