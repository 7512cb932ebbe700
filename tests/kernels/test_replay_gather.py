"""Gathering transitions: native against portable, for every part, dtype, stack and n-step window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import assert_guards_whole, covers, guarded
from replay_rings import Layout, Leaf, Twins, as_bytes, layouts
from test_replay_draws import priority_twins, window_twins

from rlstore.kernels import kernel
from rlstore.kernels.portable import OPERATIONS as PORTABLE

OBSERVATION, NEXT, COLUMN, REWARDS, DISCOUNTS, TERMINATED, TRUNCATED, FIRST, HELD = range(9)


def requests_of(layout: Layout) -> tuple:
    """Every part of a transition; leaves and the action as they are and as float32."""
    observations = [
        (part, index, as_float, leaf.shape)
        for part in (OBSERVATION, NEXT)
        for index, leaf in enumerate(layout.leaves)
        for as_float in (False, True)
    ]
    actions = [(COLUMN, 0, as_float, (2,)) for as_float in (False, True)]
    rewards = [(part, index, False, layout.reward_shape or (1,)) for part, index in ((COLUMN, 1), (REWARDS, 0))]
    flags = [(part, 0, False, (1,)) for part in (DISCOUNTS, TERMINATED, TRUNCATED, FIRST, HELD)]
    return (*observations, *actions, *rewards, *flags)


def dtype_of(layout: Layout, request: tuple) -> torch.dtype:
    part, index, as_float, _ = request
    if as_float or part in (REWARDS, DISCOUNTS) or (part == COLUMN and index == 1):
        return torch.float32
    if part in (OBSERVATION, NEXT):
        return layout.leaves[index].dtype
    return layout.action if part == COLUMN else torch.bool


def assert_same(mine: torch.Tensor, truth: torch.Tensor, converted: bool) -> None:
    assert mine.dtype == truth.dtype
    assert mine.shape == truth.shape
    if converted:  # the bits of a NaN may change when it is converted
        torch.testing.assert_close(mine, truth, rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(as_bytes(mine), as_bytes(truth))


@covers("ReplayGather")
@settings(max_examples=30)
@given(
    layouts,
    st.integers(1, 40),
    st.sampled_from([1, 2, 3, 5, 1000, 2**40]),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.integers(0, 40),
    st.booleans(),
)
def test_batches_agree(layout, writes, n_step, gamma, count, in_given):
    twins, requests = Twins(layout), requests_of(layout)
    classes = kernel("ReplayGather", "cpu"), PORTABLE["ReplayGather"]
    gathers = [make(memory.ring, requests, n_step, gamma) for make, memory in zip(classes, twins.both, strict=True)]
    for _ in range(writes):
        twins.write()
    rows = twins.some_rows(count)
    outs = [guarded((count, *request[3]), dtype_of(layout, request)) for request in requests]
    given_outs = tuple(out for out, _ in outs) if in_given else None
    mine = gathers[0].gather(rows, given_outs)
    truth = gathers[1].gather(rows, None)
    for request, result, expected in zip(requests, mine, truth, strict=True):
        assert_same(result, expected, converted=request[2])
    if in_given:
        assert all(result is out for result, (out, _) in zip(mine, outs, strict=True))
        for _, whole in outs:
            assert_guards_whole(whole)


@settings(max_examples=20)
@given(layouts, st.integers(1, 40), st.integers(1, 6), st.booleans(), st.sampled_from([1, 3]), st.integers(0, 10))
def test_windows_agree_and_are_their_rows(layout, writes, length, across, n_step, count):
    """Rows [windows, length] are gathered in runs: what comes out is what single rows give."""
    twins, requests = Twins(layout), requests_of(layout)
    for _ in range(writes):
        twins.write()
    held = twins.native.held()
    starts = held[torch.from_numpy(twins.rng.integers(len(held), size=count))] if len(held) else held
    rows = torch.empty(len(starts) * length, dtype=torch.int64)
    twins.native.ring.windows(starts, length, across, rows)
    rows = rows.view(-1, length)
    mine = kernel("ReplayGather", "cpu")(twins.native.ring, requests, n_step, 0.9)
    truth = PORTABLE["ReplayGather"](twins.portable.ring, requests, n_step, 0.9).gather(rows, None)
    singly = mine.gather(rows.flatten(), None)
    for request, result, expected, single in zip(requests, mine.gather(rows, None), truth, singly, strict=True):
        assert_same(result, expected, converted=request[2])
        assert_same(result.flatten(0, 1), single, converted=request[2])


@settings(max_examples=15)
@given(layouts, st.integers(1, 40), st.integers(1, 5), st.booleans(), st.integers(0, 20), st.booleans())
def test_a_draw_that_gathers_is_the_draw_and_its_gather(layout, writes, length, across, count, by_priority):
    """For windows and by priority: the rows that two calls draw, and the tensors that they gather."""
    twins, requests = Twins(layout), requests_of(layout)
    gather = kernel("ReplayGather", "cpu")(twins.native.ring, requests, 1, 0.9)
    (windows, _), (priorities, _) = window_twins(twins, length, 2, across), priority_twins(twins)
    for _ in range(writes):
        twins.write()
        windows.index.follow()
        priorities.tree.follow_windows(windows.index)
    first, second = torch.tensor([7, 3]), torch.tensor([7, 3])
    begins, weights = torch.empty(count, dtype=torch.int64), torch.empty(count, 1)
    tree = priorities.tree if by_priority else None
    made = gather.sample_windows(windows.index, tree, first, 0.5, count)
    if windows.index.count() == 0:
        assert made is None
        assert gather.sample_by_priority(priorities.tree, first, 0.5, count) is None
        assert torch.equal(first, second)
        return
    if tree is not None:
        tree.draw(second, 0.5, begins, weights)
    else:
        windows.index.draw(second, begins)
    rows = torch.empty(count, length, dtype=torch.int64)
    twins.native.ring.windows(begins, length, across, rows)
    assert torch.equal(first, second)
    assert torch.equal(made[2], begins)
    assert torch.equal(made[1], weights) if tree is not None else made[1] is None
    for request, result, expected in zip(requests, made[0], gather.gather(rows, None), strict=True):
        assert_same(result, expected, converted=request[2])
    tensors, drawn_weights, drawn = gather.sample_by_priority(priorities.tree, first, 0.5, count)
    priorities.tree.draw(second, 0.5, begins, weights)
    assert torch.equal(drawn, begins)
    assert torch.equal(drawn_weights, weights)
    for request, result, expected in zip(requests, tensors, gather.gather(begins, None), strict=True):
        assert_same(result, expected, converted=request[2])


@pytest.mark.parametrize("window", [[-1, 0], [-5, -1], [0, 2], [1, 0], [0, -2], [0, 2**62 + 1]])
def test_rows_of_a_window_that_do_not_follow_one_another_are_refused(window):
    twins = Twins(Layout(1, 9, (Leaf(torch.float32, 1, 1, 2),), torch.int64, (), 2, 0, seed=0))
    for _ in range(5):
        twins.write()
    for make, memory in (
        (kernel("ReplayGather", "cpu"), twins.native),
        (PORTABLE["ReplayGather"], twins.portable),
    ):
        gather = make(memory.ring, ((HELD, 0, False, (1,)),), 1, 1.0)
        assert gather.gather(torch.tensor([[0, 1], [2, -1], [-1, -1]]), None)[0].flatten(1).tolist() == [
            [True, True],
            [True, False],
            [False, False],
        ]
        with pytest.raises(IndexError, match="not held"):
            gather.gather(torch.tensor([[0, 1], window]), None)


@settings(max_examples=8)
@given(layouts, st.integers(1, 20))
def test_the_portable_version_fills_tensors_that_are_given(layout, writes):
    twins, requests = Twins(layout), requests_of(layout)
    for _ in range(writes):
        twins.write()
    gather = PORTABLE["ReplayGather"](twins.portable.ring, requests, 3, 0.9)
    rows = twins.some_rows(10)
    given_outs = tuple(torch.empty(10, *request[3], dtype=dtype_of(layout, request)) for request in requests)
    assert all(made is out for made, out in zip(gather.gather(rows, given_outs), given_outs, strict=True))
    for out, expected in zip(given_outs, gather.gather(rows, None), strict=True):
        assert_same(out, expected, converted=False)


def test_large_rows_go_past_the_cache_and_agree():
    """Rows and batches large enough for the native version to write them past the cache."""
    layout = Layout(
        2, 40, (Leaf(torch.uint8, 4, 1, 7000),), torch.int64, (), 0, 0, seed=3, trouble=(0.1, 0.05, 0.1, 0.5)
    )
    twins, requests = Twins(layout), ((OBSERVATION, 0, False, (28000,)), (NEXT, 0, False, (28000,)))
    for _ in range(60):
        twins.write()
    rows = twins.some_rows(100)
    mine = kernel("ReplayGather", "cpu")(twins.native.ring, requests, 3, 0.9).gather(rows, None)
    truth = PORTABLE["ReplayGather"](twins.portable.ring, requests, 3, 0.9).gather(rows, None)
    for result, expected in zip(mine, truth, strict=True):
        assert torch.equal(result, expected)


def test_an_n_step_window_by_hand():
    """One lane, gamma 0.5: rewards 1, 2, 4 and a termination; then 8 in an episode that goes on."""
    layout = Layout(1, 8, (Leaf(torch.float32, 1, 1, 1),), torch.int64, (), 2, 0, seed=0)
    twins = Twins(layout)
    for time, (reward, terminated) in enumerate([(1, False), (2, False), (4, True), (8, False)]):
        action, observation = torch.full((1, 2), time), torch.full((1, 1), float(time))
        following = observation + (100.0 if terminated else 1.0)
        flag, no = torch.tensor([terminated]), torch.tensor([False])
        for memory in twins.both:
            step = (observation, following, action, torch.tensor([float(reward)]), flag, no, None, None, None)
            assert memory.write(step)[-1] == -1
    requests = ((NEXT, 0, False, (1,)), (REWARDS, 0, False, (1,)), (DISCOUNTS, 0, False, (1,)))
    for make, memory in (
        (kernel("ReplayGather", "cpu"), twins.native),
        (PORTABLE["ReplayGather"], twins.portable),
    ):
        following, rewards, discounts = make(memory.ring, requests, 2, 0.5).gather(torch.tensor([0, 1, 2, 3, -1]), None)
        assert following.flatten().tolist() == [2.0, 102.0, 102.0, 4.0, 0.0]
        assert rewards.flatten().tolist() == [2.0, 4.0, 4.0, 8.0, 0.0]
        assert discounts.flatten().tolist() == [0.25, 0.0, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("wrong", ["overwritten", "to come", 2**52, 2**62 + 1, 2**63 - 1])
def test_a_row_that_is_not_held_is_refused(wrong):
    twins = Twins(Layout(3, 4, (Leaf(torch.float32, 1, 1, 2),), torch.int64, (), 0, 0, seed=0))
    for _ in range(30):
        twins.write()
    held = twins.native.held()
    row = {"overwritten": int(held.min()) % 3, "to come": int(held.max()) + 3}.get(wrong, wrong)
    rows = torch.tensor([int(held[0]), row, int(held[-1])])
    for make, memory in (
        (kernel("ReplayGather", "cpu"), twins.native),
        (PORTABLE["ReplayGather"], twins.portable),
    ):
        with pytest.raises(IndexError, match="not held"):
            make(memory.ring, ((HELD, 0, False, (1,)),), 1, 1.0).gather(rows, None)
