"""What is said of numbers, against sums that are worked out one number at a time."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstore.look.numbers import BINS, FAR, entries_of, labels_of, numbers_of

FLOATS = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0, 1e6]))


def quantile(ordered, share):
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@given(st.lists(FLOATS, max_size=40))
def test_floats_against_a_naive_model(values):
    numbers = numbers_of(np.array(values, np.float64))
    finite = sorted(value for value in values if math.isfinite(value))
    assert numbers.count == len(values)
    assert numbers.nans == sum(math.isnan(value) for value in values)
    assert numbers.infs == sum(math.isinf(value) for value in values)
    if not finite:
        assert (numbers.least, numbers.median, numbers.fences, numbers.histogram) == (None, None, None, [])
        return
    q1, median, q3 = (quantile(finite, share) for share in (0.25, 0.5, 0.75))
    told = (numbers.least, numbers.q1, numbers.median, numbers.q3, numbers.most, numbers.mean, numbers.std)
    model = (finite[0], q1, median, q3, finite[-1], statistics.fmean(finite), statistics.pstdev(finite))
    assert told == pytest.approx(model, rel=1e-6, abs=1e-6)
    low, high = numbers.fences or (-math.inf, math.inf)
    assert (numbers.fences is None) == (numbers.q1 == numbers.q3)
    if numbers.fences:
        assert numbers.fences == pytest.approx((q1 - FAR * (q3 - q1), q3 + FAR * (q3 - q1)), rel=1e-6, abs=1e-3)
    assert numbers.outliers == sum(not low <= value <= high for value in finite)
    assert sum(numbers.histogram) == len(finite) - numbers.outliers


def test_a_bin_holds_what_is_between_its_edges():
    numbers = numbers_of(np.array([0.0, 0.4, 1.0, 47.0, 48.0]))
    assert (numbers.low, numbers.high, len(numbers.histogram)) == (0.0, 48.0, BINS)
    assert {place: count for place, count in enumerate(numbers.histogram) if count} == {0: 2, 1: 1, 47: 2}


def test_outliers_are_told_from_the_middle_half_and_are_not_in_the_histogram():
    values = [0.0, 1.0, 2.0, 3.0, 4.0, 1000.0, -500.0]  # quartiles 0.5 and 3.5: what is beyond 6 * 3 of them is far
    numbers = numbers_of(np.array(values))
    assert (numbers.fences, numbers.outliers) == ((-17.5, 21.5), 2)
    assert (numbers.least, numbers.most, numbers.low, numbers.high) == (-500.0, 1000.0, 0.0, 4.0)


def test_where_there_are_none_the_histogram_has_all_numbers():
    numbers = numbers_of(np.array([0.0, 1.0, 2.0, 3.0, 4.0, 1000.0, -500.0]), has_outliers=False)
    assert (numbers.fences, numbers.outliers, numbers.low, numbers.high) == (None, 0, -500.0, 1000.0)
    assert sum(numbers.histogram) == 7


def test_where_half_of_the_numbers_are_equal_none_is_an_outlier():
    assert numbers_of(np.array([0.0] * 90 + [1.0] * 10)).outliers == 0  # sparse rewards


def test_equal_numbers_are_one_bar_in_the_middle():
    lengths, costs = numbers_of(np.array([200, 200])), numbers_of(np.array([1.5, 1.5, 1.5]))
    assert (lengths.low, lengths.high, lengths.histogram) == (195.5, 204.5, [0, 0, 0, 0, 2, 0, 0, 0, 0])
    assert (costs.low, costs.high, costs.histogram) == (1.0, 2.0, [0, 0, 0, 0, 3, 0, 0, 0, 0])


def test_whole_numbers_have_a_bin_each_and_no_outliers():
    numbers = numbers_of(np.array([3, 3, 5, 4, 5, 5]))
    assert (numbers.low, numbers.high, numbers.histogram, numbers.outliers) == (2.5, 5.5, [2, 1, 3], 0)
    flags = numbers_of(np.array([True, False, True]))
    assert (flags.mean, flags.histogram) == (pytest.approx(2 / 3), [1, 2])


def test_numbers_that_are_almost_infinite_do_no_harm():
    numbers = numbers_of(np.array([-1.7e308, 0.0, 1.0, 2.0, 1.7e308]))
    assert (numbers.infs, numbers.least, numbers.most) == (0, -1.7e308, 1.7e308)
    assert (numbers.q1, numbers.median, numbers.q3, numbers.fences) == (0.0, 1.0, 2.0, (-12.0, 14.0))
    assert (numbers.mean, numbers.std) == (pytest.approx(0.0, abs=1e292), pytest.approx(1.7e308 * math.sqrt(0.4)))


@pytest.mark.parametrize("scale", [2.0**-1070, 2.0**-600, 2.0**-20, 1.0, 2.0**600, 2.0**1020])
def test_numbers_of_any_size_are_spread_alike(scale):
    """All sums are exact: a power of two times whole numbers."""
    near, far = (numbers_of(np.array([0.0, 1.0, 2.0, 3.0, 4.0, 8.0]) * size) for size in (1.0, scale))
    names = ("least", "most", "q1", "median", "q3", "mean", "low", "high")
    assert [getattr(far, name) for name in names] == pytest.approx([getattr(near, name) * scale for name in names])
    assert (far.histogram, far.outliers) == (near.histogram, near.outliers)


@pytest.mark.parametrize("value", [3e38, 1.7976931348623157e308, -1.7976931348623157e308, 5e-324, 0.0, 2**62, -(2**63)])
def test_equal_numbers_of_any_size_are_one_bar(value):
    numbers = numbers_of(np.array([value] * 3))
    assert numbers.histogram == [0, 0, 0, 0, 3, 0, 0, 0, 0]
    assert numbers.low <= value <= numbers.high
    assert -math.inf < numbers.low < numbers.high < math.inf
    assert (numbers.mean, numbers.std, numbers.outliers) == (pytest.approx(value), pytest.approx(0.0, abs=1e292), 0)


def test_entries_are_told_apart_and_labelled():
    values = np.array([[[1.0, 10.0], [2.0, math.nan]], [[3.0, 30.0], [4.0, 40.0]]])
    assert [(e.name, e.mean, e.nans) for e in entries_of(values, (2, 2))] == [
        ("0,0", 2.0, 0),
        ("0,1", 20.0, 0),
        ("1,0", 3.0, 0),
        ("1,1", 40.0, 1),
    ]
    assert labels_of(()) == [""]
