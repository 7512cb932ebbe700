"""The ring: what is written where, what is refused, and what follows a change of memory."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from rlstore.engine.rows.ring import Column, Ring
from rlstore.engine.rows.schema import Field

CPU = torch.device("cpu")
LANES = 3


def field(name, shape=(), dtype=torch.float32, **others) -> Field:
    return Field(name, shape, dtype, "the test", **others)


def columns() -> list[Column]:
    return [
        Column(field("obs", (2,)), "obs"),
        Column(field("next_obs", (2,)), "obs", lead=1),
        Column(field("rewards"), "rewards"),
        Column(field("dones", (), torch.uint8, is_flag=True), "dones"),
        Column(field("ended", (), torch.float32, is_flag=True), "ended", lead=1),
        Column(field("state", (1, 2), lane_axis=1), "state", optional=True),
    ]


def make_ring(steps=4) -> Ring:
    """A ring whose unwritten memory is poisoned."""
    ring = Ring(columns(), steps, LANES, CPU)
    for block in ring.blocks.values():
        block.fill_(torch.nan if block.dtype.is_floating_point else 77)
    return ring


def row(number: int) -> tuple:
    """Values in which every entry tells its step, its lane and its field."""
    ids = number * LANES + torch.arange(LANES, dtype=torch.float32)
    obs = torch.stack([ids, ids + 0.25], dim=-1)
    after = obs + LANES
    ends = ids.to(torch.int64) % 2 == 0
    return obs, after, ids + 0.5, ends, ~ends, obs.unsqueeze(0) + 0.125


def assert_row(ring: Ring, place: int, number: int) -> None:
    obs, after, rewards, dones, ended, state = row(number)
    assert ring.blocks["obs"][place].tolist() == obs.tolist()
    assert ring.blocks["obs"][place + 1].tolist() == after.tolist()
    assert ring.blocks["rewards"][place].tolist() == rewards.tolist()
    assert ring.blocks["dones"][place].tolist() == dones.int().tolist()
    assert ring.blocks["ended"][place + 1].tolist() == ended.float().tolist()
    assert ring.blocks["state"][place].tolist() == state.tolist()


def snapshot(ring: Ring) -> dict:
    return {name: block.clone() for name, block in ring.blocks.items()}


def assert_same(ring: Ring, before: dict) -> None:
    assert list(ring.blocks) == list(before)
    for name, block in ring.blocks.items():
        torch.testing.assert_close(block, before[name], rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------------- layout


def test_blocks_have_time_first_and_a_row_more_where_written_ahead():
    ring = Ring(columns(), 4, LANES, CPU)
    assert {name: tuple(block.shape) for name, block in ring.blocks.items()} == {
        "obs": (5, 3, 2),
        "rewards": (4, 3),
        "dones": (4, 3),
        "ended": (5, 3),
        "state": (4, 1, 3, 2),
    }
    assert ring.blocks["dones"].dtype == torch.uint8
    assert all(bool((block == 0).all()) for block in ring.blocks.values())
    # 5*3*2*4 + 4*3*4 + 4*3*1 + 5*3*4 + 4*1*3*2*4
    assert ring.nbytes == 120 + 48 + 12 + 60 + 96


def test_an_observation_and_the_next_one_share_a_block():
    """One copy: the next observation of a row is the row after it."""
    ring = make_ring()
    ring.write(row(0))
    ring.write(row(1))
    assert ring.blocks["obs"][1].tolist() == row(1)[0].tolist()
    assert ring.blocks["obs"][2].tolist() == row(1)[1].tolist()
    assert ring.blocks["obs"][3].isnan().all()


# ---------------------------------------------------------------------------------------------------- writing


def test_rows_are_written_in_order_and_nothing_else_is_touched():
    ring = make_ring()
    for number in range(3):
        assert ring.size == number
        ring.write(row(number))
        assert_row(ring, number, number)
    assert ring.size == 3
    assert ring.written == 3
    assert ring.blocks["rewards"][3].isnan().all()
    assert ring.blocks["obs"][4].isnan().all()
    assert (ring.blocks["dones"][3] == 77).all()


def test_the_oldest_row_is_overwritten_and_the_counter_does_not_wrap():
    ring = make_ring()
    for number in range(10):
        ring.write(row(number))
    assert ring.size == 4
    assert ring.written == 10
    assert [int(ids[0]) // LANES for ids in ring.blocks["rewards"]] == [8, 9, 6, 7]
    assert_row(ring, 1, 9)


def test_none_leaves_an_optional_row_as_it_was():
    ring = make_ring()
    *others, state = row(0)
    ring.write((*others, None))
    assert ring.blocks["state"][0].isnan().all()
    ring.write((*row(1)[:-1], state))
    ring.restart()
    ring.write((*others, None))
    ring.write((*row(1)[:-1], None))
    assert ring.blocks["state"][1].tolist() == state.tolist()


FORMS = {
    "float64": lambda value: value.double() if value.is_floating_point() else value,
    "arrays": lambda value: value.numpy(),
    "lists": lambda value: value.tolist(),
    "strided": lambda value: torch.stack([value, value], dim=-1)[..., 0],
    "gradients": lambda value: value.requires_grad_() if value.is_floating_point() else value,
    "numbers as flags": lambda value: value.double() if value.dtype == torch.bool else value,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_row_in_another_form_is_written_as_what_it_means(form):
    ring = make_ring()
    ring.write(tuple(FORMS[form](value) for value in row(0)))
    ring.write(row(1))
    ring.write(tuple(FORMS[form](value) for value in row(2)))
    assert_row(ring, 2, 2)
    assert ring.blocks["rewards"][:3].tolist() == [row(number)[2].tolist() for number in range(3)]


def test_what_was_given_is_copied():
    ring = make_ring()
    given = row(0)
    ring.write(given)
    for value in given:
        value.zero_()
    assert_row(ring, 0, 0)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("wrong", ["shape", "kind", "none"])
def test_a_refused_row_changes_nothing(place, wrong):
    ring = make_ring()
    ring.write(row(0))
    before = snapshot(ring)
    values = list(row(1))
    name = ring.columns[place].field.name
    values[place] = {"shape": torch.zeros(7, 7), "kind": "no", "none": None}[wrong]
    if wrong == "none" and ring.columns[place].optional:
        values[place] = object()
    with pytest.raises(ValueError, match=f"{name} .*Nothing was written"):
        ring.write(tuple(values))
    assert_same(ring, before)
    assert ring.size == 1
    assert ring.written == 1
    ring.write(row(1))
    assert_row(ring, 1, 1)


def test_a_row_of_too_few_or_too_many_values_is_refused():
    ring = make_ring()
    before = snapshot(ring)
    for values in (row(0)[:-1], (*row(0), torch.zeros(LANES)), ()):
        with pytest.raises(ValueError, match="one value for each field"):
            ring.write(values)
    assert_same(ring, before)
    assert ring.size == 0


def test_fit_writes_nothing():
    ring = make_ring()
    before = snapshot(ring)
    fitted = ring.fit(tuple(value.tolist() for value in row(0)))
    assert_same(ring, before)
    assert [value.dtype for value in fitted][2:5] == [torch.float32, torch.uint8, torch.uint8]
    assert ring.fit((*row(0)[:-1], None))[-1] is None
    with pytest.raises(ValueError, match="rewards is missing"):
        ring.fit((*row(0)[:2], None, *row(0)[3:]))


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_a_field_of_no_entries_is_a_field(shape):
    ring = Ring([Column(field("nothing", shape), "nothing"), Column(field("rewards"), "rewards")], 2, LANES, CPU)
    ring.write((torch.zeros((LANES, *shape)), row(0)[2]))
    assert ring.size == 1
    assert ring.blocks["rewards"][0].tolist() == row(0)[2].tolist()


# ---------------------------------------------------------------------------------------------------- beginning anew


def test_restart_begins_at_row_0_and_keeps_what_is_there():
    ring = make_ring()
    for number in range(3):
        ring.write(row(number))
    before = snapshot(ring)
    ring.restart()
    assert ring.size == 0
    assert_same(ring, before)
    ring.write(row(9))
    assert_row(ring, 0, 9)
    assert ring.blocks["rewards"][1].tolist() == row(1)[2].tolist()
    assert ring.written == 4
    assert ring.size == 1


def test_zero_makes_every_block_zero():
    ring = make_ring()
    ring.write(row(0))
    ring.zero()
    assert ring.size == 0
    assert all(bool((block == 0).all()) for block in ring.blocks.values())
    ring.write(row(5))
    assert_row(ring, 0, 5)


# ---------------------------------------------------------------------------------------------------- more blocks


def test_extend_adds_a_filled_block_and_later_rows_write_it():
    ring = make_ring()
    ring.write(row(0))
    ring.extend([Column(field("final"), "final")], fills={"final": torch.nan})
    assert ring.blocks["final"].isnan().all()
    assert tuple(ring.blocks["final"].shape) == (4, LANES)
    ring.write((*row(1), torch.tensor([1.0, 2.0, 3.0])))
    assert_row(ring, 1, 1)
    assert ring.blocks["final"][0].isnan().all()
    assert ring.blocks["final"][1].tolist() == [1.0, 2.0, 3.0]


def test_computed_blocks_are_no_part_of_a_row():
    ring = Ring(columns(), 4, LANES, CPU, [field("returns")])
    ring.blocks["returns"].fill_(7.0)
    ring.write(row(0))
    assert_row(ring, 0, 0)
    assert (ring.blocks["returns"] == 7.0).all()


def test_drop_forgets_blocks_and_their_columns():
    ring = make_ring()
    ring.write(row(0))
    ring.drop(["state", "ended"])
    assert list(ring.blocks) == ["obs", "rewards", "dones"]
    ring.write(row(1)[:4])
    assert ring.blocks["rewards"][1].tolist() == row(1)[2].tolist()
    assert ring.blocks["dones"][1].tolist() == row(1)[3].int().tolist()


# ---------------------------------------------------------------------------------------------------- binding


def test_a_bound_tensor_is_what_is_served_and_written():
    ring = make_ring()
    ring.write(row(0))
    mine = torch.full((4, LANES), 5.0)
    ring.bind("rewards", mine)
    assert ring.blocks["rewards"] is mine
    ring.write(row(1))
    assert mine[0].tolist() == [5.0, 5.0, 5.0]
    assert mine[1].tolist() == row(1)[2].tolist()


def test_a_tensor_of_another_form_is_bound_as_what_it_means():
    ring = make_ring()
    ids = torch.arange(12.0).reshape(4, LANES)
    ring.bind("rewards", ids.double().t().contiguous().t().requires_grad_())
    held = ring.blocks["rewards"]
    assert held.tolist() == ids.tolist()
    assert held.dtype == torch.float32
    assert held.is_contiguous()
    assert not held.requires_grad
    ring.write(row(0))
    assert_row(ring, 0, 0)


@pytest.mark.parametrize(
    "marks", [torch.tensor([0.25, 0.0, 1.0]), torch.tensor([256, 0, 1]), torch.tensor([True, False, True])]
)
def test_bound_flags_of_any_kind_become_0_and_1(marks):
    """A quarter is a yes, and so is 256, which a byte cannot hold."""
    ring = make_ring()
    ring.bind("dones", marks.expand(4, LANES))
    assert ring.blocks["dones"].dtype == torch.uint8
    assert ring.blocks["dones"].tolist() == [[1, 0, 1]] * 4


@pytest.mark.parametrize(
    "wrong", [torch.zeros(4, 2), torch.zeros(3, LANES), torch.zeros(4, LANES, 1), [0.0], None], ids=str
)
def test_a_tensor_of_another_shape_is_not_bound(wrong):
    ring = make_ring()
    before = dict(ring.blocks)
    with pytest.raises(ValueError, match=r"rewards cannot become .*It was not changed"):
        ring.bind_all(["obs", "rewards"], [torch.zeros(5, LANES, 2), wrong])
    assert all(ring.blocks[name] is block for name, block in before.items())


def test_blocks_made_in_inference_mode_are_plain_tensors():
    with torch.inference_mode():
        ring = Ring(columns(), 2, LANES, CPU, [field("returns")])
        ring.extend([Column(field("final"), "final")])
        ring.write((*row(0), torch.zeros(LANES)))
    for block in ring.blocks.values():
        assert not block.is_inference()
        block.add_(1)


def test_a_tensor_of_another_block_is_bound_as_a_copy():
    ring = Ring(columns(), 4, LANES, CPU, [field("returns")])
    ring.bind("rewards", ring.blocks["returns"])
    ring.blocks["returns"].fill_(3.0)
    assert (ring.blocks["rewards"] == 0.0).all()


def test_a_bound_inference_tensor_gives_way_to_a_plain_copy():
    ring = make_ring()
    with torch.inference_mode():
        ring.bind("rewards", torch.full((4, LANES), 5.0))
    assert not ring.blocks["rewards"].is_inference()
    assert (ring.blocks["rewards"] == 5.0).all()
    ring.write(row(0))
    assert_row(ring, 0, 0)


def test_zero_copes_with_a_bound_inference_tensor():
    ring = make_ring()
    with torch.inference_mode():
        ring.bind("rewards", torch.full((4, LANES), 5.0))
    ring.zero()
    assert (ring.blocks["rewards"] == 0).all()


# ------------------------------------------------------------------------------------------ memory that moves


def move_to_shared_memory(block):
    block.share_memory_()


def swap_data(block):
    block.data = block.data.clone()


@pytest.mark.parametrize("move", [move_to_shared_memory, swap_data])
def test_a_block_that_moves_under_the_same_tensor_is_still_the_one_written(move):
    ring = make_ring()
    # The array keeps the old memory alive, so that a write to it is a wrong result and not a crash.
    old = np.full((4, LANES), np.nan, dtype=np.float32)
    ring.bind("rewards", torch.from_numpy(old))
    ring.write(row(0))
    move(ring.blocks["rewards"])
    ring.write(row(1))
    assert ring.blocks["rewards"][:2].tolist() == [row(0)[2].tolist(), row(1)[2].tolist()]
    assert np.isnan(old[1]).all()


# ---------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda ring: pickle.loads(pickle.dumps(ring))], ids=["copy", "pickle"]
)
def test_a_copy_has_memory_and_counters_of_its_own(twin_of):
    ring = make_ring()
    ring.write(row(0))
    twin = twin_of(ring)
    before = snapshot(ring)
    twin.write(row(1))
    assert_row(twin, 1, 1)
    assert twin.size == 2
    assert_same(ring, before)
    assert ring.size == 1
    ring.write(row(2))
    assert_row(ring, 1, 2)
    assert_row(twin, 1, 1)
