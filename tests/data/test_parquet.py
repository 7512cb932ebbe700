"""Parquet: what a storage holds and what is read back are the same, value by value; other datasets; damaged ones."""

from __future__ import annotations

import pytest
from experience import KINDS, assert_same, episodes, fill, make

from rlstore.data import read_parquet, write_parquet


@pytest.mark.parametrize("name", KINDS)
def test_what_every_class_holds_is_read_back(name, tmp_path):
    storage = make(name)
    fill(storage, name)
    write_parquet(storage, tmp_path / "a")
    source = read_parquet(tmp_path / "a")
    assert_same(list(source), episodes(name))
    assert_same(list(source), episodes(name))  # once more
    assert (source.num_steps, source.num_episodes) == (32, len(episodes(name)))
    assert (source.observation_space, source.action_space) == (storage.observation_space, storage.action_space)
