"""Steps whose every number tells where it belongs, writers that add them anywhere, and what every batch must be."""

from __future__ import annotations

import itertools
import multiprocessing
import warnings
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
import torch
from gymnasium import spaces

from rlstore import StorageClosedError

DEADLINE = 60.0  # seconds after which a test gives up; nothing waits that long unless something is broken
GAMMA = 0.5
ACTIONS = spaces.Discrete(1_000_000)
NUMBERS = 6  # of an observation: actor, episode, time, length of the episode, how it ends, and a code of all of them
TERMINATED, TRUNCATED, BROKEN, TERMINATED_WITHOUT_FINAL = range(4)  # how an episode ends
STACKED = 3  # frames
WIDTH = 512
_VECTOR = spaces.Box(-1e12, 1e12, (NUMBERS,), np.float64)


def numbers_of(actor, episode, time, length, kind):
    """Float64 ``[..., 6]``."""
    code = ((np.asarray(actor) * 31 + episode) * 101 + time) * 7 + kind
    return np.stack(np.broadcast_arrays(actor, episode, time, length, kind, code), -1).astype(np.float64)


class Box:
    space, options = _VECTOR, MappingProxyType({})

    def dress(self, actor, episode, time, length, kind):
        return numbers_of(actor, episode, time, length, kind)

    def undress(self, served):
        return served.numpy()


class Nested(Box):
    space = spaces.Dict({"numbers": _VECTOR, "halves": spaces.Tuple([_VECTOR, spaces.Box(0, 2**31 - 1, (), np.int32)])})

    def dress(self, *where):
        numbers = numbers_of(*where)
        return {"numbers": numbers, "halves": (-numbers, numbers[..., 5].astype(np.int32))}

    def undress(self, served):
        numbers, (negative, code) = served["numbers"].numpy(), (leaf.numpy() for leaf in served["halves"])
        assert np.array_equal(negative, -numbers)
        assert np.array_equal(code, numbers[..., 5])
        return numbers


class Stacks(Box):
    """Frames are told by their times; what stands before the first is zeros, the first again, or something else."""

    space = spaces.Box(-1e12, 1e12, (STACKED, NUMBERS), np.float64)
    options = MappingProxyType({"frame_stack": STACKED, "stack_axis": 0})

    def dress(self, actor, episode, time, length, kind):
        frames = []
        for back in reversed(range(STACKED)):
            frame = numbers_of(actor, episode, np.maximum(np.asarray(time) - back, 0), length, kind)
            before, padding = np.asarray(time) - back, np.asarray(episode) % 3
            frame = np.where(((before < 0) & (padding == 1))[..., None], 0.0, frame)
            frames.append(np.where(((before < 0) & (padding == 2))[..., None], before[..., None] - 0.5, frame))
        return np.stack(frames, -2)

    def undress(self, served):
        stacks = served.numpy()
        newest = stacks[..., -1, :]
        real = newest[..., 3] > 0  # a row of zeros behind the end of a window is none
        expected = self.dress(*(newest[..., i] for i in range(5)))
        assert np.array_equal(stacks[real], expected[real])
        return newest


class Wide(Box):
    """An observation that takes long to copy: the same numbers over and over, of which a few are looked at."""

    space = spaces.Box(-1e12, 1e12, (WIDTH, NUMBERS), np.float64)

    def dress(self, *where):
        return np.repeat(numbers_of(*where)[..., None, :], WIDTH, -2)

    def undress(self, served):
        first, *others = (served[..., place, :].numpy() for place in (0, WIDTH // 3, WIDTH // 2, WIDTH - 1))
        assert all(np.array_equal(first, other) for other in others)
        return first


class Goals(Box):
    space = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), _VECTOR))

    def dress(self, actor, episode, time, length, kind):
        numbers = numbers_of(actor, episode, time, length, kind)
        desired = numbers_of(actor, episode, np.full_like(time, -1), length, kind)
        return {"observation": numbers, "achieved_goal": numbers + 0.25, "desired_goal": desired + 0.25}

    def undress(self, served):
        numbers = served["observation"].numpy()
        assert np.array_equal(served["achieved_goal"].numpy(), numbers + 0.25)
        return numbers


def steps_to_goal(achieved, desired, info):
    """The reward of a relabelled transition: times that its goal lies ahead, and a half."""
    return desired[:, 2] - achieved[:, 2] + 0.5


# ------------------------------------------------------------------------------------------------- steps


def make_plan(world, actors, steps, seed=0, longest=12, kinds=(0, 1, 2, 3), hidden=False):
    """The arguments of ``steps`` calls of add() for some actors, one a lane, each with episodes of its own.

    All episodes are over at the end, so the plan can be gone through again and again.
    """
    random, lanes = np.random.default_rng(seed), []
    for _ in actors:
        lane = []
        while len(lane) < steps:
            length = min(int(random.integers(1, longest + 1)), steps - len(lane))
            kind = int(random.choice(kinds)) if len(lane) + length < steps else TRUNCATED
            episode = len({entry[0] for entry in lane})
            lane += [(episode, time, length, kind) for time in range(length)]
        lanes.append(lane)
    rows = np.array(lanes).transpose(1, 0, 2)  # [steps, lanes, 4]
    return [
        _step(world, np.array(actors), rows[step], rows[(step + 1) % steps], hidden=hidden) for step in range(steps)
    ]


def _step(world, actors, now, following, *, hidden):
    episode, time, length, kind = now.T
    last = time + 1 == length
    flagged = last & (kind != BROKEN)
    apart = last & ((kind == TERMINATED) | (kind == TRUNCATED))  # the final observation is in the infos
    after = (episode, time + 1, length, kind)
    shown = [np.where(apart, other, own) for other, own in zip(following.T, after, strict=True)]
    step = {
        "observations": world.dress(actors, episode, time, length, kind),
        "actions": time + 1000 * actors,
        "rewards": time.astype(np.float32),
        "terminateds": flagged & (kind != TRUNCATED),
        "truncateds": flagged & (kind == TRUNCATED),
        "infos": {"final_obs": world.dress(actors, *after)} if apart.any() else {},
        "next_observations": world.dress(actors, *shown),
    }
    if hidden:
        state = np.stack([np.stack([episode, time], -1)] * 2).astype(np.float32)  # [layers, lanes, hidden]
        step["hidden_states"] = torch.from_numpy(state)
    return step


# ------------------------------------------------------------------------------------------------- batches


def check_numbers(numbers):
    actor, episode, time, length, kind, code = numbers.T
    assert np.array_equal(code, ((actor * 31 + episode) * 101 + time) * 7 + kind)
    assert ((time >= 0) & (time <= length)).all()


def check_transitions(world, batch, n_step, gamma=GAMMA):
    """Every row is one that was added, and what follows it is what followed it, up to n steps on."""
    before, after = world.undress(batch.observations), world.undress(batch.next_observations)
    check_numbers(before)
    check_numbers(after)
    assert np.array_equal(before[:, [0, 1, 3, 4]], after[:, [0, 1, 3, 4]])
    actor, _, time, length, kind, _ = before.T
    taken = after[:, 2] - time
    assert ((taken >= 1) & (taken <= np.minimum(n_step, length - time))).all()
    assert np.array_equal(batch.actions.numpy().astype(np.float64), time + 1000 * actor)
    sums = sum(np.where(k < taken, gamma**k * (time + k), 0) for k in range(n_step))
    assert np.allclose(batch.rewards.numpy()[:, 0], sums)
    ended = (time + taken == length) & ((kind == TERMINATED) | (kind == TERMINATED_WITHOUT_FINAL))
    assert np.allclose(batch.discounts.numpy()[:, 0], np.where(ended, 0, gamma**taken))


def check_hindsight(world, batch):
    """A goal is that of the episode, or what was achieved at its own step or later in it."""
    before, after = world.undress(batch.observations), world.undress(batch.next_observations)
    goal = batch.observations["desired_goal"].numpy() - 0.25
    assert torch.equal(batch.observations["desired_goal"], batch.next_observations["desired_goal"])
    assert np.array_equal(goal[:, :2], before[:, :2])
    replaced = goal[:, 2] >= 0
    check_numbers(goal[replaced])
    assert (goal[replaced, 2] >= after[replaced, 2]).all()
    given = np.where(replaced, goal[:, 2] - after[:, 2] + 0.5, before[:, 2])
    assert np.array_equal(batch.rewards.numpy()[:, 0], given)
    check_transitions(world, batch._replace(rewards=torch.from_numpy(before[:, 2:3])), 1)


def check_sequences(world, batch, size, stride, *, cut=False, hidden=False):
    """Every window is of one episode, without a gap, begins where windows begin and goes on to its end.

    ``cut``: episodes may be cut off anywhere, by the death of a writer or because the storage was emptied.
    """
    before, after = world.undress(batch.observations), world.undress(batch.next_observations)
    held = batch.masks.numpy()
    taken = held.sum(1)
    assert (held == (np.arange(size) < taken[:, None])).all()
    assert not before[~held].any()
    check_numbers(before[held])
    check_numbers(after[held])
    start = before[:, :1]
    assert np.array_equal(before[held], np.where(held[..., None], numbers_of(*_further(start, size)), 0)[held])
    assert np.array_equal(after[held], numbers_of(*_further(start, size, 1))[held])
    actor, _, time, length, kind, _ = before[held].T
    assert np.array_equal(batch.actions.numpy()[held].astype(np.float64), time + 1000 * actor)
    assert np.array_equal(batch.rewards.numpy()[held][:, 0], time)
    last = (time + 1 == length) & (kind != BROKEN)
    assert np.array_equal(batch.terminated.numpy()[held][:, 0], last & (kind != TRUNCATED))
    assert np.array_equal(batch.truncated.numpy()[held][:, 0], last & (kind == TRUNCATED))
    assert batch.is_first.numpy()[held][time == 0].all()
    if not cut:
        assert np.array_equal(batch.is_first.numpy()[held], time == 0)
        begins, lengths = start[:, 0, 2], start[:, 0, 3]
        assert ((begins % stride == 0) | (begins == lengths - size)).all()
        assert (taken == np.minimum(size, lengths)).all()
    if hidden:
        states = batch.hidden_states.numpy()
        assert np.array_equal(states, np.stack([start[:, 0, 1:3]] * 2))


def _further(start, size, shift=0):
    """Where the rows of windows are that begin at ``start`` [windows, 1, 6]."""
    actor, episode, time, length, kind, _ = np.moveaxis(start, -1, 0)
    return actor, episode, time + np.arange(size) + shift, length, kind


# ------------------------------------------------------------------------------------------------- processes


def write_plan(writer, plan, rounds=None, once=None):
    """Add a plan again and again, until the storage is closed or it was added ``rounds`` times.

    ``once``: an event that is set after the first time.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that episodes are broken off
    try:
        for _ in itertools.count() if rounds is None else range(rounds):
            for step in plan:
                writer.add(**step)
            if once is not None:
                once.set()
    except StorageClosedError:
        return
    writer.close()


def write_all(jobs):
    """``write_plan`` of several writers, one after another."""
    for writer, plan in jobs:
        write_plan(writer, plan, rounds=1)


def add_and_wait(writer, steps, added, go_on, then=()):
    """Add some steps, tell it, wait to be told to go on, and add some more, unless the storage is closed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for step in steps:
        writer.add(**step)
    added.set()
    go_on.wait(DEADLINE)
    write_plan(writer, then, rounds=1)


def start(method, target, *args):
    process = multiprocessing.get_context(method).Process(target=target, args=args, daemon=True)
    process.start()
    return process


def join(*processes):
    for process in processes:
        process.join(DEADLINE)
        assert process.exitcode == 0


def kill(process):
    """End a process at once, wherever it is."""
    process.kill()
    process.join(DEADLINE)
    assert process.exitcode is not None


@contextmanager
def writing(storage, plans, method="fork"):
    """Processes that write until the storage is closed, and have written their plans once.

    Each has as many lanes as its plan has actors.
    """
    processes, once = [], [multiprocessing.get_context(method).Event() for _ in plans]
    try:
        for number, (plan, written) in enumerate(zip(plans, once, strict=True)):
            writer = storage.writer(len(plan[0]["rewards"]), name=f"w{number}")
            processes.append(start(method, write_plan, writer, plan, None, written))
        assert all(written.wait(DEADLINE) for written in once)
        yield processes
        storage.close()
        join(*processes)
    finally:
        for process in processes:
            process.kill()


# ------------------------------------------------------------------------------------------------- plain numbers

OBSERVATIONS = spaces.Box(-1e9, 1e9, (3,), np.float32)
FIVE = spaces.Discrete(5)


def put(target, time, envs=1, ended=False):
    """Add one step of each environment; observations and rewards are its number, ``1e6 * env + time``."""
    ids = torch.arange(envs) * 1e6 + time
    seen = ids.unsqueeze(1).expand(envs, 3).contiguous()
    flags = torch.zeros(envs, dtype=torch.bool)
    target.add(seen, torch.zeros(envs, dtype=torch.int64), ids, flags | ended, flags, {}, seen + 1)
