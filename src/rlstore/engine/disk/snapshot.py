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

import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlstore.engine.disk import manifest
from rlstore.engine.disk.files import raising_disk_full, reserve, sync_folder
from rlstore.engine.disk.folder import Folder
from rlstore.engine.disk.space_json import from_json, to_json
from rlstore.engine.rows.schema import dtype_name
from rlstore.errors import InvalidInputError, SnapshotError

CHUNK_BYTES = 64 << 20

_TENSOR_FILE = re.compile(r"tensors-(\d+)\.safetensors")
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

# What the safetensors format calls each dtype.
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


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
    forms = {name: _storable(name, tensor) for name, tensor in tensors.items()}
    folder = Folder("save()", path, "snapshot", _FIELDS, lambda name: not _TENSOR_FILE.fullmatch(name), _IF_FULL)
    try:
        with raising_disk_full(folder.path, _IF_FULL):
            file = folder.path / f"tensors-{_last_save(folder.path) + 1:06}.safetensors"
            try:
                checksums = _write_tensors(file, forms)
                content["file"] = {"name": file.name, "bytes": file.stat().st_size}
                content["tensors"] = {
                    name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "crc32": checksums[name]}
                    for name, tensor in tensors.items()
                }
                folder.write_manifest(content)
            finally:
                _remove_unnamed(folder.path)
    finally:
        folder.release()


def _last_save(folder: Path) -> int:
    found = (_TENSOR_FILE.fullmatch(entry.name) for entry in folder.iterdir())
    return max((int(match[1]) for match in found if match), default=0)


def _remove_unnamed(folder: Path) -> None:
    """Remove what the manifest does not name: the tensors of the previous save, or of one that did not finish."""
    path = folder / manifest.NAME
    named = json.loads(path.read_bytes())["file"]["name"] if path.exists() else None
    for entry in folder.iterdir():
        if entry.name == f"{manifest.NAME}.new" or (_TENSOR_FILE.fullmatch(entry.name) and entry.name != named):
            entry.unlink()


def _storable(name: str, tensor: Tensor) -> Tensor:
    """The tensor as a safetensors file can hold it."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.dtype not in _CODES or plain.layout != torch.strided:
        raise InvalidInputError(f"{name} is a {plain.layout} tensor of {plain.dtype}, which cannot be saved")
    return plain


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write a safetensors file, chunk by chunk, and give each tensor's checksum."""
    # The largest elements first: so each tensor begins at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksums = {}
    with open(path, "wb") as file:
        reserve(file.fileno(), 0, 8 + len(text) + end)
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in ordered.items():
            checksum = 0
            for index in chunks(tensor.shape, tensor.element_size()):
                content = _bytes_of(tensor[index].cpu())
                checksum = zlib.crc32(content, checksum)
                file.write(content)
            checksums[name] = checksum
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return checksums


def chunks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Indices that cut a tensor of this shape into parts of at most 64 MiB, in the order of contiguous memory."""
    nbytes = math.prod(shape) * itemsize
    if nbytes == 0:
        return
    if nbytes <= CHUNK_BYTES or not shape:
        yield tuple(slice(0, size) for size in shape)
        return
    rows = CHUNK_BYTES // (nbytes // shape[0])
    for begin in range(0, shape[0], max(rows, 1)):
        part = slice(begin, min(begin + max(rows, 1), shape[0]))
        # A row that is itself too large is cut in turn.
        rest = [tuple(slice(0, size) for size in shape[1:])] if rows else chunks(shape[1:], itemsize)
        for inner in rest:
            yield (part, *inner)


def _bytes_of(tensor: Tensor) -> memoryview:
    # A tensor of one element counts as contiguous whatever its strides, and a view as bytes wants a stride of 1.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


# ---------------------------------------------------------------------------------------------------- reading


class SnapshotReader:
    """A snapshot, open for reading; use it in a ``with`` statement.

    Args:
        path: The folder.

    Raises:
        SnapshotError: If there is none, or it is of a newer version, or a file is missing, truncated or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(path).absolute()
        found = manifest.read_manifest(self.folder, "snapshot", _FIELDS)
        path = self.folder / manifest.NAME
        if found["contents"] != "whole":
            raise manifest.newer_version(path, "contents", found["contents"], "whole")
        manifest.check_fields(path, found["tensors"], dict.fromkeys(found["tensors"], _TENSOR_FIELDS), "tensors.")
        self.class_name: str = found["class"]
        self.device: str = found["device"]
        self.settings, self.numbers = (self._decoded(field, found[field]) for field in ("settings", "numbers"))
        self._tensors: dict[str, Any] = found["tensors"]
        self._file = self.folder / found["file"]["name"]
        self._expect_size(found["file"]["bytes"])
        try:
            self._opened: Any = safe_open(self._file, framework="pt")
        except SafetensorError as error:
            raise self._damaged(str(error)) from error

    def _decoded(self, field: str, form: Any) -> dict[str, Any]:
        try:
            decoded: dict[str, Any] = from_json(form)
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            path = self.folder / manifest.NAME
            raise SnapshotError(f'{path} is damaged: "{field}" cannot be read ({error!r})') from error
        return decoded

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._tensors)

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
        plain = torch.view_as_real(target) if target.is_complex() else target
        checksum = 0
        try:
            # A tensor without dimensions has no slices.
            source = self._opened.get_slice(name) if plain.dim() else {(): self._opened.get_tensor(name)}
            for index in chunks(plain.shape, plain.element_size()):
                part = source[index]
                if (part.dtype, part.shape) != (plain.dtype, plain[index].shape):
                    raise self._damaged(f"{name} is not of the form that was saved")
                checksum = zlib.crc32(_bytes_of(part), checksum)
                plain[index].copy_(part)
        except SafetensorError as error:
            raise self._damaged(str(error)) from error
        if checksum != entry["crc32"]:
            raise self._damaged(f"{name} is not what was saved (its checksum differs)")

    def unusable(self, name: str, how: str) -> SnapshotError:
        """The error for a tensor that holds what cannot be."""
        return self._damaged(f"{name}: {how}")

    def _entry(self, name: str) -> Any:
        if name not in self._tensors:
            raise SnapshotError(f"the snapshot in {self.folder} has no tensor {name!r}; it has {self.names}")
        return self._tensors[name]

    def _expect_size(self, nbytes: int) -> None:
        if not self._file.is_file():
            raise SnapshotError(f"the snapshot in {self.folder} is not complete: {self._file.name} is missing")
        found = self._file.stat().st_size
        if found != nbytes:
            raise self._damaged(f"it has {found:,} bytes and should have {nbytes:,}")

    def _damaged(self, how: str) -> SnapshotError:
        return SnapshotError(f"{self._file} is damaged: {how}. Load another snapshot.")


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
        generator.manual_seed(zlib.crc32(_bytes_of(state)))
