"""What is drawn, how often: chi-square tests at fixed seeds, and priorities at the size and age they have in use."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from gymnasium import spaces
from replay_model import ReplayModel
from replay_world import Given, Goal, Vector, stacked

from rlstore import (
    HindsightReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
)

ACTION = spaces.Discrete(9)
# A fair draw is further off than this once in three million times; the seeds are fixed.
FAR = 5.0


def deviation(counts: np.ndarray, expected: np.ndarray) -> float:
    """How far counts are from what is expected, in standard deviations of a fair draw.

    The chi-square statistic, made normal by the cube root of Wilson and Hilferty.
    """
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    assert expected.min() > 5, "too few draws to tell"
    assert counts.sum() == pytest.approx(expected.sum())
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def test_the_deviation_of_fair_and_of_unfair_draws():
    rng = np.random.default_rng(0)
    fair = [deviation(rng.multinomial(50_000, np.full(100, 0.01)), np.full(100, 500.0)) for _ in range(200)]
    assert abs(np.mean(fair)) < 0.25
    assert 0.8 < np.std(fair) < 1.2
    tilted = np.linspace(0.9, 1.1, 100)
    assert deviation(rng.multinomial(50_000, tilted / tilted.sum()), np.full(100, 500.0)) > FAR
    one_missing = np.array([0.0, *[1 / 99] * 99])
    assert deviation(rng.multinomial(50_000, one_missing), np.full(100, 500.0)) > FAR


class Feeder:
    """Adds steps of vector observations to a storage and to its model; an observation's number is its own."""

    def __init__(self, storage, envs, capacity, kind=None):
        self.storage, self.envs, self.kind = storage, envs, kind or Vector()
        self.model = ReplayModel(envs, capacity)
        self.shown = [self.kind.start(iter(self.fresh())) for _ in range(envs)]

    number = 0

    def fresh(self):
        while True:
            self.number += 1
            yield self.number

    def add(self, active=None, ends=()):
        """One step; ``active`` environments take part, and of ``ends`` the episode is truncated."""
        step, ids = [], self.fresh()
        for env in range(self.envs):
            following = self.kind.follow(self.shown[env], ids)
            start = self.kind.start(ids) if env in ends else None
            final = following if env in ends else None
            step.append(Given(self.shown[env], 0, (0.0,), start or following, False, env in ends, final))
        mask = torch.tensor([active is None or env in active for env in range(self.envs)])
        flags = torch.tensor([given.truncated for given in step])
        infos = {"final_obs": stacked([self.kind.render(given.final or given.following) for given in step])}
        self.storage.add(
            stacked([self.kind.render(given.observation) for given in step]),
            torch.zeros(self.envs, dtype=torch.int64),
            torch.zeros(self.envs),
            torch.zeros(self.envs, dtype=torch.bool),
            flags,
            infos if ends else {},
            stacked([self.kind.render(given.following) for given in step]),
            mask=mask,
        )
        self.model.add([given if mask[env] else None for env, given in enumerate(step)])
        for env, given in enumerate(step):
            if mask[env]:
                self.shown[env] = given.following

    def numbers(self):
        return [one.observation[0] for one in self.model.held()]


def counted(served: list[int], rows: list[int]) -> np.ndarray:
    counts = Counter(served)
    assert set(counts) <= set(rows)
    return np.array([counts[row] for row in rows])


# ------------------------------------------------------------------------------------------------- uniform


def uniform_storage(cls, envs, capacity, **options):
    return cls(Vector.space, ACTION, "cpu", envs * capacity, envs, 64, seed=7, **options)


@pytest.mark.parametrize(("cls", "steps"), [(ReplayStorage, 20), (NStepReplayStorage, 47), (ReplayStorage, 113)])
def test_draws_are_uniform_over_transitions(cls, steps):
    workers = {"num_workers": 0} if cls is NStepReplayStorage else {}
    storage = uniform_storage(cls, 3, 47, n_step=3, **workers)
    feeder = Feeder(storage, 3, 47)
    for step in range(steps):
        feeder.add(ends={step % 3} if step % 5 == 0 else ())
    rows = feeder.numbers()
    served = [int(number) for _ in range(50) for number in storage.sample(1000).observations[:, 0].tolist()]
    assert deviation(counted(served, rows), np.full(len(rows), len(served) / len(rows))) < FAR


def test_draws_are_uniform_over_transitions_of_unequal_lanes():
    storage = uniform_storage(ReplayStorage, 3, 60)
    feeder = Feeder(storage, 3, 60)
    for step in range(80):
        feeder.add(active={0} | ({1} if step % 11 == 0 else set()) | ({2} if step == 40 else set()))
    rows = feeder.numbers()
    assert [len(lane) for lane in feeder.model.by_lane()] == [60, 8, 1]
    served = [int(number) for _ in range(50) for number in storage.sample(1000).observations[:, 0].tolist()]
    assert deviation(counted(served, rows), np.full(69, len(served) / 69)) < FAR


def test_draws_of_small_batches_are_uniform_and_do_not_depend_on_one_another():
    """Pairs within a batch and from one batch to the next: each of the 36 comes as often."""
    storage = uniform_storage(ReplayStorage, 2, 3)
    feeder = Feeder(storage, 2, 3)
    for _ in range(5):
        feeder.add()
    rows = feeder.numbers()
    batches = [[int(number) for number in storage.sample(2).observations[:, 0].tolist()] for _ in range(20_000)]
    pairs = [(one, other) for one in rows for other in rows]
    within = Counter(tuple(batch) for batch in batches)
    between = Counter((one[1], other[0]) for one, other in itertools.pairwise(batches))
    for counts in (within, between):
        total = sum(counts.values())
        assert deviation([counts[pair] for pair in pairs], np.full(36, total / 36)) < FAR


def test_batches_of_prepared_ones_are_uniform_too():
    storage = uniform_storage(NStepReplayStorage, 2, 25, num_workers=2)
    feeder = Feeder(storage, 2, 25)
    for _ in range(40):
        feeder.add()
    rows = feeder.numbers()
    served = [int(number) for _ in range(500) for number in storage.sample().observations[:, 0].tolist()]
    storage.close()
    assert deviation(counted(served, rows), np.full(50, len(served) / 50)) < FAR


def drawn(seed):
    storage = ReplayStorage(Vector.space, ACTION, "cpu", 100, 2, 64, seed=seed)
    feeder = Feeder(storage, 2, 50)
    for _ in range(60):
        feeder.add()
    return [storage.sample().observations[:, 0].tolist() for _ in range(3)]


def test_a_seed_fixes_the_draws_and_another_changes_them():
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


# ------------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("across", [False, True])
def test_sequences_are_uniform_over_windows(across):
    """Episodes of 1 to 9 steps in lanes that stand still at times, windows of 4 that overlap by 2."""
    storage = SequenceReplayStorage(
        Vector.space, ACTION, "cpu", 120, 3, 64, seed=5, sequence_length=3, burn_in=1, overlap=1, across_episodes=across
    )
    feeder, rng = Feeder(storage, 3, 40), np.random.default_rng(0)
    for _ in range(70):
        active = {env for env in range(3) if rng.random() < (0.9, 0.6, 0.2)[env]}
        feeder.add(active, {env for env in active if rng.random() < 0.3})
    rows = [window.row for window in feeder.model.windows(4, 2, across)]
    assert len(rows) > 30
    served = [row for _ in range(40) for row in storage.sample(500).rows.tolist()]
    assert deviation(counted(served, rows), np.full(len(rows), len(served) / len(rows))) < FAR


# ------------------------------------------------------------------------------------------------- hindsight


def nothing(achieved, desired, info):
    return torch.zeros(len(achieved))


@pytest.mark.parametrize(("strategy", "fraction"), [("future", 0.8), ("final", 0.25), ("episode", 1.0)])
def test_goals_come_as_often_as_the_strategy_says(strategy, fraction):
    storage = HindsightReplayStorage(
        Goal.space,
        ACTION,
        "cpu",
        24,
        2,
        64,
        seed=3,
        compute_reward=nothing,
        strategy=strategy,
        relabel_fraction=fraction,
    )
    feeder = Feeder(storage, 2, 12, Goal())
    for step in range(17):
        feeder.add(ends={0} if step in (6, 9) else {1} if step == 11 else ())
    goals, steps = feeder.model.goals(strategy), feeder.model.transitions()
    chances = {}
    for one in steps:
        for goal in goals[one.row]:
            chances[one.observation[0], goal] = fraction / len(goals[one.row]) / len(steps)
        if fraction < 1:
            chances[one.observation[0], one.observation[2]] = (1 - fraction) / len(steps)
    assert sum(chances.values()) == pytest.approx(1)
    counts, total = Counter(), 60_000
    for _ in range(60):
        batch = storage.sample(1000)
        numbers = batch.observations["observation"][:, 0].long().tolist()
        counts.update(zip(numbers, batch.observations["desired_goal"][:, 0].long().tolist(), strict=True))
    assert set(counts) <= set(chances)
    found = [counts[pair] for pair in chances]
    assert deviation(found, np.array(list(chances.values())) * total) < FAR


# ------------------------------------------------------------------------------------------------- priorities


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_single_draws_follow_the_priorities(alpha):
    """One draw a batch has the whole total for its part, so that each is on its own."""
    storage = PrioritizedReplayStorage(Vector.space, ACTION, "cpu", 30, 3, 64, seed=9, alpha=alpha, n_step=2)
    feeder = Feeder(storage, 3, 10)
    for _ in range(13):
        feeder.add()
    rows = sorted(feeder.model.rows())
    priorities = np.linspace(0.05, 4.0, 30)
    storage.update(torch.tensor(rows), torch.tensor(priorities))
    shares = priorities**alpha / (priorities**alpha).sum()
    served = [storage.sample(1).rows.item() for _ in range(20_000)]
    assert deviation(counted(served, rows), shares * 20_000) < FAR


@pytest.mark.parametrize("size", [7, 256])
def test_batches_follow_the_priorities_within_their_parts(size):
    storage = PrioritizedReplayStorage(Vector.space, ACTION, "cpu", 60, 2, 64, seed=1, alpha=1.0)
    feeder = Feeder(storage, 2, 30)
    for _ in range(30):
        feeder.add()
    rows = np.array(sorted(feeder.model.rows()))
    priorities = np.random.default_rng(2).random(60)
    storage.update(torch.tensor(rows), torch.tensor(priorities))
    draws = 60_000 // size
    served = [row for _ in range(draws) for row in storage.sample(size).rows.tolist()]
    expected = priorities / priorities.sum() * draws * size
    assert deviation(counted(served, rows.tolist()), expected) < FAR


def test_sequences_follow_their_priorities():
    storage = SequenceReplayStorage(Vector.space, ACTION, "cpu", 60, 2, 64, seed=1, alpha=1.0, sequence_length=3)
    feeder = Feeder(storage, 2, 30)
    for step in range(50):
        feeder.add(ends={0} if step % 7 == 0 else ())
    rows = [window.row for window in feeder.model.windows(3, 3)]
    priorities = np.linspace(0.2, 2, len(rows))
    storage.update(torch.tensor(rows), torch.tensor(priorities))
    served = [storage.sample(1).rows.item() for _ in range(10_000)]
    assert deviation(counted(served, rows), priorities / priorities.sum() * 10_000) < FAR


def tree_sum(leaves: np.ndarray) -> float:
    """The sum of leaves, 16 children to a node, in double; four running sums in a node, as the storage adds."""
    level = leaves.astype(np.float64)
    while len(level) > 1:
        groups = np.pad(level, (0, -len(level) % 16)).reshape(-1, 4, 4)
        sums = ((groups[:, 0] + groups[:, 1]) + groups[:, 2]) + groups[:, 3]
        level = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
    return float(level[0])


MILLION = 1_000_000
LANES = 1000


@pytest.fixture(scope="module")
def aged():
    """A million rows after ten million updates, a tenth of the rows written anew on the way, and the priorities given.

    They spread over six orders of magnitude, so that a sum that was adjusted and not recomputed would be another.
    """
    storage = PrioritizedReplayStorage(
        spaces.Box(-1e9, 1e9, (1,)),
        ACTION,
        "cpu",
        MILLION,
        LANES,
        4096,
        seed=4,
        alpha=0.6,
        beta=0.5,
        autoreset="SameStep",
    )
    zeros = torch.zeros(LANES)
    flags = torch.zeros(LANES, dtype=torch.bool)

    def add(step):
        shown = (torch.arange(LANES) + float(step * LANES)).unsqueeze(-1)
        storage.add(shown, torch.zeros(LANES, dtype=torch.int64), zeros, flags, flags, {}, shown + LANES)

    for step in range(MILLION // LANES):
        add(step)
    held = np.ones(MILLION)  # by place: row % MILLION
    first, rng, size = 0, np.random.default_rng(0), 4096
    for number in range(10_000_000 // size + 1):
        if number % 24 == 23 and first < MILLION // 10:
            largest = held.max()
            place = first % MILLION
            add(MILLION // LANES + first // LANES)
            held[place : place + LANES] = largest
            first += LANES
        rows = first + (int(rng.integers(MILLION)) + 244_141 * np.arange(size)) % MILLION  # no row twice
        priorities = 10 ** rng.uniform(-6, 1, size)
        storage.update(torch.from_numpy(rows), torch.from_numpy(priorities))
        held[rows % MILLION] = priorities
    return storage, np.arange(first, first + MILLION), held


def test_priorities_are_those_given_after_ten_million_updates(aged):
    storage, rows, held = aged
    assert rows[0] == MILLION // 10
    leaves = storage.priorities(torch.from_numpy(rows)).flatten().numpy()
    np.testing.assert_allclose(leaves, held[rows % MILLION] ** 0.6, rtol=1e-5)
    assert storage.stale_updates == 0


def test_the_total_is_the_sum_of_the_leaves_to_the_bit_after_ten_million_updates(aged, tmp_path):
    """The leaves of an environment lie one after another. A storage that is loaded sums them anew."""
    storage, rows, _ = aged
    leaves = np.empty(MILLION)
    places = rows % LANES * (MILLION // LANES) + rows // LANES % (MILLION // LANES)
    leaves[places] = storage.priorities(torch.from_numpy(rows)).flatten().numpy()
    assert float(storage.priority_total) == tree_sum(leaves)
    assert float(storage.priority_total) == pytest.approx(math.fsum(leaves), rel=1e-12)
    storage.save(tmp_path / "aged")
    assert PrioritizedReplayStorage.load(tmp_path / "aged").priority_total == storage.priority_total


def test_draws_follow_the_priorities_after_ten_million_updates(aged):
    """Rows are put into cells by a hash of theirs, and again by their priority."""
    storage, rows, held = aged
    shares = held[rows % MILLION] ** 0.6
    shares /= shares.sum()
    served = np.concatenate([storage.sample(4096).rows.numpy() for _ in range(400)]) - rows[0]
    by_hash = (rows * 2_654_435_761) % 2**32 % 4001
    order = np.argsort(shares)
    by_priority = np.empty(MILLION, np.int64)
    by_priority[order] = np.minimum(np.cumsum(shares[order]) * 4000, 3999).astype(np.int64)
    for cells in (by_hash, by_priority):
        expected = np.bincount(cells, shares) * len(served)
        assert deviation(np.bincount(cells[served], minlength=len(expected)), expected) < FAR


def test_values_and_weights_are_those_of_the_rows_drawn_after_ten_million_updates(aged):
    storage, rows, held = aged
    batch = storage.sample(4096)
    assert batch.observations.flatten().tolist() == batch.rows.tolist()  # the observation of a row is its number
    assert (batch.next_observations.flatten() - LANES).tolist() == batch.rows.tolist()
    raw = (held[batch.rows.numpy() % MILLION] ** 0.6) ** -0.5
    np.testing.assert_allclose(batch.weights.flatten().numpy(), raw / raw.max(), rtol=1e-4)
    assert int(batch.rows.min()) >= rows[0]
