"""Episodes from Parquet: datasets of LeRobot, datasets of Hugging Face, and plain files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rlstore.data.lerobot as lerobot
from rlstore.data.arrow import ArrowTable, ReadBatches
from rlstore.data.columns import GivenColumns
from rlstore.data.described import MOST_BYTES, Description, source_of
from rlstore.data.parquet_writer import ABOUT, FINALS
from rlstore.data.source import EpisodeSource, plain_file, read_description, required
from rlstore.data.table import Ends
from rlstore.engine.checks import check_path
from rlstore.errors import InvalidInputError

_READ_BYTES = 1 << 20


def read_parquet(
    source: str | os.PathLike[str] | Any,
    columns: GivenColumns | None = None,
    *,
    ends: Ends = "terminated",
    rewards: float | None = None,
) -> EpisodeSource:
    """The episodes of a dataset of LeRobot, of Parquet files, or of a dataset of Hugging Face's ``datasets``.

    Only the lists of columns are read before the episodes are iterated, and then an episode and some dozen MiB are in
    memory, however many there are. The rows of an episode have to follow one another.

    Columns are known by the names of :func:`write_parquet`, of LeRobot and of d4rl. Names that begin alike are a nest:
    ``observation.state`` and ``observation.effort`` are read as ``{"state": ..., "effort": ...}``. Videos and encoded
    images are not read: of a dataset that has them, name the columns to read.

    Args:
        source: The folder of a dataset of LeRobot, a Parquet file, a folder of such files, or a ``datasets.Dataset``.
        columns: By field the name of its column, and of each extra field; others are found by their names::

                {"observations": "observation.state"}
                {"observations": {"state": "observation.state", "effort": "observation.effort"}, "costs": "cost"}

        ends: How an episode ended of which the columns only tell where: LeRobot's ``next.done``, or a new
            ``episode_index``. With ``"truncated"`` its last step cannot be stored, because what came after it is not
            in the file.
        rewards: The reward of every step, if there is no column of them, as in demonstrations to be imitated.

    Raises:
        InvalidInputError: (a ValueError) if a file is damaged or not complete, a column is missing, or it cannot be
            read: the message names it. Damage inside of a file is found when the episodes are iterated.
        ImportError: If pyarrow is not installed.
    """
    required("pyarrow.parquet", "read_parquet()")
    if hasattr(source, "with_format"):
        return source_of(_of_hugging_face(source), None, None, columns, ends, rewards)
    path = Path(check_path("read_parquet()", "source", source, "a file or a folder"))
    if not (path / ABOUT).exists():
        table = _of_lerobot(path) if (path / lerobot.INFO).exists() else _of_files(path, "**/*.parquet")
        return source_of(table, None, None, columns, ends, rewards)
    about = Description.of(read_description(path / ABOUT, MOST_BYTES), str(path / ABOUT))
    finals = _of_files(path / FINALS, shapes=about.shapes) if about.finals else None
    if finals is not None and finals.num_rows != about.num_finals:
        raise InvalidInputError(
            f"{path / FINALS} is damaged: it has {finals.num_rows} final observations and was written with "
            f"{about.num_finals}. Write or copy it again"
        )
    return source_of(_of_lerobot(path, about.shapes), finals, about, columns, ends, rewards)


def _of_hugging_face(dataset: Any) -> ArrowTable:
    """A ``datasets.Dataset``."""
    if not isinstance(getattr(dataset, "column_names", None), list) or not hasattr(dataset, "num_rows"):
        raise InvalidInputError(
            f"read_parquet() got a {type(dataset).__name__}; give one split that is not streamed, as dataset['train']. "
            "Nothing was read."
        )

    def batches(columns: Sequence[str], size: int) -> Iterator[Any]:
        yield from dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=size)

    return ArrowTable(f"the {type(dataset).__name__}", dataset.features.arrow_schema, dataset.num_rows, batches)


def _of_files(
    path: Path,
    pattern: str = "",
    refused: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> ArrowTable:
    """A file, or the files of a folder whose names are of a pattern."""
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    if not files:
        raise InvalidInputError(f"{path} holds no Parquet files ({pattern}). Nothing was read.")
    schema, rows = _schema(files)
    return ArrowTable(str(path), schema, rows, _batches(files), refused, shapes)


def _of_lerobot(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> ArrowTable:
    """The folder of a dataset of LeRobot; ``shapes`` are known of those that we wrote."""
    info = lerobot.read_info(path / lerobot.INFO)
    videos = [name for name, feature in info["features"].items() if feature.get("dtype") == "video"]
    why = dict.fromkeys(videos, "is a video, whose frames are in other files and are not decoded here")
    table = _of_files(path, f"{lerobot.DATA}/*/*.parquet", why, lerobot.vectors(info) if shapes is None else shapes)
    if info.get("total_frames", table.num_rows) != table.num_rows:
        raise InvalidInputError(
            f"{path} is not complete: {lerobot.INFO} says that there are {info['total_frames']} steps, and its files "
            f"have {table.num_rows}. Copy the rest, or read the files alone: {path / lerobot.DATA}. Nothing was read."
        )
    return table


def _schema(files: Sequence[Path]) -> tuple[Any, int]:
    """The schema of files, and how many rows they have together."""
    pq = required("pyarrow.parquet", "read_parquet()")
    schema, rows = None, 0
    for file in files:
        with _reading(file) as opened, pq.ParquetFile(opened) as parquet:
            found, rows = parquet.schema_arrow, rows + parquet.metadata.num_rows
        schema = found if schema is None else schema
        if found.names != schema.names:
            differing = sorted(set(found.names) ^ set(schema.names))
            raise InvalidInputError(
                f"{file} and {files[0]} differ in their columns, in {differing or 'their order'}; files that are read "
                "together need the same. Nothing was read."
            )
    return schema, rows


def _batches(files: Sequence[Path]) -> ReadBatches:
    pq = required("pyarrow.parquet", "read_parquet()")

    def batches(columns: Sequence[str], size: int) -> Iterator[Any]:
        for file in files:
            with _reading(file) as opened:
                # Without pre_buffer the pages of a column are read one after another, not all at once.
                options = {"pre_buffer": False, "buffer_size": _READ_BYTES, "page_checksum_verification": True}
                with pq.ParquetFile(opened, **options) as parquet:
                    yield from parquet.iter_batches(size, columns=list(columns), use_threads=False)

    return batches


@contextmanager
def _reading(file: Path) -> Iterator[Any]:
    """The open file. Errors of Arrow say which file is damaged."""
    pa = required("pyarrow", "read_parquet()")
    try:
        with pa.OSFile(os.fsencode(plain_file(file)), "rb") as opened:  # a text would have to be UTF-8
            yield opened
    except (FileNotFoundError, PermissionError, InvalidInputError):
        raise
    except (pa.ArrowException, OSError) as error:
        reason = str(error).rstrip(".")
        raise InvalidInputError(
            f"{file} is damaged or not complete, or no Parquet file: {reason}. Write or copy it again"
        ) from error
