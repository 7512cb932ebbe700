"""Episodes into a folder of Parquet files, in the layout of LeRobot v3.0.

LeRobot knows one flag, ``next.done``, and no observation after the last step. So there are two more columns,
``next.terminated`` and ``next.truncated``; a file of its own holds the final observations, a row for each episode; and
``meta/rlstore.json`` has the spaces, and which column is what. Other programs do not read these.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import rlstore.data.lerobot as lerobot
from rlstore.data.arrow import as_column
from rlstore.data.columns import EPISODE, NUMBER, leaves
from rlstore.data.described import Description
from rlstore.data.replaced import sync, workplace
from rlstore.data.source import Array, required
from rlstore.data.written import WrittenEpisode, grouped, spaces_of
from rlstore.engine.checks import check_path, check_positive
from rlstore.engine.rows.schema import Path as FieldPath
from rlstore.errors import InvalidInputError

ABOUT, FINALS = "meta/rlstore.json", "meta/final_observations.parquet"
# All that is in such a folder: its folders, and its files.
_OURS = re.compile(
    r"README\.md|data|meta|(data|meta/episodes)/chunk-\d{3,}(/file-\d{3,}\.parquet)?|meta/episodes"
    r"|meta/(rlstore|info)\.json|meta/(tasks|final_observations)\.parquet"
)


def write_parquet(
    source: Any, path: str | os.PathLike[str], *, fps: int = 1, task: str = "unknown", progress: bool = False
) -> None:
    """Write episodes to a folder that LeRobot (v3.0), Hugging Face datasets and :func:`read_parquet` read.

    The folder replaces one that was written by this function and has nothing else in it, when it is complete. An
    episode and up to a hundred MiB are in memory, however many there are.

    Args:
        source: A storage, some of its episodes, what a reader returned, or episodes as ``add_episodes`` takes them.
        path: The folder.
        fps: Steps in a second, from which LeRobot's ``timestamp`` follows.
        task: What LeRobot calls the task, a text.
        progress: Show a progress bar.

    Raises:
        InvalidInputError: (a ValueError) if there is no episode, they differ in form, or the folder holds something
            else.
        DiskFullError: (an OSError) if the disk is full. In either case a folder that was there still is.
        ImportError: If pyarrow is not installed.
    """
    required("pyarrow.parquet", "write_parquet()")
    check_positive("write_parquet()", fps=fps)
    folder = Path(os.path.realpath(check_path("write_parquet()", "path", path)))
    _check_ours(folder)
    with workplace(folder) as work:
        new, old = work / "new", work / "old"
        with _Writer(new, fps, task) as writer:
            for group in grouped(source, "write_parquet()", progress=progress):
                writer.add(group)
        writer.finish(spaces_of(source))
        for file in (*new.rglob("*"), new):
            sync(file)
        _check_ours(folder)  # again: it has taken a while
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
        sync(folder.parent)


def _check_ours(folder: Path) -> None:
    """Refuse to replace what was not written by this function."""
    if not os.path.lexists(folder):
        return
    foreign = _foreign(folder) if folder.is_dir() else [folder.name]
    if not foreign and not (folder / ABOUT).is_file():
        foreign = [entry.name for entry in folder.iterdir()]
    if foreign:
        raise InvalidInputError(
            f"{folder} holds something that write_parquet() did not write: {foreign[:5]}. Move it away, or give "
            "another folder. Nothing was written."
        )


def _foreign(folder: Path) -> list[str]:
    """What is in a folder that this function does not write, by its path in it."""
    names = sorted(str(entry.relative_to(folder)) for entry in folder.rglob("*"))
    return [name for name in names if not _OURS.fullmatch(name) or (folder / name).is_symlink()]


class _Rows(NamedTuple):
    """A file of rows that is being written."""

    file: Any
    writer: Any

    def close(self) -> None:
        """Write its end, and close it."""
        with self.file:
            self.writer.close()


class _Writer:
    """Writes one dataset, group by group.

    Args:
        folder: Where to; it is created.
        fps: Steps in a second.
        task: The text of the task.
    """

    def __init__(self, folder: Path, fps: int, task: str) -> None:
        self._folder, self._fps, self._task = folder, fps, task
        self._open: dict[str, _Rows] = {}
        self._num_finals = self._episodes = self._steps = self._file = self._file_bytes = 0
        self._layout: dict[FieldPath, str] = {}
        self._finals: dict[FieldPath, str] = {}
        self._features: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.close()

    def add(self, group: list[WrittenEpisode]) -> None:
        """Write some episodes, as one group of rows."""
        if not self._layout:
            self._name(group[0])
        lengths = [len(episode) for episode in group]
        steps: dict[str, Array] = {
            column: np.concatenate([episode.steps[path] for episode in group]) for path, column in self._layout.items()
        }
        steps["next.done"] = steps[self._layout[("terminated",)]] | steps[self._layout[("truncated",)]]
        steps |= lerobot.numbers_of(lengths, self._episodes, self._steps, self._fps)
        self._features = lerobot.features({column: (array.shape[1:], array.dtype) for column, array in steps.items()})
        place = lerobot.place_of(self._file)
        about = lerobot.about_episodes(lengths, self._episodes, self._steps, self._file, self._task)
        self._append(f"{lerobot.DATA}/{lerobot.FILE.format(**place)}", steps)
        self._append(lerobot.EPISODES.format(chunk_index=0, file_index=0), about)
        ended = {number: e.final for number, e in enumerate(group, self._episodes) if e.final}
        if ended:
            finals = {name: np.stack([final[leaf] for final in ended.values()]) for leaf, name in self._finals.items()}
            self._append(FINALS, {lerobot.EPISODE: np.array(list(ended)), **finals})
            self._num_finals += len(ended)
        self._episodes, self._steps = self._episodes + len(group), self._steps + sum(lengths)
        self._file_bytes += sum(column.nbytes for column in steps.values())
        if self._file_bytes >= lerobot.FILE_BYTES:
            self._open.pop(f"{lerobot.DATA}/{lerobot.FILE.format(**place)}").close()
            self._file, self._file_bytes = self._file + 1, 0

    def _name(self, episode: WrittenEpisode) -> None:
        """Give each field its column."""
        self._layout = {path: lerobot.column_of(path) for path in episode.steps}
        self._finals = leaves(self._layout, "observations")
        self._shapes = {column: episode.steps[path].shape[1:] for path, column in self._layout.items()}
        if len(set(self._layout.values())) < len(self._layout):
            raise InvalidInputError(
                f"two fields would have the same column: {sorted(self._layout.values())}. Nothing was written."
            )

    def _append(self, name: str, columns: Mapping[str, Any]) -> None:
        """Append rows to a file; it is created with the first."""
        pa, pq = required("pyarrow", "Parquet"), required("pyarrow.parquet", "Parquet")
        made = {key: as_column(column) if isinstance(column, np.ndarray) else column for key, column in columns.items()}
        table = pa.table(made)
        if name not in self._open:
            file = self._folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            sink = pa.OSFile(os.fsencode(file), "wb")  # a text would have to be UTF-8
            self._open[name] = _Rows(sink, pq.ParquetWriter(sink, table.schema, write_page_checksum=True))
        self._open[name].writer.write_table(table)

    def finish(self, spaces: tuple[Any, Any]) -> None:
        """Write what describes the dataset, when all rows are written."""
        pq = required("pyarrow.parquet", "Parquet")
        layout = {**self._layout, EPISODE: lerobot.EPISODE, NUMBER: lerobot.NUMBER}
        finals = {**self._finals, EPISODE: lerobot.EPISODE} if self._num_finals else {}
        texts = {
            ABOUT: Description(spaces, layout, finals, self._num_finals, self._shapes).as_json(),
            lerobot.INFO: json.dumps(lerobot.info(self._features, self._episodes, self._steps, self._fps), indent=4),
            "README.md": lerobot.CARD,
        }
        for name, text in texts.items():
            (self._folder / name).write_text(text, encoding="utf-8")
        with required("pyarrow", "Parquet").OSFile(os.fsencode(self._folder / lerobot.TASKS), "wb") as file:
            pq.write_table(lerobot.tasks(self._task), file)
