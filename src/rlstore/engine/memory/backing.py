"""Where the blocks of a storage lie: in RAM, in shared memory, in mapped files, or on a device."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from rlstore.engine.disk.files import reserve, sync_folder, telling_full_disk, write_whole
from rlstore.engine.disk.folder_lock import LOCK_NAME, FolderLock
from rlstore.engine.memory.capacity import free_device, free_disk, free_ram
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.memory.tensors import allocate
from rlstore.errors import DoesNotFitError, InvalidInputError

KINDS = ("ram", "shared", "mapped")
FORMAT, VERSION = "rlstore mapped storage", 1
MANIFEST = "manifest.json"

# Below this a block is made at once: a mapping of its own would save nothing.
_SMALL = 1 << 20
_SMALLER = (
    "Give a smaller storage_size, store each frame once with frame_stack, keep pixels as uint8, or give "
    'memory="mapped" with a path on a {larger} disk.'
)


class Backing:
    """Makes the blocks of one storage.

    A copy of it, made by ``copy.deepcopy`` or ``pickle``, is of the kind "ram", as the copied blocks are.

    Args:
        owner: Whose blocks they are, for errors.
        kind: "ram": the device's own memory. "shared": memory that other processes can have too. "mapped": files in
            the folder ``path``, which may be larger than RAM and outlive the process; call :meth:`open` first.
        device: Where; "shared" and "mapped" are on the CPU.
        path: The folder of "mapped".
    """

    def __init__(self, owner: str, kind: str, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        if kind not in KINDS:
            raise InvalidInputError(f"memory is {kind!r}; {owner} knows {list(KINDS)}")
        if kind == "mapped" and path is None:
            raise InvalidInputError(f'memory="mapped" keeps the data in files; give {owner} the folder as path')
        if kind != "mapped" and path is not None:
            raise InvalidInputError(f'path is {os.fspath(path)!r}, which goes with memory="mapped"; memory is {kind!r}')
        if kind != "ram" and device.type != "cpu":
            raise InvalidInputError(f"memory={kind!r} lies in the CPU's memory, and the device is {str(device)!r}")
        self.owner, self.kind, self.device = owner, kind, device
        self.path = None if path is None else Path(path).absolute()
        self._lock: FolderLock | None = None
        self._attached: set[str] = set()  # the files that zeros() has given out
        self.segment: SharedMemory | None = None  # of "shared", where the blocks lie one after another
        self.is_attached = False  # to the blocks of another process

    @classmethod
    def attach(cls, owner: str, segment: SharedMemory) -> Backing:
        """A backing whose blocks are those that another process has made, asked for in the same order."""
        backing = cls(owner, "shared", torch.device("cpu"))
        backing.segment, backing.is_attached = segment, True
        return backing

    def reserve(self, nbytes: int) -> None:
        """Have the next blocks of "shared", ``nbytes`` together, lie in one segment; nothing is taken for it yet."""
        if not self.is_attached:
            self.segment = SharedMemory.create(nbytes)

    # ---------------------------------------------------------------------------------------------- is there room?

    def require(self, nbytes: int, what: str) -> None:
        """Refuse what cannot fit, before any of it is allocated.

        Args:
            nbytes: The bytes that are to be allocated.
            what: What they are for: "1,000,000 transitions of 16 environments".

        Raises:
            DoesNotFitError: (a MemoryError) with the bytes needed, those there are, and what to do.
        """
        if self.kind == "mapped":
            # Files of an earlier run that are taken up again need no new space.
            nbytes -= sum(file.stat().st_size for file in self._files() if file.name not in self._attached)
            free, where = free_disk(self._folder), f"free on the disk of {self._folder}"
        elif self.device.type == "cpu":
            found = free_ram()
            if found is None:
                return
            free, where = found[0], f"free in RAM ({found[1]})"
        else:
            there = free_device(self.device)
            if there is None:
                return
            free, where = there, f"free on {self.device}"
        if nbytes > free:
            advice = _SMALLER.format(larger="larger" if self.kind == "mapped" else "large enough")
            raise DoesNotFitError(
                f"{self.owner} needs {_size(nbytes)} for {what}, and {_size(free)} are {where}. "
                f"Nothing was allocated. {advice}"
            )

    # ---------------------------------------------------------------------------------------------- blocks

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A block of zeros, whose pages are committed only when they are touched. It is never an inference tensor.

        Where :meth:`open` has found a storage, a "mapped" block is what its file holds: at least ``shape[0]`` rows, and
        more if it was extended.

        Args:
            name: The block's name, its own among the blocks of this backing.
            shape: Its shape, time first.
            dtype: Its dtype.
        """
        shape = tuple(shape)
        if self.kind == "mapped":
            return self._map(name, shape, dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            if nbytes == 0 or self.device.type != "cpu":
                return allocate(shape, dtype, self.device)
            return self._carve(shape, dtype) if self.kind == "shared" else _zeros(shape, dtype, nbytes)
        except (OSError, RuntimeError, DoesNotFitError) as error:
            raise DoesNotFitError(
                f"{self.owner} needs {_size(nbytes)} for {name}, which the system does not give: {error}. "
                f"{_SMALLER.format(larger='large enough')}"
            ) from error

    def _carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        segment, nbytes = self.segment, SharedMemory.bytes_of([(shape, dtype)])
        if segment is None or segment.left < nbytes:
            segment = SharedMemory.create(nbytes)
        return segment.carve(shape, dtype)

    def extend(self, name: str, tensor: Tensor, rows: int) -> Tensor:
        """The same block with ``rows`` rows, the new ones zero.

        Args:
            name: The name that the block was made with.
            tensor: The block. Hold on to the result instead: what is written into one need not show in the other.
            rows: Rows of the result, at least those of the block.
        """
        if rows < len(tensor):
            raise InvalidInputError(f"{name} has {len(tensor)} rows and cannot be extended to {rows}")
        shape = (rows, *tensor.shape[1:])
        if self.kind == "mapped":
            return self._map(name, shape, tensor.dtype)
        longer = self.zeros(name, shape, tensor.dtype)
        longer[: len(tensor)].copy_(tensor)
        return longer

    def on_host(self) -> Backing:
        """A backing for blocks that the host reads and writes: this one, or RAM beside a device."""
        return self if self.device.type == "cpu" else Backing(self.owner, "ram", torch.device("cpu"))

    def holds(self, name: str) -> bool:
        """True if :meth:`zeros` would take up a block of this name from an earlier run."""
        return self.kind == "mapped" and (self._folder / _file_name(name)).exists()

    # ---------------------------------------------------------------------------------------------- mapped files

    @property
    def _folder(self) -> Path:
        if self.path is None:
            raise RuntimeError(f"a backing of kind {self.kind!r} has no folder")
        return self.path

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.bin"))

    def open(self, schema: Mapping[str, Any]) -> bool:
        """Take the folder of "mapped": make it, or find the storage that is in it.

        Args:
            schema: What the storage holds and in which form, as JSON: two storages can have the same files if and only
                if their schemas are equal.

        Returns:
            True if a storage of this schema is there: :meth:`zeros` then gives the blocks that it left.

        Raises:
            InvalidInputError: If the folder holds anything else, or another live storage uses it. Nothing was changed.
        """
        if self.kind != "mapped":
            return False
        folder = self._folder
        if folder.exists() and not folder.is_dir():
            raise InvalidInputError(f"path is {folder}, which is a file; {self.owner} needs a folder")
        strangers = [] if not folder.exists() else _strangers(folder)
        if strangers and not (folder / MANIFEST).exists():
            raise InvalidInputError(
                f"the folder {folder} holds no storage, and other things: {strangers[:5]}. {self.owner} needs a new or "
                "an empty one. Nothing was changed."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.owner, folder)
        try:
            if (folder / MANIFEST).exists():
                self._compare(json.loads(json.dumps(schema)))
                return True
            manifest = {"format": FORMAT, "version": VERSION, "schema": schema}
            with telling_full_disk(folder, "Give a path on a larger disk."):
                write_whole(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
        except BaseException:
            self.close()
            raise
        return False

    def _compare(self, schema: Any) -> None:
        path = self._folder / MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
            known = manifest["format"] == FORMAT
            version, there = manifest["version"], manifest["schema"]
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise InvalidInputError(f"{path} is not that of a mapped storage. Nothing was changed.")
        if version != VERSION:
            raise InvalidInputError(
                f"{path} is of version {version}, and this rlstore knows {VERSION}. Nothing was changed."
            )
        differences = _differences(there, schema)
        if differences:
            raise InvalidInputError(
                f"the folder {self._folder} holds another storage than {self.owner} is to be: "
                f"{'; '.join(differences)}. Give another path, or the same arguments as before. Nothing was changed."
            )

    def close(self) -> None:
        """Let go of the folder: another storage may open it. The blocks stay mapped as long as anybody holds them."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _map(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The block's file, lengthened to ``shape[0]`` rows where it is shorter, as a tensor."""
        if self._lock is None:
            raise RuntimeError(f"{self.owner} must open the folder {self._folder} before it maps {name}")
        path = self._folder / _file_name(name)
        row = math.prod(shape[1:]) * dtype.itemsize
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            held = os.fstat(descriptor).st_size
            if held < shape[0] * row:
                self._reserve(descriptor, path, held, shape[0] * row)
            rows = max(shape[0], held // row) if row else shape[0]
            memory = mmap.mmap(descriptor, rows * row) if rows * row else None
        finally:
            os.close(descriptor)
        self._attached.add(path.name)
        if memory is None:
            return allocate(shape, dtype, self.device)
        return _from_memory(memory, (rows, *shape[1:]), dtype)

    def _reserve(self, descriptor: int, path: Path, held: int, nbytes: int) -> None:
        """Lengthen a file with zeros that really have their space: writing into them can then no longer fail."""
        advice = f"{self.owner} needs {_size(nbytes - held)} more for it. {_SMALLER.format(larger='larger')}"
        try:
            with telling_full_disk(path, advice):
                reserve(descriptor, held, nbytes)
                sync_folder(self._folder)
        except BaseException:
            if held:
                os.ftruncate(descriptor, held)
            else:
                path.unlink()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return Backing, (self.owner, "ram", self.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> Tensor:
    if nbytes < _SMALL or not hasattr(mmap, "MAP_ANONYMOUS"):
        return allocate(shape, dtype, torch.device("cpu"))
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _from_memory(memory, shape, dtype)


def _from_memory(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def _strangers(folder: Path) -> list[str]:
    """What is in a folder besides what an unfinished :meth:`Backing.open` leaves."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in (LOCK_NAME, f"{MANIFEST}.new"))


def _file_name(name: str) -> str:
    quoted = quote(name, safe="")
    return f"{quoted if len(quoted) < 200 else sha256(name.encode()).hexdigest()}.bin"


def _differences(there: Any, here: Any, where: str = "") -> list[str]:
    """Each place in which two JSON values differ, in words."""
    if isinstance(there, dict) and isinstance(here, dict):
        names = [*there, *(name for name in here if name not in there)]
        parts = [(there.get(name), here.get(name), f"{where}.{name}" if where else name) for name in names]
        return [difference for part in parts for difference in _differences(*part)]
    return [] if there == here else [f"{where} is {json.dumps(there)} there and {json.dumps(here)} here"]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB ({nbytes:,} bytes)"
