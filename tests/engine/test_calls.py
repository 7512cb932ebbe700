"""Arguments with names that a constructor or a factory does not know: the error says which was meant."""

from __future__ import annotations

import inspect

import pytest
import torch
from gymnasium import spaces

from rlstore import (
    DecoupledRolloutStorage,
    DistributedStorage,
    HindsightReplayStorage,
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    RolloutStorage,
    SequenceReplayStorage,
    UnknownParameterError,
)
from rlstore.engine.calls import did_you_mean, explained
from rlstore.errors import InvalidCallError

BOX, MOVES = spaces.Box(-1, 1, (3,)), spaces.Discrete(4)
REPLAY = [
    *(ReplayStorage, NStepReplayStorage, PrioritizedReplayStorage, SequenceReplayStorage),
    HindsightReplayStorage,
]
MEANT = {
    **{(kind, given): "storage_size" for kind in REPLAY for given in ("buffer_size", "capacity", "max_size")},
    **{(kind, "n_envs"): "num_envs" for kind in (*REPLAY, RolloutStorage, DecoupledRolloutStorage)},
    **{(kind, "obs_space"): "observation_space" for kind in (*REPLAY, DecoupledRolloutStorage, DistributedStorage)},
    (ReplayStorage, "gamma"): "discount",
    (ReplayStorage, "n_steps"): "n_step",
    (NStepReplayStorage, "nstep"): "n_step",
    (PrioritizedReplayStorage, "alfa"): "alpha",
    (PrioritizedReplayStorage, "betas"): "beta",
    (SequenceReplayStorage, "seq_len"): "sequence_length",
    (RolloutStorage, "num_steps"): "num_transitions_per_env",
    (RolloutStorage, "gae_lambda"): "lam",
    (RolloutStorage, "action_shape"): "actions_shape",
    (DecoupledRolloutStorage, "n_steps"): "num_steps",
    (DecoupledRolloutStorage, "gamma"): "discount",
    (DecoupledRolloutStorage, "lam"): "gae_lambda",
    (DistributedStorage, "unroll_length"): "num_steps",
    (DistributedStorage, "num_buffers"): "num_storages",
}


@pytest.mark.parametrize(("kind", "given"), MEANT, ids=[f"{kind.__name__} {given}" for kind, given in MEANT])
def test_a_near_name_is_named(kind, given):
    with pytest.raises(TypeError) as refused:
        kind(BOX, MOVES, **{given: 4})
    assert isinstance(refused.value, InvalidInputError)
    message = str(refused.value)
    assert message.startswith(f"{kind.__name__}() has no argument {given!r}. Did you mean {MEANT[kind, given]!r}? ")
    assert "It takes " in message


def test_a_name_that_is_near_to_none_lists_what_there_is():
    with pytest.raises(TypeError, match=r"has no argument 'colour'\. It takes observation_space, action_space, dev"):
        ReplayStorage(BOX, MOVES, colour=3)


@pytest.mark.parametrize("kind", REPLAY)
def test_a_factory_refuses_at_once_what_its_storages_would(kind):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) has no argument 'bath_size'. Did you mean 'batch_size'"):
        kind.create_factory(100, BOX, MOVES, 4, bath_size=3)


@pytest.mark.parametrize("kind", [RolloutStorage, DecoupledRolloutStorage, DistributedStorage])
def test_a_factory_of_rollouts(kind):
    with pytest.raises(TypeError, match=r"create_factory\(\) has no argument 'buffer_size'. Did you mean 'size'"):
        kind.create_factory(5, buffer_size=3)


def test_missing_and_superfluous_arguments():
    with pytest.raises(InvalidCallError, match=r"ReplayStorage\(\) missing 2 required .* It takes observation_space"):
        ReplayStorage()
    with pytest.raises(InvalidCallError, match=r"DistributedStorage\(\) takes .* positional .* It takes observation_"):
        DistributedStorage(BOX, MOVES, "cpu", 1, 2, 3, 4, 5)


def test_errors_inside_a_function_are_left_alone():
    @explained
    def broken(number: int) -> int:
        return number + "1"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand") as raised:
        broken(1)
    assert not isinstance(raised.value, InvalidInputError)


def test_a_subclass_may_take_more():
    class Mine(ReplayStorage):
        def __init__(self, colour: str, **arguments: object) -> None:
            super().__init__(BOX, MOVES, **arguments)  # type: ignore[arg-type]
            self.colour = colour

    assert Mine("red", storage_size=10).colour == "red"
    with pytest.raises(TypeError, match=r"ReplayStorage\(\) has no argument 'capacity'. Did you mean 'storage_size'"):
        Mine("red", capacity=10)


def test_the_signature_stays_visible():
    assert list(inspect.signature(ReplayStorage).parameters)[:3] == ["observation_space", "action_space", "device"]
    assert inspect.signature(RolloutStorage.create_factory).parameters["training_type"].default == "rl"


@pytest.mark.parametrize(
    ("name", "meant"), [("gamma", "discount"), ("buffer_size", "storage_size"), ("bath_size", "batch_size")]
)
def test_update_storage_parameter(name, meant):
    storage = ReplayStorage(BOX, MOVES, storage_size=10)
    with pytest.raises(UnknownParameterError, match=f"no parameter '{name}'.*Did you mean '{meant}'"):
        storage.update_storage_parameter(name, 3)


def test_samples_and_extra_fields():
    storage = ReplayStorage(BOX, MOVES, storage_size=10, extra_fields={"costs": ((), torch.float32)})
    with pytest.raises(InvalidInputError, match=r"cannot hold.*'obs'.*Did you mean 'observations'"):
        storage.insert_transition({"obs": torch.zeros(1, 3)})
    step = [torch.zeros(1, 3), [0], [0.0], [False], [False], {}, torch.zeros(1, 3)]
    with pytest.raises(InvalidInputError, match=r"'cost'.*Did you mean 'costs'\? Nothing was written"):
        storage.add(*step, cost=[1.0])
    assert len(storage) == 0


def test_nothing_is_near_to_what_is_no_name():
    assert did_you_mean(3, ["batch_size"]) == ""
    assert did_you_mean(None, ["batch_size"]) == ""
