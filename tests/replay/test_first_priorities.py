"""Priorities that are given with a step: `add(..., priorities=)`, as actors of Ape-X give them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from rlstore import (
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
)

SPACE = Box(-9, 9, (1,), np.float32)
ENVS = 3


def make(**options: object) -> PrioritizedReplayStorage:
    return PrioritizedReplayStorage(
        SPACE, SPACE, storage_size=4 * ENVS, num_envs=ENVS, batch_size=8, alpha=0.5, beta=1.0, seed=0, **options
    )


def step(lanes: int = ENVS, reward: float = 1.0, **named: object) -> dict[str, object]:
    zeros = np.zeros((lanes, 1), np.float32)
    flags = np.zeros(lanes, bool)
    given = {"observations": zeros, "actions": zeros, "rewards": np.full(lanes, reward), "terminateds": flags}
    return {**given, "truncateds": flags, "infos": {}, "next_observations": zeros, **named}


@pytest.mark.parametrize(
    "given", [[4, 0, 16], np.array([4.0, 0, 16]), torch.tensor([[4.0], [0.0], [16.0]]), torch.tensor([4, 0, 16])]
)
def test_new_rows_take_the_priorities_that_are_given(given):
    storage = make()
    storage.add(**step())  # none are given, and none are held: 1 each
    storage.add(**step(priorities=given))
    storage.add(**step())  # the largest: 16 ** 0.5
    assert storage.priorities(torch.arange(9)).tolist() == [1, 1, 1, 2, 0, 4, 4, 4, 4]
    assert storage.priority_total == 21.0
    # Eight equal parts of 21: every row of p >= 21/8 is drawn at least once, and the one of 0 never.
    rows = set(storage.sample().rows.tolist())
    assert {5, 6, 7, 8} <= rows
    assert 4 not in rows


def test_what_is_drawn_has_the_weights_of_the_priorities():
    storage = make()
    storage.add(**step(priorities=[1.0, 4.0, 9.0]))
    batch = storage.sample()
    # p is 1, 2, 3: weights (P(i) * size) ** -1 over the largest, that of the smallest p drawn.
    p = torch.tensor([1.0, 2.0, 3.0])[batch.rows]
    torch.testing.assert_close(batch.weights.flatten(), p.min() / p)


def test_lanes_that_write_no_row_keep_theirs():
    storage = make(autoreset="NextStep")
    storage.add(**step(priorities=[1.0, 4.0, 9.0], terminateds=np.array([False, True, False])))
    # The second is a reset step, which is no transition; the third takes no part, and what it is given is not read.
    storage.add(**step(priorities=[16.0, 25.0, np.nan], mask=[True, True, False]))
    assert len(storage) == 4
    assert storage.priorities(torch.tensor([0, 1, 2, 3])).tolist() == [1, 2, 3, 4]


def test_rows_are_overwritten_and_updated_as_any():
    storage = make()
    for value in range(1, 7):
        storage.add(**step(priorities=[value**2] * ENVS))
    assert storage.priority_total == ENVS * (3 + 4 + 5 + 6)
    storage.update(torch.tensor([3 * ENVS]), torch.tensor([100.0]))
    assert storage.priorities(torch.tensor([3 * ENVS, 3 * ENVS + 1])).tolist() == [10, 4]
    assert storage.stale_updates == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0, 2.0], r"priorities are \(2,\) float64; give a real number for each of 3 environments"),
        (torch.ones(3, 2), r"priorities are \(3, 2\) float32; give a real number"),
        (np.ones(3, complex), r"priorities are \(3,\) complex128; give a real number"),
        ([1.0, -0.5, 1.0], "the priority of environment 1 is -0.5; priorities must be finite .* and >= 0"),
        ([1.0, 1.0, float("nan")], "the priority of environment 2 is nan"),
        ([1e300, 1.0, 1.0], "the priority of environment 0 is 1e[+]300"),
        ("high", "priorities cannot be converted"),
    ],
)
@pytest.mark.parametrize("through", ["storage", "writer", "insert_transition"])
def test_what_is_no_priority_is_refused_and_nothing_is_written(given, message, through):
    storage = make()
    adding = storage.writer() if through == "writer" else storage
    words = {"terminateds": "terminated", "truncateds": "truncated"}
    sample = {words.get(name, name): value for name, value in step(priorities=given).items() if name != "infos"}
    with pytest.raises(InvalidInputError, match=message) as error:
        storage.insert_transition(sample) if through == "insert_transition" else adding.add(**step(priorities=given))
    assert "Nothing was written." in str(error.value)
    assert len(storage) == 0
    adding.add(**step())
    assert len(storage) == ENVS


def test_priorities_of_a_refused_step_are_forgotten():
    storage = make()
    with pytest.raises(InvalidInputError, match="rewards"):
        storage.add(**step(reward=np.nan, priorities=[4.0, 4.0, 4.0]))
    storage.add(**step())
    assert storage.priorities(torch.arange(3)).tolist() == [1, 1, 1]


def test_writers_of_threads_give_them_for_their_environments():
    storage = make()
    left, right = storage.writer(range(2)), storage.writer(range(2, 3))
    right.add(**step(1, priorities=[9.0]))
    left.add(**step(2, priorities=[16.0, 0.0]))
    right.add(**step(1))
    assert storage.priorities(torch.tensor([0, 1, 2, 5])).tolist() == [4, 0, 3, 4]
    data = step(2)
    samples = {
        name: np.stack([data[word]] * 2)
        for name, word in (
            ("observations", "observations"),
            ("actions", "actions"),
            ("rewards", "rewards"),
            ("terminated", "terminateds"),
            ("truncated", "truncateds"),
            ("next_observations", "next_observations"),
        )
    }
    with pytest.raises(InvalidInputError, match="environment 1 is -1"):
        left._insert_steps({**samples, "priorities": np.array([[25.0, 36.0], [49.0, -1.0]])}, 2)
    assert len(storage) == 4
    assert left._insert_steps({**samples, "priorities": np.array([[25.0, 36.0], [49.0, 64.0]])}, 2) == 4
    assert storage.priorities(torch.tensor([3, 4, 6, 7])).tolist() == [5, 6, 7, 8]


def test_a_storage_in_shared_memory_takes_them_and_its_writers_say_that_they_cannot():
    storage = make(memory="shared")
    storage.add(**step(priorities=[4.0, 9.0, 16.0]))
    assert storage.priorities(torch.arange(3)).tolist() == [2, 3, 4]
    with pytest.raises(InvalidInputError, match='a writer of memory="shared"'):
        storage.writer().add(**step(priorities=[4.0, 9.0, 16.0]))
    assert len(storage) == 3
    storage.close()


@pytest.mark.parametrize(
    "other",
    [
        lambda: ReplayStorage(SPACE, SPACE, storage_size=30, num_envs=ENVS),
        lambda: NStepReplayStorage(SPACE, SPACE, storage_size=30, num_envs=ENVS),
        lambda: SequenceReplayStorage(SPACE, SPACE, storage_size=30, num_envs=ENVS, sequence_length=2),
        lambda: SequenceReplayStorage(SPACE, SPACE, storage_size=30, num_envs=ENVS, sequence_length=2, alpha=0.5),
    ],
)
def test_storages_without_priorities_of_transitions_refuse_them(other):
    storage = other()
    with pytest.raises(InvalidInputError, match=r"priorities were given.* Nothing was written\."):
        storage.add(**step(priorities=[1.0] * ENVS))
    assert len(storage) == 0


def test_a_single_environment_may_give_a_number():
    storage = PrioritizedReplayStorage(SPACE, SPACE, storage_size=9, alpha=1.0)
    storage.add(np.zeros(1), np.zeros(1), 0.0, False, False, {}, np.zeros(1), priorities=2.5)
    assert storage.priorities([0]).tolist() == [2.5]


def test_a_snapshot_holds_them(tmp_path):
    storage = make()
    storage.add(**step(priorities=[4.0, 9.0, 16.0]))
    storage.save(tmp_path / "snapshot")
    loaded = PrioritizedReplayStorage.load(tmp_path / "snapshot")
    assert loaded.priorities(torch.arange(3)).tolist() == [2, 3, 4]
