"""The layout of datasets of LeRobot, version 3.0: a folder of Parquet and JSON files.

``meta/info.json`` describes the columns (``features``), ``data/chunk-000/file-000.parquet`` and those after it hold a
row for each step, ``meta/episodes`` a row for each episode and ``meta/tasks.parquet`` the texts of tasks. Video columns
have no data in these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from rlstore.data.source import Array, read_description, required
from rlstore.engine.rows.schema import Path
from rlstore.errors import InvalidInputError

INFO, TASKS, DATA = "meta/info.json", "meta/tasks.parquet", "data"
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES = f"meta/episodes/{FILE}"
EPISODE, NUMBER = "episode_index", "frame_index"

_FILES_IN_CHUNK = 1000
_FILE_MEGABYTES = 100
FILE_BYTES = _FILE_MEGABYTES << 20
_MOST_BYTES = 64 << 20  # of meta/info.json

_NAMES = {
    "actions": "action",
    "rewards": "next.reward",
    "terminated": "next.terminated",
    "truncated": "next.truncated",
}
CARD = """---
task_categories: [reinforcement-learning]
tags: [LeRobot, rlstore]
configs:
- config_name: default
  data_files: data/*/*.parquet
---
Written by rlstore, in the layout of LeRobot v3.0.
"""


def column_of(path: Path) -> str:
    """What LeRobot calls a field; an only observation is ``observation.state``."""
    name = str(path[0])
    if name == "observations":
        return ".".join(("observation", *map(str, path[1:] or ("state",))))
    return _NAMES.get(name) or ".".join(("complementary_info", *map(str, path)))


def features(forms: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> dict[str, Any]:
    """What ``meta/info.json`` says of columns: a single number has the shape ``[1]``."""
    return {
        column: {"dtype": dtype.name, "shape": list(shape) or [1], "names": None}
        for column, (shape, dtype) in forms.items()
    }


def info(features: Mapping[str, Any], episodes: int, steps: int, fps: int) -> dict[str, Any]:
    """``meta/info.json`` of a dataset with one task."""
    return {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": episodes,
        "total_frames": steps,
        "total_tasks": 1,
        "chunks_size": _FILES_IN_CHUNK,
        "data_files_size_in_mb": _FILE_MEGABYTES,
        "video_files_size_in_mb": _FILE_MEGABYTES,
        "fps": fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": f"{DATA}/{FILE}",
        "video_path": None,
        "features": dict(features),
    }


def place_of(file: int) -> dict[str, int]:
    """The numbers in the name of a file."""
    return {"chunk_index": file // _FILES_IN_CHUNK, "file_index": file % _FILES_IN_CHUNK}


def numbers_of(lengths: Sequence[int], first_episode: int, first_step: int, fps: int) -> dict[str, Array]:
    """The columns that every dataset has, for the steps of some episodes.

    Args:
        lengths: The steps of each.
        first_episode: The number of the first of them.
        first_step: The number of its first step, over all episodes.
        fps: Steps in a second.
    """
    steps = int(np.sum(lengths))
    number = np.concatenate([np.arange(length) for length in lengths])
    return {
        "timestamp": (number / fps).astype(np.float32),
        NUMBER: number,
        EPISODE: np.repeat(np.arange(len(lengths)) + first_episode, lengths),
        "index": np.arange(steps) + first_step,
        "task_index": np.zeros(steps, np.int64),
    }


def about_episodes(lengths: Sequence[int], first_episode: int, first_step: int, file: int, task: str) -> dict[str, Any]:
    """The rows of ``meta/episodes`` for some episodes of one file."""
    stops = np.cumsum(lengths) + first_step
    place = place_of(file)
    return {
        EPISODE: np.arange(len(lengths)) + first_episode,
        "tasks": [[task]] * len(lengths),
        "length": np.array(lengths),
        **{f"data/{name}": np.full(len(lengths), number) for name, number in place.items()},
        "dataset_from_index": stops - lengths,
        "dataset_to_index": stops,
        "meta/episodes/chunk_index": np.zeros(len(lengths), np.int64),
        "meta/episodes/file_index": np.zeros(len(lengths), np.int64),
    }


def tasks(task: str) -> Any:
    """``meta/tasks.parquet``: as pandas writes a table whose index is the text."""
    pa = required("pyarrow", "Parquet")
    kind = {"pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    number = {"pandas_type": "int64", "numpy_type": "int64", "metadata": None}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {"name": "task_index", "field_name": "task_index", **number},
            {"name": "task", "field_name": "task", **kind},
        ],
    }
    table = pa.table({"task_index": np.zeros(1, np.int64), "task": [task]})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def read_info(file: FilePath) -> dict[str, Any]:
    """``meta/info.json`` of a dataset, with its ``features``.

    Raises:
        InvalidInputError: If it is none.
    """
    content = read_description(file, _MOST_BYTES)
    try:
        features = {str(name): dict(feature) for name, feature in content["features"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidInputError(f"{file} is damaged ({error}). Write or copy it again") from error
    return {**content, "features": features}


def vectors(info: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The columns of single numbers that are vectors of one: LeRobot keeps both alike."""
    return {
        name: (1,)
        for name, feature in info["features"].items()
        if name.startswith(("observation", "action")) and feature.get("shape") == [1]
    }
