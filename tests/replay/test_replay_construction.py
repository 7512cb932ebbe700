"""Replay storages that cannot be: what their constructors refuse, and what is just possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nstep_steps import BOX
from replay_kinds import FLAT, KINDS, PRIORITIZED, assert_tells

from rlstore import DoesNotFitError, InvalidInputError, ReplayStorage, StorageError

NAN, INF = float("nan"), float("inf")
BY_NAME = {kind.name: kind for kind in KINDS}
SEQUENCE, HINDSIGHT = BY_NAME["sequence"], BY_NAME["hindsight"]
WITHOUT_SEQUENCES = [kind for kind in KINDS if "sequence" not in kind.name]
WITH_N_STEP = [kind for kind in WITHOUT_SEQUENCES if kind is not HINDSIGHT]
NO_SIZE = (0, -1, 2.5, None, "3", True)
FRAMES = spaces.Box(0, 255, (4, 8, 8), np.uint8)

# Options that are refused: (name of the option, kinds that have it, values).
REFUSED = [
    ("storage_size", KINDS, (0, -1, 2.5, "3", True)),
    ("num_envs", KINDS, (0, -1, 2.5, "3", True)),
    ("batch_size", KINDS, (0, -1, 2.5, "3", True)),
    ("device", KINDS, ("toaster", "cuda:99", "meta", 3.5, None)),
    ("seed", KINDS, (-1, 1.5, "7", 2**64)),
    ("observation_space", KINDS, (None,)),
    ("action_space", KINDS, (None,)),
    ("reward_shape", KINDS, ((-1,), "3", 2.5, None)),
    ("dtype", KINDS, ("float99", 3, torch.complex64)),
    ("n_step", WITH_N_STEP, NO_SIZE),
    ("discount", WITHOUT_SEQUENCES, (-0.1, 1.1, NAN, INF, None, "0.9", True)),
    ("sequence_length", [SEQUENCE], NO_SIZE),
    ("burn_in", [SEQUENCE], (-1, 1.5, None, "1", True)),
    ("overlap", [SEQUENCE], (-1, 3, 4, 1.5, None, True)),
    ("hidden_shape", [SEQUENCE], ((2,), (1, -1), "a", 5, ((1, 2), (1, "b")), ((1, 2), 3))),
    ("alpha", PRIORITIZED, (-0.1, NAN, INF, None, "0.6")),
    ("beta", PRIORITIZED, (-0.1, 1.1, NAN, INF, None, "0.4")),
    ("beta_steps", PRIORITIZED, (0, -5, 1.5, "100")),
    ("compute_reward", [HINDSIGHT], (None, 1.0, "sparse")),
    ("relabel_fraction", [HINDSIGHT], (-0.1, 1.1, NAN, None, "0.8")),
]
# Options of a few names: (name, kinds, values, the names that the error lists).
NAMES = [
    ("autoreset", KINDS, ("nextstep", "", 1, "Enabled"), ("NextStep", "SameStep", "Disabled")),
    ("memory", KINDS, ("disk", "", None, 1, "RAM"), ("ram", "shared", "mapped")),
    ("strategy", [HINDSIGHT], ("past", "", None, 3), ("future", "final", "episode")),
]


@pytest.fixture(params=KINDS, ids=repr)
def kind(request):
    return request.param


@pytest.mark.parametrize(("name", "kinds", "values"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_an_option_out_of_range_is_refused_by_name(name, kinds, values):
    for kind in kinds:
        for value in values:
            with pytest.raises((ValueError, TypeError), match=name) as refused:
                kind.make(**{"storage_size": 12, name: value})
            assert isinstance(refused.value, StorageError), (kind, value)


@pytest.mark.parametrize(("name", "kinds", "values", "known"), NAMES, ids=[name for name, *_ in NAMES])
def test_an_unknown_name_is_refused_and_the_known_are_listed(name, kinds, values, known):
    for kind in kinds:
        for value in values:
            with pytest.raises(ValueError, match=name) as refused:
                kind.make(**{name: value})
            assert_tells(refused, *known)


def test_a_storage_smaller_than_its_environments_is_refused(kind):
    with pytest.raises(ValueError, match="storage_size") as refused:
        kind.make(storage_size=3, num_envs=4)
    assert_tells(refused, "3", "4")


def test_an_unknown_argument_is_refused(kind):
    with pytest.raises(TypeError, match="buffer_size"):
        kind.make(buffer_size=100)


def test_a_space_without_a_shape_is_refused(kind):
    with pytest.raises(ValueError, match="shape"):
        kind.make(action_space={"type": "Box"})


@pytest.mark.parametrize("kind", WITH_N_STEP, ids=repr)
def test_n_steps_longer_than_the_storage_are_refused(kind):
    """11 transitions of 2 environments: 5 steps each."""
    with pytest.raises(ValueError, match="n_step") as refused:
        kind.make(n_step=6, storage_size=11)
    assert_tells(refused, "n_step", "6", "5", "storage_size")
    kind.make(n_step=5, storage_size=11).close()


@pytest.mark.parametrize(("sequence_length", "burn_in"), [(7, 0), (6, 1), (1, 6)])
def test_sequences_longer_than_the_storage_are_refused(sequence_length, burn_in):
    with pytest.raises(ValueError, match="sequence_length") as refused:
        SEQUENCE.make(steps=6, sequence_length=sequence_length, burn_in=burn_in)
    assert_tells(refused, "7", "6", "storage_size")
    SEQUENCE.make(steps=7, sequence_length=sequence_length, burn_in=burn_in)


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
        HINDSIGHT.make(observation_space=space)


@pytest.mark.parametrize("kind", FLAT, ids=repr)
def test_a_frame_stack_that_does_not_divide_its_axis_is_refused(kind):
    for shape, options in (
        ((4, 8, 8), {"frame_stack": 3}),
        ((8, 8, 4), {"frame_stack": 3}),
        ((4, 8, 8), {"frame_stack": 5}),
        ((4, 8, 8), {"frame_stack": 3, "stack_axis": 1}),
        ((3,), {"frame_stack": 2}),
        ((), {"frame_stack": 2}),
    ):
        with pytest.raises(ValueError, match="frame_stack") as refused:
            kind.make(observation_space=spaces.Box(0, 255, shape, np.uint8), **options)
        assert_tells(refused, str(options["frame_stack"]))
    for frame_stack in (0, -1, 1.5, None, "4", True):
        with pytest.raises(ValueError, match="frame_stack"):
            kind.make(observation_space=FRAMES, frame_stack=frame_stack)


@pytest.mark.parametrize("stack_axis", [3, -4, 1.5, "channels"])
def test_a_stack_axis_that_does_not_exist_is_refused(stack_axis):
    with pytest.raises(ValueError, match="stack_axis"):
        BY_NAME["replay"].make(observation_space=FRAMES, frame_stack=4, stack_axis=stack_axis)


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


def test_a_path_belongs_to_mapped_memory_and_to_nothing_else(kind, tmp_path):
    with pytest.raises(ValueError, match="path"):
        kind.make(memory="mapped")
    for memory in ("ram", "shared"):
        with pytest.raises(ValueError, match="path"):
            kind.make(memory=memory, path=tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("memory", ["ram", "shared", "mapped"])
def test_what_cannot_fit_is_refused_with_the_bytes_it_would_need(memory, tmp_path):
    """A petabyte of rows, refused before any is asked for."""
    options = {"path": tmp_path / "folder"} if memory == "mapped" else {}
    for kind in KINDS:
        with pytest.raises(MemoryError) as refused:
            kind.make(storage_size=10**14, memory=memory, **options)
        assert isinstance(refused.value, DoesNotFitError)
        assert_tells(refused, "B", "storage_size")
        assert any(character.isdigit() for character in str(refused.value))
        assert not (tmp_path / "folder").exists()
