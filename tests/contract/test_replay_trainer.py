"""One trainer over every replay storage, which knows nothing of the class but the ten methods of Storage."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from combinations import pairs
from gymnasium import spaces
from replay_cases import ENDS, ENVS, REPLAY_CASES, SIZE, STEPS, ReplayCase, check_batch, collect, ids_in
from rollout_model import leaves, same_data
from storages import Algorithm
from where import SEES_VALUES

from rlstore import (
    NotReadyError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    RateLimit,
    ReplayStorage,
    SequenceReplayStorage,
    Storage,
    WaitTimeoutError,
)

# ------------------------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize(("replay", "prepared", "workers_way"), pairs(REPLAY_CASES, [True, False], [True, False]))
def test_one_loop_drives_every_replay_storage(replay, prepared, workers_way):
    storage = replay.make()
    if prepared:
        storage.init_tensors(replay.sample(900))
        assert len(storage) == 0
    seen = set()
    for rollout in range(3):
        collect(replay, storage, first=rollout * 4, steps=4)
        storage.before_gradients(None, Algorithm()) if workers_way else storage.before_gradients()
        newest = 4 * (rollout + 1)
        held = range(max(0, newest - STEPS), newest)
        assert len(storage) == len(held) * ENVS
        batches = list(storage.generate_batches(5, 8, 4))
        assert len(batches) == 20
        for batch in batches:
            seen |= set(check_batch(replay, batch, 8, held))
        info = {"loss": rollout}
        done = storage.after_gradients(batch, info) if workers_way else storage.after_gradients(None, None, info)
        assert done["loss"] == rollout
        assert done["storage_size"] == len(storage)
    assert seen == set(range(12 * ENVS))


@pytest.mark.parametrize(
    "replay", [case for case in REPLAY_CASES if case.name.endswith("prioritized")], ids=lambda case: case.name
)
def test_priorities_come_back_through_after_gradients(replay):
    storage = replay.make()
    collect(replay, storage)
    for way in range(2):
        batch = next(storage.generate_batches(1, 4))
        rows = batch["rows"].unique()
        info = {"priorities": torch.arange(1.0, len(rows) + 1)}
        done = (
            storage.after_gradients({"rows": rows}, info)
            if way
            else storage.after_gradients(None, None, {**info, "rows": rows})
        )
        alpha = storage.alpha
        assert storage.priorities(rows).flatten().tolist() == pytest.approx(
            [(place + 1) ** alpha for place in range(len(rows))], rel=1e-6
        )
        assert done["stale_updates"] == 0


def test_draws_are_proportional_to_what_is_held(replay):
    """Every transition and every window of one step counts 1, new ones with priorities too."""
    storage = replay.make()
    assert storage.draw_total == 0.0
    collect(replay, storage, steps=3)
    assert storage.draw_total == 3.0 * ENVS
    storage.reset()
    assert storage.draw_total == 0.0


def test_environments_that_sat_out_are_masked_in_samples(replay):
    storage = replay.make()
    storage.insert_transition(replay.sample(0))
    storage.insert_transition({**replay.sample(1), "masks": torch.tensor([True, False])})
    assert len(storage) == 3
    data = storage.get_all_buffer_data()
    assert data["masks"].tolist() == [[True, True], [True, False]]
    assert ids_in(data["observations"]).tolist() == [[1.0, 2.0], [3.0, 0.0]]


def test_a_loop_in_inference_mode_leaves_batches_to_learn_from(replay):
    storage = replay.make()
    with torch.inference_mode():
        collect(replay, storage)
    for batch in storage.generate_batches(2, 4, 2):
        rows = check_batch(replay, batch, 4, range(STEPS))
        weight = torch.ones(1, requires_grad=True)
        (batch["actions"][..., 0] * weight).sum().backward()
        assert weight.grad.item() == sum(rows) + 4
        batch["rewards"].add_(1)
    collect(replay, storage, first=STEPS, steps=2)


def test_what_a_learner_does_to_a_batch_stays_with_it(replay):
    storage = replay.make()
    collect(replay, storage)
    kept = []
    for batch in storage.generate_batches(5, 4, 4):
        check_batch(replay, batch, 4, range(STEPS))
        kept.append((batch["actions"], batch["actions"].clone()))
        batch["rewards"].fill_(-99)
        batch["rows"].fill_(0)
    assert all(torch.equal(held, as_served) for held, as_served in kept)


def test_what_an_environment_does_to_its_tensors_is_not_stored(replay):
    storage, twin = replay.make(), replay.make()
    collect(replay, twin)
    for step in range(STEPS):
        sample = replay.sample(step, *ENDS[step % len(ENDS)])
        storage.insert_transition(sample)
        for _, leaf in leaves(sample):
            leaf.fill_(1)
    same_data(twin.get_all_buffer_data(), storage.get_all_buffer_data())


# ------------------------------------------------------------------------------------------------- the whole


@pytest.mark.parametrize("steps", [1, 3, STEPS, STEPS + 3])
def test_all_data_come_out_and_go_into_another(replay, steps):
    storage, other = replay.make(), replay.make()
    collect(replay, storage, steps=steps)
    data = storage.get_all_buffer_data()
    held = range(max(0, steps - STEPS), steps)
    assert ids_in(data["observations"]).tolist() == [[1.0 + step * ENVS, 2.0 + step * ENVS] for step in held]
    same_data(data, storage.get_all_buffer_data(data_to_cpu=True))
    other.insert_data_slice(data)
    same_data(data, other.get_all_buffer_data())
    collect(replay, storage, other, first=steps, steps=2)  # and both go on alike
    same_data(storage.get_all_buffer_data(), other.get_all_buffer_data())


def test_a_slice_is_appended(replay):
    storage, donor = replay.make(), replay.make()
    collect(replay, storage, steps=2)
    collect(replay, donor, first=2, steps=5)
    storage.insert_data_slice(donor.get_all_buffer_data())
    numbers = ids_in(storage.get_all_buffer_data()["observations"])
    assert numbers.tolist() == [[1.0 + step * ENVS, 2.0 + step * ENVS] for step in range(1, 7)]
    for batch in storage.generate_batches(3, 8):
        check_batch(replay, batch, 8, range(1, 7))


def test_an_empty_slice_adds_nothing(replay):
    storage = replay.make()
    assert storage.get_all_buffer_data() == {}
    storage.insert_data_slice({})
    assert len(storage) == 0
    collect(replay, storage)
    before = storage.get_all_buffer_data()
    storage.insert_data_slice({})
    same_data(before, storage.get_all_buffer_data())


def test_what_is_given_out_and_taken_in_are_copies(replay):
    storage, other = replay.make(), replay.make()
    collect(replay, storage)
    data = storage.get_all_buffer_data()
    other.insert_data_slice(data)
    for _, leaf in leaves(data):
        leaf.zero_()
    same_data(storage.get_all_buffer_data(), other.get_all_buffer_data())
    assert ids_in(storage.get_all_buffer_data()["observations"])[0].tolist() == [1.0, 2.0]


def test_reset_makes_it_empty(replay):
    storage, fresh = replay.make(), replay.make()
    collect(replay, storage, first=50)
    storage.reset()
    assert len(storage) == 0
    assert storage.get_all_buffer_data() == {}
    with pytest.raises(RuntimeError, match="no data"):
        next(storage.generate_batches(1, 1))
    collect(replay, storage, fresh)
    same_data(fresh.get_all_buffer_data(), storage.get_all_buffer_data())


TWINS = [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))]


@pytest.mark.parametrize(("replay", "twin_of", "steps"), pairs(REPLAY_CASES, TWINS, [0, 2, STEPS + 1]))
def test_a_copy_goes_on_in_the_same_way(replay, twin_of, steps):
    storage = replay.make()
    collect(replay, storage, steps=steps)
    twin = twin_of(storage)
    assert type(twin) is type(storage)
    collect(replay, storage, twin, first=steps, steps=2)
    same_data(storage.get_all_buffer_data(), twin.get_all_buffer_data())
    drawn = [[batch["rows"].tolist() for batch in one.generate_batches(3, 4)] for one in (storage, twin)]
    assert drawn[0] == drawn[1]
    storage.reset()
    assert len(twin) == min(steps + 2, STEPS) * ENVS


# ------------------------------------------------------------------------------------------------- the size


def test_the_size_of_a_factory_is_that_along_the_time_axis(replay):
    """``size`` steps of each environment, whatever their number, which the first sample tells."""
    storage = replay.cls.create_factory(4, **replay.options)("cpu")
    assert (storage.max_size, storage.storage_size, storage.num_envs) == (4, None, None)
    assert "4 steps of each environment" in repr(storage)
    collect(replay, storage)
    assert (storage.max_size, storage.storage_size, storage.num_envs) == (4, 4 * ENVS, ENVS)
    assert len(storage) == 4 * ENVS
    assert ids_in(storage.get_all_buffer_data()["observations"])[0].tolist() == [1.0 + 2 * ENVS, 2.0 + 2 * ENVS]


def test_the_size_of_a_factory_that_is_told_the_environments_is_known_at_once(replay):
    storage = replay.cls.create_factory(4, num_envs=ENVS, **replay.options)("cpu")
    assert (storage.max_size, storage.storage_size) == (4, 4 * ENVS)
    for size in (0, -1, 2.5, None, True):
        with pytest.raises(ValueError, match="size is"):
            replay.cls.create_factory(size, **replay.options)
        with pytest.raises(ValueError, match=r"num_envs|environments"):
            replay.cls.create_factory(4, num_envs=size or 0, **replay.options)("cpu").init_tensors({})


@pytest.mark.parametrize("way", ["saved", "pickled", "copied"])
def test_a_storage_that_waits_for_its_first_sample_keeps_its_size(replay, way, tmp_path):
    storage = replay.cls.create_factory(4, **replay.options)("cpu")
    if way == "saved":
        storage.save(tmp_path)
        twin = Storage.load(tmp_path)
        if "compute_reward" in replay.options:
            twin.compute_reward = replay.options["compute_reward"]
    else:
        twin = copy.deepcopy(storage) if way == "copied" else pickle.loads(pickle.dumps(storage))
    for one in (twin, storage):
        assert (one.max_size, one.storage_size) == (4, None)
        collect(replay, one)
        assert (one.max_size, one.storage_size, len(one)) == (4, 4 * ENVS, 4 * ENVS)
    twin.save(tmp_path / "filled")
    assert Storage.load(tmp_path / "filled").max_size == 4


def test_n_steps_fit_into_a_factory_of_so_many_steps():
    """Of 4 transitions in all, 2 environments would have 2 steps each: fewer than the 3 of n_step."""
    storage = NStepReplayStorage.create_factory(4, num_workers=0)("cpu")
    collect(REPLAY_CASES[2], storage)
    assert (storage.n_step, len(storage)) == (3, 8)


def test_the_size_of_a_storage_that_waits_can_be_changed(replay):
    storage = replay.cls.create_factory(4, **replay.options)("cpu")
    storage.update_storage_parameter("storage_size", 3 * ENVS)  # from now on the size of all of them
    collect(replay, storage)
    assert (storage.max_size, storage.storage_size, len(storage)) == (3, 3 * ENVS, 3 * ENVS)


# ------------------------------------------------------------------------------------------------- in order


@pytest.mark.parametrize(("replay", "steps"), pairs(REPLAY_CASES, [3, STEPS, STEPS + 4]))
def test_batches_in_order_are_the_rows_of_all_data_in_each_epoch_from_the_first(replay, steps):
    storage = replay.make()
    collect(replay, storage, steps=steps)
    held = range(max(0, steps - STEPS), steps)
    before = storage.stats()["samples"]
    batches = list(storage.generate_batches(3, 2, 2, shuffle=False))
    assert storage.stats()["samples"] == before + 12
    rows = [check_batch(replay, batch, 2, held) for batch in batches]
    first = held[0] * ENVS
    assert rows == [[first, first + 1], [first + 2, first + 3], [first + 4, first + 5]] * 2
    seen = ids_in(storage.get_all_buffer_data()["observations"]).flatten()
    if replay.cls is SequenceReplayStorage:
        batches = [{"observations": batch["observations"][:, 0]} for batch in batches]
    assert torch.cat([ids_in(batch["observations"]) for batch in batches[:3]]).tolist() == seen[:6].tolist()
    by_place = [batch["rows"].tolist() for batch in storage.generate_batches(3, 2, 1, False)]
    assert by_place == rows[:3]
    random = list(storage.generate_batches(1, 4))  # the documented default
    assert [batch.keys() for batch in random] == [batches[0].keys()] or replay.cls is SequenceReplayStorage


def test_an_epoch_in_order_that_asks_for_more_than_is_held_is_refused(replay):
    storage = replay.make()
    storage.init_tensors(replay.sample(0))
    with pytest.raises(NotReadyError, match="no data"):
        next(storage.generate_batches(1, 1, shuffle=False))
    collect(replay, storage, steps=2)
    assert len(list(storage.generate_batches(2, ENVS, shuffle=False))) == 2
    with pytest.raises(ValueError, match=f"3 mini-batches of {ENVS} .* {2 * ENVS} are held"):
        next(storage.generate_batches(3, ENVS, shuffle=False))


def test_rows_in_order_that_are_overwritten_meanwhile_are_not_served(replay):
    storage = replay.make()
    collect(replay, storage)
    batches = storage.generate_batches(STEPS, ENVS, shuffle=False)
    check_batch(replay, next(batches), ENVS, range(1))
    collect(replay, storage, first=STEPS, steps=1)  # overwrites what was served
    assert check_batch(replay, next(batches), ENVS, range(1, 2)) == [ENVS, ENVS + 1]
    collect(replay, storage, first=STEPS + 1, steps=2)
    with pytest.raises(NotReadyError, match="overwritten"):
        next(batches)


def test_environments_that_sat_out_have_their_oldest_step_first():
    """Steps 0 to 3 of environment 0, and 1 and 3 of environment 1."""
    storage = ReplayStorage.create_factory(4)("cpu")
    for step in range(4):
        storage.insert_transition({**REPLAY_CASES[0].sample(step, (1,)), "masks": torch.tensor([True, step % 2 == 1])})
    data = storage.get_all_buffer_data()
    ids = torch.cat([ids_in(b["observations"]) for b in storage.generate_batches(3, 2, shuffle=False)]).tolist()
    assert ids == ids_in(data["observations"])[data["masks"]].tolist()
    assert ids == [1.0, 4.0, 3.0, 8.0, 5.0, 7.0]


def test_targets_and_weights_in_order():
    """Rewards 1 to 5 of one environment, three steps with a discount of 0.5, and a terminal state after the fourth."""
    storage = PrioritizedReplayStorage(
        spaces.Box(-9, 9, (1,)), spaces.Discrete(2), storage_size=8, n_step=3, discount=0.5, sample_info=True
    )
    for step in range(5):
        storage.add([[step]], [0], [step + 1.0], [step == 3], [False], {}, [[step + 1]])
    storage.update([0, 1], [9.0, 0.0])
    (batch,) = storage.generate_batches(1, 5, shuffle=False)
    assert batch["rewards"].flatten().tolist() == [1 + 1 + 0.75, 2 + 1.5 + 1, 3 + 2, 4, 5]
    assert batch["discounts"].flatten().tolist() == [0.125, 0, 0, 0, 0.5]
    assert batch["weights"].tolist() == [[1.0]] * 5
    assert batch["probabilities"].tolist() == [pytest.approx(0.2)] * 5
    assert batch["draw_counts"].tolist() == [1] * 5


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_windows_in_order_begin_one_after_the_other(alpha):
    """Windows of 3 steps with an overlap of 1: of an episode of 5 steps two, of one of 2 steps a short one."""
    storage = SequenceReplayStorage(
        spaces.Box(-9, 9, (1,)), spaces.Discrete(2), storage_size=9, sequence_length=3, overlap=1, alpha=alpha
    )
    for step in range(7):
        storage.add([[step]], [0], [1.0], [step in (4, 6)], [False], {}, [[step + 1]])
    (batch,) = storage.generate_batches(1, 3, shuffle=False)
    assert batch["observations"].squeeze(-1).tolist() == [[0, 1, 2], [2, 3, 4], [5, 6, 0]]
    assert batch["masks"].sum(1).flatten().tolist() == [3, 3, 2]
    with pytest.raises(ValueError, match=r"2 mini-batches of 2 sequences .* 3 are held"):
        next(storage.generate_batches(2, 2, shuffle=False))


def test_rows_in_order_are_relabeled_at_random():
    case = REPLAY_CASES[-1]
    storage = case.make(relabel_fraction=1.0, strategy="final")
    for step in range(STEPS):
        storage.insert_transition(case.sample(step))
    (batch,) = storage.generate_batches(1, SIZE, shuffle=False)
    assert batch["rows"].tolist() == list(range(SIZE))
    assert batch["observations"]["desired_goal"][:, 0].tolist() == [13.25, 14.25] * STEPS  # after the last step


def test_batches_in_order_count_for_the_rate_limit():
    limit = RateLimit(1.0, 1, 8.0)
    storage = ReplayStorage.create_factory(8, rate_limit=limit, timeout=0.0, batch_size=2)("cpu")
    collect(REPLAY_CASES[0], storage, steps=4)
    served = []
    with pytest.raises(WaitTimeoutError):
        served.extend(storage.generate_batches(4, 2, 5, shuffle=False))
    assert storage.stats()["samples"] < 40


# ------------------------------------------------------------------------------------------------- parameters


def test_parameters_are_changed_for_the_next_batch(replay):
    storage = replay.make()
    collect(replay, storage)
    storage.update_storage_parameter("batch_size", 5)
    assert storage.batch_size == 5
    assert len(next(storage.generate_batches(1, None))["rows"]) == 5
    if "discount" in replay.options:
        storage.update_storage_parameter("discount", 0.125)
        batch = next(storage.generate_batches(1, 40))
        assert set(batch["discounts"].flatten().tolist()) == {0.0, 0.125}


BAD_VALUES = {
    "batch_size": [0, -1, 2.5, None],
    "storage_size": [0, -1, 2.5, None, SIZE + ENVS],
    "discount": [-0.1, 1.5, float("nan"), None],
    "n_step": [0, STEPS + 1, 1.5],
    "beta": [-0.1, 1.5, float("nan")],
}


def test_a_parameter_out_of_range_is_refused_and_nothing_changes(replay):
    storage = replay.make()
    collect(replay, storage)
    before = storage.get_all_buffer_data()
    for name, values in BAD_VALUES.items():
        if not hasattr(storage, name):
            continue
        held = getattr(storage, name)
        for value in values:
            with pytest.raises(ValueError, match=name):
                storage.update_storage_parameter(name, value)
            assert getattr(storage, name) == held
    same_data(before, storage.get_all_buffer_data())


def test_an_unknown_parameter_is_refused_and_the_known_are_named(replay):
    storage = replay.make()
    collect(replay, storage, steps=2)
    for name in ("gama", "_ring", "device", "", "rewards"):
        with pytest.raises(ValueError, match="batch_size") as caught:
            storage.update_storage_parameter(name, 1)
        assert repr(name) in str(caught.value)


@pytest.mark.parametrize("moment", ["new", "allocated", "reset"])
def test_the_size_of_an_empty_replay_storage_can_be_changed(replay, moment):
    storage = replay.make()
    if moment == "allocated":
        storage.init_tensors(replay.sample(0))
    if moment == "reset":
        collect(replay, storage)
        storage.reset()
    storage.update_storage_parameter("storage_size", 4 * ENVS)
    collect(replay, storage)
    assert len(storage) == 4 * ENVS
    assert ids_in(storage.get_all_buffer_data()["observations"])[0].tolist() == [1.0 + 2 * ENVS, 2.0 + 2 * ENVS]


# ------------------------------------------------------------------------------------------------- refusals


def bad_samples(case: ReplayCase):
    """Samples that must be refused, by what is wrong with them."""
    good = case.sample(30)
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "next_observations"):
        yield f"no {name}", {other: value for other, value in good.items() if other != name}
        yield f"{name} None", {**good, name: None}
        yield f"{name} of 3 envs", {**good, name: torch.zeros(ENVS + 1, 2)}
        yield f"{name} complex", {**good, name: torch.zeros(ENVS, 2) * 1j}
    for name in ("terminated", "truncated") if SEES_VALUES else ():
        yield f"{name} nan", {**good, name: torch.tensor([0.0, float("nan")])}
    ended = case.sample(30, (0,))
    yield "final observations of another shape", {**ended, "final_observations": torch.zeros(ENVS, 9)}
    yield "an unknown name", {**good, "reward": torch.zeros(ENVS)}
    yield "masks of 3 envs", {**good, "masks": torch.ones(ENVS + 1, dtype=torch.bool)}
    yield "empty", {}


def refusal(storage, sample, what):
    """What the storage says to a bad sample."""
    try:
        storage.insert_transition(sample)
    except ValueError as error:
        return str(error)
    return pytest.fail(f"a sample was taken that is bad: {what}")


@pytest.mark.parametrize("steps", [0, 2, STEPS + 1])
def test_a_bad_sample_is_refused_by_replay_and_nothing_changes(replay, steps):
    storage, twin = replay.make(), replay.make()
    for one in (storage, twin):
        one.init_tensors(replay.sample(0))
    collect(replay, storage, twin, steps=steps)
    for what, sample in bad_samples(replay):
        assert "Nothing was" in refusal(storage, sample, what)
        same_data(twin.get_all_buffer_data(), storage.get_all_buffer_data())
    collect(replay, storage, twin, first=steps, steps=2)
    same_data(twin.get_all_buffer_data(), storage.get_all_buffer_data())
    drawn = [[batch["rows"].tolist() for batch in one.generate_batches(3, 4)] for one in (storage, twin)]
    assert drawn[0] == drawn[1]


BAD_SLICES = {
    "no observations": lambda data: {name: value for name, value in data.items() if name != "observations"},
    "no rewards": lambda data: {name: value for name, value in data.items() if name != "rewards"},
    "fewer rewards than steps": lambda data: {**data, "rewards": data["rewards"][:-1]},
    "rewards of too many environments": lambda data: {**data, "rewards": torch.zeros(STEPS, ENVS + 1, 1)},
    "actions of another shape": lambda data: {**data, "actions": torch.zeros(STEPS, ENVS, 9)},
    "an unknown name": lambda data: {**data, "reward": data["rewards"]},
    "None": lambda data: {**data, "rewards": None},
    "a flag that is nan": lambda data: {**data, "terminated": torch.full((STEPS, ENVS, 1), float("nan"))},
}


def test_a_bad_slice_is_refused_by_replay_and_nothing_changes(replay):
    storage = replay.make()
    collect(replay, storage)
    before = storage.get_all_buffer_data()
    for what, change in BAD_SLICES.items():
        if what == "a flag that is nan" and not SEES_VALUES:
            continue
        with pytest.raises((ValueError, TypeError)):
            storage.insert_data_slice(change(storage.get_all_buffer_data()))
        same_data(before, storage.get_all_buffer_data())


def test_batches_that_cannot_be_had_are_refused_by_replay(replay):
    storage, twin = replay.make(), replay.make()
    collect(replay, storage, twin)
    for arguments in ((0, 1), (1, 0), (-1, 1), (1, -1), (2.0, 1), (1, 2.5), (None, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match=r"batch|epochs"):
            next(storage.generate_batches(*arguments))
    drawn = [[batch["rows"].tolist() for batch in one.generate_batches(2, 4)] for one in (storage, twin)]
    assert drawn[0] == drawn[1]
