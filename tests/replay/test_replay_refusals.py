"""Replay storages: what is refused, what the error says, and that a refused call changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nstep_steps import fill, obs_of
from replay_kinds import (
    FLAT,
    KINDS,
    PRIORITIZED,
    assert_same,
    assert_same_draws,
    assert_tells,
    assert_untouched,
    make_prioritized,
    objects,
    state,
    twins,
)

from rlstore import InvalidInputError, NotReadyError, RateLimit, ReplayStorage, StorageError

NAN, INF = float("nan"), float("inf")
BY_NAME = {kind.name: kind for kind in KINDS}
HINDSIGHT = BY_NAME["hindsight"]
NOTHING = "Nothing was (written|changed)"

SCALARS = ("actions", "rewards", "terminateds", "truncateds")
FLAGS = ("terminateds", "truncateds")
OBSERVATIONS = ("observations", "next_observations")

# Arguments of add() that every storage refuses: name, value.
BAD = [
    *((name, bad) for name in (*SCALARS, *OBSERVATIONS) for bad in (None, object())),
    *((name, torch.zeros(3)) for name in SCALARS),  # too many environments
    *((name, torch.zeros(1)) for name in SCALARS),
    *((name, 0.0) for name in SCALARS),
    *((name, torch.zeros(2, 2)) for name in SCALARS),
    *((name, torch.zeros(1, 2)) for name in SCALARS),
    *((name, torch.zeros(2, dtype=torch.complex64)) for name in SCALARS),
    *((name, ["a", "b"]) for name in SCALARS),
    *((name, [0.0, [1.0]]) for name in SCALARS),
    *((name, torch.tensor([NAN, 0.0])) for name in FLAGS),
    *((name, np.array([0.0, NAN])) for name in FLAGS),
    *(("infos", bad) for bad in (7, "infos", [1, 2], object())),
    *(
        ("mask", bad)
        for bad in (torch.ones(3), torch.ones(1), True, torch.ones(2, 2), [True, NAN], "all", [[1], [1, 1]])
    ),
]
# Those of storages whose observations are a vector of 2.
BAD_BOXES = [
    torch.zeros(2, 3),
    torch.zeros(3, 2),
    torch.zeros(2),
    torch.zeros(2, 2, dtype=torch.complex64),
    {"a": torch.zeros(2, 2)},
    (torch.zeros(2, 2), torch.zeros(2, 2)),
    [["a", "b"], ["c", "d"]],
]
BAD_FINALS = [
    torch.zeros(2, 3),
    torch.zeros(3, 2),
    objects(np.zeros(2), np.zeros(3)),
    objects(np.zeros(2)),
    ["a", "b"],
    7.0,
    {"a": torch.zeros(2, 2)},
]
# Parameters, by name; six steps an environment: an n_step of 7 is too long, and a storage with data keeps its size.
BAD_PARAMETERS = {
    "batch_size": (0, -1, 1.5, None, "8"),
    "discount": (-0.1, 1.1, NAN, None),
    "n_step": (0, -1, 7, 2.5),
    "beta": (-0.1, 1.1, NAN),
    "storage_size": (100, 0),
}


@pytest.fixture(params=KINDS, ids=repr)
def kind(request):
    return request.param


def refuse(call, word, note=NOTHING):
    """The call raises an error of ours that names the word and says that nothing was changed."""
    with pytest.raises((ValueError, AttributeError), match=rf"(?s){word}.*{note}" if note else word) as refused:
        call()
    assert isinstance(refused.value, StorageError)
    return refused


def refused_adds(kind, step):
    """Arguments of add() that are refused in a step, each with the word that its error names."""
    for name, value in BAD:
        yield name, kind.step(step, **{name: value})
    if kind not in FLAT:
        return
    for bad in BAD_BOXES:
        for name in OBSERVATIONS:
            yield name, kind.step(step, **{name: bad})
    for bad in BAD_FINALS:
        for key in ("final_obs", "final_observation"):
            yield key, kind.step(step, terminated=(0, 1), infos={key: bad})


# ------------------------------------------------------------------------------------------------- nothing changes


@pytest.mark.parametrize("rows", [0, 4, 9], ids=["empty", "midway", "wrapped"])
def test_a_refused_call_names_its_argument_and_changes_nothing(kind, rows):
    storage, twin = twins(kind, rows)
    before = state(storage)
    for word, step in refused_adds(kind, rows):
        refuse(lambda step=step: storage.add(**step), word)
        assert_same(state(storage), before)
    for size in (0, -1, 1.5, "4", True, [3]):
        refuse(lambda size=size: storage.sample(size), "batch_size", note="")
    for name in ("gammma", "", "observation_space", "_generator", "nstep", None):
        refuse(lambda name=name: storage.update_storage_parameter(name, 1), "batch_size", note="")
    for name, values in BAD_PARAMETERS.items():
        for value in values:
            if rows or name != "storage_size":
                refuse(lambda n=name, v=value: storage.update_storage_parameter(n, v), name, note="")
    with pytest.raises(TypeError, match="next_observations"):
        storage.add(*list(kind.step(rows).values())[:6])
    assert_untouched(kind, storage, twin, rows)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_bad_keys_and_leaves_of_goals_are_named_and_nothing_changes(name):
    storage, twin = twins(HINDSIGHT, 4)
    good = HINDSIGHT.observations(torch.tensor([9.0, 10.0]))
    for named, bad in (
        ("achieved_goal", {**good, "achieved_goal": None}),
        ("achieved_goal", {**good, "achieved_goal": torch.zeros(2, 3)}),
        ("desired_goal", {**good, "desired_goal": torch.zeros(3, 2)}),
        ("observation", {**good, "observation": ["a", "b"]}),
        ("speed", {**good, "speed": torch.zeros(2, 2)}),
        ("desired_goal", {key: value for key, value in good.items() if key != "desired_goal"}),
        ("observation", obs_of(torch.ones(2))),
    ):
        refuse(lambda bad=bad: storage.add(**HINDSIGHT.step(4, **{name: bad})), named)
    assert_untouched(HINDSIGHT, storage, twin, 4)


@pytest.mark.parametrize(
    "hidden",
    [torch.zeros(2, 1, 4), torch.zeros(1, 2, 3), torch.zeros(1, 3, 4), (torch.zeros(1, 2, 4),) * 2, None, "state"],
    ids=["transposed", "too short", "too many envs", "a pair", "missing", "text"],
)
def test_a_bad_recurrent_state_is_named_and_nothing_changes(hidden):
    kind = BY_NAME["sequence"]
    storage = kind.make(hidden_shape=(1, 4))
    good = torch.zeros(1, 2, 4)
    storage.add(**kind.step(0), hidden_states=good)
    before = state(storage)
    refuse(lambda: storage.add(**kind.step(1), hidden_states=hidden), "hidden_states")
    assert_same(state(storage), before)
    storage.add(**kind.step(1), hidden_states=good)
    assert len(storage) == 4


def test_a_recurrent_state_for_a_storage_that_holds_none_is_refused():
    kind = BY_NAME["sequence"]
    storage = kind.make()
    with pytest.raises(ValueError, match="hidden_shape"):
        storage.add(**kind.step(0), hidden_states=torch.zeros(1, 2, 4))
    assert len(storage) == 0


def test_what_an_environment_that_is_masked_out_is_given_is_not_refused(kind):
    """A mask that leaves all of them out adds nothing, whatever the numbers are."""
    storage, twin = twins(kind, 4)
    rubbish = kind.observations(torch.full((2,), NAN))
    flags = {name: torch.full((2,), NAN) for name in FLAGS}
    given = {"observations": rubbish, "next_observations": rubbish, "rewards": [NAN, INF], **flags}
    storage.add(**kind.step(4, mask=[False, False], **given))
    assert_untouched(kind, storage, twin, 4)


def test_an_error_says_what_was_given_what_was_expected_and_where_it_comes_from(kind):
    storage, twin = twins(kind, 4)
    refused = refuse(lambda: storage.add(**kind.step(4, rewards=torch.zeros(7))), "rewards")
    assert_tells(refused, "(7,)", "float32", "(2,")
    refused = refuse(lambda: storage.add(**kind.step(4, actions=torch.zeros(2, 5))), "actions")
    assert_tells(refused, "(2, 5)", "action_space")
    if kind in FLAT:
        refused = refuse(lambda: storage.add(**kind.step(4, observations=torch.zeros(2, 9))), "observations")
        assert_tells(refused, "(2, 9)", "(2, 2)", "observation_space")
    assert_untouched(kind, storage, twin, 4)


@pytest.mark.parametrize("bad", [256, -1, 0.5])
def test_values_that_do_not_fit_their_dtype_are_refused(bad):
    kind = BY_NAME["replay"]
    storage = kind.make(observation_space=spaces.Box(0, 255, (2,), np.uint8))
    ones = torch.ones(2, 2, dtype=torch.uint8)
    storage.add(**kind.step(0, observations=ones, next_observations=ones))
    before = state(storage)
    for name in OBSERVATIONS:
        given = {**dict.fromkeys(OBSERVATIONS, ones), name: torch.full((2, 2), bad)}
        refuse(lambda given=given: storage.add(**kind.step(1, **given)), rf"{name}.*uint8")
    assert_same(state(storage), before)


@pytest.mark.parametrize("kind", FLAT, ids=repr)
def test_rewards_of_another_shape_are_refused(kind):
    for shape, bad in (((3,), (2,)), ((3,), (2, 1)), ((3,), (2, 2)), ((), (2, 3))):
        storage = kind.make(reward_shape=shape)
        storage.add(**kind.step(0, rewards=torch.ones(2, *shape)))
        before = state(storage)
        refused = refuse(lambda s=storage, b=bad: s.add(**kind.step(1, rewards=torch.zeros(b))), "rewards")
        assert_tells(refused, str(bad))
        assert_same(state(storage), before)
        storage.close()


# ------------------------------------------------------------------------------------------------- too early, too late


def test_a_batch_of_an_empty_storage_is_refused_and_works_later(kind):
    storage, twin = twins(kind, 0)
    asks = [storage.sample, lambda: storage.sample(4), lambda: next(iter(storage.generate_batches(1, 4)))]
    if hasattr(storage, "replay_iter"):
        asks.append(lambda: next(storage.replay_iter))
    for ask in asks:
        with pytest.raises(NotReadyError, match=r"(?i)empty|no data|nothing|no transitions"):
            ask()
    assert_untouched(kind, storage, twin, 0)


def test_sequences_have_to_be_long_enough_or_over():
    """One window of 3 steps needs 3 steps, or an episode that ended before."""
    kind = BY_NAME["sequence"]
    storage = kind.make(num_envs=1)
    for step in range(2):
        storage.add(**kind.step(step, 1))
        with pytest.raises(NotReadyError):
            storage.sample()
    storage.add(**kind.step(2, 1))
    assert storage.sample().rewards.shape == (24, 3, 1)


def test_a_parameter_takes_effect_at_once(kind):
    storage = kind.make()
    kind.fill(storage, 4)
    storage.update_storage_parameter("batch_size", 7)
    assert storage.batch_size == 7
    assert len(storage.sample().rewards) == 7
    storage.close()


def test_a_closed_storage_says_so(kind):
    storage = kind.make()
    kind.fill(storage, 4)
    storage.sample()
    storage.close()
    storage.close()
    for use in (
        lambda: storage.add(**kind.step(4)),
        storage.sample,
        lambda: next(iter(storage.generate_batches(1, 4))),
    ):
        with pytest.raises((RuntimeError, ValueError), match="closed") as refused:
            use()
        assert isinstance(refused.value, StorageError)


# ------------------------------------------------------------------------------------------------- priorities

BAD_PRIORITIES = [
    torch.ones(2),
    torch.ones(4),
    torch.ones(3, 2),
    torch.ones(1, 3),
    torch.ones(()),
    1.0,
    None,
    ["a", "b", "c"],
    torch.ones(3) * 1j,
]
NO_PRIORITY = "(No priority was changed|Nothing was written)"


@pytest.mark.parametrize("kind", PRIORITIZED, ids=repr)
def test_a_refused_update_names_what_was_bad_and_changes_no_priority(kind):
    """After 9 steps of 2 environments the next row is 18."""
    storage, twin = twins(kind, 9)
    rows = storage.sample().rows.unique()[:3]
    assert torch.equal(twin.sample().rows.unique()[:3], rows)
    for bad in (NAN, -0.5, INF, -INF):
        for form in (torch.tensor, np.array, list, lambda p: torch.tensor(p).unsqueeze(-1)):
            refused = refuse(lambda f=form, b=bad: storage.update(rows, f([1.0, b, 1.0])), f"row {int(rows[1])}", "")
            assert_tells(refused, "priorit", "of 3", str(bad).lstrip("-"), "finite", "No priority was changed")
    for bad in BAD_PRIORITIES:
        refuse(lambda bad=bad: storage.update(rows, bad), "priorities", NO_PRIORITY)
    for row in (-1, -(2**62), 10**9, 2**62, 18, 19):
        given = torch.tensor([int(rows[0]), row])
        refused = refuse(lambda g=given: storage.update(g, torch.tensor([3.0, 3.0])), str(row), "")
        assert_tells(refused, "row", "No priority was changed")
    for bad in (torch.tensor([0.5, 1.0]), torch.ones(2, 2, dtype=torch.int64), None, ["a", "b"], [NAN, 1.0]):
        refuse(lambda bad=bad: storage.update(bad, torch.ones(2)), "rows", NO_PRIORITY)
    with pytest.raises((TypeError, ValueError), match="priorities"):
        storage.update(torch.tensor([8]))
    assert_untouched(kind, storage, twin, 9)


@pytest.mark.parametrize("num_envs", [1, 3, 999])
def test_a_row_beyond_all_counting_is_refused(num_envs):
    """Where a row becomes a time and an environment, no rounding may make another row of it."""
    storage = make_prioritized(num_envs, 4)
    fill(storage, 3)
    before = storage.sample(50 * num_envs).weights
    generator = torch.Generator().manual_seed(0)
    far = torch.randint(2**52, 2**63 - 1, (50,), generator=generator).tolist()
    for row in (2**53 + 1, 2**62, 2**63 - 1, *far):
        with pytest.raises(ValueError, match=str(row)):
            storage.update([row], [5.0])
    assert storage.stale_updates == 0
    assert torch.equal(storage.sample(50 * num_envs).weights, before)


@pytest.mark.parametrize("kind", PRIORITIZED, ids=repr)
def test_when_all_priorities_are_0_there_is_nothing_to_draw(kind):
    storage, twin = twins(kind, 6)
    for either in (storage, twin):
        rows = torch.cat([either.sample().rows for _ in range(20)]).unique()
        either.update(rows, torch.zeros(len(rows)))
    with pytest.raises(NotReadyError, match="priorit"):
        storage.sample()
    assert_same(state(storage), state(twin))
    for either in (storage, twin):
        either.update(rows[:1], [2.0])
    assert set(storage.sample().rows.tolist()) == {int(rows[0])}
    twin.sample()
    assert_same_draws(storage, twin)


# ------------------------------------------------------------------------------------------------- hindsight


class OwnError(Exception):
    """The caller's."""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_compute_reward_reaches_the_caller_and_the_storage_works_on(num_workers):
    broken = True

    def compute_reward(achieved, desired, info):
        if broken:
            raise OwnError("no reward today")
        return torch.zeros(len(achieved))

    storage = HINDSIGHT.make(compute_reward=compute_reward, num_workers=num_workers)
    HINDSIGHT.fill(storage, 5)
    before = state(storage)
    for _ in range(2):
        with pytest.raises(OwnError, match="no reward today"):
            storage.sample()
    assert_same(state(storage), before)
    broken = False
    # What was prepared while it was broken may still raise; what is drawn from now on does not.
    for _ in range(num_workers):
        try:
            storage.sample()
        except OwnError:
            continue
    assert storage.sample().rewards.shape == (24, 1)
    storage.close()


@pytest.mark.parametrize(
    "result",
    [torch.zeros(23), torch.zeros(25), torch.zeros(24, 2), 0.0, None, ["a"] * 24, torch.zeros(24) * 1j],
    ids=["too few", "too many", "two columns", "a number", "none", "text", "complex"],
)
def test_a_compute_reward_that_does_not_give_a_number_for_each_row_is_named(result):
    storage = HINDSIGHT.make(compute_reward=lambda achieved, desired, info: result)
    HINDSIGHT.fill(storage, 5)
    before = state(storage)
    refused = refuse(storage.sample, "compute_reward", note="")
    if isinstance(result, torch.Tensor):
        assert_tells(refused, str(tuple(result.shape)), "24")
    assert_same(state(storage), before)


@pytest.mark.parametrize("served", ["sample", "sample of another size", "generate_batches"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("why", ["it raises", "it gives nan"])
def test_a_batch_whose_reward_fails_was_not_drawn(why, num_workers, served):
    """The next call has the batch that it would have had, and nothing was counted."""
    broken = False

    def compute_reward(achieved, desired, info):
        if broken and why == "it raises":
            raise OwnError
        return torch.full((len(achieved),), torch.nan if broken else 0.5)

    def draw(storage):
        if served == "generate_batches":
            return next(storage.generate_batches(1))
        batch = storage.sample() if served == "sample" else storage.sample(7)
        return batch._asdict()

    limit = RateLimit(samples_per_insert=50, min_size=1, tolerance=100_000)
    options = {"sample_info": True, "relabel_fraction": 1.0, "num_workers": num_workers}
    storages = [HINDSIGHT.make(compute_reward=compute_reward, rate_limit=limit, **options) for _ in range(2)]
    for storage in storages:
        HINDSIGHT.fill(storage, 5)
    for _ in range(3):
        whole, failed = (draw(storage) for storage in storages)
        before, numbers = state(storages[1]), storages[1].stats()
        broken = True
        for _ in range(2):
            with pytest.raises(OwnError if why == "it raises" else InvalidInputError):
                draw(storages[1])
            if num_workers == 0:  # else what was drawn ahead is counted
                assert storages[1].stats() == numbers
        assert_same(state(storages[1]), before)
        broken = False
        for name in ("actions", "rewards", "draw_counts"):
            assert torch.equal(whole[name], failed[name])
    first, second = storages
    assert_same_draws(first, second)
    for storage in storages:
        storage.close()


def test_a_reward_that_is_not_finite_counts_only_where_a_goal_was_replaced():
    def nan(achieved, desired, info):
        return torch.full((len(achieved),), torch.nan)

    never = HINDSIGHT.make(compute_reward=nan, relabel_fraction=0.0)
    HINDSIGHT.fill(never, 5)
    assert never.sample().rewards.isfinite().all()
    always = HINDSIGHT.make(compute_reward=nan, relabel_fraction=1.0)
    HINDSIGHT.fill(always, 5)
    refused = refuse(always.sample, "compute_reward", note="No batch was served.")
    assert_tells(refused, "nan", "transition 0", "allow_nonfinite_rewards=True")
    allowed = HINDSIGHT.make(compute_reward=nan, relabel_fraction=1.0, allow_nonfinite_rewards=True)
    HINDSIGHT.fill(allowed, 5)
    assert allowed.sample().rewards.isnan().all()


# ------------------------------------------------------------------------------------------------- where advice is due


def test_a_writer_that_is_given_the_rows_of_others_says_which_are_its_own():
    storage = BY_NAME["replay"].make(3)
    with storage.writer(range(1, 2)) as writer, pytest.raises(InvalidInputError) as refused:
        writer.add(**BY_NAME["replay"].step(0, 3))
    assert str(refused.value) == (
        "observations has 3 rows; this writer has environment 1 only, of 3. Nothing was written. Give it the steps of "
        "its own, or make a writer of more: storage.writer(3)."
    )
    with storage.writer(range(1, 3)) as writer, pytest.raises(InvalidInputError, match="environments 1 to 2 only"):
        writer.add(**BY_NAME["replay"].step(0, 3))
    assert len(storage) == 0


def test_a_size_in_the_place_of_the_device_is_told():
    with pytest.raises(InvalidInputError, match=r"third argument of ReplayStorage. Did you mean storage_size=10000\?"):
        ReplayStorage(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), 10_000, 4)


def test_an_extra_field_that_was_not_declared_tells_how():
    storage = BY_NAME["replay"].make()
    with pytest.raises(InvalidInputError, match=r"Declare it in the constructor .*extra_fields=\{'costs': "):
        storage.add(**BY_NAME["replay"].step(0), costs=[1.0, 2.0])
    with pytest.raises(InvalidInputError, match=r"Did you mean 'mask'\? Nothing was written\.$"):
        storage.add(**BY_NAME["replay"].step(0), masks=[True, True])
    assert len(storage) == 0
