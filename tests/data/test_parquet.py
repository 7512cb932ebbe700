"""Parquet: what a storage holds and what is read back are the same, value by value; other datasets; damaged ones."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from experience import (
    BOX,
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

from rlstore import InvalidInputError, ReplayStorage
from rlstore.data import read_npz, read_parquet, write_npz, write_parquet
from rlstore.data.arrow import as_column


@pytest.mark.parametrize("name", KINDS)
def test_every_class_is_read_back_and_holds_the_same_again(name, tmp_path):
    storage = make(name)
    fill(storage, name)
    write_parquet(storage, tmp_path / "a")
    source = read_parquet(tmp_path / "a")
    assert_same(list(source), episodes(name))
    assert_same(list(source), episodes(name))  # once more
    assert (source.num_steps, source.num_episodes) == (32, len(episodes(name)))
    assert (source.observation_space, source.action_space) == (storage.observation_space, storage.action_space)
    assert_same(without_row_ids(copied(name, source)), without_row_ids(storage))


def test_from_npz_to_parquet_and_back(tmp_path):
    storage = make("recurrent")
    fill(storage, "recurrent")
    write_npz(storage, tmp_path / "a.npz")
    write_parquet(read_npz(tmp_path / "a.npz"), tmp_path / "a")
    write_npz(read_parquet(tmp_path / "a"), tmp_path / "b.npz")
    assert (tmp_path / "b.npz").read_bytes() == (tmp_path / "a.npz").read_bytes()


def test_the_layout_is_that_of_lerobot(tmp_path):
    storage = make("replay of a nest")
    fill(storage, "replay of a nest")
    write_parquet(storage.episodes()[:3], tmp_path / "a", fps=4, task="walk")
    first, second, third = episodes("replay of a nest")[:3]
    files = {str(file.relative_to(tmp_path / "a")) for file in (tmp_path / "a").rglob("*") if file.is_file()}
    assert files == {
        "README.md",
        "data/chunk-000/file-000.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/final_observations.parquet",
        "meta/info.json",
        "meta/rlstore.json",
        "meta/tasks.parquet",
    }
    info = json.loads((tmp_path / "a/meta/info.json").read_text())
    expected = {"codebase_version": "v3.0", "total_episodes": 3, "total_frames": 13, "total_tasks": 1, "fps": 4}
    assert info.items() >= {**expected, "video_path": None, "robot_type": None}.items()
    assert info["splits"] == {"train": "0:3"}
    assert info["data_path"].format(chunk_index=0, file_index=0) in files
    data = pq.read_table(tmp_path / "a/data/chunk-000/file-000.parquet")
    assert set(info["features"]) == set(data.column_names)
    assert info["features"]["observation.camera.left"] == {"dtype": "uint8", "shape": [2, 3, 1], "names": None}
    assert info["features"]["next.reward"] == {"dtype": "float32", "shape": [1], "names": None}
    rows = data.to_pydict()
    assert rows["episode_index"] == [0] * 4 + [1] * 5 + [2] * 4
    assert rows["frame_index"] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert rows["index"] == list(range(13))
    assert rows["timestamp"] == [number / 4 for number in rows["frame_index"]]
    assert rows["task_index"] == [0] * 13
    assert rows["next.done"] == [False] * 3 + [True] + [False] * 4 + [True] + [False] * 3 + [True]
    assert rows["next.terminated"] == [False] * 3 + [True] + [False] * 8 + [True]
    assert rows["next.reward"] == [*first["rewards"].tolist(), *second["rewards"].tolist(), *third["rewards"].tolist()]
    assert rows["action"][4:9] == second["actions"].tolist()
    assert rows["observation.camera.left"][:4] == first["observations"]["camera"]["left"].tolist()
    assert rows["complementary_info.contacts"][4:9] == second["contacts"].tolist()
    meta = pq.read_table(tmp_path / "a/meta/episodes/chunk-000/file-000.parquet").to_pydict()
    assert meta["tasks"] == [["walk"]] * 3
    assert (meta["length"], meta["dataset_from_index"], meta["dataset_to_index"]) == ([4, 5, 4], [0, 4, 9], [4, 9, 13])
    assert meta["data/chunk_index"] == meta["data/file_index"] == [0, 0, 0]
    tasks = pq.read_table(tmp_path / "a/meta/tasks.parquet")
    assert tasks.to_pydict() == {"task_index": [0], "task": ["walk"]}
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]


def test_large_datasets_have_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("rlstore.data.lerobot.FILE_BYTES", 1)
    monkeypatch.setattr("rlstore.data.lerobot._FILES_IN_CHUNK", 3)
    monkeypatch.setattr("rlstore.data.written._GROUP_BYTES", 1)
    storage = make("replay")
    fill(storage, "replay")
    write_parquet(storage, tmp_path / "a")
    files = sorted(str(file.relative_to(tmp_path / "a/data")) for file in (tmp_path / "a/data").rglob("*.parquet"))
    assert files == [f"chunk-00{number // 3}/file-00{number % 3}.parquet" for number in range(8)]
    meta = pq.read_table(tmp_path / "a/meta/episodes/chunk-000/file-000.parquet").to_pydict()
    assert meta["data/chunk_index"] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert meta["data/file_index"] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert_same(list(read_parquet(tmp_path / "a")), episodes("replay"))


# ------------------------------------------------------------------------------------------------ datasets of others

IDS = np.arange(9)
LENGTHS = [4, 5]


def lerobot(folder, changes=None, features=None, info=None):
    """A dataset as LeRobot makes it, of two episodes, with a camera whose frames are in a video."""
    columns = {
        "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(18, dtype=np.float32)), 2),
        "action": pa.array([[float(number)] * 3 for number in IDS], pa.list_(pa.float32())),
        "next.reward": pa.array(IDS / 2, pa.float32()),
        "next.done": pa.array([False] * 3 + [True] + [False] * 5),
        "timestamp": pa.array(IDS / 10, pa.float32()),
        "frame_index": pa.array([*range(4), *range(5)]),
        "episode_index": pa.array([0] * 4 + [1] * 5),
        "index": pa.array(IDS),
        "task_index": pa.array([0] * 9),
        **(changes or {}),
    }
    columns = {name: column for name, column in columns.items() if column is not None}
    (folder / "data/chunk-000").mkdir(parents=True)
    (folder / "meta").mkdir()
    pq.write_table(pa.table(columns), folder / "data/chunk-000/file-000.parquet")
    known = {name: {"dtype": "float32", "shape": [1], "names": None} for name in columns}
    known |= {"observation.state": {"dtype": "float32", "shape": [2]}, "action": {"dtype": "float32", "shape": [3]}}
    known["observation.images.top"] = {"dtype": "video", "shape": [480, 640, 3], "names": None}
    content = {"codebase_version": "v3.0", "total_frames": 9, "fps": 10, "features": {**known, **(features or {})}}
    (folder / "meta/info.json").write_text(json.dumps({**content, **(info or {})}))
    return folder


STATE = {"observations": "observation.state"}


def test_a_video_is_refused_by_name_and_the_rest_can_be_read(tmp_path):
    lerobot(tmp_path / "a")
    with pytest.raises(InvalidInputError, match=r"observation\.images\.top of .* is a video.*Name the columns to read"):
        read_parquet(tmp_path / "a")
    source = read_parquet(tmp_path / "a", STATE)
    first, second = source
    assert_same(first["observations"], np.arange(8, dtype=np.float32).reshape(4, 2))
    assert_same(second["actions"], np.repeat(np.arange(4, 9, dtype=np.float32)[:, None], 3, 1))
    assert_same(second["rewards"], np.array([2, 2.5, 3, 3.5, 4], np.float32))
    assert first["terminated"].tolist() == [False, False, False, True]
    for flags in (first["truncated"], second["truncated"], second["terminated"]):
        assert not flags.any()
    assert source.observation_space == BOX


def test_ends_of_lerobot_mean_what_the_caller_says(tmp_path):
    lerobot(tmp_path / "a", {"next.done": None})
    terminated = list(read_parquet(tmp_path / "a", STATE))
    assert [episode["terminated"].tolist() for episode in terminated] == [[False] * 3 + [True], [False] * 4 + [True]]
    truncated = read_parquet(tmp_path / "a", STATE, ends="truncated")
    assert [episode["truncated"].tolist() for episode in truncated] == [[False] * 3 + [True], [False] * 4 + [True]]
    with pytest.warns(UserWarning, match="2 of the steps given were left out"):
        storage = ReplayStorage.from_episodes(truncated, batch_size=2)
    assert [(episode.length, episode.truncated) for episode in storage.episodes()] == [(3, True), (4, True)]
    assert storage.episodes()[0].final_observations.tolist() == [6, 7]


def test_demonstrations_without_rewards(tmp_path):
    lerobot(tmp_path / "a", {"next.reward": None})
    with pytest.raises(InvalidInputError, match=r"no column of rewards.*rewards=0\.0"):
        read_parquet(tmp_path / "a", STATE)
    assert all((episode["rewards"] == 0).all() for episode in read_parquet(tmp_path / "a", STATE, rewards=0.0))


def test_several_observations_are_a_nest_and_extra_fields_are_named(tmp_path):
    grid = pa.array(np.arange(36).reshape(9, 2, 2).tolist(), pa.list_(pa.list_(pa.int32())))
    lerobot(tmp_path / "a", {"observation.grid": grid, "cost": pa.array(IDS * 2)}, {"observation.images.top": {}})
    (tmp_path / "a/meta/info.json").write_text(json.dumps({"features": {}}))
    first, _ = read_parquet(tmp_path / "a", {"costs": "cost"})
    assert first.keys() == {"observations", "actions", "rewards", "terminated", "truncated", "costs"}
    assert_same(first["observations"]["grid"], np.arange(16, dtype=np.int32).reshape(4, 2, 2))
    assert_same(first["observations"]["state"], np.arange(8, dtype=np.float32).reshape(4, 2))
    assert_same(first["costs"], IDS[:4] * 2)
    first, _ = read_parquet(tmp_path / "a", {"observations": {"map": "observation.grid"}})
    assert list(first["observations"]) == ["map"]


def test_a_vector_of_one_number_stays_a_vector(tmp_path):
    numbers = pa.array(IDS / 2, pa.float32())
    columns, one = ("observation.state", "action"), {"dtype": "float32", "shape": [1]}
    lerobot(tmp_path / "a", dict.fromkeys(columns, numbers), dict.fromkeys(columns, one))
    source = read_parquet(tmp_path / "a", STATE)
    first, _ = source
    assert_same(first["actions"], np.array([[0], [0.5], [1], [1.5]], np.float32))
    assert source.action_space == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    assert first["rewards"].shape == (4,)


def test_plain_files_without_a_description(tmp_path):
    """In the order of their names; episodes go on from one to the next."""
    rows = {"obs": IDS * 1.0, "actions": IDS % 3, "rewards": IDS / 4, "terminals": IDS == 2, "timeouts": IDS == 6}
    table = pa.table({name: pa.array(column) for name, column in rows.items()})
    (tmp_path / "part").mkdir()
    for number, (start, stop) in enumerate([(0, 1), (1, 5), (5, 9)]):
        pq.write_table(table.slice(start, stop - start), tmp_path / f"part/{number}.parquet")
    source = read_parquet(tmp_path / "part")
    assert [episode["observations"].tolist() for episode in source] == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    assert [episode["truncated"].tolist() for episode in source] == [[False] * 3, [False] * 3 + [True], [False] * 2]
    assert (source.num_steps, source.num_episodes, source.action_space) == (9, 3, spaces.Discrete(3))
    assert [episode["rewards"].tolist() for episode in read_parquet(tmp_path / "part/2.parquet")] == [
        [1.25, 1.5],
        [1.75, 2],
    ]


class HuggingFaceDataset:
    """As much of ``datasets.Dataset`` as is used."""

    def __init__(self, table):
        self.table, self.column_names, self.num_rows = table, table.column_names, table.num_rows
        self.features = type("Features", (), {"arrow_schema": table.schema})

    def select_columns(self, names):
        return HuggingFaceDataset(self.table.select(names))

    def with_format(self, kind):
        assert kind == "arrow"
        return self

    def iter(self, batch_size):
        for start in range(0, self.num_rows, batch_size):
            yield self.table.slice(start, batch_size)


def test_datasets_of_hugging_face(tmp_path):
    file = lerobot(tmp_path / "a") / "data/chunk-000/file-000.parquet"
    source = read_parquet(HuggingFaceDataset(pq.read_table(file)))
    assert_same(list(source), list(read_parquet(file)))
    assert (source.num_steps, source.num_episodes) == (9, 2)
    with pytest.raises(InvalidInputError, match="give one split that is not streamed"):
        read_parquet(type("DatasetDict", (dict,), {"with_format": None})())


# ------------------------------------------------------------------------------------------------ what is refused

IMAGES = pa.array([{"bytes": b"png", "path": "a"}] * 9)
REFUSED = {
    "encoded images": ({"observation.state": IMAGES}, STATE, r"observation\.state of .* holds encoded images"),
    "text": ({"action": pa.array(["left"] * 9)}, STATE, r"action of .* holds string; numbers are needed"),
    "lists of several lengths": (
        {"action": pa.array([[1.0]] * 8 + [[1.0, 2.0]])},
        STATE,
        r"action of .* holds lists of 1 to 2 entries",
    ),
    "a missing value": ({"next.reward": pa.array([None, *IDS[1:] / 2])}, STATE, r"next\.reward of .* in 1 of 9 rows"),
    "unsorted rows": (
        {"frame_index": pa.array([0, 2, 1, 3, *range(5)])},
        STATE,
        "frame_index of .* is 2 in row 1, after 0",
    ),
    "an episode in two parts": (
        {"episode_index": pa.array([0, 0, 1, 1, 0, 0, 0, 0, 0]), "frame_index": pa.array([0, 1, 0, 1, 2, 3, 4, 5, 6])},
        STATE,
        "episode_index of .* is 0 again in row 4",
    ),
    "an end before the end": (
        {"terminals": pa.array(IDS == 1)},
        STATE,
        "terminals of .* is set in row 1, after which episode_index says that episode 0 goes on",
    ),
    "no such column": ({}, {"observations": "observation.stat"}, "Did you mean 'observation.state'?"),
    "no such key": ({}, {"observations": {"state": "observation.image"}}, "has no column 'observation.image'"),
    "no actions": ({"action": None}, STATE, "no column that is known to be its actions"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_datasets_that_are_refused(why, tmp_path):
    changes, columns, message = REFUSED[why]
    storage = ReplayStorage(BOX, spaces.Box(-9, 9, (3,)), storage_size=50, num_envs=1, batch_size=2)
    with pytest.raises(InvalidInputError, match=message):
        storage.add_episodes(read_parquet(lerobot(tmp_path / "a", changes), columns))
    assert len(storage) == 0


def test_files_of_different_columns_or_types_are_refused(tmp_path):
    folder = lerobot(tmp_path / "a", info={"total_frames": 18})
    first = folder / "data/chunk-000/file-000.parquet"
    table = pq.read_table(first)
    pq.write_table(table.drop_columns(["index"]), folder / "data/chunk-000/file-001.parquet")
    with pytest.raises(InvalidInputError, match=r"file-001.* differ in their columns, in \['index'\]"):
        read_parquet(folder, STATE)
    table = table.set_column(2, "next.reward", pa.array(IDS / 2, pa.float64()))
    pq.write_table(table, folder / "data/chunk-000/file-001.parquet")
    with pytest.raises(
        InvalidInputError, match=r"next\.reward of .* is .*float64.* in some rows and .*float32.* in others"
    ):
        list(read_parquet(folder, STATE))


def test_a_dataset_that_lacks_files_is_refused(tmp_path):
    folder = lerobot(tmp_path / "a", info={"total_frames": 20})
    with pytest.raises(InvalidInputError, match=r"is not complete: meta/info\.json .* 20 steps, and its files have 9"):
        read_parquet(folder, STATE)
    assert read_parquet(folder / "data", STATE).num_steps == 9
    shutil.rmtree(folder / "data")
    with pytest.raises(InvalidInputError, match="holds no Parquet files"):
        read_parquet(folder, STATE)
    for text in ("{", "[]", "{}", '{"features": 3}', '{"features": {"action": 3}}'):
        (folder / "meta/info.json").write_text(text)
        with pytest.raises(InvalidInputError, match=r"info\.json is damaged"):
            read_parquet(folder, STATE)
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "b")


def written(folder):
    storage = make("prioritized")
    fill(storage, "prioritized")
    write_parquet(storage, folder)
    return storage, [folder / name for name in ("data/chunk-000/file-000.parquet", "meta/final_observations.parquet")]


@pytest.mark.parametrize("name", ["rlstore", "info"])
def test_lists_in_lists_without_end_are_refused(tmp_path, name):
    written(tmp_path / "a")
    (tmp_path / f"a/meta/{name}.json").write_text("[" * 100_000)
    with pytest.raises(InvalidInputError, match=rf"{name}\.json is damaged"):
        read_parquet(tmp_path / "a")


def test_columns_with_more_numbers_than_places_in_lists_are_written_in_parts(tmp_path, monkeypatch):
    storage = make("replay of images")
    fill(storage, "replay of images")
    monkeypatch.setattr("rlstore.data.arrow._MOST_NUMBERS", 20)  # three images of six numbers
    assert as_column(np.zeros((7, 2, 3), np.uint8)).num_chunks == 3
    write_parquet(storage, tmp_path / "a")
    assert_same(list(read_parquet(tmp_path / "a")), episodes("replay of images"))


def test_a_file_that_was_cut_short_is_refused_when_it_is_opened(tmp_path):
    storage, files = written(tmp_path / "a")
    before = held(storage)
    for file in files:
        content = file.read_bytes()
        for length in {*range(0, len(content), 199), len(content) - 1}:
            file.write_bytes(content[:length])
            with pytest.raises(InvalidInputError, match=rf"{file.name} is damaged or not complete, or no Parquet file"):
                storage.add_episodes(read_parquet(tmp_path / "a"))
        file.write_bytes(content)
    assert_same(held(storage), before)
    assert_same(list(read_parquet(tmp_path / "a")), episodes("prioritized"))


def test_final_observations_that_are_not_those_of_the_episodes(tmp_path):
    written(tmp_path / "a")
    file = tmp_path / "a/meta/final_observations.parquet"
    whole = pq.read_table(file)
    pq.write_table(whole.slice(1), file)
    with pytest.raises(
        InvalidInputError,
        match=r"is damaged: it has 7 final observations and was written with 8",
    ):
        list(read_parquet(tmp_path / "a"))
    pq.write_table(whole.drop_columns(["observation.state"]), file)
    with pytest.raises(InvalidInputError, match=r"is damaged: observation\.state is missing"):
        read_parquet(tmp_path / "a")


def test_a_changed_value_is_found(tmp_path):
    """In the pages of values, which are what a file mostly consists of, each with a checksum."""
    storage, (file, _) = written(tmp_path / "a")
    before, content = held(storage), file.read_bytes()
    value = np.float32(episodes("prioritized")[0]["observations"][1, 1]).tobytes()
    places = [place for place in range(len(content)) if content.startswith(value, place)]
    assert places
    for place in places:
        changed = bytearray(content)
        changed[place + 2] ^= 1
        file.write_bytes(changed)
        with pytest.raises(InvalidInputError, match=r"file-000\.parquet is damaged"):
            storage.add_episodes(read_parquet(tmp_path / "a"))
    assert_same(held(storage), before)


# ------------------------------------------------------------------------------------------------ writing

GIVEN = {"observations": np.ones((3, 2)), "actions": np.ones(2), "rewards": np.ones(2), "terminated": True}


def contents(folder):
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_folder_is_replaced_when_the_new_one_is_complete(tmp_path):
    write_parquet([GIVEN], tmp_path / "a")
    before = contents(tmp_path)
    with pytest.raises(InterruptedWriteError):
        write_parquet(interrupted([GIVEN, GIVEN]), tmp_path / "a")
    with pytest.raises(InvalidInputError, match="rewards is float32"):
        write_parquet([GIVEN, {**GIVEN, "rewards": np.ones(2, np.float32)}], tmp_path / "a")
    assert contents(tmp_path) == before
    write_parquet([GIVEN, GIVEN], tmp_path / "a")
    assert read_parquet(tmp_path / "a").num_episodes == 2
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/thesis.txt").write_text("mine")
    with pytest.raises(InvalidInputError, match=r"holds something that write_parquet\(\) did not write"):
        write_parquet([GIVEN], tmp_path / "a")
    assert contents(tmp_path) == {str(tmp_path / "a/thesis.txt"): b"mine"}
    (tmp_path / "b").mkdir()
    write_parquet([GIVEN], tmp_path / "b")  # an empty one is nobody's
    assert read_parquet(tmp_path / "b").num_steps == 2


@pytest.mark.parametrize("thing", ["FIFO", "device", "loop"])
def test_what_is_no_folder_is_left_alone(thing, tmp_path):
    place = tmp_path / "a"
    os.mkfifo(place) if thing == "FIFO" else place.symlink_to(os.devnull if thing == "device" else place)
    before = place.lstat()
    with pytest.raises(InvalidInputError, match=r"did not write.* Nothing was written"):
        write_parquet([GIVEN], place)
    assert (place.lstat().st_mode, place.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert os.listdir(tmp_path) == ["a"]


def test_what_somebody_has_put_beside_its_files_is_not_replaced(tmp_path):
    write_parquet([GIVEN], tmp_path / "a")
    for name in ("thesis.txt", "data/chunk-000/mine.parquet", "meta/stats.json", "empty"):
        path = tmp_path / "a" / name
        path.mkdir() if name == "empty" else path.write_text("mine")
        before = contents(tmp_path)
        with pytest.raises(InvalidInputError, match=rf"did not write: \['{name}'\]"):
            write_parquet([GIVEN, GIVEN], tmp_path / "a")
        assert contents(tmp_path) == before
        path.rmdir() if name == "empty" else path.unlink()

    def meanwhile():
        yield GIVEN
        (tmp_path / "a/thesis.txt").write_text("mine")
        yield GIVEN

    with pytest.raises(InvalidInputError, match=r"thesis\.txt"):
        write_parquet(meanwhile(), tmp_path / "a")
    assert (tmp_path / "a/thesis.txt").read_text() == "mine"
    (tmp_path / "a/thesis.txt").unlink()
    write_parquet([GIVEN, GIVEN], tmp_path / "a")
    assert read_parquet(tmp_path / "a").num_episodes == 2


@pytest.mark.parametrize(("given", "message"), [([], "got no episode"), (GIVEN, "got a dict")])
def test_what_is_no_source(given, message, tmp_path):
    with pytest.raises(InvalidInputError, match=message):
        write_parquet(given, tmp_path / "a")
    with pytest.raises(InvalidInputError, match="fps is 0"):
        write_parquet([GIVEN], tmp_path / "a", fps=0)
    assert not list(tmp_path.iterdir())


def test_fields_that_would_have_one_column_are_refused(tmp_path):
    given = {**GIVEN, "observations": {"a": {"b": np.ones((3, 1))}, "a.b": np.ones((3, 1))}}
    with pytest.raises(InvalidInputError, match="two fields would have the same column"):
        write_parquet([given], tmp_path / "a")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    for call in (lambda: read_parquet(tmp_path), lambda: write_parquet([GIVEN], tmp_path / "a")):
        with pytest.raises(ImportError, match=r"_parquet\(\) needs pyarrow, .*pip install 'rlstore\[data\]'"):
            call()
