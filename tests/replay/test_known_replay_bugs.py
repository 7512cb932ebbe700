"""What has gone wrong in replay elsewhere, and must not here. Each test is named for what broke."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from combinations import each
from counting_env import drive, make_vector
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from nstep_steps import BOX, MANY, Lane, assert_tables, fill, ids_of, make_step, make_storage, obs_of, served
from replay_kinds import GOALS, KINDS, assert_same, leaves, state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlstore import PrioritizedReplayStorage, ReplayStorage, SequenceReplayStorage, UnknownParameterError

# ------------------------------------------------------------------------------------- 1: n-step windows


@pytest.mark.parametrize("written", [1, 2, 4, 7, 8, 9, 12, 15])
def test_n_step_window_crosses_neither_the_write_cursor_nor_an_episode(written):
    """At every place of the cursor, before the storage is full and after."""
    storage, lane = make_storage(1, 5, n_step=3, discount=0.5), Lane(5, 3, 0.5)
    for step in range(written):
        ended = step % 6 == 4
        storage.add(**make_step(step, 1, terminated=(0,) if ended else ()))
        lane.add(step + 1, step + 1.25, -step - 1 if ended else step + 2, "terminated" if ended else None)
    assert_tables(served(storage), lane.table())


def test_discount_is_that_of_the_steps_really_taken():
    """Not gamma^n at the newest row, and not gamma where n is 3."""
    storage = make_storage(1, 8, n_step=3, discount=0.5)
    fill(storage, 4)
    assert {number: line[2] for number, line in served(storage).items()} == {1: 0.125, 2: 0.125, 3: 0.25, 4: 0.5}


def test_unfilled_storage_is_not_read_beyond_what_was_written():
    storage = make_storage(2, 1000, n_step=5, discount=1.0)
    fill(storage, 3)
    assert_tables(
        served(storage),
        {
            number: (number, sum(later + 0.25 for later in range(number, 7, 2)), 1.0, 8 - number % 2)
            for number in range(1, 7)
        },
    )


# ------------------------------------------------------------------------------------- 26: attributes that lie


def test_an_assigned_parameter_is_not_ignored_by_draws(tmp_path):
    """Rewards of 1: with three steps and a discount of 0.99 the largest target is 1 + 0.99 + 0.9801."""
    storage = ReplayStorage(BOX, spaces.Discrete(2), storage_size=8, batch_size=64, seed=0)
    for step in range(8):
        storage.add(obs_of(torch.tensor([float(step)])), [0], [1.0], [0], [0], {}, obs_of(torch.tensor([step + 1.0])))
    assert storage.sample().rewards.amax().item() == 1.0
    storage.n_step = 3
    assert storage.sample().rewards.amax().item() == pytest.approx(2.9701)
    storage.save(tmp_path)
    assert ReplayStorage.load(tmp_path).sample().rewards.amax().item() == pytest.approx(2.9701)


def test_no_second_exponent_gets_into_a_priority_tree(tmp_path):
    storage = PrioritizedReplayStorage(BOX, spaces.Discrete(2), storage_size=4, alpha=0.5)
    for step in range(4):
        storage.add(obs_of(torch.tensor([float(step)])), [0], [1.0], [0], [0], {}, obs_of(torch.tensor([step + 1.0])))
    storage.update([0, 1], [4.0, 4.0])
    with pytest.raises(UnknownParameterError, match=r"'alpha' .* is fixed"):
        storage.alpha = 1.0
    storage.save(tmp_path)
    loaded = PrioritizedReplayStorage.load(tmp_path)
    loaded.update([2, 3], [4.0, 4.0])
    assert loaded.priorities([0, 1, 2, 3]).tolist() == [2.0] * 4


# ------------------------------------------------------------------------------------- 3, 4, 5: the ends of episodes


def test_final_observation_is_taken_where_only_ended_environments_give_one():
    storage = make_storage(3, 4, n_step=1)
    final = np.full(3, None, dtype=object)
    final[1] = np.array([-70, -69], np.float32)
    storage.add(**make_step(0, 3, truncated=(1,), infos={"final_obs": final}))
    assert {number: line[3] for number, line in served(storage).items()} == {1: 4, 2: -7, 3: 6}


@pytest.mark.parametrize("how", ["terminated", "truncated"])
def test_single_copy_of_observations_does_not_serve_the_reset_observation(how):
    """The next observation of a last step is what the episode ended in, not the start of the next in the row after."""
    storage = make_storage(1, 6, n_step=1)
    for step in range(20):
        storage.add(**make_step(step, 1, **({how: (0,)} if step % 3 == 1 else {})))
        for number, line in served(storage).items():
            assert line[3] == (-number if number % 3 == 2 else number + 1)


def test_whole_data_hold_the_final_observations_as_well():
    storage = make_storage(1, 6, n_step=1)
    for step in range(8):
        storage.add(**make_step(step, 1, truncated=(0,) if step % 3 == 1 else ()))
    data = storage.get_all_buffer_data()
    assert (data["observations"][:, 0, 0] / 10).tolist() == [3, 4, 5, 6, 7, 8]
    assert (data["next_observations"][:, 0, 0] / 10).tolist() == [4, 5, -5, 7, 8, -8]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.value)
def test_autoreset_inserts_no_invalid_transition(mode):
    """No transition leads from one episode into another: numbers differ by a hundred between episodes."""
    vector = make_vector(mode)
    storage = make_storage(3, 40, observation_space=vector.single_observation_space, n_step=1)
    played = drive(vector, storage, 40)
    batch = storage.sample()
    assert torch.equal(batch.next_observations[:, 0], batch.observations[:, 0] + 1)
    assert set(batch.observations[:, 0].tolist()) == {float(step[0]) for lane in played for step in lane}


# ------------------------------------------------------------------------------------- 6: sequences


def naive_windows(length, over, size, stride):
    """Where the windows of an episode start: (start, steps in it)."""
    starts = list(range(0, length - size + 1, stride))
    if over and (not starts or starts[-1] + size < length):
        starts.append(max(0, length - size))
    return {(start, min(size, length)) for start in starts}


@pytest.mark.parametrize(("overlap", "burn_in"), [(0, 0), (1, 1), (2, 0), (2, 1)])
def test_slices_neither_miss_the_last_step_nor_cross_trajectories_at_any_place_of_the_cursor(overlap, burn_in):
    """Episodes of 1, 2, ... steps in a lane of 9 places; a window is told by its first step, whatever the cursor is."""
    size = 3 + burn_in
    storage = SequenceReplayStorage(
        BOX,
        spaces.Discrete(1_000_000),
        storage_size=9,
        batch_size=200,
        sequence_length=3,
        burn_in=burn_in,
        overlap=overlap,
        seed=0,
    )
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 2]
    first, finished, step = {}, [], 0
    for length in lengths:
        begin = step
        for _ in range(length):
            over = step == begin + length - 1
            storage.add(**make_step(step, 1, truncated=(0,) if over else ()))
            step += 1
            episodes = [*finished, (begin, step - begin, over)]
            first = {
                start + offset: taken
                for start, so_far, done in episodes
                for offset, taken in naive_windows(so_far, done, size, 3 - overlap)
                if start + offset >= step - 9
            }
            if first:
                check_windows(storage.sample(), first, burn_in, size, {e[0] for e in episodes})
        finished.append((begin, length, True))
    assert step == sum(lengths)


def check_windows(batch, first, burn_in, size, beginnings):
    """``first`` maps the step at which a window starts to how many steps it holds."""
    starts = (batch.observations[:, 0, 0] / 10).long() - 1
    assert set(starts.tolist()) == first.keys()
    for row, start in enumerate(starts.tolist()):
        taken = first[start]
        steps = range(start, start + taken)
        assert (batch.observations[row, :taken, 0] / 10).tolist() == [s + 1 for s in steps]
        assert batch.actions[row, :taken].tolist() == [s + 1 for s in steps]
        assert not batch.observations[row, taken:].any()
        assert batch.masks[row].tolist() == [burn_in <= i < taken for i in range(size)]
        assert batch.is_first[row, :taken].tolist() == [s in beginnings for s in steps]
        assert not batch.truncated[row, : taken - 1].any()
        for i, s in enumerate(steps):
            ended = bool(batch.truncated[row, i])
            assert (batch.next_observations[row, i, 0] / 10).item() == (-s - 1 if ended else s + 2)


def test_slice_that_was_asked_for_across_episodes_tells_where_they_begin():
    storage = SequenceReplayStorage(
        BOX, spaces.Discrete(99), storage_size=8, batch_size=400, sequence_length=4, across_episodes=True, seed=0
    )
    for step in range(8):
        storage.add(**make_step(step, 1, terminated=(0,) if step in (1, 4) else ()))
    batch = storage.sample()
    starts = (batch.observations[:, 0, 0] / 10).long()
    assert set(starts.tolist()) == {1, 5}
    firsts = {int(s): first.tolist() for s, first in zip(starts, batch.is_first, strict=True)}
    assert firsts == {1: [True, False, True, False], 5: [False, True, False, False]}
    assert batch.masks.all()


# ------------------------------------------------------------------------------------- 11: constant in the size


class Work(TorchDispatchMode):
    """Counts torch's operations, and the bytes of what they make."""

    def __init__(self):
        super().__init__()
        self.operations, self.bytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        self.bytes += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


@pytest.mark.parametrize("options", [{}, {"alpha": 0.5}, {"overlap": 2, "burn_in": 1}], ids=str)
def test_sequence_sampling_does_not_grow_with_the_buffer(options):
    spent = []
    for steps in (100, 20_000):
        storage = SequenceReplayStorage(
            BOX, spaces.Discrete(9), storage_size=steps, batch_size=16, sequence_length=4, seed=0, **options
        )
        length = steps // 10
        data = {
            "observations": torch.arange(2.0 * steps).reshape(steps, 1, 2),
            "next_observations": torch.arange(2.0 * steps).reshape(steps, 1, 2) + 2,
            "actions": torch.zeros(steps, 1, dtype=torch.int64),
            "rewards": torch.zeros(steps, 1),
            "terminated": torch.arange(1, steps + 1).reshape(steps, 1) % length == 0,
            "truncated": torch.zeros(steps, 1, dtype=torch.bool),
        }
        storage.insert_data_slice(data)
        assert len(storage) == steps
        for _ in range(3):
            storage.sample()
        with Work() as work:
            storage.sample()
        spent.append((work.operations, work.bytes))
    assert spent[0] == spent[1]


# ------------------------------------------------------------------------------------- 12 and 13: memory


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_next_observations_are_not_stored_twice(kind):
    """An observation of 1000 bytes, in episodes of 100 steps: hardly more than 1000 bytes a transition."""
    space = spaces.Box(0, 255, (1000,), np.uint8)
    if kind.space is GOALS:
        goal = spaces.Box(0, 255, (2,), np.uint8)
        space = spaces.Dict({"observation": space, "achieved_goal": goal, "desired_goal": goal})
    storage = kind.make(num_envs=1, steps=400, observation_space=space)
    image = torch.zeros(1, 1000, dtype=torch.uint8)

    def observe(step):
        image[0, :2] = torch.tensor([step % 250, 1])
        if kind.space is not GOALS:
            return image.clone()
        return {"observation": image.clone(), "achieved_goal": image[:, :2].clone(), "desired_goal": image[:, 2:4]}

    for step in range(500):
        given = {"observations": observe(step), "next_observations": observe(step + 1), "infos": {}}
        storage.add(**kind.step(step, 1, truncated=(0,) if step % 100 == 99 else (), **given))
    assert len(storage) == 400
    assert storage.nbytes < 400 * 1100
    storage.close()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    each([kind for kind in KINDS if kind.space is BOX], [np.uint8, np.int16, np.float16, np.float64]),
    ids=repr,
)
def test_bytes_become_floats_only_where_they_are_served(kind, dtype):
    storage = kind.make(observation_space=spaces.Box(0, 200, (2,), dtype))
    for step in range(4):
        ids = ids_of(step).numpy().astype(dtype)
        obs = np.stack([ids, ids + dtype(100)], -1)
        storage.add(**kind.step(step, observations=obs, next_observations=obs + dtype(2)))
    kept = torch.from_numpy(np.empty(0, dtype)).dtype
    data = storage.get_all_buffer_data()
    assert data["observations"].dtype == data["next_observations"].dtype == kept
    assert data["observations"][0].tolist() == [[1, 101], [2, 102]]
    served_as = torch.float32 if kind.name.startswith("n-step") else kept
    assert storage.sample().observations.dtype == storage.sample().next_observations.dtype == served_as
    storage.close()


# ------------------------------------------------------------------------------------- 14: nothing before an end


@pytest.mark.parametrize(
    ("kind", "num_workers"), each([kind for kind in KINDS if "sequence" not in kind.name], [0, 1, 8]), ids=repr
)
def test_first_step_is_served_before_any_episode_ends_and_no_worker_is_without_data(kind, num_workers):
    storage = kind.make(num_envs=1, num_workers=num_workers)
    storage.add(**kind.step(0, 1))
    for _ in range(2 * num_workers + 2):
        assert set(storage.sample().actions.tolist()) == {1}
    storage.close()


# ------------------------------------------------------------------------------------- 23: ragged data


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_lanes_of_different_lengths_are_kept_and_not_cut(kind):
    storage = kind.make(num_envs=3, steps=6)
    turns = [(True, True, True), (False, True, True), (False, False, True), (False, True, True)]
    taken = [0, 0, 0]
    for step, turn in enumerate(turns):
        ids = torch.tensor([100.0 * (env + 1) + taken[env] for env in range(3)])
        given = {"observations": kind.observations(ids), "next_observations": kind.observations(ids + 1)}
        storage.add(**kind.step(step, 3, actions=ids.long(), mask=list(turn), **given))
        taken = [count + turned for count, turned in zip(taken, turn, strict=True)]
    assert taken == [1, 3, 4]
    assert len(storage) == 8
    data = storage.get_all_buffer_data()
    masks = data["masks"].reshape(4, 3).bool()
    assert masks.sum(0).tolist() == taken
    assert [data["actions"].reshape(4, 3)[:, env][masks[:, env]].tolist() for env in range(3)] == [
        [100],
        [200, 201, 202],
        [300, 301, 302, 303],
    ]
    other = kind.make(num_envs=3, steps=6)
    other.insert_data_slice(data)
    assert_same(state(other), state(storage))
    for either in (storage, other):
        either.close()


@pytest.mark.parametrize(
    ("kind", "name"), each(KINDS, ["rewards", "actions", "terminated", "truncated", "masks"]), ids=repr
)
def test_columns_of_different_lengths_are_refused_and_not_cut(kind, name):
    storage, other = kind.make(), kind.make()
    kind.fill(storage, 4)
    data = storage.get_all_buffer_data()
    before = state(other)
    with pytest.raises(ValueError, match=rf"(?s){name}.*Nothing was (written|changed)"):
        other.insert_data_slice({**data, name: data[name][:3]})
    assert_same(state(other), before)
    for either in (storage, other):
        either.close()


# ------------------------------------------------------------------------------------- 25: fixed shapes, prefetch


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_every_batch_has_the_same_shapes_and_dtypes(kind):
    """Whatever is in the storage: a compiled learner compiles once."""
    storage = kind.make(num_envs=2, steps=6)
    kind.fill(storage, 3)
    seen = set()
    for step in range(3, 30):
        kind.fill(storage, 1, first=step)
        batch = leaves(storage.sample())
        seen.add(tuple((name, tuple(leaf.shape), leaf.dtype, leaf.stride()) for name, leaf in batch.items()))
    assert len(seen) == 1
    storage.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "sequence" not in kind.name], ids=repr)
def test_prefetch_really_gathers_a_batch_before_it_is_asked_for(kind):
    """There is room for a single step. The batches prepared from it hold it, though it has been written over."""
    storage = kind.make(num_envs=1, steps=1, num_workers=2, **({} if kind.name == "hindsight" else {"n_step": 1}))
    threads = threading.active_count()
    storage.add(**kind.step(0, 1))
    drawn = [storage.sample()]
    assert threading.active_count() > threads
    for step in range(1, 4):
        storage.add(**kind.step(step, 1))
    drawn += [storage.sample() for _ in range(3)]
    # One when it was asked for, two that were ready, and one drawn when the first of them was taken.
    assert [set(batch.actions.tolist()) for batch in drawn] == [{1}, {1}, {1}, {4}]
    storage.close()


def test_uniform_replay_draws_from_everything():
    storage = ReplayStorage(BOX, spaces.Discrete(1_000_000), storage_size=40, num_envs=4, batch_size=MANY, seed=0)
    fill(storage, 25)
    assert set(storage.sample().actions.tolist()) == set(range(61, 101))
