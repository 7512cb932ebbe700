"""npz: what a storage holds and what is read back are the same, value by value; files of others; damaged ones."""

from __future__ import annotations

import json
import re
import zipfile
import zlib

import numpy as np
import pytest
import torch
from experience import (
    BOX,
    D4RL,
    IDS,
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

from rlstore import InvalidInputError, ReplayStorage, RolloutStorage, RowNotHeldError
from rlstore.data import read_npz, read_parquet, write_npz, write_parquet


def test_the_expected_episodes_are_those_of_the_storage():
    for name in KINDS:
        storage = make(name)
        fill(storage, name)
        assert_same(held(storage), episodes(name), name)


@pytest.mark.parametrize("name", KINDS)
def test_what_every_class_holds_is_read_back(name, tmp_path):
    storage = make(name)
    fill(storage, name)
    write_npz(storage, tmp_path / "a.npz")
    source = read_npz(tmp_path / "a.npz")
    assert_same(list(source), episodes(name))
    assert_same(list(source), episodes(name))  # once more
    assert (source.num_steps, source.num_episodes) == (32, len(episodes(name)))
    assert (source.observation_space, source.action_space) == (storage.observation_space, storage.action_space)


@pytest.mark.parametrize("name", KINDS)
def test_every_class_holds_the_same_again(name, tmp_path):
    """Into another storage of the class, out again, and in as a file of a file."""
    storage = make(name)
    fill(storage, name)
    write_npz(storage, tmp_path / "a.npz")
    again = copied(name, read_npz(tmp_path / "a.npz"))
    assert_same(without_row_ids(again), without_row_ids(storage))
    assert again.episodes().terminated.sum() == 2
    assert again.episodes().truncated.sum() == 3
    write_npz(read_npz(tmp_path / "a.npz"), tmp_path / "b.npz")
    assert (tmp_path / "b.npz").read_bytes() == (tmp_path / "a.npz").read_bytes()


def test_numpy_reads_the_arrays(tmp_path):
    storage = make("replay of a nest")
    fill(storage, "replay of a nest")
    write_npz(storage.episodes()[:2], tmp_path / "a.npz")
    first, second = episodes("replay of a nest")[:2]
    with np.load(tmp_path / "a.npz") as arrays:
        assert_same(arrays["rewards"], np.concatenate([first["rewards"], second["rewards"]]))
        assert arrays["episode_lengths"].tolist() == [4, 5]
        assert arrays["terminations"].tolist() == [False] * 3 + [True] + [False] * 5
        assert arrays["truncations"].tolist() == [False] * 8 + [True]
        assert_same(arrays["observations/camera/left"][4:], second["observations"]["camera"]["left"])
        assert_same(arrays["final_observations/pair/0"][1], second["final_observations"]["pair"][0])
        assert_same(arrays["contacts"][:4], first["contacts"])
        assert json.loads(arrays["rlstore"].item())["version"] == 1


def test_spaces_are_taken_from_the_arrays_where_only_episodes_were_given(tmp_path):
    storage = make("n-step")
    fill(storage, "n-step")
    write_npz(list(storage.episodes()), tmp_path / "a.npz")
    source = read_npz(tmp_path / "a.npz")
    assert (source.observation_space, source.action_space) == (BOX, spaces.Discrete(5, start=-1))


@pytest.mark.parametrize(("write", "read"), [(write_npz, read_npz), (write_parquet, read_parquet)])
def test_rollouts_only_know_the_final_observations_of_episodes_that_go_on(write, read, tmp_path):
    storage = RolloutStorage.from_spaces(BOX, spaces.Discrete(3), num_envs=2, num_steps=4, autoreset="SameStep")
    for step in range(4):
        ids = np.arange(2) + 2 * step
        sample = {
            "observations": np.stack([ids, -ids], -1).astype(np.float32),
            "actions": ids % 3,
            "rewards": ids / 2,
            "terminated": ids == 2,
            "truncated": ids == 5,
            "values": ids / 4,
            "log_probs": -ids / 8,
            "next_observations": np.stack([ids + 2, -ids - 2], -1).astype(np.float32),
        }
        storage.insert_transition({name: torch.as_tensor(value) for name, value in sample.items()})
    assert [episode.is_over for episode in storage.episodes()] == [True, True, False, False]
    write(storage, tmp_path / "a")
    found = list(read(tmp_path / "a"))
    assert [episode["rewards"].tolist() for episode in found] == [[0, 1], [0.5, 1.5, 2.5], [2, 3], [3.5]]
    assert [episode["values"].tolist() for episode in found] == [[0, 0.5], [0.25, 0.75, 1.25], [1, 1.5], [1.75]]
    assert [episode["terminated"].any() for episode in found] == [True, False, False, False]
    assert [episode["truncated"].any() for episode in found] == [False, True, False, False]
    finals = [episode["final_observations"].tolist() if "final_observations" in episode else None for episode in found]
    assert finals == [None, None, [8, -8], [9, -9]]


def test_episodes_of_several_storages_and_of_a_caller_in_one_file(tmp_path):
    """Where only some have a final observation."""
    names, given = ["replay", "n-step", "replay"], []
    for name in names:
        storage = make(name)
        fill(storage, name)
        given += [*storage.episodes()[:2], {**episodes(name)[2], "final_observations": None}, storage.episodes()[3]]
    write_npz(given, tmp_path / "a.npz")
    expected = [episode for name in names for episode in episodes(name)[:4]]
    for place in (2, 6, 10):
        del expected[place]["final_observations"]
    assert_same(list(read_npz(tmp_path / "a.npz")), expected)
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["final_episodes"].tolist() == [0, 1, 3, 4, 5, 7, 8, 9, 11]


# ------------------------------------------------------------------------------------------------ files of others


def test_arrays_of_d4rl(tmp_path):
    infos = {"infos/qpos": IDS * 1.5, "metadata/algorithm": np.array("SAC")}
    np.savez_compressed(tmp_path / "a.npz", **D4RL, **infos)
    source = read_npz(tmp_path / "a.npz")
    found = list(source)
    assert [episode["rewards"].tolist() for episode in found] == [
        [0, 0.25, 0.5, 0.75],
        [1, 1.25, 1.5, 1.75],
        [2, 2.25, 2.5, 2.75],
    ]
    assert [(e["terminated"].tolist(), e["truncated"].tolist()) for e in found] == [
        ([False, False, False, True], [False] * 4),
        ([False] * 4, [False, False, False, True]),
        ([False] * 4, [False] * 4),
    ]
    assert found[1].keys() == {"observations", "actions", "rewards", "terminated", "truncated"}
    assert (source.num_steps, source.num_episodes) == (12, 3)
    assert source.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert source.action_space == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    with pytest.warns(UserWarning, match="2 of the steps given were left out"):
        storage = ReplayStorage.from_episodes(source, batch_size=2)
    rewards = [episode.rewards.tolist() for episode in storage.episodes()]
    assert rewards == [[0, 0.25, 0.5, 0.75], [1, 1.25, 1.5], [2, 2.25, 2.5]]


def test_episodes_end_where_the_next_observation_is_another_one(tmp_path):
    following = np.where((IDS == 3) | (IDS == 5) | (IDS == 7), 1000 + IDS, IDS + 1)
    arrays = {
        "obs": IDS.astype(np.float32)[:, None],
        "next_obs": following.astype(np.float32)[:, None],
        "actions": IDS % 3,
        "rewards": IDS / 4,
        "terminals": IDS == 3,
    }
    np.savez(tmp_path / "a.npz", **arrays)
    source = read_npz(tmp_path / "a.npz")
    assert [episode["actions"].tolist() for episode in source] == [[0, 1, 2, 0], [1, 2], [0, 1], [2, 0, 1, 2]]
    assert [episode["final_observations"].item() for episode in source] == [1003, 1005, 1007, 12]
    assert [episode["terminated"].any() for episode in source] == [True, False, False, False]
    assert (source.num_episodes, source.action_space) == (4, spaces.Discrete(3))


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_one_flag_for_both_ends_means_what_the_caller_says(ends, tmp_path):
    arrays = {"s": IDS[:, None] * 1.0, "a": IDS % 2 * 1.0, "dones": (IDS % 4 == 3).astype(np.float32), "c": IDS}
    np.savez(tmp_path / "a.npz", **arrays)
    columns = {"observations": {"state": "s"}, "actions": "a", "costs": "c"}
    found = list(read_npz(tmp_path / "a.npz", columns, ends=ends, rewards=-1))
    assert [episode["costs"].tolist() for episode in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(episode[ends].tolist() == [False, False, False, True] for episode in found)
    other = "truncated" if ends == "terminated" else "terminated"
    assert not any(episode[other].any() for episode in found)
    assert all((episode["rewards"] == -1).all() for episode in found)
    assert_same(found[1]["observations"]["state"], np.array([[4.0], [5], [6], [7]]))


def test_big_endian_arrays_are_read_as_numbers(tmp_path):
    np.savez(tmp_path / "a.npz", **{**D4RL, "rewards": D4RL["rewards"].astype(">f4")})
    assert_same(next(iter(read_npz(tmp_path / "a.npz")))["rewards"], D4RL["rewards"][:4])


@pytest.mark.parametrize("column", ["observations/state", "observations/camera/left"])
def test_a_part_of_the_observations_keeps_its_final_observations(column, tmp_path):
    storage = make("replay of a nest")
    fill(storage, "replay of a nest")
    write_npz(storage, tmp_path / "a.npz")
    found = list(read_npz(tmp_path / "a.npz", {"observations": {"seen": column}, "costs": "costs"}))
    for episode, expected in zip(found, episodes("replay of a nest"), strict=True):
        for name in ("observations", "final_observations"):
            part = expected[name]["state"] if column.endswith("state") else expected[name]["camera"]["left"]
            assert_same(episode[name], {"seen": part})
        for name in ("actions", "rewards", "terminated", "truncated", "costs"):
            assert_same(episode[name], expected[name])
        assert "contacts" not in episode


def test_a_column_that_only_has_the_name_of_a_field(tmp_path):
    np.savez(tmp_path / "a.npz", **D4RL, episode=np.arange(3))
    with pytest.raises(InvalidInputError, match="differ in length"):
        read_npz(tmp_path / "a.npz")
    assert read_npz(tmp_path / "a.npz", {"episode": None}).num_episodes == 3


# ------------------------------------------------------------------------------------------------ what is refused

REFUSED = {
    "no observations": (
        {"observations": None},
        {},
        r"has no column that is known to be its observations; it has .*actions",
    ),
    "no actions": ({"actions": None}, {}, "known to be its actions"),
    "no rewards": ({"rewards": None}, {}, "has no column of rewards"),
    "no ends": ({"terminals": None, "timeouts": None}, {}, "no column that tells where episodes end"),
    "a length": ({"rewards": np.ones(11)}, {}, r"differ in length: \{.*'rewards': 11"),
    "objects": ({"actions": np.array([None] * 12)}, {}, "actions of .* is object"),
    "text": ({"rewards": np.array(["1"] * 12)}, {}, "rewards of .* is <U1"),
    "Fortran's order": ({"observations": np.asfortranarray(np.ones((12, 2)))}, {}, "observations of .* Fortran order"),
    "nan as a flag": ({"terminals": np.full(12, np.nan)}, {}, "terminals of .* holds float64 .*nan"),
    "a flag for each entry": ({"terminals": np.zeros((12, 2))}, {}, r"terminals of .* holds float64 \(2,\)"),
    "no such column": ({}, {"columns": {"rewards": "reward"}}, "has no column 'reward'. Did you mean 'rewards'?"),
    "a column that is none": ({}, {"columns": {"rewards": 3}}, r"columns\['rewards'\] is 3"),
    "columns that are no dict": ({}, {"columns": "obs"}, "columns is 'obs'; give a dict"),
    "rewards that are no number": ({}, {"rewards": "none"}, "rewards is 'none'"),
    "another end": ({}, {"ends": "done"}, "ends is 'done'; it has to be 'terminated' or 'truncated'"),
    "half of the next observations": ({"next_observations/a": np.ones(12)}, {}, "each needs one"),
    "lengths that are nan": ({"episode_lengths": np.array([4, np.nan, 4])}, {}, r"episode_lengths\[1\] of .* is nan"),
    "an infinite length": ({"episode_lengths": np.array([np.inf, 4, 4])}, {}, r"episode_lengths\[0\] of .* is inf"),
    "half a step": ({"episode_lengths": np.array([4.5, 3.5, 4])}, {}, r"episode_lengths\[0\] of .* is 4\.5"),
    "lengths with two axes": ({"episode_lengths": np.array([[4, 4, 4]])}, {}, r"episode_lengths of .* shape \(1, 3\)"),
    "lengths that are one": ({"episode_lengths": np.ones(13, np.int64)}, {}, r"episode_lengths of .* shape \(13,\)"),
    # 4 * 2**62 is 0 in 64 bits, and 2 * (2**63 - 1) is -2.
    "lengths that wrap to 12": ({"episode_lengths": np.array([2**62] * 4 + [12])}, {}, r"\[0\] of .* is 4611686018"),
    "lengths that wrap again": ({"episode_lengths": np.array([2**63 - 1] * 2 + [14])}, {}, r"\[0\] of .* is 92233720"),
    "lengths of uint64": ({"episode_lengths": np.array([2**64 - 8, 20], np.uint64)}, {}, r"\[0\] of .* is 184467440"),
    "no length": ({"episode_lengths": np.array([0, 8, 4])}, {}, r"episode_lengths\[0\] of .* is 0"),
    "a length below 0": ({"episode_lengths": np.array([-4, 8, 8])}, {}, r"episode_lengths\[0\] of .* is -4"),
    "episodes that are nan": (
        {"e": np.array([0.0, np.nan] * 6)},
        {"columns": {"episodes": "e"}},
        r"e of .* holds float64 \(\), or nan",
    ),
    "episodes with two axes": (
        {"e": np.zeros((12, 2))},
        {"columns": {"episodes": "e"}},
        r"e of .* holds float64 \(2,\)",
    ),
    "no steps": ({name: array[:0] for name, array in D4RL.items() if array.ndim}, {}, "has no steps"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_files_that_are_refused(why, tmp_path):
    changes, arguments, message = REFUSED[why]
    arrays = {name: array for name, array in {**D4RL, **changes}.items() if array is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InvalidInputError, match=message):
        list(read_npz(tmp_path / "a.npz", **arguments))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float32])
def test_lengths_of_any_dtype_are_whole_numbers(dtype, tmp_path):
    flags = dict.fromkeys(("terminals", "timeouts"), np.zeros(12, bool))
    np.savez(tmp_path / "a.npz", **{**D4RL, **flags, "episode_lengths": np.array([5, 7], dtype)})
    assert [len(episode["rewards"]) for episode in read_npz(tmp_path / "a.npz")] == [5, 7]


@pytest.mark.timeout(60)
def test_steps_that_no_byte_stands_behind_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in ("observations", "actions"):
            with archive.open(f"{name}.npy", "w") as member:
                head = {"descr": "<f4", "fortran_order": False, "shape": (10**15, 0)}
                np.lib.format.write_array_header_1_0(member, head)
        with archive.open("episode_lengths.npy", "w") as member:
            np.lib.format.write_array(member, np.array([10**15]))
    with pytest.raises(InvalidInputError, match="1,000,000,000,000,000 steps without a number in them"):
        read_npz(tmp_path / "a.npz", rewards=0.0)


@pytest.mark.parametrize(
    ("actions", "space"),
    [
        (IDS - 3, spaces.Discrete(12, start=-3)),
        (IDS.astype(np.uint64), spaces.Discrete(12)),
        ((IDS - 100).astype(np.int8), spaces.Discrete(12, start=-100)),
        (np.stack([IDS - 3, IDS], 1), spaces.MultiDiscrete([12, 12], start=[-3, 0])),
    ],
)
def test_whole_numbers_as_actions(actions, space, tmp_path):
    np.savez(tmp_path / "a.npz", **{**D4RL, "actions": actions})
    assert read_npz(tmp_path / "a.npz").action_space == space


@pytest.mark.parametrize("actions", [[2**63] * 12, [2**64 - 1] * 12])
def test_actions_that_no_space_can_count_are_refused(actions, tmp_path):
    np.savez(tmp_path / "a.npz", **{**D4RL, "actions": np.array(actions, np.uint64)})
    with pytest.raises(InvalidInputError, match=r"whole numbers from the least to the largest.* give action_space"):
        read_npz(tmp_path / "a.npz").action_space  # noqa: B018 - it is made when it is asked for


def test_a_nan_or_another_space_leaves_a_storage_as_it_was(tmp_path):
    storage = ReplayStorage(spaces.Box(-9, 9, (2,)), spaces.Box(-9, 9, (1,)), storage_size=50, num_envs=1, batch_size=2)
    np.savez(tmp_path / "good.npz", **D4RL)
    with pytest.warns(UserWarning, match="left out"):
        storage.add_episodes(read_npz(tmp_path / "good.npz"))
    before = held(storage)
    broken = D4RL["observations"].copy()
    broken[-2, 1] = np.nan
    for changed, message in (
        ({"observations": broken}, "episode 2: observations.* is nan"),
        (
            {"observations": np.ones((12, 3), np.float32)},
            r"observations of a step are \(3,\) float32; this storage holds \(2,\)",
        ),
        ({"actions": np.full((12, 1), np.nan, np.float32)}, "actions.* is nan"),
    ):
        np.savez(tmp_path / "bad.npz", **{**D4RL, **changed})
        with pytest.raises(InvalidInputError, match=message):
            storage.add_episodes(read_npz(tmp_path / "bad.npz"))
        assert_same(held(storage), before)


def written(path):
    storage = make("prioritized")
    fill(storage, "prioritized")
    write_npz(storage, path)
    return storage, path.read_bytes()


def test_a_file_that_was_cut_short_is_refused_when_it_is_opened(tmp_path):
    _, content = written(tmp_path / "a.npz")
    for length in {*range(0, len(content), 97), len(content) - 1}:
        (tmp_path / "a.npz").write_bytes(content[:length])
        with pytest.raises(InvalidInputError, match=r"a\.npz is damaged or not complete, or no npz file"):
            read_npz(tmp_path / "a.npz")


def test_a_changed_byte_is_found_or_does_not_matter(tmp_path):
    """Never other data, and nothing is stored."""
    storage, content = written(tmp_path / "a.npz")
    expected = episodes("prioritized")
    before = held(storage)
    found = 0
    for place in range(0, len(content), 41):
        changed = bytearray(content)
        changed[place] ^= 0x10
        (tmp_path / "a.npz").write_bytes(changed)
        try:
            got = list(read_npz(tmp_path / "a.npz"))
        except InvalidInputError as error:
            assert "a.npz" in str(error)  # noqa: PT017
            found += 1
            with pytest.raises(InvalidInputError):
                storage.add_episodes(read_npz(tmp_path / "a.npz"))
            continue
        assert_same(got, expected)
    assert_same(held(storage), before)
    assert found > len(content) / 41 * 0.8


def test_every_bit_of_the_list_of_members_counts_or_does_not_matter(tmp_path):
    """A name that is another one in the list alone would leave a member out, as the final observations are."""
    _, content = written(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        begin = archive.start_dir
    expected = episodes("prioritized")
    for place in range(begin, len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (tmp_path / "a.npz").write_bytes(changed)
        try:
            got = list(read_npz(tmp_path / "a.npz"))
        except InvalidInputError:
            continue
        assert_same(got, expected, f"byte {place}")


def test_final_observations_of_no_episode_are_refused(tmp_path):
    written(tmp_path / "a.npz")
    arrays = dict(np.load(tmp_path / "a.npz"))
    arrays["final_episodes"] = arrays["final_episodes"][::-1].copy()
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InvalidInputError, match="is damaged: it has a final observation of episode"):
        list(read_npz(tmp_path / "a.npz"))


def test_a_file_that_is_none_or_missing(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\3\4 and something else")
    with pytest.raises(InvalidInputError, match="is damaged or not complete, or no npz file"):
        read_npz(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError):
        read_npz(tmp_path / "b.npz")
    with pytest.raises(InvalidInputError, match="path is 3"):
        read_npz(3)


@pytest.mark.parametrize("change", ["none", "no actions", "empty path", "wrong places"])
def test_a_description_that_cannot_be_is_refused(tmp_path, change):
    written(tmp_path / "a.npz")
    arrays = dict(np.load(tmp_path / "a.npz"))
    about = json.loads(arrays["rlstore"].item())
    del about["crc32"]
    columns = about["columns"]
    about["columns"] = {
        "none": [],
        "no actions": [entry for entry in columns if entry[0] != ["actions"]],
        "empty path": [*columns, [[], "rewards"]],
        "wrong places": [
            [["observations", 5], column] if path == ["observations"] else [path, column] for path, column in columns
        ],
    }[change]
    about["crc32"] = zlib.crc32(json.dumps(about).encode())
    np.savez(tmp_path / "a.npz", **{**arrays, "rlstore": np.array(json.dumps(about))})
    with pytest.raises(InvalidInputError, match=r"a\.npz is damaged: its description cannot be read"):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize(("shape", "kind"), [((10**12,), "<U10"), ((), "<U99999999"), ((), "<f8"), ((), "<U9")])
def test_a_description_that_would_fill_the_memory_is_none(tmp_path, shape, kind):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("rlstore.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": kind, "fortran_order": False, "shape": shape})
    with pytest.raises(InvalidInputError, match=r"a\.npz is damaged or not complete"):
        read_npz(tmp_path / "a.npz")


def test_a_link_goes_on_to_be_one(tmp_path):
    storage, content = written(tmp_path / "a.npz")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.npz").symlink_to(tmp_path / "elsewhere/b.npz")
    write_npz(storage, tmp_path / "link.npz")
    assert (tmp_path / "link.npz").is_symlink()
    assert (tmp_path / "elsewhere/b.npz").read_bytes() == content


def test_a_file_of_a_newer_version_is_refused(tmp_path):
    arrays = {**D4RL, "rlstore": np.array(json.dumps({"version": 2}))}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InvalidInputError, match="newer version of rlstore"):
        read_npz(tmp_path / "a.npz")


# ------------------------------------------------------------------------------------------------ writing


GIVEN = {"observations": np.ones((3, 2)), "actions": np.ones(2), "rewards": np.ones(2), "terminated": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": None}, r"episode 1: it lacks \['rewards'\]"),
        ({"rewards": np.ones(3)}, r"episode 1: rewards is not \[2, ...\]"),
        ({"actions": np.ones((2, 4))}, r"actions is float64 \(4,\) in episode 1, and float64 \(\) in those before it"),
        ({"rewards": np.ones(2, np.float32)}, "rewards is float32 .* in episode 1, and float64"),
        ({"costs": np.ones(2)}, "costs is float64 .* in episode 1, and missing in those before it"),
        ({"terminated": [True, False]}, "episode 1: it ends before its last step"),
        (
            {"observations": np.ones((2, 2)), "final_observations": np.ones(3)},
            r"it is float64 \(3,\) in final_observations of episode 1, and float64 \(2,\) in its observations",
        ),
        (
            {"observations": np.ones((2, 2)), "final_observations": {"a": np.ones(2)}},
            "it is missing in final_observations of episode 1",
        ),
        ({"actions": ["a", "b"]}, "episode 1: actions is <U1; files hold numbers"),
    ],
)
def test_episodes_that_differ_leave_the_old_file(changes, message, tmp_path):
    (tmp_path / "a.npz").write_bytes(b"old")
    with pytest.raises(InvalidInputError, match=message):
        write_npz([GIVEN, {**GIVEN, **changes}], tmp_path / "a.npz")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.npz", b"old")]


def test_an_interrupted_writer_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"old")
    with pytest.raises(InterruptedWriteError):
        write_npz(interrupted([GIVEN, GIVEN]), tmp_path / "a.npz")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.npz", b"old")]
    write_npz(iter([GIVEN, GIVEN]), tmp_path / "a.npz")
    assert zipfile.is_zipfile(tmp_path / "a.npz")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("source", "message"), [([], "got no episode"), (3, "got a int"), (GIVEN, "got a dict")])
def test_what_is_no_source(source, message, tmp_path):
    with pytest.raises(InvalidInputError, match=message):
        write_npz(source, tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(InvalidInputError, match="is a folder; give the name of a file"):
        write_npz([GIVEN], tmp_path)
    with pytest.raises(InvalidInputError, match=r"there is no folder .*missing for a\.npz; create it"):
        write_npz([GIVEN], tmp_path / "missing" / "a.npz")


def test_a_progress_bar_counts_the_episodes(tmp_path, capsys):
    write_npz([GIVEN] * 3, tmp_path / "a.npz")
    assert capsys.readouterr().out == ""
    write_npz(read_npz(tmp_path / "a.npz"), tmp_path / "b.npz", progress=True)
    assert re.search(r"Writing .*100%", capsys.readouterr().out)


def test_steps_that_are_overwritten_before_they_are_written(tmp_path):
    storage = make("replay")
    fill(storage, "replay")
    listed = storage.episodes()
    fill(storage, "replay", 4)
    with pytest.raises(RowNotHeldError, match="is not held any more"):
        write_npz(listed, tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())
    write_npz(storage, tmp_path / "a.npz")
