"""Models of Stable-Baselines3 whose buffers are on disk are loaded: for prediction, or to go on after a SIGKILL."""

import copy
import signal
import subprocess
import sys

import killed_sb3
import numpy as np
import pytest
from killed_sb3 import COMMITTED, KILLED, Still, model, options
from stable_baselines3 import DQN, PPO

from rlstore import InvalidInputError, Journal, SnapshotError, Storage
from rlstore.sb3 import ReplayBuffer, RolloutBuffer

SPACES = Still.observation_space, Still.action_space


@pytest.fixture(autouse=True)
def seeded():
    np.random.seed(0)


def files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def sums(buffer):
    """The sums of rewards that are served, and which rewards are held."""
    return set(buffer.sample(500).rewards.flatten().tolist()), buffer.storage.get_all_buffer_data()["rewards"].flatten()


@pytest.mark.parametrize("kind", ["journal", "mapped"])
def test_a_run_that_was_killed_goes_on(kind, tmp_path):
    killed = subprocess.run([sys.executable, killed_sb3.__file__, kind, tmp_path], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    before = files(tmp_path)
    resumed = DQN.load(tmp_path / "model.zip", env=Still(10.0))
    assert files(tmp_path) == before
    if kind == "journal":
        resumed.replay_buffer.resume()
    resumed.learn(15, reset_num_timesteps=False)
    assert resumed.num_timesteps == COMMITTED + 1 + 15
    kept = {"journal": COMMITTED, "mapped": KILLED - 1}[kind]
    served, held = sums(resumed.replay_buffer)
    assert held.tolist() == [1] * kept + [10] * 15
    assert served == {1, 2, 3, 10, 20, 30}  # the first step after the reset looks like the one that would have followed
    resumed.replay_buffer.storage.close()
    again = DQN.load(tmp_path / "model.zip", env=Still(10.0)).replay_buffer
    if kind == "journal":
        again.resume()
    assert sums(again)[1].tolist() == held.tolist()
    again.storage.close()


@pytest.mark.parametrize("kind", ["journal", "mapped"])
def test_a_model_is_loaded_beside_the_one_that_learns(kind, tmp_path):
    learning = model(Still(1.0), options(kind, tmp_path)).learn(10)
    learning.save(tmp_path / "model.zip")
    loaded = DQN.load(tmp_path / "model.zip", env=Still(10.0))
    observation = np.zeros(2, np.float32)
    assert loaded.predict(observation, deterministic=True) == learning.predict(observation, deterministic=True)
    with pytest.raises(InvalidInputError, match=r"in use|already holds"):
        loaded.learn(5)
    with pytest.raises(InvalidInputError, match=r"in use|already holds"):
        copy.copy(loaded.replay_buffer)
    learning.learn(5, reset_num_timesteps=False)
    assert sums(learning.replay_buffer)[1].tolist() == [1] * 15
    apart = DQN.load(tmp_path / "model.zip", env=Still(10.0), replay_buffer_kwargs={}).learn(5)
    assert sums(apart.replay_buffer)[1].tolist() == [10] * 5
    learning.replay_buffer.storage.close()


def test_what_a_journal_holds_is_neither_added_to_nor_replaced_unasked(tmp_path):
    first = ReplayBuffer(100, *SPACES, journal=tmp_path / "run")
    first.resume()  # there is nothing yet
    assert not (tmp_path / "run").exists()
    step = np.zeros((1, 2)), np.zeros((1, 2)), np.zeros(1, int), np.ones(1), np.zeros(1, bool), [{}]
    first.add(*step)
    with pytest.raises(InvalidInputError, match="in use"):
        first.resume()
    first.storage.close()
    before = files(tmp_path)
    second = ReplayBuffer(100, *SPACES, journal=str(tmp_path / "run"))
    with pytest.raises(InvalidInputError, match=r"already holds .*: call resume\(\) .* Nothing was changed"):
        second.add(*step)
    for name, other in {
        "storage_size": ReplayBuffer(90, *SPACES, journal=tmp_path / "run"),
        "num_envs": ReplayBuffer(100, *SPACES, n_envs=2, journal=tmp_path / "run"),
        "n_step": ReplayBuffer(100, *SPACES, n_steps=3, journal=tmp_path / "run"),
        "observation_space": ReplayBuffer(100, *reversed(SPACES), journal=tmp_path / "run"),
    }.items():
        with pytest.raises(InvalidInputError, match=f"{name}.* was made with .*Nothing was changed"):
            other.resume()
    with pytest.raises(SnapshotError, match="PrioritizedReplayStorage"):
        ReplayBuffer(100, *SPACES, prioritized=True, journal=tmp_path / "run").resume()
    assert files(tmp_path) == before
    second.resume()
    second.add(*step)
    assert second.size() == 2
    second.storage.close()
    with pytest.raises(InvalidInputError, match="has no journal"):
        ReplayBuffer(100, *SPACES).resume()


def test_a_loaded_ppo_predicts_and_learns_with_another_journal(tmp_path):
    options = {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "device": "cpu"}
    options |= {"rollout_buffer_class": RolloutBuffer, "rollout_buffer_kwargs": {"journal": tmp_path / "run"}}
    learning = PPO("MlpPolicy", Still(1.0), **options).learn(8)
    learning.save(tmp_path / "model.zip")
    learning.rollout_buffer.storage.journal.close()
    before = files(tmp_path)
    loaded = PPO.load(tmp_path / "model.zip", env=Still(1.0), device="cpu")
    loaded.predict(np.zeros(2, np.float32))
    with pytest.raises(InvalidInputError, match="rollouts are not resumed: give another folder"):
        loaded.learn(8)
    assert files(tmp_path) == before
    other = {"journal": tmp_path / "other"}
    loaded = PPO.load(tmp_path / "model.zip", env=Still(2.0), device="cpu", rollout_buffer_kwargs=other)
    loaded.learn(8)
    loaded.rollout_buffer.storage.journal.close()
    rewards = [Storage.load(tmp_path / name).rewards.flatten().tolist() for name in ("run", "other")]
    assert rewards == [[1] * 8, [2] * 8]


def test_a_copy_of_a_mapped_buffer_is_in_ram_and_says_so(tmp_path):
    learning = model(Still(1.0), options("mapped", tmp_path)).learn(10)
    with pytest.warns(UserWarning, match=r"all data in RAM.*storage\.save\(path\)"):
        learning.save_replay_buffer(tmp_path / "replay.pkl")
    learning.load_replay_buffer(tmp_path / "replay.pkl")
    learning.save_replay_buffer(tmp_path / "again.pkl")  # which it is by now
    assert sums(learning.replay_buffer)[1].tolist() == [1] * 10


def test_a_journal_with_an_interval_of_its_own_is_saved_with_the_model(tmp_path):
    learning = model(Still(1.0), {"journal": Journal(tmp_path / "run", interval=500, fsync=False)}).learn(5)
    learning.save(tmp_path / "model.zip")
    learning.replay_buffer.storage.close()
    resumed = DQN.load(tmp_path / "model.zip", env=Still(10.0))
    resumed.replay_buffer.resume()
    assert resumed.replay_buffer.storage.journal._journal == Journal(tmp_path / "run", interval=500, fsync=False)
    resumed.replay_buffer.storage.close()
