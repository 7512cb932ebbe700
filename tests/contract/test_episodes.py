"""Episodes and rows, read one by one, of every class against what was inserted."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from replay_cases import ENVS, STEPS, check_row, collect, ids_in
from storages import NUM_ENVS
from storages import ids_in as ids_of
from where import DEVICE

from rlstore import DecoupledRolloutStorage, InvalidInputError, RowNotHeldError

# ---------------------------------------------------------------------------------------------------- replay


def test_rows_of_replay_are_read_as_they_were_added(replay):
    storage = replay.make()
    collect(replay, storage, steps=STEPS + 3)
    rows = storage.held_rows()
    assert rows.tolist() == list(range(3 * ENVS, (STEPS + 3) * ENVS))
    steps = storage[rows]
    masks = torch.ones(len(rows), dtype=torch.bool)
    # Discounts are those of this replay's batches, so that the rows can be looked at as one.
    steps = {**steps, "masks": masks, "discounts": 0.5 * (~steps["terminated"]).float()}
    for place, row in enumerate(rows.tolist()):
        check_row(replay, steps, place, row)


def test_episodes_of_replay_are_listed_and_read(replay):
    storage = replay.make()
    assert len(storage.episodes()) == 0
    collect(replay, storage, steps=5)
    found = [
        (
            e.env,
            ids_in(e.observations).tolist(),
            e.rewards.tolist(),
            ids_in(e.final_observations).item(),
            (e.terminated, e.truncated, e.is_over, e.is_whole),
        )
        for e in storage.episodes()
    ]
    # Environment 0 terminates in steps 1 and 3; environment 1 is truncated in steps 2 and 3; see ENDS.
    assert found == [
        (0, [1.0, 3.0], [1.25, 1.75], 1003.0, (True, False, True, True)),
        (1, [2.0, 4.0, 6.0], [1.5, 2.0, 2.5], 1006.0, (False, True, True, True)),
        (0, [5.0, 7.0], [2.25, 2.75], 1007.0, (True, True, True, True)),
        (1, [8.0], [3.0], 1008.0, (False, True, True, True)),
        (0, [9.0], [3.25], 11.0, (False, False, False, True)),
        (1, [10.0], [3.5], 12.0, (False, False, False, True)),
    ]
    assert storage.episodes().returns.tolist() == [3.0, 6.0, 5.0, 3.0, 3.25, 3.5]


def test_steps_of_replay_that_were_overwritten_or_removed_are_refused(replay):
    storage = replay.make()
    collect(replay, storage)
    first, last = storage.episodes()[0], storage.episodes()[-1]
    collect(replay, storage, first=STEPS, steps=1)
    told = r"row 0 is not held any more: step 0 of environment 0 was.*; steps 1 to 6 of it are held.*Nothing was read"
    for read in (lambda: first.observations, lambda: first["rewards"], lambda: storage[0], lambda: storage[[2, 0]]):
        with pytest.raises(RowNotHeldError, match=told):
            read()
    with pytest.raises(IndexError, match="row 14 was never written: it would be step 7 of environment 0; steps 1"):
        storage[14]
    with pytest.raises(RowNotHeldError, match=r"row -1 is negative, and no row is\."):
        storage[torch.tensor([4, -1])]
    assert ids_in(last.observations).tolist()[-1] == STEPS * ENVS  # which is still held
    storage.reset()
    assert len(storage.episodes()) == len(storage.held_rows()) == 0
    with pytest.raises(RowNotHeldError, match="overwritten or removed; none of its steps is held"):
        last.final_observations  # noqa: B018


def test_a_closed_storage_shows_nothing(replay):
    storage = replay.make()
    collect(replay, storage)
    episode = storage.episodes()[0]
    storage.close()
    for look in (storage.episodes, storage.held_rows, lambda: storage[0], lambda: episode.actions):
        with pytest.raises(RuntimeError, match="closed"):
            look()


def test_what_was_saved_is_listed_as_before(replay, tmp_path):
    storage = replay.make()
    collect(replay, storage, steps=STEPS + 2)
    storage.save(tmp_path / "saved")
    loaded = type(storage).load(tmp_path / "saved")
    before, after = storage.episodes(), loaded.episodes()
    for name in ("envs", "lengths", "returns", "terminated", "truncated", "is_over", "is_whole", "rows"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    for one, other in zip(before, after, strict=True):
        assert ids_in(one.observations).tolist() == ids_in(other.observations).tolist()
    assert before.is_whole.tolist().count(False) == 1


# ---------------------------------------------------------------------------------------------------- rollouts


class Rollout:
    """The ends of the steps of a rollout, and the pieces that they cut it into."""

    def __init__(self, size):
        self.size, self.ends = size, []

    def pieces(self):
        """In order of their first steps: environment, steps, how the last one ended ("" if it did not)."""
        found = []
        for env in range(NUM_ENVS):
            first = 0
            for step, ends in enumerate(self.ends):
                if ends[env] or step == len(self.ends) - 1:
                    found.append((first, env, list(range(first, step + 1)), ends[env]))
                    first = step + 1
        return [piece[1:] for piece in sorted(found)]


def look_at(storage, rollout, number):
    """All episodes of a rollout, whose first step has so many steps before it, are as they were inserted."""
    listed, expected = storage.episodes(), rollout.pieces()
    assert len(listed) == len(expected)
    for episode, (env, steps, end) in zip(listed, expected, strict=True):
        ids = [float(1 + (number + step) * NUM_ENVS + env) for step in steps]
        assert (episode.env, episode.length, episode.rows.tolist()) == (
            env,
            len(ids),
            [s * NUM_ENVS + env for s in steps],
        )
        assert (episode.terminated, episode.truncated, episode.is_over) == (end == "t", end == "c", bool(end))
        assert ids_of(episode.observations).tolist() == ids
        assert episode.rewards.tolist() == [i / 4 + 1 for i in ids]
        assert episode.total_return == sum(i / 4 + 1 for i in ids)
        assert episode.actions.reshape(len(ids), -1)[:, 0].tolist() == ids
        if "values" in episode.names:
            assert episode["values"].tolist() == [i / 8 for i in ids]
            assert episode["log_probs"].tolist() == [-i for i in ids]
        if end:
            assert episode.final_observations is None
        else:
            assert ids_of(episode.final_observations).item() == ids[-1] + NUM_ENVS
    return listed


@pytest.mark.parametrize("seed", range(3))
def test_episodes_of_rollouts_are_what_was_inserted(case, seed):
    rng, number = random.Random(seed), 0
    storage = case.create_factory(6)(DEVICE)
    assert len(storage.episodes()) == len(storage.held_rows()) == 0
    for _ in range(6):
        rollout = Rollout(6)
        for step in range(rng.randrange(3, 7)):
            ends = [rng.choice(["", "", "t", "c"]) for _ in range(NUM_ENVS)]
            flags = [[env for env in range(NUM_ENVS) if ends[env] == kind] for kind in "tc"]
            storage.insert_transition(case.sample(number + step, *flags))
            rollout.ends.append(ends)
            if step % 2:
                listed = look_at(storage, rollout, number)
        listed = look_at(storage, rollout, number)
        assert listed.is_whole.tolist() == [steps[0] > 0 for _, steps, _ in rollout.pieces()]
        data, rows = storage.get_all_buffer_data(), torch.tensor(rng.sample(range(len(rollout.ends) * NUM_ENVS), 5))
        assert storage.held_rows().tolist() == list(range(len(rollout.ends) * NUM_ENVS))
        found = storage[rows]
        assert set(data) - set(found) <= {"last_observations", "flags_before"}
        for name, value in found.items():
            same(value, rows_of(data[name], rows))
        storage.after_gradients()
        number += len(rollout.ends)
        storage.insert_transition(case.sample(number))
        with pytest.raises(RowNotHeldError, match=r"another one was begun. List the episodes"):
            listed[0].observations  # noqa: B018
        storage.reset()  # which forgets the ends before it, as far as they are known


def rows_of(nest, rows):
    """Some rows of a nest of tensors ``[steps, envs, ...]``."""
    if isinstance(nest, tuple):
        return tuple(rows_of(part, rows) for part in nest)
    if isinstance(nest, torch.Tensor):
        return nest.flatten(0, 1)[rows]
    return {name: rows_of(part, rows) for name, part in nest.items()}


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0))
        return
    parts = range(len(one)) if isinstance(one, tuple) else one.keys()
    for part in parts:
        same(one[part], other[part])


def test_a_rollout_that_follows_an_end_begins_a_whole_episode_where_that_is_known(case):
    storage = case.create_factory(2)(DEVICE)
    for step in range(2):
        storage.insert_transition(case.sample(step, terminated=[1] if step else []))
    assert storage.episodes().is_whole.tolist() == [False] * NUM_ENVS
    storage.after_gradients()
    storage.insert_transition(case.sample(2))
    keeps_flags = isinstance(storage, DecoupledRolloutStorage)
    assert storage.episodes().is_whole.tolist() == [False, keeps_flags, False]


def test_rows_of_rollouts_that_are_not_held_are_refused(case):
    storage = case.create_factory(4)(DEVICE)
    with pytest.raises(IndexError, match=r"holds no rows|0 steps of 3 environments"):
        storage[0]
    for step in range(2):
        storage.insert_transition(case.sample(step))
    for row in (6, -1, 10**12):
        with pytest.raises(RowNotHeldError, match=rf"row {row} is not held: the rollout has 2 steps of 3.*0 to 5 are"):
            storage[[0, row]]


# ---------------------------------------------------------------------------------------------------- what is asked for

BAD_ROWS = [
    1.5,
    [0.0],
    True,
    [True, False],
    "0",
    ["0"],
    None,
    slice(0, 3),
    2**70,
    {},
    [[1], [2, 3]],
    torch.tensor([1j]),
]


@pytest.mark.parametrize("rows", BAD_ROWS, ids=repr)
def test_what_is_no_row_id_is_refused(replay, rows):
    storage = replay.make()
    collect(replay, storage, steps=2)
    for read in (storage.__getitem__, storage.as_dataset):
        if rows is None and read == storage.as_dataset:
            continue  # which are all
        with pytest.raises(InvalidInputError, match=r"needs whole numbers, the ids of rows.*It got .*held_rows\(\)"):
            read(rows)


def test_row_ids_come_in_any_form(replay):
    storage = replay.make()
    collect(replay, storage, steps=4)
    alone = storage[5]
    assert alone["rewards"].tolist() == [6 / 4 + 1]
    assert ids_in(alone["observations"]).tolist() == 6.0
    for rows in ([5, 2], (5, 2), np.array([5, 2]), torch.tensor([5, 2], dtype=torch.uint8).to(DEVICE)):
        assert ids_in(storage[rows]["observations"]).tolist() == [6.0, 3.0]
    assert ids_in(storage[[[5], [2]]]["observations"]).tolist() == [[6.0], [3.0]]
    assert storage[[[5], [2]]]["rewards"].shape == (2, 1, 1)
    assert ids_in(storage[[]]["observations"]).tolist() == []


def test_fields_that_there_are_not_are_refused(replay):
    storage = replay.make()
    collect(replay, storage, steps=2)
    with pytest.raises(InvalidInputError, match=r"no field 'reward'; they have .*Did you mean 'rewards'\?"):
        storage.episodes()[0]["reward"]
    with pytest.raises(InvalidInputError, match=r"no field 'obs'; they have .*Did you mean 'observations'"):
        storage.as_dataset(names=["actions", "obs"])
    with pytest.raises(InvalidInputError, match="names is 'actions'; give a list"):
        storage.as_dataset(names="actions")


def test_a_listing_is_a_sequence_that_can_be_sliced_and_masked(replay):
    storage = replay.make()
    collect(replay, storage, steps=5)
    listed = storage.episodes()
    assert [e.total_return for e in listed[1:3]] == [6.0, 5.0]
    assert [e.total_return for e in listed[listed.returns > 4]] == [6.0, 5.0]
    assert [e.total_return for e in listed[torch.tensor([3, -1])]] == [3.0, 3.5]
    assert [e.total_return for e in listed[[3, -1]]] == [3.0, 3.5]
    assert [e.total_return for e in listed[listed.is_over.numpy()]] == [3.0, 6.0, 5.0, 3.0]
    assert len(listed[[]]) == len(listed[6:]) == 0
    assert [listed[place].rows.tolist() for place in (0, -1, torch.tensor(3))] == [[0, 2], [9], [7]]
    assert listed[::-1].rows.tolist() == [9, 8, 7, 4, 6, 1, 3, 5, 0, 2]
    assert repr(listed) == "Episodes(6: 4 over, 2 going on; 10 steps)"
    assert repr(listed[0]) == "Episode(env 0, 2 steps, return 3.0, terminated)"
    with pytest.raises(IndexError, match="episode 6 of 6"):
        listed[6]
    with pytest.raises(IndexError):
        listed[[0, 6]]
    for index in ("0", 1.0, None, torch.tensor([0.5]), torch.tensor([True]), [[0]], torch.tensor(0.5)):
        with pytest.raises(InvalidInputError, match=r"is no index of 6 episodes; give a number"):
            listed[index]


def test_a_storage_is_not_iterated_by_row_ids(replay):
    storage = replay.make()
    if hasattr(type(storage), "replay_iter"):
        return  # it yields batches
    with pytest.raises(TypeError, match="not iterable"):
        iter(storage)
