"""Episodes from Parquet: datasets of LeRobot, datasets of Hugging Face, and plain files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rlstore.data.lerobot as lerobot
from rlstore.data.arrow import ArrowTable, ReadBatches, ReadFinals
from rlstore.data.columns import GivenColumns, Layout, find_layout
from rlstore.data.described import Description
from rlstore.data.parquet_writer import ABOUT, FINALS
from rlstore.data.source import Array, EpisodeSource, required
from rlstore.data.table import Ends, TableSource
from rlstore.engine.checks import check_path
from rlstore.engine.rows.schema import Path as FieldPath
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
        table, layout = _of_hugging_face(source), None
    else:
        table, layout = _of_files(Path(check_path("read_parquet()", "source", source, "a file or a folder")))
    if columns is not None or layout is None:
        layout = find_layout(table.columns, columns, table.origin)
    table.require(layout)
    return TableSource(table, layout, ends, rewards)


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


def _of_files(path: Path) -> tuple[ArrowTable, Layout | None]:
    """A folder or a file, and the layout, if it was written by :func:`write_parquet`."""
    is_lerobot = (path / lerobot.INFO).is_file()
    pattern = f"{lerobot.DATA}/*/*.parquet" if is_lerobot else "**/*.parquet"
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    if not files:
        raise InvalidInputError(f"{path} holds no Parquet files ({pattern}). Nothing was read.")
    schema, rows = _schema(files)
    if not is_lerobot:
        return ArrowTable(str(path), schema, rows, _batches(files)), None
    info = _json(path / lerobot.INFO)
    features = info.get("features", {})
    if info.get("total_frames", rows) != rows:
        raise InvalidInputError(
            f"{path} is not complete: {lerobot.INFO} says that there are {info['total_frames']} steps, and its files "
            f"have {rows}. Copy the rest, or read the files alone: {path / lerobot.DATA}. Nothing was read."
        )
    if (path / ABOUT).is_file():
        about = Description.of((path / ABOUT).read_text(encoding="utf-8"), str(path / ABOUT))
        finals = _finals(path / FINALS, about) if about.finals else None
        return ArrowTable(
            str(path), schema, rows, _batches(files), {}, about.spaces, about.shapes, finals
        ), about.layout
    videos = {
        name: "is a video, whose frames are in other files and are not decoded here"
        for name, feature in features.items()
        if feature.get("dtype") == "video"
    }
    # LeRobot keeps vectors of one number as single numbers.
    vectors: dict[str, tuple[int, ...]] = {
        field.name: (1,)
        for field in schema
        if field.name.startswith(("observation", "action")) and not field.type.num_fields
    }
    return ArrowTable(str(path), schema, rows, _batches(files), videos, shapes=vectors), None


def _schema(files: Sequence[Path]) -> tuple[Any, int]:
    """The schema of files, and how many rows they have together."""
    pq = required("pyarrow.parquet", "read_parquet()")
    schema, rows = None, 0
    for file in files:
        with _reading(file), pq.ParquetFile(file) as parquet:
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
            with _reading(file):
                # Without pre_buffer the pages of a column are read one after another, not all at once.
                options = {"pre_buffer": False, "buffer_size": _READ_BYTES, "page_checksum_verification": True}
                with pq.ParquetFile(file, **options) as parquet:
                    yield from parquet.iter_batches(size, columns=list(columns), use_threads=False)

    return batches


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Errors of Arrow say which file is damaged."""
    pa = required("pyarrow", "read_parquet()")
    try:
        yield
    except (FileNotFoundError, PermissionError, InvalidInputError):
        raise
    except (pa.ArrowException, OSError) as error:
        raise InvalidInputError(
            f"{file} is damaged or not complete, or no Parquet file: {error}. Write or copy it again"
        ) from error


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return dict(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError(f"{file} is damaged: {error}. Write or copy it again") from error


def _finals(file: Path, about: Description) -> ReadFinals:
    """The final observations that :func:`write_parquet` wrote, one after another."""
    schema, rows = _schema([file])
    table = ArrowTable(str(file), schema, rows, _batches([file]), shapes=about.shapes)

    def finals() -> Iterator[dict[FieldPath, Array]]:
        for rows in table.read(set(about.finals.values())):
            for place in range(len(next(iter(rows.values())))):
                yield {leaf: rows[column][place, ...] for leaf, column in about.finals.items()}

    return finals
