"""Replay storages that cannot be: what their constructors refuse, and what is just possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nstep_steps import BOX
from replay_kinds import GOALS, KINDS, PRIORITIZED, assert_tells, distance

from rlstore import (
    DoesNotFitError,
    HindsightReplayStorage,
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
)

NAN, INF = float("nan"), float("inf")
BY_NAME = {kind.name: kind for kind in KINDS}


@pytest.fixture(params=KINDS, ids=repr)
def kind(request):
    return request.param


@pytest.mark.parametrize("name", ["storage_size", "num_envs", "batch_size"])
@pytest.mark.parametrize("size", [0, -1, 2.5, "3", True])
def test_sizes_that_are_no_size_are_refused(kind, name, size):
    with pytest.raises(ValueError, match=name):
        kind.storage_class(kind.space, spaces.Discrete(2), **{"storage_size": 100, **kind.options, name: size})


def test_a_storage_smaller_than_its_environments_is_refused(kind):
    with pytest.raises(ValueError, match="storage_size") as refused:
        kind.make(storage_size=3, num_envs=4)
    assert_tells(refused, "3", "4")


@pytest.mark.parametrize("device", ["toaster", "cuda:99", "meta", 3.5, None])
def test_a_device_that_is_not_there_is_refused(kind, device):
    with pytest.raises(ValueError, match="device"):
        kind.make(device=device)


@pytest.mark.parametrize("seed", [-1, 1.5, "7", 2**64])
def test_a_seed_that_is_none_is_refused(kind, seed):
    with pytest.raises(ValueError, match="seed"):
        kind.make(seed=seed)


def test_an_unknown_argument_is_refused(kind):
    with pytest.raises(TypeError, match="buffer_size"):
        kind.make(buffer_size=100)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"observation_space": None}, "observation_space"),
        ({"action_space": None}, "action_space"),
        ({"action_space": {"type": "Box"}}, "shape"),
    ],
)
def test_spaces_that_say_too_little_are_refused(kind, given, message):
    with pytest.raises(ValueError, match=message):
        kind.make(**given)


# ------------------------------------------------------------------------------------------------- n steps


@pytest.mark.parametrize("storage_class", [ReplayStorage, NStepReplayStorage, PrioritizedReplayStorage])
@pytest.mark.parametrize("n_step", [0, -1, 1.5, None, "3", True])
def test_an_n_step_that_is_none_is_refused(storage_class, n_step):
    with pytest.raises(ValueError, match="n_step"):
        storage_class(BOX, spaces.Discrete(2), n_step=n_step, storage_size=10)


@pytest.mark.parametrize("storage_class", [ReplayStorage, NStepReplayStorage, PrioritizedReplayStorage])
def test_n_steps_longer_than_the_storage_are_refused(storage_class):
    """11 transitions of 2 environments: 5 steps each."""
    with pytest.raises(ValueError, match="n_step") as refused:
        storage_class(BOX, spaces.Discrete(2), n_step=6, storage_size=11, num_envs=2)
    assert_tells(refused, "n_step", "6", "5", "storage_size")
    storage_class(BOX, spaces.Discrete(2), n_step=5, storage_size=11, num_envs=2).close()


@pytest.mark.parametrize("discount", [-0.1, 1.1, NAN, INF, None, "0.9", True])
@pytest.mark.parametrize(
    ("storage_class", "options"),
    [
        (ReplayStorage, {}),
        (NStepReplayStorage, {}),
        (PrioritizedReplayStorage, {}),
        (HindsightReplayStorage, {"compute_reward": distance}),
    ],
)
def test_a_discount_out_of_range_is_refused(storage_class, options, discount):
    space = GOALS if storage_class is HindsightReplayStorage else BOX
    with pytest.raises(ValueError, match="discount"):
        storage_class(space, spaces.Discrete(2), storage_size=10, discount=discount, **options)


# ------------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("length", [0, -1, 1.5, None, "3", True])
def test_a_sequence_length_that_is_none_is_refused(length):
    with pytest.raises(ValueError, match="sequence_length"):
        BY_NAME["sequence"].make(sequence_length=length)


@pytest.mark.parametrize(("sequence_length", "burn_in"), [(7, 0), (6, 1), (1, 6)])
def test_sequences_longer_than_the_storage_are_refused(sequence_length, burn_in):
    with pytest.raises(ValueError, match="sequence_length") as refused:
        BY_NAME["sequence"].make(steps=6, sequence_length=sequence_length, burn_in=burn_in)
    assert_tells(refused, "7", "6", "storage_size")
    BY_NAME["sequence"].make(steps=7, sequence_length=sequence_length, burn_in=burn_in)


@pytest.mark.parametrize("burn_in", [-1, 1.5, None, "1", True])
def test_a_burn_in_that_is_none_is_refused(burn_in):
    with pytest.raises(ValueError, match="burn_in"):
        BY_NAME["sequence"].make(burn_in=burn_in)


@pytest.mark.parametrize("overlap", [-1, 3, 4, 1.5, None, True])
def test_an_overlap_that_leaves_no_way_forward_is_refused(overlap):
    with pytest.raises(ValueError, match="overlap"):
        BY_NAME["sequence"].make(sequence_length=3, overlap=overlap)


@pytest.mark.parametrize("shape", [(2,), (1, -1), "a", 5, ((1, 2), (1, "b")), ((1, 2), 3)], ids=repr)
def test_a_hidden_shape_that_is_none_is_refused(shape):
    with pytest.raises(ValueError, match="hidden_shape"):
        BY_NAME["sequence"].make(hidden_shape=shape)


@pytest.mark.parametrize(
    "hidden",
    [torch.zeros(2, 1, 4), torch.zeros(1, 2, 3), torch.zeros(1, 3, 4), (torch.zeros(1, 2, 4),) * 2, None, "state"],
    ids=["the wrong way round", "too short", "too many envs", "a pair", "missing", "text"],
)
def test_a_bad_recurrent_state_is_named_and_nothing_changes(hidden):
    kind = BY_NAME["sequence"]
    storage = kind.make(hidden_shape=(1, 4))
    good = torch.zeros(1, 2, 4)
    storage.add(**kind.step(0), hidden_states=good)
    with pytest.raises(ValueError, match=r"(?s)hidden_states.*Nothing was written"):
        storage.add(**kind.step(1), hidden_states=hidden)
    assert len(storage) == 2
    storage.add(**kind.step(1), hidden_states=good)
    assert len(storage) == 4


def test_a_recurrent_state_for_a_storage_that_holds_none_is_refused():
    kind = BY_NAME["sequence"]
    storage = kind.make()
    with pytest.raises(ValueError, match="hidden_shape"):
        storage.add(**kind.step(0), hidden_states=torch.zeros(1, 2, 4))
    assert len(storage) == 0


# ------------------------------------------------------------------------------------------------- priorities


@pytest.mark.parametrize("kind", PRIORITIZED, ids=repr)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alpha", value) for value in (-0.1, NAN, INF, None, "0.6")),
        *(("beta", value) for value in (-0.1, 1.1, NAN, INF, None, "0.4")),
        *(("beta_steps", value) for value in (0, -5, 1.5, "100")),
    ],
)
def test_exponents_out_of_range_are_refused(kind, name, value):
    with pytest.raises(ValueError, match=name):
        kind.make(**{name: value})


# ------------------------------------------------------------------------------------------------- hindsight


@pytest.mark.parametrize("compute_reward", [None, 1.0, "sparse"])
def test_a_compute_reward_that_cannot_be_called_is_refused(compute_reward):
    with pytest.raises((TypeError, ValueError), match="compute_reward"):
        BY_NAME["hindsight"].make(compute_reward=compute_reward)


@pytest.mark.parametrize("strategy", ["past", "", None, 3])
def test_an_unknown_strategy_is_refused_and_the_known_are_named(strategy):
    with pytest.raises(ValueError, match="strategy") as refused:
        BY_NAME["hindsight"].make(strategy=strategy)
    assert_tells(refused, "future", "final", "episode")


@pytest.mark.parametrize("fraction", [-0.1, 1.1, NAN, None, "0.8"])
def test_a_relabel_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match="relabel_fraction"):
        BY_NAME["hindsight"].make(relabel_fraction=fraction)


@pytest.mark.parametrize(
    "space",
    [
        BOX,
        spaces.Dict({"observation": BOX, "achieved_goal": BOX}),
        spaces.Dict({"achieved_goal": BOX, "desired_goal": BOX}),
        spaces.Dict({"observation": BOX, "achieved_goal": BOX, "desired_goal": spaces.Box(0, 1, (3,))}),
    ],
    ids=["no Dict", "no desired goal", "no observation", "goals of two shapes"],
)
def test_a_space_without_goals_is_refused(space):
    with pytest.raises(ValueError, match=r"goal|observation"):
        BY_NAME["hindsight"].make(observation_space=space)


# ------------------------------------------------------------------------------------------------- frame stacks

FLAT = [kind for kind in KINDS if kind.space is BOX]


@pytest.mark.parametrize("kind", FLAT, ids=repr)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 8, 8), {"frame_stack": 3}),
        ((8, 8, 4), {"frame_stack": 3}),
        ((4, 8, 8), {"frame_stack": 5}),
        ((4, 8, 8), {"frame_stack": 3, "stack_axis": 1}),
        ((3,), {"frame_stack": 2}),
        ((), {"frame_stack": 2}),
    ],
)
def test_a_frame_stack_that_does_not_divide_its_axis_is_refused(kind, shape, options):
    with pytest.raises(ValueError, match="frame_stack") as refused:
        kind.make(observation_space=spaces.Box(0, 255, shape, np.uint8), **options)
    assert_tells(refused, str(options["frame_stack"]))


@pytest.mark.parametrize("kind", FLAT, ids=repr)
@pytest.mark.parametrize("frame_stack", [0, -1, 1.5, None, "4", True])
def test_a_frame_stack_that_is_none_is_refused(kind, frame_stack):
    with pytest.raises(ValueError, match="frame_stack"):
        kind.make(observation_space=spaces.Box(0, 255, (4, 8, 8), np.uint8), frame_stack=frame_stack)


@pytest.mark.parametrize("stack_axis", [3, -4, 1.5, "channels"])
def test_a_stack_axis_that_is_not_there_is_refused(stack_axis):
    with pytest.raises(ValueError, match="stack_axis"):
        BY_NAME["replay"].make(
            observation_space=spaces.Box(0, 255, (4, 8, 8), np.uint8), frame_stack=4, stack_axis=stack_axis
        )


@pytest.mark.parametrize("shape", [(-1,), "3", 2.5, None])
def test_a_reward_shape_that_is_none_is_refused(kind, shape):
    with pytest.raises(ValueError, match="reward_shape"):
        kind.make(reward_shape=shape)


@pytest.mark.parametrize("autoreset", ["nextstep", "", 1, "Enabled"])
def test_an_unknown_autoreset_mode_is_refused_and_the_known_are_named(kind, autoreset):
    with pytest.raises(ValueError, match="autoreset") as refused:
        kind.make(autoreset=autoreset)
    assert_tells(refused, "NextStep", "SameStep", "Disabled")


@pytest.mark.parametrize("dtype", ["float99", 3, torch.complex64])
def test_a_dtype_that_cannot_be_served_is_refused(kind, dtype):
    with pytest.raises(ValueError, match="dtype"):
        kind.make(dtype=dtype)


WAVES = {"shape": (2,), "dtype": "complex64"}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"observation_space": {"sound": WAVES, "level": {"shape": (1,)}}}, 'observations["sound"]'),
        ({"action_space": {**WAVES, "type": "Box"}}, "actions"),
    ],
    ids=["observations", "actions"],
)
def test_complex_spaces_are_refused_by_name(given, name, tmp_path):
    options = {"storage_size": 10, "num_envs": 2, "memory": "mapped", "path": tmp_path / "rows"}
    spaces_given = {"observation_space": BOX, "action_space": spaces.Discrete(2), **given}
    with pytest.raises(InvalidInputError, match="real numbers only") as refused:
        ReplayStorage(**spaces_given, **options)
    assert_tells(refused, name, "complex64", "ReplayStorage", "Nothing was allocated")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["observations", "actions"])
def test_a_complex_first_sample_is_refused_by_name(name):
    storage = ReplayStorage.create_factory(10)("cpu", None, None)
    one = torch.ones(2, 1)
    sample = {"observations": one, "actions": one, "rewards": [1.0, 1.0], "next_observations": one}
    sample |= {"terminated": [0, 0], "truncated": [0, 0]}
    with pytest.raises(InvalidInputError, match="real numbers only") as refused:
        storage.insert_transition({**sample, name: one * 1j})
    assert_tells(refused, name, "complex64", "the first sample")
    storage.insert_transition(sample)  # it left no shapes behind
    assert len(storage) == 2


# ------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("memory", ["disk", "", None, 1, "RAM"])
def test_an_unknown_kind_of_memory_is_refused_and_the_known_are_named(kind, memory):
    with pytest.raises(ValueError, match="memory") as refused:
        kind.make(memory=memory)
    assert_tells(refused, "ram", "shared", "mapped")


def test_a_mapped_storage_needs_a_path(kind):
    with pytest.raises(ValueError, match="path"):
        kind.make(memory="mapped")


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_a_path_that_would_be_ignored_is_refused(kind, memory, tmp_path):
    with pytest.raises(ValueError, match="path"):
        kind.make(memory=memory, path=tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("memory", ["ram", "shared", "mapped"])
def test_what_cannot_fit_is_refused_with_the_bytes_it_would_need(kind, memory, tmp_path):
    """A petabyte of rows, told before any is asked for."""
    options = {"path": tmp_path / "folder"} if memory == "mapped" else {}
    with pytest.raises(MemoryError) as refused:
        kind.make(storage_size=10**14, memory=memory, **options)
    assert isinstance(refused.value, DoesNotFitError)
    assert_tells(refused, "B", "storage_size")
    assert any(character.isdigit() for character in str(refused.value))
    assert not (tmp_path / "folder").exists()
