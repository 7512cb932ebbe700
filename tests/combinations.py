"""Fewer combinations of parameters than all: every pair of values meets once, or every value occurs once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which any two values of any two axes occur together; always the same ones."""
    places = [range(len(axis)) for axis in axes]
    missing = {
        (one, first, other, second)
        for one, other in combinations(range(len(axes)), 2)
        for first, second in product(places[one], places[other])
    }
    everything = list(product(*places))
    random.Random(0).shuffle(everything)
    chosen = []
    while missing:
        best = max(everything, key=lambda combination: len(_pairs_of(combination) & missing))
        missing -= _pairs_of(best)
        chosen.append(best)
    return [tuple(axis[place] for axis, place in zip(axes, best, strict=True)) for best in sorted(chosen)]


def each(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which every value of every axis occurs: as many as the longest axis has."""
    return [tuple(axis[place % len(axis)] for axis in axes) for place in range(max(map(len, axes)))]


def _pairs_of(combination: Iterable[int]) -> set[tuple[int, int, int, int]]:
    return {(one, first, other, second) for (one, first), (other, second) in combinations(enumerate(combination), 2)}
