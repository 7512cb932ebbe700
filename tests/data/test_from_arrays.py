"""from_arrays(): flat arrays as d4rl and Minari have them, against worked examples."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from data_episodes import ACTIONS, CASES, FLAT, Case, assert_same, contents, episode_of, flat
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import rlstore
from rlstore import ReplayStorage

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LENGTHS = (5, 7, 1, 6, 8, 2, 9)
FLAT_ONE = spaces.Box(-np.inf, np.inf, (1,), np.float32)


def joined(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Their arrays, one after another, with next_observations."""

    def part(value: Any, first: int, last: int | None) -> Any:
        return {k: v[first:last] for k, v in value.items()} if isinstance(value, dict) else value[first:last]

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: join([value[key] for value in values]) for key in values[0]}
        return np.concatenate(values)

    arrays = {name: join([e[name] for e in episodes]) for name in episodes[0] if name != "observations"}
    observed = [e["observations"] for e in episodes]
    return {
        **arrays,
        "observations": join([part(value, 0, -1) for value in observed]),
        "next_observations": join([part(value, 1, None) for value in observed]),
    }


@EVERY
@pytest.mark.parametrize("lanes", [1, 3])
def test_arrays_are_stored_like_their_episodes(case: Case, lanes: int) -> None:
    episodes = [episode_of(case.form, index, length) for index, length in enumerate(LENGTHS)]
    if lanes > 1:  # without a flag the end is seen only by the observations, and what follows is in the same piece
        episodes[3]["truncations"][-1] = True
    arguments = case.given(num_envs=lanes)
    with pytest.warns(UserWarning, match="no end was flagged there") if lanes == 1 else nullcontext():
        loaded = case.kind.from_arrays(joined(episodes), case.form.space, ACTIONS, 180, **arguments)
    twin = case.kind.from_episodes(episodes, case.form.space, ACTIONS, 180, **arguments)
    assert_same(contents(loaded), contents(twin))
    for storage in (loaded, twin):
        storage.seed(5)
    for one, other in zip(flat(loaded.sample()), flat(twin.sample()), strict=True):
        assert torch.equal(one, other)


# What follows the steps of D4RL, which has no end without a flag in it.
FOLLOWING = np.array([2, 3, 3.5, 5, 5.5, 6.5], np.float32)[:, None]


def observed(*numbers: float) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.float32)[:, None]


# Two steps that end in a truncation, two that end in a termination, and one that goes on.
D4RL = {
    "observations": observed(1, 2, 3, 4, 5, 6),
    "actions": observed(10, 20, 30, 40, 50, 60),
    "rewards": np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], np.float32),
    "terminals": np.array([0, 0, 0, 0, 1, 0], bool),
    "timeouts": np.array([0, 0, 1, 0, 0, 0], bool),
}


def transitions(storage: Any) -> list[tuple[float, ...]]:
    """Observation, action, reward, next observation, terminated and truncated of each row."""
    rows = storage[storage.held_rows()]
    names = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated")
    columns = [rows[name].flatten().tolist() for name in names]
    return [tuple(round(float(value), 3) for value in row) for row in zip(*columns, strict=True)]


def test_without_next_observations_steps_that_need_them_are_left_out() -> None:
    with pytest.warns(UserWarning, match="2 of the steps given were left out, 4 were stored") as told:
        storage = ReplayStorage.from_arrays(D4RL)
    assert told[0].filename == __file__
    assert transitions(storage) == [
        (1, 10, 0.1, 2, 0, 0),
        (2, 20, 0.2, 3, 0, 1),
        (4, 40, 0.4, 5, 0, 0),
        (5, 50, 0.5, 5, 1, 0),
    ]
    assert [e.is_over for e in storage.episodes()] == [True, True]


def test_a_terminal_step_at_the_very_end_is_stored() -> None:
    storage = ReplayStorage.from_arrays({name: value[3:5] for name, value in D4RL.items()})
    assert transitions(storage) == [(4, 40, 0.4, 5, 0, 0), (5, 50, 0.5, 5, 1, 0)]


def test_an_episode_of_one_truncated_step_is_left_out() -> None:
    arrays = {**D4RL, "timeouts": np.array([1, 1, 0, 1, 0, 0], bool)}
    with pytest.warns(UserWarning, match="4 of the steps given were left out"):
        storage = ReplayStorage.from_arrays(arrays)
    assert transitions(storage) == [(3, 30, 0.3, 4, 0, 1), (5, 50, 0.5, 5, 1, 0)]


def test_a_termination_before_such_a_step_is_none_the_less() -> None:
    arrays = {**D4RL, "terminals": np.array([0, 1, 0, 0, 0, 1], bool)}
    with pytest.warns(UserWarning, match="1 of the steps given were left out"):
        storage = ReplayStorage.from_arrays(arrays)
    ends = [(row[0], *row[4:]) for row in transitions(storage)]
    assert ends == [(1, 0, 0), (2, 1, 0), (4, 0, 0), (5, 0, 0), (6, 1, 0)]


def test_an_open_end_is_cut_off() -> None:
    arrays = {name: value[3:] for name, value in D4RL.items()}
    arrays["terminals"] = np.zeros(3, bool)
    with pytest.warns(UserWarning, match="1 of the steps"):
        storage = ReplayStorage.from_arrays(arrays)
    assert transitions(storage) == [(4, 40, 0.4, 5, 0, 0), (5, 50, 0.5, 6, 0, 0)]
    (episode,) = storage.episodes()
    assert (episode.is_over, episode.terminated, episode.truncated) == (True, False, False)


def test_next_observations_are_the_truth() -> None:
    """One of them does not continue, without a flag: the episode was cut off there."""
    following = observed(2, 3, 3.5, 4.5, 5.5, 6.5)
    with pytest.warns(UserWarning, match="not the observations of the next steps, in 1 of 6 steps"):
        storage = ReplayStorage.from_arrays({**D4RL, "next_observations": following})
    assert transitions(storage) == [
        (1, 10, 0.1, 2, 0, 0),
        (2, 20, 0.2, 3, 0, 0),
        (3, 30, 0.3, 3.5, 0, 1),
        (4, 40, 0.4, 4.5, 0, 0),
        (5, 50, 0.5, 5.5, 1, 0),
        (6, 60, 0.6, 6.5, 0, 0),
    ]
    ends = [(e.length, e.is_over, e.terminated, e.truncated) for e in storage.episodes()]
    assert ends == [(3, True, False, True), (1, True, False, False), (1, True, True, False), (1, True, False, False)]


@pytest.mark.parametrize("ended", ["terminated", "terminations", "terminals", "terminateds"])
@pytest.mark.parametrize("cut", ["truncated", "truncations", "timeouts", "truncateds"])
def test_flags_go_by_many_names(ended: str, cut: str) -> None:
    rest = {name: D4RL[name] for name in ("observations", "actions", "rewards")}
    flags = {ended: D4RL["terminals"].tolist(), cut: torch.as_tensor(D4RL["timeouts"]).float()[:, None]}
    storage = ReplayStorage.from_arrays({**rest, **flags, "next_observations": FOLLOWING})
    assert [row[4:] for row in transitions(storage)] == [(0, 0), (0, 0), (0, 1), (0, 0), (1, 0), (0, 0)]


def test_what_datasets_hold_beside_the_steps_is_left_out() -> None:
    beside = {"infos": {"qpos": np.zeros(6)}, "infos/qvel": np.zeros(6), "metadata/algorithm": "SAC"}
    storage = ReplayStorage.from_arrays({**D4RL, **beside, "next_observations": FOLLOWING})
    assert len(storage) == 6


def test_spaces_are_taken_from_the_arrays() -> None:
    nest = {"a": np.zeros((3, 2), np.uint8), "b": (np.zeros((3,), np.float64), np.zeros((3, 1), bool))}
    last = {"rewards": [0, 1, 2], "terminated": [False, False, True]}
    storage = ReplayStorage.from_arrays({"observations": nest, "actions": [0, 4, -2], **last}, batch_size=2)
    assert storage.obs_shape == {"a": (2,), "b": {0: (), 1: (1,)}}
    assert [field.dtype for field in storage._fields.observations] == [torch.uint8, torch.float64, torch.bool]
    assert (storage.action_space.start, storage.action_space.n) == (-2, 7)
    several = ReplayStorage.from_arrays(
        {"observations": observed(1, 2, 3), "actions": [[0, 1], [2, 5], [1, 1]], **last}
    )
    assert several.action_space.nvec.tolist() == [3, 6]
    several.add(observed(7), [[2, 5]], [0.0], [True], [False], {}, observed(8))
    with pytest.raises(ValueError, match="whole number from 0 to 2"):
        several.add(observed(7), [[3, 5]], [0.0], [True], [False], {}, observed(8))


def test_values_are_converted_to_the_dtypes_of_the_spaces() -> None:
    arrays = {name: value.astype(np.float64) for name, value in D4RL.items()}
    arrays["next_observations"] = FOLLOWING
    box = {"shape": (1,), "dtype": "float32", "type": "Box"}
    storage = ReplayStorage.from_arrays(arrays, box, box)
    assert [row[0] for row in transitions(storage)] == [1, 2, 3, 4, 5, 6]
    assert storage._rows.blocks["observations"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["read only", "strided", "tensor", "list"])
def test_arrays_of_every_kind(kind: str) -> None:
    arrays: dict[str, Any] = {**D4RL, "next_observations": FOLLOWING}
    expected = transitions(ReplayStorage.from_arrays(arrays))
    for name, value in arrays.items():
        if kind == "read only":
            value = value.copy()
            value.flags.writeable = False
        elif kind == "strided":
            value = np.stack([value, value], -1)[..., 0]
        elif kind == "tensor":
            value = torch.as_tensor(value)
        else:
            value = value.tolist()
        arrays[name] = value
    box = {"shape": (1,), "dtype": "float32", "type": "Box"}
    assert transitions(ReplayStorage.from_arrays(arrays, box, box)) == expected


def test_numbers_that_numpy_does_not_have() -> None:
    arrays: dict[str, Any] = {
        **D4RL,
        "next_observations": torch.as_tensor(FOLLOWING).bfloat16(),
        "observations": torch.as_tensor(D4RL["observations"]).bfloat16(),
    }
    storage = ReplayStorage.from_arrays(arrays)
    assert storage.observation_space.dtype == np.float32
    assert storage[storage.held_rows()]["observations"].flatten().equal(arrays["observations"].float().flatten())
    arrays["observations"][2] = math.nan
    with pytest.raises(rlstore.InvalidInputError, match=r"observations\[2(, 0)?\] is nan"):
        ReplayStorage.from_arrays(arrays)


def test_all_steps_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are whole episodes; what is stored does not depend on how many there are."""
    episodes = [episode_of(FLAT, index, length) for index, length in enumerate(LENGTHS)]
    episodes[3]["truncations"][-1] = True
    arrays = joined(episodes)
    expected = contents(ReplayStorage.from_arrays(arrays, FLAT.space, ACTIONS))
    monkeypatch.setattr("rlstore.replay.loading.given._READY_BYTES", 150)
    assert_same(expected, contents(ReplayStorage.from_arrays(arrays, FLAT.space, ACTIONS)))
    short = {name: value for name, value in arrays.items() if name != "next_observations"}
    with pytest.warns(UserWarning, match="left out"):
        pieces = contents(ReplayStorage.from_arrays(short, FLAT.space, ACTIONS))
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="left out"):
        assert_same(pieces, contents(ReplayStorage.from_arrays(short, FLAT.space, ACTIONS)))


def test_a_folder_with_a_storage_is_left_alone(tmp_path: Any) -> None:
    arrays = {**D4RL, "next_observations": FOLLOWING}
    options = {"memory": "mapped", "path": tmp_path / "mapped"}
    ReplayStorage.from_arrays(arrays, **options).close()
    with pytest.raises(ValueError, match="there is a ReplayStorage in this folder, with 6 transitions"):
        ReplayStorage.from_arrays(arrays, **options)
    box = rlstore.ReplayStorage.from_arrays(arrays).observation_space
    reopened = ReplayStorage(box, {"shape": (1,), "type": "Box"}, storage_size=6, **options)
    assert len(reopened) == 6


def expected_of(ended: list[int], following: list[float] | None) -> list[tuple[float, ...]]:
    """What is stored of steps 0, 1, 2...; ``ended`` has bit 0 where one terminated and bit 1 where it was truncated.

    Each is an observation, the next one, and how its episode ended: 1 terminated, 2 truncated, 3 both, 4 cut off.
    """
    stored: list[tuple[float, ...]] = []
    count = len(ended)
    for step, how in enumerate(ended):
        if following is not None:
            goes_on = step + 1 < count and following[step] == step + 1
            stored.append((step, following[step], how if how or goes_on else 4))
        elif how & 1:
            stored.append((step, step, how))
        elif not how and step + 1 < count:
            is_lost = ended[step + 1] == 2
            stored.append((step, step + 1, 2 if is_lost else 4 if step + 2 == count and not ended[step + 1] else 0))
    return stored


@settings(max_examples=80)
@given(
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=1, max_size=30),
    st.one_of(st.none(), st.lists(st.sampled_from([True, True, True, False]), min_size=30, max_size=30)),
    st.sampled_from([1, 3]),
    st.sampled_from([60, 1 << 30]),
)
def test_arrays_are_what_a_simple_model_makes_of_them(ended, goes_on, lanes, piece):
    count = len(ended)
    following = None
    if goes_on is not None:
        following = [step + (1.0 if is_next else 0.5) for step, is_next in enumerate(goes_on[:count])]
    arrays = {
        "observations": observed(*range(count)),
        "actions": np.arange(count),
        "rewards": np.arange(count) / 2,
        "terminals": [how & 1 for how in ended],
        "timeouts": [how & 2 for how in ended],
        **({} if following is None else {"next_observations": np.array(following)[:, None]}),
    }
    expected = expected_of(ended, following)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", UserWarning)
        patch.setattr("rlstore.replay.loading.given._READY_BYTES", piece)
        patch.setattr("rlstore.replay.loading.given._COPIED_BYTES", piece)
        storage = ReplayStorage.from_arrays(arrays, FLAT_ONE, ACTIONS, num_envs=lanes)
    found = []
    for episode in storage.episodes():
        assert episode.is_over
        steps = storage[episode.rows]
        now, then = (steps[name].flatten().tolist() for name in ("observations", "next_observations"))
        how = episode.terminated + 2 * episode.truncated or 4
        *before, last = [(one, other, 0) for one, other in zip(now, then, strict=True)]
        found += [*before, (*last[:2], how)]
        assert torch.equal(steps["actions"], steps["observations"].flatten().long())
        assert torch.equal(steps["rewards"].flatten() * 2, steps["observations"].flatten())
    assert sorted(found) == expected
