"""Minari: what a storage holds and what is read back are the same, value by value; datasets that Minari made."""

from __future__ import annotations

import numpy as np
import pytest
from experience import EXTRA, KINDS, assert_same, episodes, fill, make

from rlstore.data import read_minari, write_minari


@pytest.fixture(autouse=True)
def datasets_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def given(name):
    """The episodes as Minari keeps them: the final observation is the last one."""
    return [with_final_inside(episode) for episode in episodes(name)]


def with_final_inside(episode):
    final = episode.pop("final_observations")
    return {**episode, "observations": joined(episode["observations"], final)}


def joined(observations, final):
    if isinstance(observations, dict):
        return {key: joined(observations[key], final[key]) for key in observations}
    if isinstance(observations, tuple):
        return tuple(map(joined, observations, final))
    return np.concatenate([observations, np.asarray(final)[None]])


def own_fields(name):
    options = KINDS[name][3]
    return (*(EXTRA if "extra_fields" in options else ()), *(("hidden_states",) if "hidden_shape" in options else ()))


@pytest.mark.parametrize("name", KINDS)
def test_what_every_class_holds_is_read_back(name):
    storage = make(name)
    fill(storage, name)
    dataset = write_minari(storage, "mine/things-v0")
    source = read_minari("mine/things-v0", own_fields(name))
    assert_same(list(source), given(name))
    assert_same(list(source), given(name))  # once more
    assert_same(list(read_minari(dataset, own_fields(name))), given(name))
    assert (source.num_steps, source.num_episodes) == (32, len(episodes(name)))
    assert (source.observation_space, source.action_space) == (storage.observation_space, storage.action_space)
