"""Every operation of the table but the writer of rows, native against portable, on random inputs.

Where an operation is simple enough to say in a few lines of Python, both are held against those lines too.
"""

from __future__ import annotations

import copy
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, LANES, WIDTHS, assert_guards_whole, covers, guarded, native, random_tensor

from rlstore.kernels.portable import OPERATIONS as PORTABLE

FLAG_PATTERNS = ["none", "all", "some", "many"]


# ---------------------------------------------------------------------------------------------------- scans


class Rollout:
    """Random arguments of a scan, in the order in which all of them take them."""

    def __init__(self, seed: int, steps: int, lanes: int, patterns: tuple[str, str], final: str, dtype: torch.dtype):
        rng = np.random.default_rng(seed)
        self.steps, self.lanes, self.dtype = steps, lanes, dtype
        self.rewards = torch.from_numpy(rng.uniform(-2, 2, (steps, lanes))).to(dtype)
        self.values = torch.from_numpy(rng.uniform(-2, 2, (steps, lanes))).to(dtype)
        self.last_values = torch.from_numpy(rng.uniform(-2, 2, lanes)).to(dtype)
        self.log_rhos = torch.from_numpy(rng.normal(0, 1, (steps, lanes))).to(dtype)
        self.terminated = self._flags(rng, patterns[0])
        self.truncated = None if patterns[1] == "absent" else self._flags(rng, patterns[1])
        self.final_values = None
        if final != "absent":
            self.final_values = torch.from_numpy(rng.uniform(-2, 2, (steps, lanes))).to(dtype)
            if final == "some nan":
                self.final_values[torch.from_numpy(rng.random((steps, lanes)) < 0.4)] = torch.nan

    def _flags(self, rng: np.random.Generator, pattern: str) -> torch.Tensor:
        share = {"none": 0.0, "all": 1.0, "some": 0.15, "many": 0.5}[pattern]
        # Any byte that is not 0 is a yes.
        marks = np.where(rng.random((self.steps, self.lanes)) < share, rng.choice([1, 2, 255], ()), 0)
        return torch.from_numpy(marks.astype(np.uint8))

    @property
    def ends(self):
        return self.terminated, self.truncated, self.final_values

    def assert_agree(self, operation: str, arguments: tuple, outputs: int) -> None:
        """The native results are those of the portable version, and every entry was written."""
        mine = [guarded((self.steps, self.lanes), self.dtype) for _ in range(outputs)]
        truth = [torch.full((self.steps, self.lanes), torch.nan, dtype=self.dtype) for _ in range(outputs)]
        for out, _ in mine:
            out.fill_(torch.nan)
        native(operation)(*arguments, *(out for out, _ in mine))
        PORTABLE[operation](*arguments, *truth)
        tolerance = 1e-12 if self.dtype == torch.float64 else 16 * torch.finfo(torch.float32).eps
        scale = max(1.0, *(float(expected.abs().max()) for expected in truth))
        for (out, whole), expected in zip(mine, truth, strict=True):
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * scale)
            assert_guards_whole(whole)


fractions = st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0])
rollouts = st.builds(
    Rollout,
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 12),
    lanes=st.sampled_from(LANES),
    patterns=st.tuples(st.sampled_from(FLAG_PATTERNS), st.sampled_from(["absent", *FLAG_PATTERNS])),
    final=st.sampled_from(["absent", "known", "some nan"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)


@covers("gae")
@given(rollouts, fractions, fractions)
def test_gae_agrees(rollout, gamma, lam):
    arguments = (rollout.rewards, rollout.values, rollout.last_values, *rollout.ends, gamma, lam)
    rollout.assert_agree("gae", arguments, outputs=2)


@covers("fill_gae")
@given(rollouts, fractions, fractions, st.booleans())
def test_fill_gae_agrees(rollout, gamma, lam, dones):
    """Its normalization is that of normalize(), on what is compared here."""
    arguments = (rollout.rewards, rollout.values, rollout.last_values, *rollout.ends, dones, gamma, lam, None)
    rollout.assert_agree("fill_gae", arguments, outputs=2)


@covers("discounted_returns")
@given(rollouts, fractions)
def test_discounted_returns_agree(rollout, gamma):
    rollout.assert_agree("discounted_returns", (rollout.rewards, rollout.last_values, *rollout.ends, gamma), outputs=1)


@covers("n_step_returns")
@given(rollouts, fractions, st.sampled_from([1, 2, 3, 5, 11, 12, 13, 1000, 2**63 - 1]))
def test_n_step_returns_agree(rollout, gamma, n):
    arguments = (rollout.rewards, rollout.values, rollout.last_values, *rollout.ends, gamma, n)
    rollout.assert_agree("n_step_returns", arguments, outputs=1)


@covers("vtrace")
@given(rollouts, fractions, fractions, st.tuples(*[st.sampled_from([0.5, 1.0, 3.0, math.inf])] * 3))
def test_vtrace_agrees(rollout, gamma, lam, clips):
    inputs = (rollout.rewards, rollout.values, rollout.last_values, *rollout.ends, rollout.log_rhos)
    rollout.assert_agree("vtrace", (*inputs, gamma, lam, *clips), outputs=2)


def test_vtrace_shows_a_ratio_that_is_nan():
    """min(clip, nan) must not pass for the clip: a broken log-probability has to be seen."""
    one = torch.ones(1, 3)
    log_rhos = torch.tensor([[0.0, math.nan, 0.0]])
    flags = torch.zeros(1, 3, dtype=torch.uint8)
    targets, advantages = torch.zeros(1, 3), torch.zeros(1, 3)
    arguments = (one, one, one[0].clone(), flags, None, None, log_rhos, 0.5, 1.0, 1.0, 1.0, 1.0)
    native("vtrace")(*arguments, targets, advantages)
    assert targets.isnan().tolist() == [[False, True, False]]
    assert advantages.isnan().tolist() == [[False, True, False]]


def test_scans_take_a_trailing_dimension_of_one():
    rollout = Rollout(1, 4, 5, ("some", "some"), "some nan", torch.float32)
    flat = [torch.empty(4, 5) for _ in range(2)]
    native("gae")(rollout.rewards, rollout.values, rollout.last_values, *rollout.ends, 0.9, 0.9, *flat)
    deep = [torch.empty(4, 5, 1) for _ in range(2)]
    wide = [tensor.unsqueeze(-1) for tensor in (rollout.rewards, rollout.values, rollout.last_values, *rollout.ends)]
    native("gae")(*wide, 0.9, 0.9, *deep)
    for a, b in zip(flat, deep, strict=True):
        torch.testing.assert_close(b.squeeze(-1), a, rtol=0, atol=0)


@covers("normalize")
@given(
    st.integers(0, 2**32),
    st.sampled_from([2, 3, 7, 8, 9, 16, 17, 33, 100, 1000]),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1e-8, 1e-5, 0.5]),
)
def test_normalize_agrees(seed, count, dtype, epsilon):
    x = torch.from_numpy(np.random.default_rng(seed).normal(3, 10, count)).to(dtype)
    plain = x.tolist()
    mean, spread = statistics.fmean(plain), statistics.stdev(plain) + epsilon
    by_hand = [(value - mean) / spread for value in plain]
    expected = x.clone()
    PORTABLE["normalize"](expected, epsilon)
    out, whole = guarded((count,), dtype)
    out.copy_(x)
    native("normalize")(out, epsilon)
    tolerance = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out, torch.tensor(by_hand, dtype=dtype), rtol=tolerance, atol=tolerance)
    assert_guards_whole(whole)


# ---------------------------------------------------------------------------------------------------- gather


def some_rows(rng: np.random.Generator, steps: int, lanes: int, count: int) -> torch.Tensor:
    """Rows with repeats, the first and the last among them."""
    rows = rng.integers(0, steps * lanes, count)
    rows[:2] = [0, steps * lanes - 1][: min(2, count)]
    return torch.from_numpy(rows)


@covers("gather")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_agrees(dtype, width):
    rng = np.random.default_rng(width)
    for steps, lanes, count in [(1, 1, 1), (5, 7, 3), (6, 16, 40), (3, 33, 0)]:
        source = random_tensor(rng, (steps, lanes, width), dtype)
        rows = some_rows(rng, steps, lanes, count)
        out, whole = guarded((count, width), dtype)
        native("gather")((source,), rows, (out,))
        expected = torch.empty((count, width), dtype=dtype)
        PORTABLE["gather"]((source,), rows, (expected,))
        assert out.tolist() == expected.tolist()
        assert out.tolist() == [source[row // lanes, row % lanes].tolist() for row in rows.tolist()]
        assert_guards_whole(whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_converts_every_dtype_to_float32(dtype):
    rng = np.random.default_rng(7)
    for width in WIDTHS:
        source = random_tensor(rng, (5, 9, width), dtype)
        rows = some_rows(rng, 5, 9, 20)
        out, whole = guarded((20, width), torch.float32)
        native("gather")((source,), rows, (out,))
        expected = torch.stack([source[row // 9, row % 9].float() for row in rows.tolist()])
        assert torch.equal(out, expected)
        PORTABLE["gather"]((source,), rows, (out.zero_(),))
        assert torch.equal(out, expected)
        assert_guards_whole(whole)


def test_gather_converts_the_ends_of_a_range_as_torch_does():
    source = torch.tensor([[2**62 + 1, -(2**63), 2**63 - 1, 2**24 + 1]]).unsqueeze(-1)
    out = torch.empty(4, 1)
    native("gather")((source,), torch.arange(4), (out,))
    assert out.flatten().tolist() == [2.0**62, -(2.0**63), 2.0**63, 2.0**24]
    doubles = torch.tensor([[1e300, -1e300, math.nan, 5e-324]], dtype=torch.float64).unsqueeze(-1)
    native("gather")((doubles,), torch.arange(4), (out,))
    assert out.flatten().tolist()[:2] == [math.inf, -math.inf]
    assert out.isnan().flatten().tolist() == [False, False, True, False]
    assert float(out[3]) == 0.0


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(LANES), st.integers(0, 50), st.data())
def test_gather_of_several_fields_agrees(seed, steps, lanes, count, data):
    rng = np.random.default_rng(seed)
    fields = data.draw(
        st.lists(st.tuples(st.sampled_from(DTYPES[:6]), st.sampled_from(WIDTHS), st.booleans()), max_size=5)
    )
    sources = tuple(random_tensor(rng, (steps, lanes, width), dtype) for dtype, width, _ in fields)
    dtypes = [torch.float32 if convert else dtype for dtype, _, convert in fields]
    rows = some_rows(rng, steps, lanes, count)
    outs = [guarded((count, width), dtype) for (_, width, _), dtype in zip(fields, dtypes, strict=True)]
    native("gather")(sources, rows, tuple(out for out, _ in outs))
    expected = tuple(torch.empty_like(out) for out, _ in outs)
    PORTABLE["gather"](sources, rows, expected)
    for (out, whole), truth in zip(outs, expected, strict=True):
        assert out.tolist() == truth.tolist()
        assert_guards_whole(whole)


# ---------------------------------------------------------------------------------------------------- segments


def naive_segments(dones: torch.Tensor, first: int, last: int) -> list[tuple[int, int, int]]:
    found = []
    for lane in range(first, last):
        start = 0
        for t in range(dones.shape[0]):
            if dones[t, lane] or t == dones.shape[0] - 1:
                found.append((lane, start, t + 1 - start))
                start = t + 1
    return found


@st.composite
def done_flags(draw):
    steps, lanes = draw(st.integers(1, 9)), draw(st.sampled_from(LANES[:9]))
    share = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    marks = torch.from_numpy((rng.random((steps, lanes)) < share) * rng.choice([1, 3, 255])).to(torch.uint8)
    first = draw(st.integers(0, lanes))
    return marks, first, draw(st.integers(first, lanes)), rng


def split_with(implementation, dones, first, last):
    count = implementation("count_segments")(dones, first, last)
    parts = [torch.full((count,), -7) for _ in range(3)]
    implementation("split_segments")(dones, first, last, *parts)
    return parts


@covers("count_segments", "split_segments")
@given(done_flags())
def test_count_and_split_agree(flags):
    dones, first, last, _ = flags
    expected = naive_segments(dones, first, last)
    for dims in (dones, dones.unsqueeze(-1)):
        for implementation in (native, lambda operation: PORTABLE[operation]):
            lanes, starts, lengths = split_with(implementation, dims, first, last)
            assert list(zip(lanes.tolist(), starts.tolist(), lengths.tolist(), strict=True)) == expected


@covers("pad_segments")
@given(done_flags(), st.sampled_from(DTYPES), st.sampled_from([(), (1,), (3,), (2, 3), (0,)]), st.integers(0, 9))
def test_pad_agrees(flags, dtype, shape, shorter):
    """``shorter`` steps fewer than the source has, where no trajectory needs them."""
    dones, first, last, rng = flags
    lanes, starts, lengths = split_with(native, dones, first, last)
    longest = int(lengths.max()) if len(lengths) else 1
    steps = max(longest, dones.shape[0] - shorter)
    sources = (random_tensor(rng, (*dones.shape, *shape), dtype), random_tensor(rng, (*dones.shape, 2), torch.float32))
    results = []
    for implementation in (native("pad_segments"), PORTABLE["pad_segments"]):
        outs = [guarded((steps, len(lanes), *source.shape[2:]), source.dtype) for source in sources]
        mask, mask_memory = guarded((steps, len(lanes)), torch.bool)
        implementation(sources, lanes, starts, lengths, tuple(out for out, _ in outs), mask)
        for whole in (mask_memory, *(whole for _, whole in outs)):
            assert_guards_whole(whole)
        results.append([mask.tolist(), *(out.tolist() for out, _ in outs)])
    expected_mask = [[t < length for length in lengths.tolist()] for t in range(steps)]
    expected = []
    for source in sources:
        zero = torch.zeros(source.shape[2:], dtype=source.dtype).tolist()
        expected.append(
            [
                [
                    source[start + t, lane].tolist() if t < length else zero
                    for lane, start, length in naive_segments(dones, first, last)
                ]
                for t in range(steps)
            ]
        )
    assert results[0] == [expected_mask, *expected]
    assert results[1] == [expected_mask, *expected]


@covers("first_states")
@given(done_flags(), st.sampled_from(DTYPES), st.integers(1, 3), st.sampled_from([0, 1, 3, 8]))
def test_first_states_agree(flags, dtype, layers, hidden):
    dones, first, last, rng = flags
    lanes, starts, _ = split_with(native, dones, first, last)
    states = random_tensor(rng, (dones.shape[0], layers, dones.shape[1], hidden), dtype)
    expected = [
        [states[start, layer, lane].tolist() for lane, start, _ in naive_segments(dones, first, last)]
        for layer in range(layers)
    ]
    for implementation in (native("first_states"), PORTABLE["first_states"]):
        out, whole = guarded((layers, len(lanes), hidden), dtype)
        implementation(states, lanes, starts, out)
        assert out.tolist() == expected
        assert_guards_whole(whole)


@covers("copy_lanes")
@given(
    st.integers(0, 2**32),
    st.integers(0, 9),
    st.sampled_from(LANES),
    st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (1,), (3,), (2, 3), (0,), (700,)])), max_size=4),
    st.data(),
)
def test_copy_lanes_agrees(seed, steps, lanes, fields, data):
    first = data.draw(st.integers(0, lanes))
    last = data.draw(st.integers(first, lanes))
    rng = np.random.default_rng(seed)
    sources = tuple(random_tensor(rng, (steps, lanes, *shape), dtype) for dtype, shape in fields)
    before = copy.deepcopy(sources)
    expected = [[step[first:last] for step in source.tolist()] for source in sources]
    for implementation in (native("copy_lanes"), PORTABLE["copy_lanes"]):
        outs = [guarded((steps, last - first, *source.shape[2:]), source.dtype) for source in sources]
        implementation(sources, first, last, tuple(out for out, _ in outs))
        for (out, whole), truth in zip(outs, expected, strict=True):
            assert out.tolist() == truth
            assert_guards_whole(whole)
    assert [now.tolist() for now in sources] == [then.tolist() for then in before]


def test_inputs_are_left_as_they_were():
    """Scans read their arguments; only the outputs change."""
    rollout = Rollout(3, 5, 9, ("some", "some"), "some nan", torch.float64)
    before = copy.deepcopy([rollout.rewards, rollout.values, rollout.last_values, *rollout.ends])
    outs = [torch.empty(5, 9, dtype=torch.float64) for _ in range(2)]
    arguments = (rollout.rewards, rollout.values, rollout.last_values, *rollout.ends)
    native("gae")(*arguments, 0.9, 0.9, *outs)
    native("n_step_returns")(*arguments, 0.9, 3, outs[0])
    native("vtrace")(*arguments, rollout.log_rhos, 0.9, 1.0, 1.0, 1.0, 1.0, *outs)
    for now, then in zip(arguments, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
