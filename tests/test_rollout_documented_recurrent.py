"""RolloutStorage's recurrent batches: padding, masks and the hidden states at each trajectory's start."""

import pytest
import torch
from combinations import each
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_ids import (
    DEFAULT_DONES,
    ENVS,
    HIDDEN,
    STEPS,
    assert_equal,
    build,
    fields_of,
    fill,
    hidden_of,
    ids_of_step,
    observations_of,
    recurrent_batch,
    tensors_of,
)
from tensordict import TensorDict

from rlstore import RolloutStorage

MEMORIES = {
    "none": lambda ids: (None, None),
    "gru": lambda ids: (hidden_of(ids), hidden_of(ids, sign=-1)),
    "gru of three layers": lambda ids: (hidden_of(ids, 3), hidden_of(ids, 3, sign=-1)),
    "lstm": lambda ids: ((hidden_of(ids), hidden_of(ids + 1)), (hidden_of(ids, sign=-1), hidden_of(ids + 2))),
    "lstm of two layers": lambda ids: ((hidden_of(ids, 2), hidden_of(ids + 1, 2)),) * 2,
    "gru actor, lstm critic": lambda ids: (hidden_of(ids), (hidden_of(ids, 2), hidden_of(ids + 1, 2))),
    "actor only": lambda ids: (hidden_of(ids), None),
    "critic only": lambda ids: (None, (hidden_of(ids, sign=-1), hidden_of(ids + 1))),
}


def assert_batches(storage, dones, states, num_mini_batches, *, num_epochs=2, offset=0, envs=ENVS):
    """Compare every batch of every epoch with the plain model."""
    m = envs // num_mini_batches
    batches = list(storage.recurrent_mini_batch_generator(num_mini_batches, num_epochs))
    assert len(batches) == num_mini_batches * num_epochs
    for i, batch in enumerate(batches):
        first = i % num_mini_batches * m
        expected = recurrent_batch(dones, (first, first + m), states, offset, envs)
        assert_equal(batch, expected)
        assert batch.observations.batch_size == expected.masks.shape
        assert type(batch.hidden_states) is tuple
        assert all(state.is_contiguous() for state in tensors_of(batch.hidden_states).values())


def test_a_rollout_written_out_by_hand():
    """Two environments, four steps: environment 0 ends after step 1, environment 1 after steps 0 and 3."""
    storage = RolloutStorage("rl", 2, 4, TensorDict({"policy": torch.zeros(2, 1)}, batch_size=[2]), [1], "cpu")
    dones = [[0, 1], [1, 0], [0, 0], [0, 1]]
    for step in range(4):
        ids = torch.tensor([[10.0 + step], [20.0 + step]])
        transition = RolloutStorage.Transition()
        transition.observations = TensorDict({"policy": ids}, batch_size=[2])
        transition.actions = transition.values = ids
        transition.rewards = transition.actions_log_prob = ids.squeeze(1)
        transition.dones = torch.tensor(dones[step])
        transition.distribution_params = (ids,)
        transition.hidden_states = (ids.view(1, 2, 1) + 100.0, None)
        storage.add_transition(transition)
    storage.returns = storage.advantages = torch.zeros(4, 2, 1)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert batch.observations["policy"].squeeze(-1).tolist() == [
        [10.0, 12.0, 20.0, 21.0],
        [11.0, 13.0, 0.0, 22.0],
        [0.0, 0.0, 0.0, 23.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert batch.masks.tolist() == [
        [True, True, True, True],
        [True, True, False, True],
        [False, False, False, True],
        [False, False, False, False],
    ]
    assert batch.hidden_states[0].tolist() == [[[110.0], [112.0], [120.0], [121.0]]]
    assert batch.hidden_states[1] is None
    assert batch.values.squeeze(-1).tolist() == [[10.0, 20.0], [11.0, 21.0], [12.0, 22.0], [13.0, 23.0]]
    # Taking the masked steps trajectory by trajectory gives the rollout back: that is how networks undo the padding.
    flat = batch.observations["policy"].transpose(0, 1)[batch.masks.transpose(0, 1)]
    assert flat.view(2, 4).tolist() == [[10.0, 11.0, 12.0, 13.0], [20.0, 21.0, 22.0, 23.0]]


@pytest.mark.parametrize(("memory", "num_mini_batches"), each([*MEMORIES], [1, 2, ENVS]))
def test_batches_match_the_model(memory, num_mini_batches):
    storage = build()
    for offset in (0, 200):
        storage.clear()
        fill(storage, offset=offset, hidden=lambda _, ids: MEMORIES[memory](ids))
        states = [MEMORIES[memory](ids_of_step(step, offset)) for step in range(STEPS)]
        assert_batches(storage, DEFAULT_DONES, states.__getitem__, num_mini_batches, offset=offset)


@settings(max_examples=30)
@given(data=st.data())
def test_any_dones_any_shape_match_the_model(data):
    envs, steps = data.draw(st.integers(1, 6), label="envs"), data.draw(st.integers(1, 7), label="steps")
    written = data.draw(st.integers(1, steps), label="written")
    flags = st.lists(st.integers(0, 1), min_size=envs, max_size=envs)
    dones = data.draw(st.lists(flags, min_size=written, max_size=written), label="dones")
    storage = build(envs=envs, steps=steps)
    fill(storage, offset=400, dones=[[1] * envs])
    storage.clear()
    fill(storage, written, dones=dones, hidden=lambda _, ids: MEMORIES["gru"](ids))
    states = [MEMORIES["gru"](ids_of_step(step, 0, envs)) for step in range(written)]
    num_mini_batches = data.draw(st.integers(1, envs), label="num_mini_batches")
    assert_batches(storage, dones, states.__getitem__, num_mini_batches, envs=envs)


@pytest.mark.parametrize("written", [1, 3, 5])
def test_only_steps_written_since_clear_are_served(written):
    storage = fill(build(), dones=[[1] * ENVS], hidden=lambda _, ids: MEMORIES["lstm"](ids))
    storage.clear()
    fill(storage, written, offset=300, hidden=lambda _, ids: MEMORIES["lstm"](ids))
    states = [MEMORIES["lstm"](ids_of_step(step, 300)) for step in range(written)]
    assert_batches(storage, DEFAULT_DONES[:written], states.__getitem__, 2, offset=300)


def test_observations_keep_their_dtype_and_padding_is_zero():
    storage = fill(build())
    for batch in storage.recurrent_mini_batch_generator(2, 1):
        stored = tensors_of(storage.observations)
        for name, tensor in tensors_of(batch.observations).items():
            assert tensor.dtype == stored[name].dtype, name
            assert tensor[~batch.masks].count_nonzero() == 0, name
        assert batch.masks.dtype == torch.bool
        assert int(batch.masks.sum()) == STEPS * (ENVS // 2)


def test_trailing_environments_that_do_not_fill_a_mini_batch_are_dropped():
    storage = fill(build(), dones=None)
    batches = list(storage.recurrent_mini_batch_generator(2, 1))
    seen = torch.cat([batch.observations["policy"][0, :, 0] for batch in batches])
    assert seen.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_eight_epochs_unless_told_otherwise():
    assert sum(1 for _ in fill(build()).recurrent_mini_batch_generator(1)) == 8


# ---------------------------------------------------------------------------------------------------------------------
# Saved hidden states


def test_saved_states_are_lists_in_time_order():
    storage = build()
    assert storage.saved_hidden_state_a is storage.saved_hidden_state_c is None
    fill(storage, hidden=lambda _, ids: MEMORIES["gru actor, lstm critic"](ids))
    assert isinstance(storage.saved_hidden_state_a, list)
    assert isinstance(storage.saved_hidden_state_c, list)
    steps = [MEMORIES["gru actor, lstm critic"](ids_of_step(step)) for step in range(STEPS)]
    assert_equal(storage.saved_hidden_state_a, [torch.stack([actor for actor, _ in steps])])
    assert storage.saved_hidden_state_a[0].shape == (STEPS, 1, ENVS, HIDDEN)
    critic = [torch.stack([critic[part] for _, critic in steps]) for part in (0, 1)]
    assert_equal(storage.saved_hidden_state_c, critic)


@pytest.mark.parametrize(("memory", "given"), [("actor only", "a"), ("critic only", "c")])
def test_a_side_that_is_none_stays_none(memory, given):
    storage = fill(build(), hidden=lambda _, ids: MEMORIES[memory](ids))
    other = "c" if given == "a" else "a"
    assert getattr(storage, f"saved_hidden_state_{given}") is not None
    assert getattr(storage, f"saved_hidden_state_{other}") is None


@pytest.mark.parametrize("memory", ["gru", "lstm"])
def test_the_first_step_may_come_before_the_networks_have_a_state(memory):
    storage = fill(build(), hidden=lambda step, ids: MEMORIES[memory](ids) if step else (None, None))
    states = [MEMORIES[memory](ids_of_step(step)) for step in range(STEPS)]
    states[0] = MEMORIES[memory](torch.full((ENVS, 1), torch.nan))
    for state in tensors_of(list(states[0])).values():
        state.zero_()
    assert_batches(storage, DEFAULT_DONES, states.__getitem__, 2)


def test_a_step_without_states_keeps_what_was_saved_for_it():
    storage = fill(build(), hidden=lambda _, ids: MEMORIES["gru"](ids))
    storage.clear()
    silent = {0, 2, 3}
    fill(storage, offset=600, hidden=lambda step, ids: (None, None) if step in silent else MEMORIES["gru"](ids))
    states = [MEMORIES["gru"](ids_of_step(step, 0 if step in silent else 600)) for step in range(STEPS)]
    assert_batches(storage, DEFAULT_DONES, states.__getitem__, 2, offset=600)


def test_one_side_may_be_silent_on_a_step():
    storage = fill(build(), hidden=lambda _, ids: MEMORIES["gru"](ids))
    storage.clear()
    fill(storage, offset=600, hidden=lambda _, ids: (MEMORIES["gru"](ids)[0], None))
    states = [(hidden_of(ids_of_step(step, 600)), hidden_of(ids_of_step(step), sign=-1)) for step in range(STEPS)]
    assert_batches(storage, DEFAULT_DONES, states.__getitem__, 2, offset=600)


def test_states_given_are_copied():
    given = [MEMORIES["lstm"](ids_of_step(step)) for step in range(STEPS)]
    storage = fill(build(), hidden=lambda step, _: given[step])
    for state in tensors_of(given).values():
        state.zero_()
    assert_batches(storage, DEFAULT_DONES, lambda step: MEMORIES["lstm"](ids_of_step(step)), 1)


# ---------------------------------------------------------------------------------------------------------------------
# Clients that write into the attributes


def test_dones_written_or_rebound_decide_the_trajectories():
    storage = fill(build(), hidden=lambda _, ids: MEMORIES["gru"](ids))
    states = [MEMORIES["gru"](ids_of_step(step)) for step in range(STEPS)].__getitem__
    storage.dones[3] = 1
    written = [list(flags) for flags in DEFAULT_DONES]
    written[3] = [1] * ENVS
    assert_batches(storage, written, states, 2)
    storage.dones = torch.zeros_like(storage.dones)
    assert_batches(storage, [[0] * ENVS] * STEPS, states, 2)


def test_an_item_of_the_saved_states_can_be_replaced():
    storage = fill(build(), hidden=lambda _, ids: MEMORIES["lstm"](ids))
    storage.saved_hidden_state_a[1] = torch.full_like(storage.saved_hidden_state_a[1], 7.0)
    states = [MEMORIES["lstm"](ids_of_step(step)) for step in range(STEPS)]
    states = [((actor[0], torch.full_like(actor[1], 7.0)), critic) for actor, critic in states]
    assert_batches(storage, DEFAULT_DONES, states.__getitem__, 2)


def test_rebound_fields_and_states_are_served():
    storage = fill(build(), hidden=lambda _, ids: MEMORIES["gru"](ids))
    ids = torch.stack([ids_of_step(step, 800) for step in range(STEPS)])
    fields = fields_of(ids)
    storage.observations = observations_of(ids)
    storage.actions, storage.values = fields["actions"], fields["values"]
    storage.returns = fields["returns"].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    with torch.inference_mode():
        storage.advantages = fields["advantages"] + 0.0
    storage.actions_log_prob = fields["old_actions_log_prob"]
    storage.distribution_params = fields["old_distribution_params"]
    storage.saved_hidden_state_a = [torch.stack([hidden_of(ids[step]) for step in range(STEPS)])]
    storage.saved_hidden_state_c[0].copy_(torch.stack([hidden_of(ids[step], sign=-1) for step in range(STEPS)]))
    states = [MEMORIES["gru"](ids[step]) for step in range(STEPS)]
    assert_batches(storage, DEFAULT_DONES, states.__getitem__, 2, offset=800)
    tensors = (
        tensor for batch in storage.recurrent_mini_batch_generator(2, 1) for tensor in tensors_of(batch).values()
    )
    assert not any(tensor.is_inference() for tensor in tensors)
