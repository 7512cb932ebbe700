"""Replay buffers for Stable-Baselines3 serve what its own serve of the same steps, transition by transition.

Batches are on CUDA if that is asked for.
"""

import copy
import re
import runpy
import sys

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from combinations import each
from gymnasium import spaces
from sb3_steps import NUMBERS, add_all, forms, rows, steps
from stable_baselines3.common import buffers as theirs
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from where import DEVICE

import rlstore.sb3
from rlstore import InvalidInputError, PrioritizedReplayStorage
from rlstore.sb3 import DictReplayBuffer, PrioritizedReplayBufferSamples, ReplayBuffer

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE = spaces.Discrete(5)
OBSERVATIONS = {
    "Box": BOX,
    "image": spaces.Box(0, 255, (3, 4, 2), np.uint8),
    "float64": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "Discrete": spaces.Discrete(NUMBERS),
    "MultiDiscrete": spaces.MultiDiscrete([64, 64]),
    "MultiBinary": spaces.MultiBinary(12),
    "Dict": spaces.Dict(
        {"box": BOX, "number": spaces.Discrete(NUMBERS), "image": spaces.Box(0, 255, (2, 2), np.uint8)}
    ),
}
ACTIONS = {
    "Discrete": DISCRETE,
    "Discrete from 3": spaces.Discrete(5, start=3),
    "Box": spaces.Box(-1, 1, (2,), np.float32),
    "Box float64": spaces.Box(-1, 1, (2, 3), np.float64),
    "MultiDiscrete": spaces.MultiDiscrete([3, 64]),
    "MultiBinary": spaces.MultiBinary(4),
}
DRAWS = 1000  # of some 50 transitions: each is drawn


@pytest.fixture(autouse=True)
def seeded():
    np.random.seed(0)
    torch.manual_seed(0)


def pair(observations=BOX, actions=DISCRETE, n_envs=3, size=48, ours=None, **arguments):
    """A buffer of theirs and one of ours."""
    is_dict = isinstance(observations, spaces.Dict)
    given = (size, observations, actions, DEVICE, n_envs)
    their_class, our_class = (
        (theirs.DictReplayBuffer, DictReplayBuffer) if is_dict else (theirs.ReplayBuffer, ReplayBuffer)
    )
    return their_class(*given, **arguments), our_class(*given, **arguments, **(ours or {}))


@pytest.mark.parametrize(
    ("observations", "actions", "n_envs", "count", "memory"),
    each(list(OBSERVATIONS), list(ACTIONS), [1, 3, 3], [60, 11, 60, 60], ["ram", "device"]),
)
def test_every_transition_is_theirs(observations, actions, n_envs, count, memory):
    spaces_given = OBSERVATIONS[observations], ACTIONS[actions]
    their, our = pair(*spaces_given, n_envs, ours={"memory": memory})
    add_all(their, steps(*spaces_given, n_envs, count))
    add_all(our, steps(*spaces_given, n_envs, count))
    expected, served = their.sample(DRAWS), our.sample(DRAWS)
    assert type(served) is type(expected)
    assert forms(served) == forms(expected)
    assert rows(served) == rows(expected)
    assert len(rows(served)) == min(count, their.buffer_size) * n_envs


@pytest.mark.parametrize(("given", "assigned"), [(np.float64, np.float32), (np.int64, np.int32), (np.uint8, np.uint8)])
def test_the_dtype_of_a_space_may_be_assigned_as_a_type(given, assigned):
    """As CleanRL's SAC, TD3 and DDPG do, whose environments go on to return the dtype of before."""
    observations, actions = spaces.Box(0, 200, (3,), given), spaces.Box(-1, 1, (2,), np.float32)
    taken = steps(observations, actions, 1, 40)
    observations.dtype = assigned
    their, our = pair(observations, actions, n_envs=1)
    add_all(their, taken)
    add_all(our, taken)
    expected, served = their.sample(DRAWS), our.sample(DRAWS)
    assert forms(served) == forms(expected)
    assert rows(served) == rows(expected)
    assert len(rows(served)) == 40


@pytest.mark.parametrize("handled", [True, False])
def test_ends_by_a_time_limit_are_terminations_only_if_that_is_asked_for(handled):
    their, _ = pair(handle_timeout_termination=handled)
    our = ReplayBuffer(48, BOX, DISCRETE, DEVICE, 3, handle_timeout_termination=handled, gamma=0)  # used by sums alone
    for buffer in (their, our):
        add_all(buffer, steps(BOX, DISCRETE, 3, 16))
    served = rows(our.sample(DRAWS))
    assert served == rows(their.sample(DRAWS))
    assert sum(row["dones "][0] for row in served.values()) == (6 if handled else 12)  # 12 episodes ended


def test_a_step_that_looks_like_the_reset_step_of_another_autoreset_mode_is_stored():
    buffer = ReplayBuffer(30, BOX, DISCRETE, DEVICE, 1)
    first, last, after = (np.full((1, 3), number, np.float32) for number in range(3))
    zero, none = np.zeros(1, np.float32), np.zeros(1, int)
    buffer.add(first, last, none, zero, np.array([True]), [{}])
    buffer.add(last, after, none, zero, np.array([False]), [{}])  # the episode begins where the one before ended
    assert buffer.size() == 2
    assert {row["observations "][0] for row in rows(buffer.sample(50)).values()} == {0, 1}


def test_the_position_is_theirs_at_every_step():
    their, our = pair(size=20)
    assert our.buffer_size == their.buffer_size == 6
    for step in steps(BOX, DISCRETE, 3, 15):
        assert (our.pos, our.full, our.size()) == (their.pos, their.full, their.size())
        their.add(*step)
        our.add(*step)
    assert our.full
    for name in ("n_envs", "buffer_size", "device", "obs_shape", "action_dim", "handle_timeout_termination"):
        assert getattr(our, name) == getattr(their, name)
    our.reset()
    assert (our.pos, our.full, our.size()) == (0, False, 0)


@pytest.mark.parametrize("n_steps", [2, 3, 5])
@pytest.mark.parametrize("count", [10, 60], ids=["not full", "wrapped"])
def test_sums_of_several_steps_are_theirs(n_steps, count):
    arguments = {"n_steps": n_steps, "gamma": 0.5}  # powers of two, so that sums are exact in any order
    given = (48, BOX, DISCRETE, DEVICE, 3)
    their, our = theirs.NStepReplayBuffer(*given, **arguments), ReplayBuffer(*given, **arguments)
    for buffer in (their, our):
        add_all(buffer, steps(BOX, DISCRETE, 3, count))
    expected, served = their.sample(DRAWS), our.sample(DRAWS)
    assert forms(served) == forms(expected)
    # After a termination their discounts are multiplied by 1 - dones = 0, and ours are 0 themselves.
    expected = expected._replace(discounts=expected.discounts * (1 - expected.dones))
    assert rows(served) == rows(expected)


class Counting(gym.Env):
    """Observations and rewards grow with every step; episodes are truncated after five."""

    observation_space = spaces.Dict({"box": BOX, "other": BOX})
    action_space = DISCRETE

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return {"box": np.zeros(3, np.float32), "other": np.ones(3, np.float32)}, {}

    def step(self, action):
        self.count += 1
        observation = {"box": np.full(3, self.count, np.float32), "other": np.full(3, -self.count, np.float32)}
        return observation, float(self.count), False, self.count == 5, {}


def normalizer(clip_reward=10.0):
    """Statistics of 40 steps, of one key of two."""
    env = VecNormalize(DummyVecEnv([Counting] * 3), norm_obs_keys=["box"], clip_obs=1e6, clip_reward=clip_reward)
    env.reset()
    for _ in range(40):
        env.step(np.zeros(3, dtype=int))
    return env


@pytest.mark.parametrize("clip_reward", [10.0, 0.5])
def test_observations_and_rewards_are_normalized_as_theirs(clip_reward):
    env = normalizer(clip_reward)
    their, our = pair(env.observation_space)
    for buffer in (their, our):
        add_all(buffer, steps(env.observation_space, DISCRETE, 3, 10))
    expected, served = their.sample(DRAWS, env=env), our.sample(DRAWS, env=env)
    assert forms(served) == forms(expected)
    assert rows(served) == rows(expected)
    assert served.rewards.max() <= clip_reward


def test_single_observations_and_sums_of_rewards_are_normalized_as_theirs():
    env = normalizer()
    env.obs_rms, env.norm_obs_keys = env.obs_rms["box"], None
    # Rewards are up to 29 / 8, which is not clipped; sums of them are larger than the bound.
    env.clip_reward = 4 / np.sqrt(env.ret_rms.var + env.epsilon)
    given, arguments = (48, BOX, DISCRETE, DEVICE, 3), {"n_steps": 3, "gamma": 0.5}
    their, our = theirs.NStepReplayBuffer(*given, **arguments), ReplayBuffer(*given, **arguments)
    for buffer in (their, our):
        add_all(buffer, steps(BOX, DISCRETE, 3, 10))
    expected, served = (rows(buffer.sample(DRAWS, env=env)) for buffer in (their, our))
    assert expected.keys() == served.keys()
    for key, row in served.items():
        assert row["next_observations "] == expected[key]["next_observations "]
        assert row["rewards "] == pytest.approx(expected[key]["rewards "], rel=1e-6)
    env.norm_reward = False
    # The largest sum, as it is: of the last three steps of environment 2.
    assert our.sample(DRAWS, env=env).rewards.max() == (23 + 0.5 * 26 + 0.25 * 29) / 8


def test_observations_are_stored_once():
    their, our = pair(spaces.Box(0, 255, (4, 20, 20), np.uint8), n_envs=1, size=1000)
    assert their.observations.nbytes + their.next_observations.nbytes == 2 * 1_600_000
    assert our.storage.nbytes < 1.1 * 1_600_000


def test_optimized_memory_goes_with_everything_and_changes_nothing():
    given = (48, BOX, DISCRETE, DEVICE, 3)
    with pytest.raises(ValueError, match="does not support"):
        theirs.ReplayBuffer(*given, optimize_memory_usage=True)
    plain, optimized = ReplayBuffer(*given), ReplayBuffer(*given, optimize_memory_usage=True)
    for buffer in (plain, optimized):
        add_all(buffer, steps(BOX, DISCRETE, 3, 30))
    assert rows(plain.sample(DRAWS)) == rows(optimized.sample(DRAWS))


@pytest.mark.parametrize("memory", ["ram", "shared", "mapped", "device"])
def test_an_end_that_learn_marks_is_one_where_observations_stay_the_same(memory, tmp_path):
    path = {"path": tmp_path / "rows"} if memory == "mapped" else {}
    where = DEVICE if memory == "device" else "cpu"
    buffer = ReplayBuffer(40, DISCRETE, DISCRETE, where, 2, n_steps=3, gamma=1.0, memory=memory, **path)
    zeros = np.zeros(2, int)
    for reward, count in ((1, 5), (10, 20), (100, 5)):  # the last of which replace the first
        for _ in range(count):
            buffer.add(zeros, zeros, zeros, np.full(2, reward, np.float32), zeros > 0, [{}, {}])
        buffer.dones[(buffer.pos - 1) % buffer.buffer_size] = True
        buffer.dones[(buffer.pos - 1) % buffer.buffer_size] = True  # has ended already
    samples = buffer.sample(DRAWS)
    assert set(samples.rewards.flatten().tolist()) == {10, 20, 30, 100, 200, 300}
    assert (samples.discounts == 1).all()  # none of them is a termination
    buffer.storage.close()


def test_an_end_that_learn_marks_is_no_termination_and_the_next_episode_is_apart():
    buffer = ReplayBuffer(30, BOX, DISCRETE, DEVICE, 1, optimize_memory_usage=True, n_steps=3, gamma=0.5)
    add_all(buffer, steps(BOX, DISCRETE, 1, 2))
    buffer.dones[(buffer.pos - 1) % buffer.buffer_size] = True  # what learn() does
    add_all(buffer, steps(BOX, DISCRETE, 1, 7)[4:6])
    served = rows(buffer.sample(DRAWS))
    # Steps 0 and 1, then 4 and 5: rewards are the numbers of the steps / 8, and observations twice those numbers.
    found = {
        row["observations "][0]: (row["rewards "], row["next_observations "][0], row["dones "])
        for row in served.values()
    }
    assert found == {
        0: ([0.5 / 8], 4, [0]),
        2: ([1 / 8], 4, [0]),
        8: ([(4 + 0.5 * 5) / 8], 12, [0]),
        10: ([5 / 8], 12, [0]),
    }


def test_priorities_decide_what_is_drawn():
    buffer = ReplayBuffer(
        48, BOX, DISCRETE, DEVICE, 3, prioritized=True, alpha=1.0, beta=1.0, n_steps=2, gamma=0.5, seed=0
    )
    assert isinstance(buffer.storage, PrioritizedReplayStorage)
    add_all(buffer, steps(BOX, DISCRETE, 3, 4))
    samples = buffer.sample(12)
    assert type(samples) is PrioritizedReplayBufferSamples
    assert samples.weights.shape == (12, 1)
    assert set(samples.rows.tolist()) == set(range(12))  # equal priorities, one from each twelfth
    buffer.update_priorities(samples.rows, torch.where(samples.observations[:, 0] == 8, 3.0, 0.0))
    chosen = buffer.sample(6)
    assert chosen.observations[:, 0].tolist() == [8] * 6  # step 1 of environment 1
    # Its sum of two steps: 4 / 8 + 0.5 * 7 / 8; the second is the last of a terminated episode... of environment 1.
    assert chosen.rewards.flatten().tolist() == [(4 + 0.5 * 7) / 8] * 6
    buffer.update_priorities([0, 1], [3.0, 1.0])
    assert sorted(buffer.storage.priorities([0, 1, 4]).tolist()) == [1, 3, 3]


def test_batches_with_priorities_hold_dicts_too():
    space = OBSERVATIONS["Dict"]
    buffer, uniform = (
        DictReplayBuffer(48, space, DISCRETE, DEVICE, 3, prioritized=True),
        DictReplayBuffer(48, space, DISCRETE, DEVICE, 3),
    )
    for one in (buffer, uniform):
        add_all(one, steps(space, DISCRETE, 3, 10))
    samples = buffer.sample(DRAWS)
    found = rows(samples)
    for row in found.values():
        del row["weights "], row["rows "]
    assert found == rows(uniform.sample(DRAWS))


def test_our_buffers_are_theirs_to_isinstance():
    _, our = pair(OBSERVATIONS["Dict"])
    assert isinstance(our, theirs.DictReplayBuffer)
    assert isinstance(our, ReplayBuffer)


def test_options_reach_the_storage_and_unknown_ones_are_refused(tmp_path):
    buffer = ReplayBuffer(30, BOX, DISCRETE, memory="mapped", path=tmp_path / "replay", seed=1)
    add_all(buffer, steps(BOX, DISCRETE, 1, 5))
    buffer.storage.close()
    resumed = ReplayBuffer(30, BOX, DISCRETE, memory="mapped", path=tmp_path / "replay", seed=1)
    assert (resumed.pos, resumed.size()) == (5, 5)
    with pytest.raises(TypeError, match="alpha"):
        ReplayBuffer(30, BOX, DISCRETE, alpha=0.5)  # only with prioritized=True


def test_a_step_that_does_not_fit_is_refused_and_changes_nothing():
    buffer = ReplayBuffer(30, BOX, DISCRETE, DEVICE, 2)
    ((obs, next_obs, action, reward, done, infos),) = steps(BOX, DISCRETE, 2, 1)
    with pytest.raises(InvalidInputError, match="Nothing was written"):
        buffer.add(obs[:, :2], next_obs, action, reward, done, infos)
    with pytest.raises(InvalidInputError, match="rewards"):
        buffer.add(obs, next_obs, action, reward * np.nan, done, infos)
    assert buffer.size() == 0
    with pytest.raises(AttributeError, match=r"storage\.get_all_buffer_data\(\)"):
        _ = buffer.rewards
    assert copy.copy(buffer).storage is buffer.storage


@pytest.mark.parametrize(
    "read",
    [lambda dones: dones[0], np.zeros_like, lambda dones: dones.sum(), lambda dones: dones.__setitem__(3, True)],
    ids=["an entry", "all", "their sum", "another write"],
)
def test_ends_cannot_be_read(read):
    buffer = ReplayBuffer(30, BOX, DISCRETE, DEVICE, 1)
    add_all(buffer, steps(BOX, DISCRETE, 1, 2))
    with pytest.raises(AttributeError, match=r"has no 'dones': .* storage\.get_all_buffer_data\(\)"):
        read(buffer.dones)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"n_step": 3}, "has no argument 'n_step'. Did you mean 'n_steps'?"),
        ({"discount": 0.9}, "has no argument 'discount'. Did you mean 'gamma'?"),
        ({"priorized": True}, "has no argument 'priorized'. Did you mean 'prioritized'?"),
        ({"prioritized": True, "alhpa": 0.5}, "has no argument 'alhpa'. Did you mean 'alpha'?"),
        ({"num_envs": 2}, "has no argument 'num_envs'. Did you mean 'n_envs'?"),
        ({"autoreset": "NextStep"}, "has no argument 'autoreset'. It takes"),
        ({"alpha": 0.5}, "alpha needs prioritized=True"),
    ],
    ids=str,
)
@pytest.mark.parametrize("journal", [False, True])  # whose folder is opened later
def test_options_that_it_does_not_have_are_refused_at_once(options, advice, journal, tmp_path):
    kept = {"journal": tmp_path / "run"} if journal else {}
    with pytest.raises(TypeError, match=re.escape(advice)) as caught:
        ReplayBuffer(30, BOX, DISCRETE, **options, **kept)
    assert isinstance(caught.value, InvalidInputError)


WHOLE = {name: OBSERVATIONS[name] for name in ("MultiBinary", "image", "Discrete", "MultiDiscrete", "Dict")}


def as_floats(observations):
    if isinstance(observations, dict):
        return {key: as_floats(part) for key, part in observations.items()}
    return observations.astype(np.float64)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_may_come_as_floats(name):
    """As from SubprocVecEnv, which does not convert what environments return to the dtype of their space."""
    their, our = pair(WHOLE[name])
    made = steps(WHOLE[name], DISCRETE, 3, 10)
    add_all(their, made)
    add_all(our, [(as_floats(step[0]), as_floats(step[1]), *step[2:]) for step in made])
    expected, served = their.sample(DRAWS), our.sample(DRAWS)
    assert forms(served) == forms(expected)
    assert rows(served) == rows(expected)


@pytest.mark.parametrize("value", [0.5, 300.0, -1.0, np.nan, np.inf])
def test_floats_that_a_space_of_whole_numbers_cannot_hold_are_refused(value):
    space = spaces.Box(0, 255, (2,), np.uint8)
    buffer = ReplayBuffer(30, space, DISCRETE, DEVICE, 1)
    one, zero = np.full((1, 2), value), np.zeros((1, 2))
    for given in ((one, zero), (zero, one)):
        with pytest.raises(InvalidInputError, match=r"observations.* cannot be held as uint8 without loss"):
            buffer.add(*given, np.zeros(1, int), np.zeros(1), np.zeros(1, bool), [{}])
    assert buffer.size() == 0


def test_a_subclass_with_samples_of_its_own_is_refused():
    with pytest.raises(InvalidInputError, match=r"Own overrides _get_samples\(\).* override sample\(\) instead"):
        type("Own", (DictReplayBuffer,), {"_get_samples": lambda self, rows, env=None: None})


def test_without_stable_baselines3_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(ImportError, match=r"needs Stable-Baselines3, .*: pip install stable-baselines3"):
        runpy.run_path(rlstore.sb3.__file__)


def test_a_version_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(stable_baselines3, "__version__", "2.6.0a1")
    with pytest.raises(ImportError, match=r"2\.7 or later, and 2\.6\.0a1 is installed: pip install --upgrade"):
        runpy.run_path(rlstore.sb3.__file__)


def test_what_stable_baselines3_lacks_itself_is_told_as_it_is(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "stable_baselines3"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="cloudpickle") as caught:
        runpy.run_path(rlstore.sb3.__file__)
    assert "not installed" not in str(caught.value)
