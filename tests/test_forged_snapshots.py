"""Snapshots whose tables and numbers were forged, checksums and all: refused by rlstore, or of use; never a crash."""

from __future__ import annotations

import random

import pytest
import torch
from forged_states import FORGED, forgeries, judge

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def some(count):
    return lambda state: random.Random(0).sample(list(forgeries(state, random.Random(0))), count)


@pytest.mark.parametrize("name", ["frames, starts", "prioritized, ahead", "sequences, by priority", "distributed"])
def test_a_forged_snapshot_is_refused_or_of_use(name):
    assert sum(judge(name, some(8)).values()) == 8


def forged_entry(column, value, lacks=""):
    """The open episode of each environment, with another entry in the table of episodes."""

    def forge(state):
        numbers, tensors = state
        episodes = tensors["episodes"].clone()
        episodes[tensors["counters"][2], column] = value
        left = {name: tensor for name, tensor in tensors.items() if (lacks or "-") not in name}
        return [(f"{column} = {value}", numbers, {**left, "episodes": episodes})]

    return forge


@pytest.mark.parametrize("value", [2**40, -(2**40), 2**62, -1])
def test_an_open_episode_that_begins_elsewhere(value):
    """The next step is compared with frames before its beginning."""
    assert judge("frames, starts", forged_entry(0, value)) == {"refused": 1, "used": 0}


def test_frames_of_a_table_that_is_not_there():
    assert judge("frames", forged_entry(3, 0)) == {"refused": 1, "used": 0}
    assert judge("frames, starts", forged_entry(3, 0, lacks=" start ")) == {"refused": 1, "used": 0}


def test_an_episode_index_of_another_environment():
    def forge(state):
        numbers, tensors = state
        name = "record 0 episode"
        of_lane = tensors[name].view(3, -1).clone()
        of_lane[0] = of_lane[1]
        return [("episode", numbers, {**tensors, name: of_lane.flatten()})]

    assert judge("replay", forge) == {"refused": 1, "used": 0}


def test_a_record_of_more_rows_than_can_be_counted():
    """In 64 bits the sum over all environments is 0: so many rows the record has."""

    def forge(state):
        numbers, tensors = state
        many = torch.tensor([2**63 - 1, 2**63 - 1, 2])
        empty = {name: tensor[:0] for name, tensor in tensors.items() if name.startswith("record 0 ")}
        bounds = {"record 0 first": torch.zeros_like(many), "record 0 stop": many}
        counters = torch.cat([many.unsqueeze(0), tensors["counters"][1:]])
        return [("stop", numbers, {**tensors, **empty, **bounds, "counters": counters})]

    assert judge("replay", forge) == {"refused": 1, "used": 0}


def test_priorities_of_what_is_not_there_are_dropped():
    def forge(state):
        numbers, tensors = state
        return [("leaves", numbers, {**tensors, "priorities": tensors["priorities"].clone().fill_(2.0)})]

    assert judge("sequences, by priority", forge) == {"refused": 0, "used": 1}


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FORGED)
def test_every_forgery_is_refused_or_of_use(name):
    counts = judge(name, lambda state: list(forgeries(state, random.Random(1))))
    print(name, counts)
    assert counts["refused"] > 20
