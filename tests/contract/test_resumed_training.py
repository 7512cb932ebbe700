"""Training that is stopped and taken up again is served the same batches, to the bit, as training that is not."""

from __future__ import annotations

import os

import pytest
from resumed_training import TRAININGS, WAYS, play, play_stopped

pytestmark = pytest.mark.filterwarnings("ignore:the observations of an environment")


def ways_of(name):
    """A folder of its own for each save is tried with the first form of each class: the next save is no other there."""
    return set(WAYS) - ({"saved elsewhere"} if ", " in name else set())


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory):
    """What a training is served that is not stopped; each is played once."""
    played = {}

    def of(name):
        if name not in played:
            played[name] = play(TRAININGS[name], tmp_path_factory.mktemp("unstopped"))
        return played[name]

    return of


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in TRAININGS for way in WAYS if way in ways_of(name)])
def test_a_training_that_was_stopped_goes_on_with_the_same_batches(name, way, tmp_path, unstopped, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing here outlives the machine
    assert play_stopped(TRAININGS[name], WAYS[way], tmp_path) == unstopped(name)
