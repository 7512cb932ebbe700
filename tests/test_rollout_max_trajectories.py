"""Recurrent mini-batches with room for a fixed number of trajectories, and those that CUDA makes of a table."""

import pytest
import torch
from rollout_ids import ENVS, STEPS, assert_equal, build, fill, hidden_of, tensors_of

from rlstore import InvalidInputError
from rlstore.engine.batches import trajectories

MEMORIES = {
    "none": lambda ids: (None, None),
    "gru": lambda ids: (hidden_of(ids, 2), hidden_of(ids, sign=-1)),
    "lstm": lambda ids: ((hidden_of(ids), hidden_of(ids + 1)), None),
}
# With these ends environments 0 and 1 fall into 1 and 3 trajectories, 2 and 3 into 3 and 1.
MOST = 4


@pytest.fixture(params=MEMORIES)
def storage(request):
    storage = build()
    fill(storage, hidden=lambda _, ids: MEMORIES[request.param](ids))
    return storage


@pytest.mark.parametrize("room", [MOST, MOST + 1, 40])
def test_what_is_not_there_is_padding(storage, room):
    pairs = zip(
        storage.recurrent_mini_batch_generator(2, 2, max_trajectories=room),
        storage.recurrent_mini_batch_generator(2, 2),
        strict=True,
    )
    for batch, plain in pairs:
        count = plain.masks.shape[1]
        assert count == MOST
        assert batch.masks.shape == batch.observations.batch_size == (STEPS, room)
        assert not batch.masks[:, count:].any()
        assert torch.equal(batch.masks[:, :count], plain.masks)
        pairs = [(batch.observations, plain.observations), (batch.hidden_states, plain.hidden_states)]
        for ours, theirs in pairs:
            expected = tensors_of(theirs)
            for name, tensor in tensors_of(ours).items():
                assert torch.equal(tensor[:, :count], expected[name])
                assert not tensor[:, count:].any()
                assert tensor.is_contiguous()
        assert_equal(batch.returns, plain.returns)
        assert_equal(batch.actions, plain.actions)


def test_more_than_there_is_room_for_is_refused(storage):
    with pytest.raises(InvalidInputError, match="environments 0 to 1 fall into 4 trajectories; there is room for 3"):
        list(storage.recurrent_mini_batch_generator(2, 1, max_trajectories=MOST - 1))


@pytest.mark.parametrize("room", [0, -1, 1.5, "3"])
def test_room_for_no_whole_number_of_trajectories_is_refused(storage, room):
    with pytest.raises(InvalidInputError, match="max_trajectories"):
        list(storage.recurrent_mini_batch_generator(2, 1, max_trajectories=room))


def test_the_trainer_can_ask_for_it_too(storage):
    batches = list(storage.generate_batches(2, recurrent=True, max_trajectories=9))
    assert [tuple(batch["masks"].shape) for batch in batches] == [(STEPS, 9)] * 2
    with pytest.raises(InvalidInputError, match="recurrent=True"):
        list(storage.generate_batches(2, max_trajectories=9))


@pytest.mark.parametrize("room", [None, 7])
@pytest.mark.parametrize("count", [1, 2, ENVS])
def test_a_table_of_all_trajectories_gives_the_same_tensors(storage, count, room):
    """What is done on CUDA, here by the reference."""
    ring, sources = storage._ring, storage._sources(STEPS)
    room = None if room is None else room * ENVS
    observations = tuple(sources.pop("observations")[1])
    others = tuple(leaf for _, part in sources.values() for leaf in part)
    states = tuple(block for name, block in ring.blocks.items() if name.startswith("saved_hidden_state"))
    fields = (observations, states, others)
    tabulated = trajectories.TabulatedTrajectories(ring.blocks["dones"], count, room)
    here = list(trajectories.SplitTrajectories(ring.blocks["dones"], count, room).batches(*fields))
    assert len(here) == count
    for ours, truth in zip(tabulated.batches(*fields), here, strict=True):
        for group, expected_group in zip(ours, truth, strict=True):
            tensors, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (group, expected_group))
            assert len(tensors) == len(expected)
            for tensor, other in zip(tensors, expected, strict=True):
                assert tensor.dtype == other.dtype
                assert torch.equal(tensor, other)
                assert tensor.is_contiguous()


@pytest.mark.parametrize("room", [None, STEPS * ENVS])
@pytest.mark.parametrize("count", [1, 2, ENVS])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_table_leaves_out_reset_steps_too(storage, count, room, share):
    """Also where every step is one, and there is no trajectory at all."""
    dones = storage._ring.blocks["dones"]
    resets = (torch.rand(dones.shape, generator=torch.Generator().manual_seed(4)) < share).to(torch.uint8)
    ids = torch.arange(1, STEPS * ENVS + 1).view(STEPS, ENVS)
    fields = ((ids,), (ids.view(STEPS, 1, ENVS, 1).float(),), (ids,))
    kinds = trajectories.TabulatedTrajectories, trajectories.SplitTrajectories
    ends = trajectories.ends_around(dones, resets)
    table, here = (list(kind(ends, count, room, resets).batches(*fields)) for kind in kinds)
    for ours, truth in zip(table, here, strict=True):
        assert torch.equal(ours.masks, truth.masks)
        assert torch.equal(ours.observations[0], truth.observations[0])
        assert torch.equal(ours.states[0], truth.states[0])
    served = torch.cat([batch.observations[0][batch.masks] for batch in here])
    width = ENVS // count * count
    assert sorted(served.tolist()) == ids[:, :width][resets[:, :width].view(STEPS, width) == 0].tolist()
