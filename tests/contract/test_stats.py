"""``stats()`` of every class against counts that a model works out from lists of all steps."""

from __future__ import annotations

import copy
import math
import multiprocessing
import random
import re
import warnings
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stats_model import Lane, ages, episode_numbers, fragment_numbers, spread
from storages import CASES, NUM_ENVS
from where import DEVICE

from rlstore import (
    DecoupledRolloutStorage,
    DistributedStorage,
    HindsightReplayStorage,
    Journal,
    NotReadyError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    RateLimit,
    ReplayStorage,
    RolloutStorage,
    SequenceReplayStorage,
    Storage,
    WaitTimeoutError,
)
from rlstore.engine import measures
from rlstore.engine.disk import journal as journals
from rlstore.engine.processes import waits

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
ENVS, STEPS = 3, 7  # environments, and the steps that are held of each
BOX, ACTIONS = spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(5)
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), BOX))


def no_reward(achieved, desired, info):
    return -(achieved - desired).abs().sum(-1)


# Each: the class, and what it is made with besides what all are.
REPLAYS = {
    "uniform": (ReplayStorage, {}),
    "n-step": (NStepReplayStorage, {"n_step": 2, "num_workers": 0}),
    "prioritized": (PrioritizedReplayStorage, {"alpha": 0.7}),
    "sequences": (SequenceReplayStorage, {"sequence_length": 3, "overlap": 1}),
    "sequences by priority": (SequenceReplayStorage, {"sequence_length": 3, "overlap": 1, "alpha": 0.7}),
    "hindsight": (HindsightReplayStorage, {"compute_reward": no_reward}),
}


def make(name, **more):
    kind, options = REPLAYS[name]
    space = GOALS if kind is HindsightReplayStorage else BOX
    common = {"storage_size": ENVS * STEPS, "num_envs": ENVS, "batch_size": 4, "autoreset": "SameStep", "seed": 1}
    return kind(space, ACTIONS, DEVICE, **{**common, **options, **more})


class Played:
    """A replay storage, and what was done to it in lists."""

    def __init__(self, storage, seed=0):
        self.storage, self.rng = storage, random.Random(seed)
        self.lanes = [Lane() for _ in range(ENVS)]
        self.samples, self.drawn, self.stale = 0, {}, 0

    def observed(self, times):
        values = np.array([[float(time)] for time in times], np.float32)
        if isinstance(self.storage, HindsightReplayStorage):
            return dict.fromkeys(("observation", "achieved_goal", "desired_goal"), values)
        return values

    def add(self, add=None, rewards=None):
        """One step, in which some environments take part, end an episode, or break it off."""
        rng, times = self.rng, [len(lane.rewards) for lane in self.lanes]
        mask = np.array([rng.random() < 0.8 for _ in self.lanes])
        ends = np.array([rng.choice([0, 0, 0, 0, 1, 2, 3]) for _ in self.lanes])
        breaks = [rng.random() < 0.1 for _ in self.lanes]
        if rewards is None:
            rewards = np.array([rng.choice([-2.0, 0.5, 1.0, 8.0]) for _ in self.lanes], np.float32)
        seen = self.observed([-1 - time if broken else time for time, broken in zip(times, breaks, strict=True)])
        following = self.observed([time + 1 for time in times])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that episodes were broken off
            step = (seen, np.zeros(ENVS, np.int64), rewards, ends & 1, ends & 2, {}, following)
            (add or self.storage.add)(*step, mask=mask)
        for env in np.flatnonzero(mask):
            self.lanes[env].step(float(rewards[env]), int(ends[env]), breaks[env])

    def draw(self):
        """A batch of a random size, whose rows are counted."""
        size = self.rng.randint(1, 5)
        rows = next(self.storage.generate_batches(1, size))["rows"].flatten().tolist()
        self.samples += size
        for row in rows:
            self.drawn[row] = self.drawn.get(row, 0) + 1
        return rows

    def update(self, rows):
        """Set the priorities of some rows; those that were overwritten are stale."""
        values = [self.rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in rows]
        self.storage.update(torch.tensor(rows), torch.tensor(values))
        self.stale += len(set(rows) - set(self.held))

    @property
    def held(self):
        """The ids of the rows that are held."""
        return [time * ENVS + env for env, lane in enumerate(self.lanes) for time in lane.held(STEPS)]

    def expected(self):
        """All numbers that follow from the steps."""
        inserts, held = sum(len(lane.rewards) for lane in self.lanes), self.held
        return {
            "transitions": len(held),
            "capacity": ENVS * STEPS,
            "fill": len(held) / (ENVS * STEPS),
            "bytes": self.storage.nbytes,
            "inserts": inserts,
            "samples": self.samples,
            **({"samples_per_insert": self.samples / inserts} if inserts else {}),
            **episode_numbers(self.lanes, STEPS),
            **ages([len(lane.held(STEPS)) for lane in self.lanes]),
            "nonfinite_rewards": sum(
                not math.isfinite(lane.rewards[time]) for lane in self.lanes for time in lane.held(STEPS)
            ),
            "nonfinite_observations": 0,
            "dropped_batches": 0,
        }


def draws(drawn, items):
    """The numbers about draws of the rows, or windows, that there are."""
    counts = [drawn.get(row, 0) for row in items]
    return {"draws_mean": sum(counts) / len(counts), "draws_max": max(counts), "draws_never": counts.count(0)}


def assert_equal(found, expected):
    if torch.device(DEVICE).type == "cuda":  # whose kernels count what those of the CPU refuse
        expected = {**{name: 0 for name in ("invalid_rewards", "invalid_actions") if name in found}, **expected}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name
        assert type(found[name]) in (int, float), name
        assert math.isfinite(found[name])


@pytest.mark.parametrize("name", ["uniform", "n-step", "hindsight"])
def test_uniform_replay_tells_what_is_held_added_and_served(name):
    played = Played(make(name))
    for step in range(25):
        played.add()
        if step > 3:
            played.storage.sample(step)
            played.samples += step
            list(played.storage.generate_batches(2, 3))
            played.samples += 2 * 3
        assert_equal(played.storage.stats(), played.expected())


def test_priorities_draws_and_stale_updates_are_those_of_the_rows_that_are_held():
    played, old = Played(make("prioritized", sample_info=True)), []
    for step in range(40):
        played.add()
        if step < 4:
            continue
        rows = played.draw()
        old = [*dict.fromkeys(rows), *old[:6]]  # each once, and some that are overwritten by now
        played.update(list(dict.fromkeys(old)))
        held = played.storage.priorities(torch.tensor(played.held)).tolist()
        above = [value for value in held if value > 0]
        expected = {
            **played.expected(),
            **draws(played.drawn, played.held),
            **spread("priority", above),
            "priority_mean": sum(held) / len(held),
            "stale_updates": played.stale,
        }
        assert_equal(played.storage.stats(), expected)
    assert played.stale > 5
    assert expected["draws_never"] > 0 < expected["episodes_broken"]


@pytest.mark.parametrize("name", ["sequences", "sequences by priority"])
def test_draws_and_priorities_of_sequences_are_those_of_their_first_rows(name):
    played = Played(make(name, sample_info=True))
    for step in range(30):
        played.add()
        if step < 6:
            continue
        rows = played.draw()
        starts = [time * ENVS + env for env, lane in enumerate(played.lanes) for time in lane.windows(STEPS, 3, 2)]
        expected = {**played.expected(), **draws(played.drawn, starts)}
        if "priority" in name:
            played.update(list(dict.fromkeys(rows)))
            held = played.storage.priorities(torch.tensor(starts)).tolist()
            above = [value for value in held if value > 0]
            expected.update(spread("priority", above), priority_mean=sum(held) / len(held), stale_updates=0)
        assert_equal(played.storage.stats(), expected)
        assert len(starts) == len(set(starts)) > 3


# ---------------------------------------------------------------------------------------------------- rollouts


ENDS = [((0,), (1,)), ((), ()), ((2,), (0, 2)), ((), ()), ((1,), ())]  # terminated and truncated, in turn


def end_bits(step, keeps_both):
    """The bits of how each environment ended; RolloutStorage keeps of both flags that it terminated."""
    terminated, truncated = ENDS[step % len(ENDS)]
    bits = [(env in terminated) + 2 * (env in truncated) for env in range(NUM_ENVS)]
    return bits if keeps_both else [min(bit, 1) if bit == 3 else bit for bit in bits]


def test_a_rollout_tells_of_itself_and_counts_over_all_rollouts(case):
    size, samples, inserts = 6, 0, 0
    storage = case.create_factory(size)(DEVICE, None, None)
    before = [0] * NUM_ENVS  # the ends before the first step, which DAAC keeps
    for rollout in range(3):
        rewards, ends = [], []
        for step in range(rollout * size, (rollout + 1) * size):
            sample = case.sample(step, *ENDS[step % len(ENDS)])
            storage.insert_transition(sample)
            rewards.append(sample["rewards"].tolist())
            ends.append(end_bits(step, "decoupled" in case.name))
            inserts += NUM_ENVS
            begins = [bool(end) and "decoupled" in case.name for end in before]
            held = len(rewards) * NUM_ENVS
            assert_equal(
                storage.stats(),
                {
                    "transitions": held,
                    "capacity": size * NUM_ENVS,
                    "fill": held / (size * NUM_ENVS),
                    "bytes": storage._ring.nbytes,
                    "inserts": inserts,
                    "samples": samples,
                    "samples_per_insert": samples / inserts,
                    **fragment_numbers(rewards, ends, [[False] * NUM_ENVS] * len(ends), begins),
                    "nonfinite_rewards": 0,
                    "nonfinite_observations": 0,
                },
            )
        for batch in storage.generate_batches(2, 4, 3):
            samples += len(batch["rewards"])
            assert storage.stats()["samples"] == samples
        assert samples == (rollout + 1) * 2 * 4 * 3
        storage.after_gradients()
        before = ends[-1]


@pytest.mark.parametrize("reuse", [False, True])
def test_samples_of_every_generator_of_rollouts_are_counted(reuse):
    case = next(case for case in CASES if case.name == "rl")
    storage = case.create_factory(4)(DEVICE, None, None)
    for step in range(4):
        storage.insert_transition(case.sample(step, *ENDS[step]))
    list(storage.mini_batch_generator(2, 3, reuse=reuse))
    assert storage.stats()["samples"] == 3 * 12
    list(storage.recurrent_mini_batch_generator(1, 2, reuse=reuse))
    list(storage.generate_batches(3, None, 2, recurrent=True, reuse=reuse))
    assert storage.stats()["samples"] == (3 + 2 + 2) * 12
    next(storage.mini_batch_generator(4, 8, reuse=reuse))
    assert storage.stats()["samples"] == (3 + 2 + 2) * 12 + 3


def test_steps_of_other_generators_are_counted():
    case = next(case for case in CASES if case.name == "distillation")
    teacher = case.create_factory(3)(DEVICE, None, None)
    for step in range(3):
        teacher.insert_transition(case.sample(step))
    assert len(list(teacher.generator())) == 3
    assert teacher.stats()["samples"] == 3 * NUM_ENVS


def test_reset_steps_are_part_of_no_episode():
    rng = random.Random(4)
    storage = RolloutStorage.from_spaces(BOX, ACTIONS, ENVS, 9, DEVICE)
    due, rewards, ends, resets = [False] * ENVS, [], [], []
    for _ in range(9):
        ends.append([0 if reset else rng.choice([0, 0, 1, 2]) for reset in due])
        rewards.append([0.0 if reset else float(rng.randint(1, 9)) for reset in due])
        resets.append(due)
        flags = np.array(ends[-1])
        storage.add(
            observations=np.zeros((ENVS, 1), np.float32), actions=np.zeros(ENVS, np.int64),
            rewards=np.array(rewards[-1], np.float32), terminated=flags == 1, truncated=flags == 2,
            values=np.zeros(ENVS, np.float32), log_probs=np.zeros(ENVS, np.float32),
        )  # fmt: skip
        due = [bool(end) for end in ends[-1]]
    found = storage.stats()
    expected = fragment_numbers(rewards, ends, resets, [False] * ENVS)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["reset_steps"] == sum(map(sum, resets)) > 3
    assert found["transitions"] == len(storage) == 9 * ENVS


def test_a_rollout_that_was_saved_counts_on(case, tmp_path):
    storage = case.create_factory(2)(DEVICE, None, None)
    for step in range(2):
        storage.insert_transition(case.sample(step, *ENDS[step]))
    list(storage.generate_batches(2, 3))
    expected = storage.stats()
    assert expected["samples"] == 6
    storage.save(tmp_path)
    for other in (copy.deepcopy(storage), Storage.load(tmp_path)):
        assert_equal(other.stats(), expected)


def test_before_its_first_sample_a_rollout_has_no_size():
    found = RolloutStorage.create_factory(4)(DEVICE, None, None).stats()
    assert found == {"transitions": 0, "capacity": 0, "bytes": 0, "inserts": 0, "samples": 0}


def test_what_is_not_finite_in_a_rollout_is_counted(monkeypatch):
    storage = DecoupledRolloutStorage(BOX, ACTIONS, DEVICE, 3, 2, allow_nonfinite_rewards=True)
    zeros, flags = torch.zeros(2), torch.tensor([False, True])
    for seen, reward in ((math.nan, 0.0), (math.inf, math.nan), (0.0, 1.0)):
        obs = torch.tensor([[seen], [0.0]])
        storage.add(obs, zeros, torch.full((2,), reward), flags, flags, obs, zeros, zeros, zeros)
    found = storage.stats()
    assert (found["nonfinite_rewards"], found["nonfinite_observations"]) == (2, 2)
    assert (found["episodes_complete"], found["return_mean"]) == (2, 1.0)
    monkeypatch.setattr(measures, "_NEWEST", 4)
    assert storage.stats()["nonfinite_observations"] == 1


# ---------------------------------------------------------------------------------------------------- hand-off


def hand_off(**options):
    given = {"num_steps": 4, "num_storages": 7, "batch_size": 2, "timeout": 0.0, "seed": 0}
    return DistributedStorage(BOX, ACTIONS, **{**given, **options})


NOBODY = {
    "slots_free": 7, "slots_writing": 0, "slots_full": 0, "slots_reading": 0,
    "actors": 0, "learners": 0, "lost_actors": 0, "lost_learners": 0,
    "insert_waits": 0, "insert_wait_seconds": 0.0, "sample_waits": 0, "sample_wait_seconds": 0.0,
    "abandoned_rollouts": 0, "reclaimed_rollouts": 0, "policy_version": 0,
}  # fmt: skip


def test_rollouts_that_a_trainer_inserts_are_told_as_they_come_and_go():
    storage, rng = hand_off(), random.Random(2)
    samples = inserts = 0
    before, totals = [0] * ENVS, [0.0] * ENVS
    for rollout in range(3):
        rewards, ends, reported = [], [], []
        for step in range(4):
            held = step * ENVS
            assert storage.stats().items() >= {"transitions": held, "inserts": inserts, "samples": samples}.items()
            ends.append([rng.choice([0, 0, 1, 2, 3]) for _ in range(ENVS)])
            rewards.append([rng.choice([0.5, -1.0, 4.0]) for _ in range(ENVS)])
            flags = torch.tensor(ends[-1])
            storage.insert_transition(
                {
                    "observations": torch.full((ENVS, 1), float(step)),
                    "next_observations": torch.full((ENVS, 1), step + 1.0),
                    "actions": torch.zeros(ENVS, dtype=torch.int64),
                    "rewards": torch.tensor(rewards[-1]),
                    "terminated": flags % 2 == 1,
                    "truncated": flags > 1,
                }
            )
            inserts += ENVS
            earlier = ends[-2] if step else before
            totals = [
                (0 if ended else total) + reward
                for ended, total, reward in zip(earlier, totals, rewards[-1], strict=True)
            ]
            reported += [total for total, end in zip(totals, ends[-1], strict=True) if end]
        begins = [bool(end) for end in before]
        expected = {
            "transitions": 4 * ENVS,
            "capacity": 28,
            "fill": 4 * ENVS / 28,
            "bytes": storage._slots.memory.segment.nbytes,
            "inserts": inserts,
            "samples": samples,
            "samples_per_insert": samples / inserts,
            **fragment_numbers(rewards, ends, [[False] * ENVS] * 4, begins),
            **spread("reported_return", reported),
            **spread("policy_lag", [0]),
            "nonfinite_rewards": 0,
            "nonfinite_observations": 0,
            **NOBODY,
            "slots_free": 7 - ENVS,
            "slots_full": ENVS,
        }
        assert_equal(storage.stats(), expected)
        for batch in storage.generate_batches(3, 1, 2):
            samples += batch["rewards"].shape[0] * batch["rewards"].shape[1]
            assert storage.stats()["samples"] == samples
        assert samples == (rollout + 1) * 2 * 3 * 4
        twin = copy.deepcopy(storage)
        assert (twin.stats()["inserts"], twin.stats()["samples"]) == (inserts, samples)
        storage.after_gradients()
        assert storage.stats()["samples"] == samples
        before = ends[-1]
    storage.reset()
    assert storage.stats().items() >= {"transitions": 0, "inserts": 0, "samples": 0, "slots_free": 7}.items()


def play_rollout(actor, version, commit=True):
    with actor.rollout(version) as rollout:
        for row in range(5):
            ended = row in (2, 4)
            rollout.write(row, obs=[0.0], reward=1.0, terminated=ended, truncated=False, episode_return=row * 10.0)
        if not commit:
            rollout.abandon()


def test_actors_and_learners_are_told_with_their_waits_and_the_age_of_policies(clock):
    storage = hand_off(num_storages=2)
    actor, learner = storage.actor(), storage.learner(prefetch=0)
    with pytest.raises(WaitTimeoutError):
        next(learner)
    learner.publish(5)
    for version in (3, 5):
        play_rollout(actor, version)
    with pytest.raises(WaitTimeoutError):
        actor.reserve()
    found = storage.stats()
    assert found.items() >= {
        **NOBODY, "slots_free": 0, "slots_full": 2, "actors": 1, "learners": 1, "policy_version": 5,
        "insert_waits": 1, "insert_wait_seconds": 0.25, "sample_waits": 1, "sample_wait_seconds": 0.25,
        "policy_lag_mean": 1.0, "policy_lag_min": 0.0, "policy_lag_max": 2.0,
        "episodes": 4, "episodes_terminated": 4, "episodes_complete": 2, "return_mean": 2.0, "length_mean": 2.0,
        "reported_return_mean": 30.0, "reported_return_min": 20.0, "reported_return_max": 40.0,
        "transitions": 8, "inserts": 8, "samples": 0, "nonfinite_observations": 0,
    }.items()  # fmt: skip
    next(learner)
    play_rollout(actor, 6, commit=False)
    play_rollout(actor, 6)
    found = storage.stats()
    assert found.items() >= {
        "transitions": 4, "inserts": 12, "samples": 8, "abandoned_rollouts": 1, "sample_waits": 1, "insert_waits": 1,
        "policy_lag_mean": -1.0,
    }.items()  # fmt: skip
    actor.close()
    learner.close()
    storage.close()


def test_a_hand_off_that_was_saved_counts_on(tmp_path):
    storage = hand_off(num_storages=4)
    with storage.actor() as actor, storage.learner(prefetch=0) as learner:
        for version in range(4):
            play_rollout(actor, version)
        next(learner)
    storage.save(tmp_path)
    loaded = Storage.load(tmp_path)
    assert_equal(loaded.stats(), storage.stats())
    assert loaded.stats().items() >= {"inserts": 16, "samples": 8, "transitions": 8}.items()
    list(loaded.generate_batches(1, 2))
    assert loaded.stats()["samples"] == 16
    loaded.after_gradients()
    assert loaded.stats()["samples"] == 16


def test_before_its_first_sample_a_hand_off_has_no_more_than_a_size():
    found = DistributedStorage.create_factory(4, num_storages=3)("cpu", None, None).stats()
    assert found == {"transitions": 0, "capacity": 12, "fill": 0.0, "bytes": 0, "inserts": 0, "samples": 0}


# ---------------------------------------------------------------------------------------------------- without a model


def plain(**options):
    """Ten transitions of one environment, added one by one by :func:`add`."""
    given = {"storage_size": 10, "batch_size": 2, "seed": 0, **options}
    return ReplayStorage(BOX, ACTIONS, DEVICE, **given)


def add(storage, *rewards, end=False, seen=0.0):
    for reward in rewards:
        last = end and reward is rewards[-1]
        storage.add([[seen]], [0], [reward], [last], [False], {}, [[seen]])


def test_before_the_first_sample_there_is_nothing_to_tell_but_the_size():
    storage = ReplayStorage.create_factory(12)(DEVICE, None, None)
    assert storage.stats() == {
        "transitions": 0, "capacity": 0, "bytes": 0, "inserts": 0, "samples": 0,
    }  # fmt: skip
    known = ReplayStorage.create_factory(6, num_envs=2)(DEVICE, None, None).stats()
    assert (known["capacity"], known["fill"]) == (12, 0.0)


def test_no_mean_is_told_of_nothing():
    found = plain().stats()
    assert found["transitions"] == found["episodes"] == 0
    missing = {"samples_per_insert", "row_age_mean", "row_age_max"}
    missing |= {f"{name}_{kind}" for name in ("return", "length") for kind in ("mean", "min", "max")}
    assert not missing & found.keys()


def test_a_closed_storage_tells_nothing():
    storage = plain()
    storage.close()
    with pytest.raises(NotReadyError, match="is closed"):
        storage.stats()


def test_rewards_that_are_not_finite_are_counted_and_left_out_of_returns():
    storage = plain(allow_nonfinite_rewards=True)
    add(storage, 1.0, math.nan, end=True)
    add(storage, 2.0, 3.0, end=True)
    add(storage, math.inf)
    found = storage.stats()
    assert [found[name] for name in ("nonfinite_rewards", "episodes_complete", "return_mean")] == [2, 2, 5.0]
    assert found["length_mean"] == 2.0
    add(storage, *[0.0] * 8)  # the first two are gone, and one that was not finite is among them
    assert storage.stats()["nonfinite_rewards"] == 1


@pytest.mark.parametrize(("shape", "told"), [((), True), ((1,), True), ((2,), False)])
def test_a_return_of_several_numbers_is_not_told(shape, told):
    storage = plain(reward_shape=shape)
    storage.add([[0.0]], [0], np.full((1, *shape), 2.0), [True], [False], {}, [[0.0]])
    found = storage.stats()
    assert found["episodes_complete"] == 1
    assert found.get("return_mean") == (2.0 if told else None)


def test_of_the_newest_observations_those_are_counted_that_are_not_finite(monkeypatch):
    storage = plain()
    for seen in (math.nan, 1.0, math.inf, math.nan):
        add(storage, 0.0, end=True, seen=seen)
    assert storage.stats()["nonfinite_observations"] == 3
    monkeypatch.setattr(measures, "_NEWEST", 3)
    assert storage.stats()["nonfinite_observations"] == 2
    monkeypatch.setattr(measures, "_NEWEST_NUMBERS", 1)
    assert storage.stats()["nonfinite_observations"] == 1
    storage.reset()
    assert storage.stats()["nonfinite_observations"] == 0  # though the memory has them still


def test_whole_numbers_are_always_finite():
    pixels = spaces.Box(0, 255, (2, 2), np.uint8)
    storage = ReplayStorage(pixels, ACTIONS, DEVICE, storage_size=8)
    assert "nonfinite_observations" not in storage.stats()


def test_a_reset_leaves_what_was_counted():
    played = Played(make("uniform"))
    for _ in range(9):
        played.add()
    played.draw()
    inserts = played.storage.stats()["inserts"]
    played.storage.reset()
    found = played.storage.stats()
    assert (found["transitions"], found["episodes"]) == (0, 0)
    assert (found["inserts"], found["samples"]) == (inserts, played.samples)
    assert inserts > 0 < played.samples


def test_copies_and_snapshots_count_on(tmp_path):
    played = Played(make("prioritized", sample_info=True))
    for _ in range(12):
        played.add()
    played.draw()
    played.storage.save(tmp_path)
    expected = played.storage.stats()
    for other in (copy.deepcopy(played.storage), Storage.load(tmp_path)):
        assert_equal(other.stats(), expected)
        other.sample(3)
        assert other.stats()["samples"] == played.samples + 3
    assert played.storage.stats()["samples"] == played.samples


def test_a_mapped_folder_that_is_reopened_tells_of_its_rows(tmp_path):
    played = Played(make("uniform", memory="mapped", path=tmp_path / "rows"))
    for _ in range(11):
        played.add()
    played.draw()
    played.storage.close()
    played.storage, played.samples = make("uniform", memory="mapped", path=tmp_path / "rows"), 0
    assert_equal(played.storage.stats(), played.expected())
    played.storage.close()


def test_a_refused_sample_is_not_counted():
    storage = plain()
    with pytest.raises(NotReadyError):
        storage.sample()
    assert storage.stats()["samples"] == 0


def test_prefetched_batches_are_counted_when_they_are_served_and_stale_ones_as_dropped():
    storage = plain(num_workers=2, fetch_every=3)
    add(storage, 1.0, 1.0)
    storage.sample()  # two more are prefetched
    assert storage.stats()["samples"] == 2
    add(storage, 1.0, 1.0, 1.0)
    storage.sample()
    found = storage.stats()
    assert (found["samples"], found["dropped_batches"]) == (4, 2)
    storage.update_storage_parameter("discount", 0.5)  # with a new pipeline
    assert storage.stats()["dropped_batches"] == 2


# ---------------------------------------------------------------------------------------------------- waits, journals


@pytest.fixture
def clock(monkeypatch):
    """The clock of waits: each look at it is a quarter of a second later."""
    ticks = count()
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic_ns=lambda: next(ticks) * 250_000_000))


def test_waits_for_the_rate_limit_are_counted_on_both_sides(clock):
    storage = plain(rate_limit=RateLimit(1.0, min_size=2, tolerance=2.0), timeout=0.0)
    for _ in range(2):
        with pytest.raises(WaitTimeoutError):
            storage.sample()
    add(storage, *[0.0] * 4)
    with pytest.raises(WaitTimeoutError):
        add(storage, 0.0)
    storage.sample(2)
    add(storage, 0.0)
    found = storage.stats()
    names = ("sample_waits", "sample_wait_seconds", "insert_waits", "insert_wait_seconds", "lost_writers")
    assert [found[name] for name in names] == [2, 0.5, 1, 0.25, 0]
    assert (found["inserts"], found["samples"]) == (5, 2)


def test_without_a_rate_limit_nothing_is_waited_for():
    storage = plain()
    add(storage, 0.0)
    assert not [name for name in storage.stats() if "wait" in name]


class Clock:
    """What the journal asks what time it is."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        told = SimpleNamespace(**vars(journals.time))
        told.monotonic = lambda: self.now
        monkeypatch.setattr(journals, "time", told)


def test_the_lag_of_a_journal_is_counted_from_its_last_commit(monkeypatch, tmp_path):
    clock = Clock(monkeypatch)
    storage = plain(journal=Journal(tmp_path / "journal", interval=1e6))
    assert storage.stats().items() >= {"journal_lag_seconds": 0.0, "journal_lag_inserts": 0}.items()
    add(storage, *[0.0] * 3)
    clock.now += 7.0
    assert storage.stats().items() >= {"journal_lag_seconds": 7.0, "journal_lag_inserts": 3}.items()
    storage.journal.commit()
    clock.now += 0.5
    add(storage, 0.0)
    assert storage.stats().items() >= {"journal_lag_seconds": 0.5, "journal_lag_inserts": 1}.items()
    monkeypatch.setattr(storage.journal._writer, "write", fail)
    with pytest.raises(OSError, match="no"):
        storage.journal.commit()
    clock.now += 0.5
    assert storage.stats().items() >= {"journal_lag_seconds": 1.0, "journal_lag_inserts": 1}.items()
    monkeypatch.undo()
    storage.close()


def fail(*args, **kwargs):
    raise OSError("no")


# ---------------------------------------------------------------------------------------------------- other processes


FORK = multiprocessing.get_context("fork")


def act(writer, seed, steps):
    played = Played(None, seed)
    for _ in range(steps):
        played.add(writer.add)
    writer.close()


def test_what_a_writer_of_another_process_added_is_told():
    played = Played(make("prioritized", memory="shared", sample_info=True), seed=5)
    process = FORK.Process(target=act, args=(played.storage.writer(), 5, 30))
    process.start()
    for _ in range(30):
        played.add(lambda *args, **kwargs: None)
    process.join()
    played.draw()
    for lane in played.lanes:  # the writer has left
        lane.ends = [0 if end is None else end for end in lane.ends]
    expected = {**played.expected(), **draws(played.drawn, played.held), "lost_writers": 0, "stale_updates": 0}
    expected.update(spread("priority", [1.0]))
    assert_equal(played.storage.stats(), expected)
    played.storage.close()


def wait_to_add(writer):
    add(writer, 0.0, 0.0, 0.0)
    with pytest.raises(WaitTimeoutError):
        add(writer, 0.0)
    writer.close()


def test_waits_of_writers_in_other_processes_are_counted():
    limit = RateLimit(1.0, min_size=1, tolerance=2.0)
    storage = plain(memory="shared", rate_limit=limit, timeout=0.05)
    process = FORK.Process(target=wait_to_add, args=(storage.writer(),))
    process.start()
    process.join()
    found = storage.stats()
    assert process.exitcode == 0
    assert (found["inserts"], found["insert_waits"], found["sample_waits"]) == (3, 1, 0)
    assert 0 < found["insert_wait_seconds"] < 60  # a busy machine may have begun to count late
    storage.close()


def test_a_storage_that_was_overwritten_while_it_was_looked_at_is_looked_at_again(monkeypatch):
    storage = plain(memory="shared")
    add(storage, 1.0, 2.0, end=True)
    lapped = iter([torch.tensor([0]), None])
    monkeypatch.setattr(type(storage._rows), "overrun", lambda ring: next(lapped, None))
    assert storage.stats()["return_mean"] == 3.0
    assert next(lapped, "asked twice") == "asked twice"
    storage.close()


# ---------------------------------------------------------------------------------------------------- other classes


class Own(Storage):
    """As a user of the original base wrote it: nothing but the ten methods."""

    create_factory = init_tensors = get_all_buffer_data = insert_data_slice = insert_transition = None
    before_gradients = after_gradients = generate_batches = reset = update_storage_parameter = None

    def __init__(self):
        pass


def test_a_class_of_a_user_is_told_what_to_implement():
    with pytest.raises(NotImplementedError, match=r"Own has no stats\(\). Implement it: it returns a dict of numbers"):
        Own().stats()


def test_an_event_file_of_tensorboard_holds_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    played, told = Played(make("prioritized", sample_info=True)), {}
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(6, 12):
            for _ in range(step):
                played.add()
            played.draw()
            told[step] = played.storage.stats()
            for name, value in played.storage.stats().items():
                writer.add_scalar(f"replay/{name}", value, step)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {tag.removeprefix("replay/") for tag in events.Tags()["scalars"]} == told[11].keys()
    for tag in events.Tags()["scalars"]:
        name = tag.removeprefix("replay/")
        found = {event.step: event.value for event in events.Scalars(tag)}
        expected = {step: numbers[name] for step, numbers in told.items() if name in numbers}
        assert found == pytest.approx(expected, rel=1e-6), name  # an event is a float32
    assert len(told[11]) > 25


PAGE = Path(__file__).parents[2] / "docs" / "look.md"


def test_every_number_is_in_the_documentation():
    section = PAGE.read_text().split("## Numbers: stats()")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    documented = set()
    for row in rows:
        names = re.findall(r"`([\w.]+)`", row)
        stem = names[0].rpartition("_")[0]
        documented |= {name.replace("...", stem) for name in names}
    told = {"invalid_rewards", "invalid_actions"}  # on CUDA alone
    limit = RateLimit(min_size=1)
    played = Played(make("prioritized", sample_info=True, rate_limit=limit))
    for _ in range(20):
        played.add()
    told |= played.storage.stats().keys()
    storage = hand_off()
    with storage.actor() as actor:
        play_rollout(actor, 0)
    told |= storage.stats().keys()
    told |= RolloutStorage.from_spaces(BOX, ACTIONS, 2, 3).stats().keys()
    told |= {"journal_lag_seconds", "journal_lag_inserts"}  # tested above
    assert documented == told
