"""Data that are refused: what the error says, and that the whole storage is as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from data_episodes import ACTIONS, EXTRA, FLAT, GOALS, assert_same, contents, episode_of, no_reward

import rlstore
from rlstore import InvalidInputError, ReplayStorage

LONG = 4
GOOD = episode_of(FLAT, 1, LONG, extra=True)


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name not in names}


def changed(name: str, place: Any, value: float) -> dict[str, Any]:
    """The good episode with one other entry."""
    array = GOOD[name].astype(np.float64 if np.isfinite(value) and value % 1 else GOOD[name].dtype)
    array = array.copy()
    array[place] = value
    return {**GOOD, name: array}


NO_FLAGS = without("terminations", "truncations")
EPISODES: dict[str, tuple[Any, str]] = {
    "unequal lengths": (
        {**GOOD, "actions": GOOD["actions"][:-1]},
        r"unequal length: observations 5, actions 3, rewards 4",
    ),
    "unequal extra": ({**GOOD, "costs": np.zeros(9, np.float32)}, r"unequal length: .*costs 9"),
    "too many observations": ({**GOOD, "observations": np.zeros((6, 2), np.float32)}, "unequal length: observations 6"),
    "unequal flags": ({**GOOD, "truncations": [False] * 3}, "unequal length: .*truncated 3"),
    "no steps": ({name: value[:0] for name, value in GOOD.items()}, "there are no steps: observations 0, actions 0"),
    "no rewards": (without("rewards"), r"lacks \['rewards'\]"),
    "no extra field": (without("costs"), r"lacks \['costs'\]"),
    "no end flags": (NO_FLAGS, "no end flags: give terminated, terminations, terminals or terminateds.*truncated with"),
    "an end twice": ({**GOOD, "timeouts": GOOD["truncations"]}, "'truncations' and 'timeouts' are the same flags"),
    "dones": (
        {**NO_FLAGS, "dones": GOOD["truncations"]},
        "'dones' is not known.*does not tell whether an episode terminated",
    ),
    "ends inside": (
        {**GOOD, "terminations": [False, True, False, False]},
        "there are 4 steps, and an end is flagged in step 1; give",
    ),
    "a flag that is nan": ({**GOOD, "terminations": [0.0, np.nan, 0.0, 1.0]}, "terminated is nan at 1 of 4 entries"),
    "unknown name": ({**GOOD, "reward": GOOD["rewards"]}, r"'reward' is not known.* mean 'rewards'\?"),
    "unknown extra": (
        {**GOOD, "cost": GOOD["costs"]},
        r"'cost' is not known.* mean 'costs'\?.*storage has \['costs'\]",
    ),
    "misspelt flags": (
        {"terminal" if name == "truncations" else name: v for name, v in GOOD.items() if name != "terminations"},
        r"'terminal' is not known.* mean 'terminals'\?",
    ),
    "not a name": ({**GOOD, 3: 1}, "3 is not known"),
    "nan observation": (changed("observations", (2, 1), np.nan), r"observations\[2, 1\] is nan"),
    "nan final": ({**GOOD, "observations": GOOD["observations"][:-1], "final_observations": [0, np.nan]}, r"is nan"),
    "nan reward": (changed("rewards", 2, np.nan), "rewards in step 2 is nan; it has to be finite"),
    "infinite reward": (changed("rewards", 0, np.inf), "rewards in step 0 is inf; it has to be finite"),
    "action of another space": (
        changed("actions", 3, 10_000),
        "actions in step 3 is 10000; .* from 0 to 9999, fixed by the",
    ),
    "fraction of an action": (changed("actions", 3, 0.5), "actions is .*float64 cannot be held as int64"),
    "another shape": (
        {**GOOD, "observations": np.zeros((5, 3))},
        r"of a step are \(3,\) float64; this storage holds \(2,\)",
    ),
    "another nest": (
        {**GOOD, "observations": {"a": np.zeros((5, 2))}},
        "observations is a dict; give a tensor or an arr",
    ),
    "final with steps": (
        {**GOOD, "observations": np.zeros((4, 2)), "final_observations": np.zeros((4, 2))},
        r"final_observations are \(4, 2\), and observations \(4, 2\); the former are one",
    ),
    "states": ({**GOOD, "hidden_states": np.zeros((4, 1, 2))}, "'hidden_states' is not known"),
    "text": ({**GOOD, "rewards": ["a", "b", "c", "d"]}, "rewards cannot be converted to a tensor"),
    "no dict": ([1, 2, 3], "is a list; give a dict of arrays"),
    "none": (None, "is a NoneType; give a dict of arrays"),
}


def filled() -> Any:
    storage = rlstore.PrioritizedReplayStorage(FLAT.space, ACTIONS, storage_size=30, extra_fields=EXTRA, num_envs=2)
    storage.add_episodes([episode_of(FLAT, 8, 5, extra=True), episode_of(FLAT, 9, 3, extra=True)])
    both = np.stack([FLAT.observe(7, 0)] * 2)  # of each environment an episode that goes on
    storage.add(both, [1, 1], [0.0, 0.0], [False] * 2, [False] * 2, {}, both + 1, costs=[1.0, 1.0])
    storage.update(storage.held_rows()[:3], torch.tensor([3.0, 1.0, 2.0]))
    return storage


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"observation": [[0.0]], "actions": [0], "rewards": [0.0], "terminals": [1]}, r"mean 'observations'\?"),
        ({"observations": [[0.0]], "actions": [0], "rewards": [0.0], "terminal": [1]}, r"mean 'terminals'\?"),
        ({"observations": [[0.0]], "actions": [0], "rewards": 1.0, "terminals": [1]}, "rewards have no steps"),
        ({"observations": [], "actions": [], "rewards": [], "terminals": []}, "rewards have no steps"),
        ("data.npz", "is a str; give a dict of arrays"),
    ],
)
def test_arrays_without_spaces_say_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{message}.*Nothing was written"):
        ReplayStorage.from_arrays(given)


@pytest.mark.parametrize("name", EPISODES)
@pytest.mark.parametrize("place", [0, 2])
def test_of_a_list_with_a_bad_episode_nothing_is_stored(name: str, place: int) -> None:
    bad, message = EPISODES[name]
    storage = filled()
    before = {**contents(storage), "tree": storage._sampler.tree.leaves.clone(), "all": storage._rows.counters.clone()}
    episodes = [GOOD, GOOD, GOOD]
    episodes[place] = bad
    with pytest.raises(InvalidInputError, match=f"(?s)episode {place}.*{message}.*Nothing was"):
        storage.add_episodes(episodes)
    after = {**contents(storage), "tree": storage._sampler.tree.leaves, "all": storage._rows.counters}
    assert_same(before, after)
    storage.sample(4)


@pytest.mark.parametrize("name", EPISODES)
def test_no_storage_is_made_of_bad_data(name: str, tmp_path: Any) -> None:
    bad, message = EPISODES[name]
    options = {"extra_fields": EXTRA, "memory": "mapped", "path": tmp_path / "here"}
    with pytest.raises(InvalidInputError, match=f"(?s){message}.*Nothing was"):
        ReplayStorage.from_episodes([bad], FLAT.space, ACTIONS, 20, **options)
    if isinstance(bad, dict) and not name.startswith(("too many", "ends", "nan final", "final")):
        flat = {**bad, "observations": np.zeros((4, 3), np.float32) if "shape" in name else bad.get("observations")}
        flat = {k: v[:4] if k == "observations" and not isinstance(v, dict) else v for k, v in flat.items()}
        with pytest.raises(InvalidInputError, match="Nothing was"):
            ReplayStorage.from_arrays(flat, FLAT.space, ACTIONS, 20, **options)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (GOOD, r"add_episodes\(\) got a dict; give a list of episodes.*from_arrays\(\)"),
        (7, r"add_episodes\(\) got a int; give a list of episodes"),
        (None, r"add_episodes\(\) got a NoneType"),
        ("text", r"got 'text'; open a file with a reader of rlstore\.data"),
    ],
)
def test_what_is_no_list_of_episodes(given: Any, message: str) -> None:
    storage = filled()
    before = contents(storage)
    with pytest.raises(InvalidInputError, match=message):
        storage.add_episodes(given)
    assert_same(before, contents(storage))


def test_arguments_that_the_class_does_not_take() -> None:
    with pytest.raises(TypeError, match=r"ReplayStorage\(\) has no argument 'nstep'. Did you mean 'n_step'"):
        ReplayStorage.from_episodes([GOOD], nstep=3)
    with pytest.raises(TypeError, match=r"from_arrays\(\).*It takes arrays, observation_space"):
        ReplayStorage.from_arrays()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="there are no episodes"):
        ReplayStorage.from_episodes([])
    with pytest.raises(ValueError, match="num_envs is 0"):
        ReplayStorage.from_episodes([without("costs")], num_envs=0)
    with pytest.raises(ValueError, match="sequence_length is 20, and SequenceReplayStorage holds 4 steps"):
        rlstore.SequenceReplayStorage.from_episodes([without("costs")], sequence_length=20)
    with pytest.raises(ValueError, match="storage_size is 0"):
        ReplayStorage.from_episodes([without("costs")], storage_size=0)
    with pytest.raises(ValueError, match=r"needs a Dict space with \['observation', 'achieved_goal'"):
        rlstore.HindsightReplayStorage.from_episodes([without("costs")], compute_reward=no_reward)


def test_rewards_that_are_not_finite_are_stored_where_they_are_allowed() -> None:
    given = {**without("costs"), "rewards": np.array([0, np.nan, np.inf, -np.inf], np.float32)}
    storage = ReplayStorage.from_episodes([given], allow_nonfinite_rewards=True)
    assert storage.episodes()[0].rewards.tolist()[2:] == [np.inf, -np.inf]


def test_infinite_observations_are_stored_and_so_is_what_a_storage_holds() -> None:
    """A NaN that add() has taken is not refused on the way to another storage."""
    given = {**without("costs"), "observations": GOOD["observations"].copy()}
    given["observations"][1] = np.inf, -np.inf
    storage = ReplayStorage.from_episodes([given], storage_size=9)
    bad = np.array([np.nan, 0], np.float32)
    storage.add(bad, 0, 0.0, False, True, {}, bad)
    copy = ReplayStorage.from_episodes(storage.episodes())
    assert copy[4]["observations"].isnan().tolist() == [True, False]
    assert torch.equal(copy[1]["observations"], storage[1]["observations"])


def test_goals_of_another_nest() -> None:
    storage = rlstore.HindsightReplayStorage(GOALS.space, ACTIONS, storage_size=9, compute_reward=no_reward)
    given = episode_of(GOALS, 0, 3)
    del given["observations"]["desired_goal"]
    with pytest.raises(InvalidInputError, match=r'episode 0.*missing \[.observations\["desired_goal"\]'):
        storage.add_episodes([given])
    assert len(storage) == 0
