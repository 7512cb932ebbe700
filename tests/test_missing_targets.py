"""Returns and advantages that nobody has written are NaN, warned of or refused; and names that are almost right."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import DecoupledRolloutStorage, NotReadyError, RolloutStorage, Storage

ENVS, STEPS = 2, 3


def transition_of(step, **attributes):
    ids = torch.arange(1.0, ENVS + 1) + step * ENVS
    transition = RolloutStorage.Transition()
    transition.observations = TensorDict({"policy": ids.view(ENVS, 1)}, batch_size=[ENVS])
    transition.actions, transition.rewards, transition.dones = ids.view(ENVS, 1), ids, torch.zeros(ENVS)
    transition.values = transition.actions_log_prob = ids
    for name, value in attributes.items():
        setattr(transition, name, value)
    return transition


class Rollouts:
    """RolloutStorage: how it is made and filled, and its documented generators."""

    def make(self):
        obs = TensorDict({"policy": torch.zeros(ENVS, 1)}, batch_size=[ENVS])
        return RolloutStorage("rl", ENVS, STEPS, obs, [1], seed=0)

    def fill(self, storage):
        storage.clear()
        for step in range(STEPS):
            storage.add_transition(transition_of(step))
        return storage

    def compute(self, storage):
        storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)

    def batches(self, storage):
        return [list(storage.mini_batch_generator(2, 1)), list(storage.recurrent_mini_batch_generator(1, 1))]


class Decoupled:
    """The same of DecoupledRolloutStorage."""

    def make(self):
        return DecoupledRolloutStorage(
            spaces.Box(-9, 9, (1,)), spaces.Discrete(99), num_steps=STEPS, num_envs=ENVS, seed=0
        )

    def fill(self, storage):
        for step in range(STEPS):
            ids, flags = torch.arange(1.0, ENVS + 1) + step * ENVS, torch.zeros(ENVS)
            storage.add(ids.view(ENVS, 1), ids, ids, flags, flags, ids.view(ENVS, 1) + ENVS, ids, ids, ids)
        return storage

    def compute(self, storage):
        storage.compute_returns_and_advantages(torch.zeros(ENVS))

    def batches(self, storage):
        return [list(storage.sample(2))]


class Critic:
    def get_values(self, observations):
        return torch.zeros(ENVS)


FAMILIES = {"rollout": Rollouts(), "decoupled": Decoupled()}
WORDS = "the returns and advantages of this rollout are NaN: they were not computed since it began"


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def assert_missing(family, storage):
    """The storage warns once, serves NaN, and refuses dicts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        served = [family.batches(storage) for _ in range(2)]
    assert [str(warning.message)[: len(WORDS)] for warning in caught] == [WORDS]
    assert (caught[0].category, caught[0].filename) == (RuntimeWarning, __file__)
    for batch in (batch for epochs in served for epoch in epochs for batch in epoch):
        assert batch.returns.isnan().all()
        assert batch.advantages.isnan().all()
        assert batch.values.isfinite().all()
    before = storage._generator.get_state()
    with pytest.raises(
        NotReadyError, match=r"were not computed since it began; call compute_returns.*before_gradients\(\)"
    ):
        next(storage.generate_batches(1))
    assert torch.equal(storage._generator.get_state(), before)


def assert_served(family, storage):
    """Warnings are errors here."""
    family.batches(storage)
    assert len(list(storage.generate_batches(2))) == 2


def test_nobody_has_written_them(family):
    storage = family.fill(family.make())
    assert storage.returns.isnan().all()
    assert storage.advantages.isnan().all()
    assert_missing(family, storage)


def test_those_of_the_rollout_before_do_not_count(family):
    storage = family.fill(family.make())
    family.compute(storage)
    assert_served(family, storage)
    assert_missing(family, family.fill(storage))


def test_recurrent_dicts_are_refused_too():
    storage = Rollouts().fill(Rollouts().make())
    with pytest.raises(NotReadyError, match="were not computed"):
        next(storage.generate_batches(1, recurrent=True))


def write_rows(storage):
    for t in range(STEPS):
        storage.returns[t] = 1.0
    storage.advantages = storage.returns - 0.5


def write_by_numpy(storage):
    storage.returns.numpy()[:] = 1.0


def write_in_inference_mode(storage):
    with torch.inference_mode():
        storage.returns[:] = 1.0


def rebind(storage):
    storage.returns, storage.advantages = torch.ones_like(storage.returns), torch.zeros_like(storage.returns)


WAYS = {
    "rows": write_rows,
    "numpy": write_by_numpy,
    "inference mode": write_in_inference_mode,
    "other tensors": rebind,
    "one value": lambda storage: storage.advantages[0].fill_(2.0),
    "before_gradients": lambda storage: storage.before_gradients(Critic()),
}


@pytest.mark.parametrize("way", WAYS)
def test_whoever_writes_them_is_noticed_in_every_rollout(family, way):
    storage = family.make()
    for _ in range(3):
        family.fill(storage)
        if way == "before_gradients" and isinstance(storage, RolloutStorage):
            storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)
        else:
            WAYS[way](storage)
        assert_served(family, storage)


def test_a_tensor_taken_before_may_be_written_into(family):
    storage = family.make()
    returns = storage.returns
    numbers = storage.returns.numpy()
    for write in (lambda: returns.fill_(1.0), lambda: numbers.fill(1.0)):
        family.fill(storage)
        write()
        assert_served(family, storage)
        assert storage.returns.eq(1).all()


def test_targets_that_were_computed_and_are_nan_are_served(family):
    storage = family.fill(family.make())
    storage.values[:] = torch.nan
    family.compute(storage)
    assert storage.returns.isnan().all()
    assert_served(family, storage)


def test_a_refused_step_leaves_those_of_the_rollout_before():
    storage = Rollouts().fill(Rollouts().make())
    storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)
    before = storage.returns.clone()
    storage.clear()
    with pytest.raises(ValueError, match="rewards"):
        storage.add_transition(transition_of(0, rewards=torch.zeros(ENVS + 1)))
    assert torch.equal(storage.returns, before)
    storage.add_transition(transition_of(0))
    assert storage.returns.isnan().all()


ADDED = (
    r"the returns and advantages of the newest steps are NaN: they were computed when the rollout had 2 steps, and now "
    r"it has 3; call compute_returns\(\)"
)


def partly_computed():
    """Two steps with targets, and one that was added behind them."""
    family = Rollouts()
    storage = family.make()
    for step in range(2):
        storage.add_transition(transition_of(step))
    storage.compute_returns(torch.zeros(ENVS), 0.5, 0.5, normalize_advantage=False)
    storage.add_transition(transition_of(2))
    return storage


def test_those_of_steps_that_were_added_later_are_missing():
    storage = partly_computed()
    # Rewards and values alike are 1, 2 and then 3, 4: 3 + 0 - 3, and 1 + 3/2 - 1 in the step before.
    assert storage.advantages[:2, :, 0].tolist() == [[1.5, 2.0], [0.0, 0.0]]
    assert storage.advantages[2].isnan().all()
    for recurrent in (False, True):
        with pytest.raises(NotReadyError, match=ADDED):
            next(storage.generate_batches(1, recurrent=recurrent))
    with pytest.warns(RuntimeWarning, match=ADDED):
        assert next(storage.mini_batch_generator(1, 1)).advantages.isnan().sum() == ENVS
    Rollouts().compute(storage)
    assert_served(Rollouts(), storage)
    assert storage.advantages.isfinite().all()


@pytest.mark.parametrize("write", [lambda block: block[2].fill_(7.0), lambda block: block.numpy()[2].fill(7.0)])
@pytest.mark.parametrize("name", ["returns", "advantages"])
def test_those_of_steps_that_were_added_later_may_be_written_by_a_program(write, name):
    storage = partly_computed()
    storage.advantages /= 2  # what was computed is changed in place: that says nothing of the step behind it
    with pytest.raises(NotReadyError, match=ADDED):
        next(storage.generate_batches(1))
    write(getattr(storage, name))
    assert_served(Rollouts(), storage)


@pytest.mark.parametrize("again", ["deepcopy", "pickle", "saved"])
def test_copies_know_that_steps_were_added_later(again, tmp_path):
    storage = partly_computed()
    twin = copy.deepcopy(storage) if again == "deepcopy" else pickle.loads(pickle.dumps(storage))
    if again == "saved":
        storage.save(tmp_path / "snapshot")
        twin = Storage.load(tmp_path / "snapshot")
    with pytest.raises(NotReadyError, match=ADDED):
        next(twin.generate_batches(1))
    Rollouts().compute(twin)
    assert_served(Rollouts(), twin)


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage)), "saved", "inserted"],
    ids=["deepcopy", "pickle", "saved", "inserted"],
)
@pytest.mark.parametrize("computed", [False, True])
def test_copies_know_it(family, again, computed, tmp_path):
    storage = family.fill(family.make())
    if computed:
        family.compute(storage)
    if again == "saved":
        storage.save(tmp_path / "snapshot")
        twin = Storage.load(tmp_path / "snapshot")
    elif again == "inserted":
        twin = family.make()
        twin.insert_data_slice(storage.get_all_buffer_data())
    else:
        twin = again(storage)
    torch.testing.assert_close(twin.returns, storage.returns, rtol=0, atol=0, equal_nan=True)
    if computed:
        assert_served(family, twin)
    else:
        assert_missing(family, twin)
    assert_missing(family, family.fill(copy.deepcopy(family.fill(family.make()))))


def test_an_empty_copy_notices_it(family):
    for twin in (copy.deepcopy(family.make()), pickle.loads(pickle.dumps(family.make()))):
        assert_missing(family, family.fill(twin))


def test_distillation_has_none():
    obs = TensorDict({"policy": torch.zeros(ENVS, 1)}, batch_size=[ENVS])
    storage = RolloutStorage("distillation", ENVS, STEPS, obs, [1])
    for step in range(STEPS):
        storage.add_transition(transition_of(step, privileged_actions=torch.zeros(ENVS, 1)))
    assert len(list(storage.generator())) == STEPS
    assert len(list(storage.generate_batches(1))) == 1


# ---------------------------------------------------------------------------------------------------- almost right


@pytest.mark.parametrize(("name", "meant"), [("truncted", "truncated"), ("final_value", "final_values")])
def test_an_attribute_that_is_almost_one_that_is_not_set_is_warned_of_once(name, meant):
    storage, flags = Rollouts().make(), torch.ones(ENVS, dtype=torch.bool)
    with pytest.warns(RuntimeWarning, match=f"the transition has '{name}', which is not stored, and no '{meant}'"):
        storage.add_transition(transition_of(0, **{name: flags}))
    assert storage.step == 1
    Rollouts().fill(storage)  # and never again
    storage.clear()
    storage.add_transition(transition_of(0, **{name: flags}))


def test_an_extra_field_is_meant_too():
    obs = TensorDict({"policy": torch.zeros(ENVS, 1)}, batch_size=[ENVS])
    storage = RolloutStorage("rl", ENVS, STEPS, obs, [1], extra_fields={"costs": ((), torch.float32)})
    storage.add_transition(transition_of(0, costs=torch.zeros(ENVS), cost=torch.ones(ENVS)))  # costs is set


def test_other_attributes_are_nobody_s_business():
    storage, flags = Rollouts().make(), torch.zeros(ENVS, dtype=torch.bool)
    own = {"amp_observations": flags, "privileged_observations": flags, "next_observations": flags, "id": 7}
    storage.add_transition(transition_of(0, **own, truncted=None, truncated=flags, truncateds=flags))
    storage.add_transition(transition_of(1, **own))
    assert storage.step == 2
