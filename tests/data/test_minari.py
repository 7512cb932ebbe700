"""Minari: what a storage holds and what is read back are the same, value by value; datasets that Minari made."""

from __future__ import annotations

import inspect
import sys

import gymnasium
import h5py
import minari
import numpy as np
import pytest
from experience import (
    BOX,
    EXTRA,
    KINDS,
    InterruptedWriteError,
    assert_same,
    copied,
    episodes,
    fill,
    held,
    interrupted,
    make,
    without_row_ids,
)
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer

from rlstore import InvalidInputError, ReplayStorage
from rlstore.data import read_minari, write_minari

# Minari before 0.5.4, which is the last one for Python 3.10.
LOSES_IMAGES = "jpeg_encoding" not in inspect.signature(minari.create_dataset_from_buffers).parameters
WITH_IMAGES = ("replay of a nest", "replay of images", "sequence")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where Minari keeps its datasets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def given(name):
    """The episodes as Minari keeps them: the final observation is the last one."""
    found = episodes(name)
    for episode in found:
        episode["observations"] = joined(episode["observations"], episode.pop("final_observations"))
    return found


def joined(observations, final):
    if isinstance(observations, dict):
        return {key: joined(observations[key], final[key]) for key in observations}
    if isinstance(observations, tuple):
        return tuple(map(joined, observations, final))
    return np.concatenate([observations, np.asarray(final)[None]])


def own_fields(name):
    options = KINDS[name][3]
    return (*(EXTRA if "extra_fields" in options else ()), *(("hidden_states",) if "hidden_shape" in options else ()))


@pytest.mark.parametrize("name", [name for name in KINDS if not (LOSES_IMAGES and name in WITH_IMAGES)])
def test_every_class_is_read_back_and_holds_the_same_again(name):
    storage = make(name)
    fill(storage, name)
    dataset = write_minari(storage, "mine/things-v0")
    source = read_minari("mine/things-v0", own_fields(name))
    assert_same(list(source), given(name))
    assert_same(list(source), given(name))  # once more
    assert_same(list(read_minari(dataset, own_fields(name))), given(name))
    assert (source.num_steps, source.num_episodes) == (32, len(episodes(name)))
    assert (source.observation_space, source.action_space) == (storage.observation_space, storage.action_space)
    assert_same(without_row_ids(copied(name, source)), without_row_ids(storage))


@pytest.mark.skipif(LOSES_IMAGES, reason="Minari 0.5.4")
def test_images_are_kept_as_they_are():
    """Minari's own way is JPEG, which changes them."""
    rng = np.random.default_rng(0)
    image = spaces.Box(0, 255, (40, 40, 3), np.uint8)
    frames = rng.integers(0, 256, (4, 40, 40, 3), np.uint8)
    episode = {"observations": frames, "actions": np.arange(3), "rewards": np.ones(3), "truncated": True}
    write_minari([episode], "images-v0", observation_space=image, action_space=spaces.Discrete(3))
    assert_same(next(iter(read_minari("images-v0")))["observations"], frames)


def test_minari_before_its_images_without_loss(monkeypatch):
    create = minari.create_dataset_from_buffers

    def old(dataset_id, buffer, observation_space=None, action_space=None):
        return create(dataset_id, buffer, observation_space=observation_space, action_space=action_space)

    monkeypatch.setattr(minari, "create_dataset_from_buffers", old)
    with pytest.raises(InvalidInputError, match=r"images is uint8 \(40,\), which Minari .* JPEG: that changes it"):
        write_minari([{**GIVEN, "images": np.ones((2, 40), np.uint8)}], "images-v0", **SPACES)
    write_minari([GIVEN], "vectors-v0", **SPACES)


def test_a_dataset_that_minari_made(recwarn):
    """Of an environment's own steps, with infos of resets."""
    env = gymnasium.make("CartPole-v1", max_episode_steps=12)
    buffers = []
    for seed in range(4):
        observations, rewards, ends, actions = [env.reset(seed=seed)[0]], [], [], []
        while not ends or not any(ends[-1]):
            actions.append(np.int64(seed % 2))
            observation, reward, *end, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(reward)
            ends.append(end)
        terminations, truncations = map(list, zip(*ends, strict=True))
        infos = {"number": np.arange(len(observations)), "other": np.zeros(len(observations))}
        arrays = {"observations": np.array(observations), "actions": np.array(actions), "rewards": np.array(rewards)}
        buffers.append(EpisodeBuffer(**arrays, terminations=terminations, truncations=truncations, infos=infos))
    dataset = minari.create_dataset_from_buffers("cartpole/test-v0", buffers, env="CartPole-v1")
    recwarn.clear()
    source = read_minari(dataset.filter_episodes(lambda episode: episode.id != 1), extra_fields=["number"])
    assert source.num_episodes == 3
    assert source.num_steps == sum(len(buffers[number].rewards) for number in (0, 2, 3))
    for episode, number in zip(source, (0, 2, 3), strict=True):
        buffer = buffers[number]
        assert_same(episode["observations"], buffer.observations)
        assert_same(episode["actions"], buffer.actions)
        assert episode["terminated"].tolist() == buffer.terminations
        assert episode["truncated"].tolist() == buffer.truncations
        assert episode["number"].tolist() == list(range(1, len(buffer.rewards) + 1))  # the first is that of the reset
        assert "other" not in episode
    fields = {"number": ((), "int64")}
    storage = ReplayStorage.from_episodes(source, batch_size=2, extra_fields=fields)
    assert storage.observation_space == env.observation_space
    assert [episode.terminated for episode in storage.episodes()] == [buffers[n].terminations[-1] for n in (0, 2, 3)]
    assert_same(storage.episodes()[1].final_observations.numpy(), buffers[2].observations[-1])


# ------------------------------------------------------------------------------------------------ what is refused

SPACES = {"observation_space": BOX, "action_space": spaces.Discrete(3)}
OBSERVED = np.ones((3, 2), np.float32)
GIVEN = {"observations": OBSERVED, "actions": np.arange(2), "rewards": np.ones(2), "terminated": True}


def test_datasets_that_are_refused():
    write_minari([GIVEN], "given-v0", **SPACES, author="me")
    assert minari.load_dataset("given-v0").storage.metadata["author"] == {"me"}
    with pytest.raises(InvalidInputError, match=r"has no info 'cost' in episode 0\..* It has \[\]"):
        list(read_minari("given-v0", ["cost"]))
    with pytest.raises(InvalidInputError, match="extra_fields is 'cost'"):
        read_minari("given-v0", "cost")
    with pytest.raises(InvalidInputError, match="got a int; give the id"):
        read_minari(3)
    with pytest.raises(FileNotFoundError, match="missing-v0"):
        read_minari("missing-v0")
    storage = ReplayStorage(spaces.Box(-9, 9, (4,)), spaces.Discrete(3), storage_size=9, num_envs=1, batch_size=2)
    with pytest.raises(
        InvalidInputError, match=r"observations of a step are \(2,\) float32; this storage holds \(4,\)"
    ):
        storage.add_episodes(read_minari("given-v0"))
    assert len(storage) == 0


def test_a_damaged_file_leaves_a_storage_as_it_was(folder):
    storage = make("replay")
    fill(storage, "replay")
    write_minari(storage, "given-v0")
    before = held(storage)
    file = folder / "given-v0/data/main_data.hdf5"
    content = file.read_bytes()
    for length in {*range(0, len(content), 1999), len(content) - 1}:
        file.write_bytes(content[:length])
        with pytest.raises(InvalidInputError, match="the dataset given-v0 is damaged or not complete"):
            storage.add_episodes(read_minari("given-v0"))
    file.write_bytes(content)
    with h5py.File(file, "a") as changed:
        del changed["episode_3"]["rewards"]
    with pytest.raises(InvalidInputError, match=r"the dataset given-v0 is damaged or not complete.*rewards"):
        storage.add_episodes(read_minari("given-v0"))
    assert_same(held(storage), before)


@pytest.mark.parametrize(
    ("name", "given", "changes", "message"),
    [
        ("given", [GIVEN], {}, "dataset_id is 'given'; Minari needs a name with a version"),
        ("a given-v0", [GIVEN], {}, "Minari refuses to write 'a given-v0': Malformed dataset ID"),
        ("given-v0", [], {}, "got no episode"),
        ("given-v0", [GIVEN], {"action_space": None}, "action_space is None; Minari needs a Gymnasium space"),
        ("given-v0", [GIVEN, {**GIVEN, "rewards": np.ones(2, np.float16)}], {}, "rewards is float16"),
        ("given-v0", [GIVEN, {**GIVEN, "observations": OBSERVED[:2]}], {}, "has no final observation"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(name, given, changes, message, folder):
    with pytest.raises(InvalidInputError, match=message):
        write_minari(given, name, **{**SPACES, **changes})
    assert [path for path in folder.glob("**/*") if path.is_file()] == []


def test_a_dataset_of_the_same_id_is_not_replaced(folder):
    write_minari([GIVEN], "given-v0", **SPACES)
    with pytest.raises(InvalidInputError, match=r"there is a dataset 'given-v0', and Minari replaces none"):
        write_minari([GIVEN, GIVEN], "given-v0", **SPACES)
    assert read_minari("given-v0").num_episodes == 1


def test_an_interrupted_writer_leaves_nothing(folder, monkeypatch):
    monkeypatch.setattr("rlstore.data.written._GROUP_BYTES", 1)  # the first episode is written before the second comes
    with pytest.raises(InterruptedWriteError):
        write_minari(interrupted([GIVEN, GIVEN]), "mine/given-v0", **SPACES)
    assert not (folder / "mine/given-v0").exists()
    write_minari([GIVEN, GIVEN, GIVEN], "mine/given-v0", **SPACES)
    assert (read_minari("mine/given-v0").num_episodes, read_minari("mine/given-v0").num_steps) == (3, 6)


@pytest.mark.parametrize("missing", ["minari", "h5py"])
def test_without_minari_the_error_says_what_to_install(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"write_minari\(\) needs {missing}, .*pip install 'rlstore\[data\]'"):
        write_minari([GIVEN], "given-v0", **SPACES)
