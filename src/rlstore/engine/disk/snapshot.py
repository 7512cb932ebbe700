"""Snapshots: a folder with a manifest and the tensors in the safetensors format.

The manifest names its file of tensors. A save writes another file beside that one, then replaces the manifest
atomically, and then removes the file that the old one named. So a crash at any moment leaves the old snapshot or the
new one, complete; what an unfinished save leaves is removed by the next.

    manifest.json                see manifest.py; "contents": "whole", "class", "device", "settings", "numbers",
                                 "file": {"name", "bytes"}, and "tensors": {name: {"dtype", "shape", "crc32"}}
    tensors-000001.safetensors   the tensors; complex ones as pairs of real numbers
    lock                         held during a save

``contents`` says that the snapshot has all tensors. A journal or an incremental snapshot would have another value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.disk import manifest
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.files import raising_disk_full
from rlstore.engine.disk.folder import Folder
from rlstore.engine.disk.space_json import from_json, to_json
from rlstore.engine.disk.tensor_file import TensorFile, checksum_of, storable, write_tensors
from rlstore.engine.rows.schema import dtype_name
from rlstore.errors import SnapshotError

_TENSOR_FILE = re.compile(r"tensors-([0-9]{6,})\.safetensors")
_FIELDS = {
    "contents": str,
    "class": str,
    "device": str,
    "settings": dict,
    "numbers": dict,
    "file": {"name": str, "bytes": int},
    "tensors": dict,
}
_TENSOR_FIELDS = {"dtype": str, "shape": list, "crc32": int}
_IF_FULL = "Save to a larger disk."

# ---------------------------------------------------------------------------------------------------- writing


def write_snapshot(
    path: str | os.PathLike[str],
    class_name: str,
    device: str,
    settings: Mapping[str, Any],
    numbers: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Save, replacing the snapshot that is there, if any. No second copy of the tensors is made.

    Args:
        path: The folder.
        class_name: The ``class_name`` of :class:`SnapshotReader`.
        device: The device of the tensors.
        settings: The arguments of the storage (see :mod:`rlstore.engine.disk.space_json` for what they may hold).
        numbers: The rest of its state that is not a tensor, likewise.
        tensors: By name; views are fine.

    Raises:
        InvalidInputError: If the folder holds something else, or another save to it is in progress.
        DiskFullError: If the disk is full. As after any other error, the snapshot that was there still is.
    """
    content = {
        "contents": "whole",
        "class": class_name,
        "device": device,
        "settings": to_json(settings),
        "numbers": to_json(numbers, "numbers"),
    }
    forms = {name: storable(name, tensor) for name, tensor in tensors.items()}
    folder = Folder("save()", path, "snapshot", _FIELDS, lambda name: not _TENSOR_FILE.fullmatch(name), _IF_FULL)
    directory = folder.directory
    try:
        with raising_disk_full(folder.path, _IF_FULL):
            file = f"tensors-{_last_save(directory) + 1:06}.safetensors"
            try:
                checksums = write_tensors(directory.create(file), forms)
                directory.sync()
                content["file"] = {"name": file, "bytes": os.stat(file, dir_fd=directory.descriptor).st_size}
                content["tensors"] = {
                    name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "crc32": checksums[name]}
                    for name, tensor in tensors.items()
                }
                folder.write_manifest(content)
            finally:
                _remove_unnamed(directory)
    finally:
        folder.release()


def _last_save(directory: Directory) -> int:
    found = (_TENSOR_FILE.fullmatch(name) for name in directory.names())
    return max((int(match[1]) for match in found if match), default=0)


def _remove_unnamed(directory: Directory) -> None:
    """Remove what the manifest does not name: the tensors of the previous save, or of one that did not finish."""
    names, named = directory.names(), None
    if manifest.NAME in names:
        named = manifest.read_manifest(directory, "snapshot", _FIELDS)["file"]["name"]
    for name in names:
        if name == f"{manifest.NAME}.new" or (_TENSOR_FILE.fullmatch(name) and name != named):
            with suppress(SnapshotError):  # a folder of this name is not ours
                directory.remove(name)


# ---------------------------------------------------------------------------------------------------- reading


class SnapshotReader:
    """A snapshot, open for reading; use it in a ``with`` statement.

    A save that replaces it meanwhile changes nothing: what is open stays readable until it is closed.

    Args:
        path: The folder.

    Raises:
        SnapshotError: If there is none, or it is of a newer version, or a file is missing, truncated or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(path).absolute()
        if not self.folder.is_dir():
            raise SnapshotError(f"there is no snapshot in {self.folder}: it is not a folder")
        with Directory(self.folder) as directory:
            found, descriptor = _open_newest(directory)
        self.manifest, file = self.folder / manifest.NAME, found["file"]
        self._file = TensorFile(descriptor, self.folder / file["name"])
        try:
            if self._file.nbytes != file["bytes"]:
                raise self._file.damaged(f"it has {self._file.nbytes:,} bytes and should have {file['bytes']:,}")
            self._tensors: dict[str, Any] = found["tensors"]
            self._check_tensors()
            self.class_name: str = found["class"]
            self.device: str = found["device"]
            self.settings, self.numbers = (self._decoded(field, found[field]) for field in ("settings", "numbers"))
        except BaseException:
            self._file.close()
            raise

    def _check_tensors(self) -> None:
        """Hold what the manifest says of the tensors against the header of the file."""
        shapes, dtypes = self._file.shapes, self._file.dtypes
        manifest.check_fields(self.manifest, self._tensors, dict.fromkeys(self._tensors, _TENSOR_FIELDS), "tensors.")
        if shapes.keys() != self._tensors.keys():
            other = sorted(shapes.keys() ^ self._tensors.keys())[0]
            raise self._file.damaged(f"{other} is in the file or in {manifest.NAME}, and not in both")
        for name, entry in self._tensors.items():
            dtype = getattr(torch, entry["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise self.damaged(f"tensors.{name}.dtype", entry["dtype"])
            form = (dtype.to_real(), (*entry["shape"], 2)) if dtype.is_complex else (dtype, tuple(entry["shape"]))
            if (dtypes[name], shapes[name]) != form:
                raise self._file.damaged(f"{name} is not of the form that was saved")

    def _decoded(self, field: str, form: Any) -> dict[str, Any]:
        try:
            decoded: dict[str, Any] = from_json(form, self._file.nbytes)
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            AttributeError,
            AssertionError,
            RuntimeError,
        ) as error:
            raise SnapshotError(f'{self.manifest} is damaged: "{field}" cannot be read ({error!r})') from error
        return decoded

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of the file of tensors."""
        return self._file.nbytes

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        dtype: torch.dtype = getattr(torch, self._entry(name)["dtype"])
        return dtype

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """A tensor, in new memory. It is never an inference tensor."""
        with torch.inference_mode(False):
            made = torch.empty(self.shape(name), dtype=self.dtype(name), device=device)
        self.read_into(name, made)
        return made

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill a tensor of the same shape and dtype, which may be a view, on any device.

        Raises:
            SnapshotError: If it is not of the same shape and dtype, or what was read is not what was saved.
        """
        entry = self._entry(name)
        if (self.shape(name), self.dtype(name)) != (tuple(target.shape), target.dtype):
            raise SnapshotError(
                f"{name} was saved as {self.shape(name)} {entry['dtype']} in {self.folder}, and is to be read into "
                f"{tuple(target.shape)} {dtype_name(target.dtype)}"
            )
        self._file.read_into(name, target, entry["crc32"])

    def verify(self, name: str) -> None:
        """Read a tensor and forget it.

        Raises:
            SnapshotError: If it is not what was saved.
        """
        self._file.verify(name, self._entry(name)["crc32"])

    def check_numbers(self, numbers: Mapping[str, Any], fields: manifest.Fields) -> None:
        """Refuse numbers that lack a field, or have one of another type; see :func:`manifest.check_fields`."""
        manifest.check_fields(self.manifest, numbers, fields, "numbers.")

    def damaged(self, field: str, found: object) -> SnapshotError:
        """The error for a field of the manifest whose value cannot be."""
        return SnapshotError(f'{self.manifest} is damaged: "{field}" is {str(found)[:80]!r}')

    def unusable(self, name: str, how: str) -> SnapshotError:
        """The error for a tensor that holds what cannot be."""
        return self._file.damaged(f"{name}: {how}")

    def _entry(self, name: str) -> Any:
        if name not in self._tensors:
            raise SnapshotError(f"the snapshot in {self.folder} has no tensor {name!r}; it has {self.names}")
        return self._tensors[name]


def _open_newest(directory: Directory) -> tuple[dict[str, Any], int]:
    """The manifest, and the descriptor of the file of tensors that it names.

    A save may replace the manifest and remove that file in between. Then there is a newer manifest: it is read instead.
    """
    missing = None
    while True:
        found = manifest.read_manifest(directory, "snapshot", _FIELDS)
        if found["contents"] != "whole":
            raise manifest.newer_version(directory.path / manifest.NAME, "contents", found["contents"], "whole")
        name = found["file"]["name"]
        if not _TENSOR_FILE.fullmatch(name):
            raise SnapshotError(f'{directory.path / manifest.NAME} is damaged: "file.name" is {name!r}')
        if name == missing:
            raise SnapshotError(f"the snapshot in {directory.path} is not complete: {name} is missing")
        try:
            return found, directory.open(name)
        except FileNotFoundError:
            missing = name


def generator_state(generator: torch.Generator) -> dict[str, Tensor]:
    """The state of a generator, as a tensor named after its kind of device."""
    return {f"generator[{generator.device.type}]": generator.get_state()}


def restore_generator(generator: torch.Generator, reader: SnapshotReader) -> None:
    """Restore the state of a generator from :func:`generator_state`.

    A generator of another kind of device is seeded instead, with a seed derived from the saved state.
    """
    (name,) = (name for name in reader.names if name.startswith("generator["))
    state = reader.tensor(name)
    if name == f"generator[{generator.device.type}]":
        generator.set_state(state)
    else:
        generator.manual_seed(checksum_of(state))
