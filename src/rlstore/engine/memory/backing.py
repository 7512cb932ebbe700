"""Where the blocks of a storage are allocated: in RAM, in shared memory, in mapped files, or on a device."""

from __future__ import annotations

import math
import mmap
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.calls import warn_caller
from rlstore.engine.disk.files import free_disk
from rlstore.engine.disk.mapped import NEED_LESS, MappedFiles, PrivateFiles, size_text, tensor_over
from rlstore.engine.disk.seal import RowFiles
from rlstore.engine.memory import capacity
from rlstore.engine.memory.growth import REFUSED
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.memory.tensors import allocate
from rlstore.errors import DoesNotFitError, InvalidInputError, SnapshotError

KINDS = ("ram", "shared", "mapped")

_SMALL = 1 << 20  # below this a mapping of its own has no advantage
_HUGE_PAGE = 2 << 20
# Address space without a promise of memory. Python has no name for it; it is the same on x86-64 and ARM.
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0


class Backing:
    """Allocates the blocks of one storage.

    A copy made by ``copy.deepcopy`` or ``pickle`` is of the kind "ram", as the copied blocks are.

    Args:
        owner: The class name of the storage, for errors.
        kind: "ram": the device's own memory. "shared": memory that other processes can attach. "mapped": files in the
            folder ``path``, which may be larger than RAM and outlive the process; call :meth:`open` first.
        device: The device; "shared" and "mapped" are on the CPU.
        path: The folder of "mapped".
    """

    def __init__(self, owner: str, kind: str, device: torch.device, path: str | os.PathLike[str] | None = None) -> None:
        if kind not in KINDS:
            raise InvalidInputError(f"memory is {kind!r}; {owner} needs one of {list(KINDS)}")
        if kind == "mapped" and path is None:
            raise InvalidInputError(f'memory="mapped" keeps the data in files; give {owner} the folder as path')
        if kind != "mapped" and path is not None:
            raise InvalidInputError(f'path is {os.fspath(path)!r}, which needs memory="mapped"; memory is {kind!r}')
        if kind != "ram" and device.type != "cpu":
            raise InvalidInputError(f"memory={kind!r} is memory of the CPU, and the device is {str(device)!r}")
        self.owner, self.kind, self.device = owner, kind, device
        self._files = None if path is None else MappedFiles(owner, path)
        self.segment: SharedMemory | None = None  # of "shared": the blocks, one after another
        self.is_attached = False  # to blocks that another process allocated

    @classmethod
    def attach(cls, owner: str, segment: SharedMemory) -> Backing:
        """A backing whose blocks are those that another process allocated, requested in the same order."""
        backing = cls(owner, "shared", torch.device("cpu"))
        backing.segment, backing.is_attached = segment, True
        return backing

    @classmethod
    def private(cls, owner: str, files: PrivateFiles) -> Backing:
        """A backing whose blocks are those of a mapped folder; what is written to them stays in memory."""
        backing = cls(owner, "mapped", torch.device("cpu"), files.path)
        backing._files, backing.is_attached = files, True
        return backing

    @property
    def is_private(self) -> bool:
        """True if the blocks are those of a mapped folder that somebody else may write to."""
        return isinstance(self._files, PrivateFiles)

    def charge(self, nbytes: int, what: str) -> None:
        """Count memory that is written because a folder says so, where somebody only looks at it; see :class:`Room`."""
        if isinstance(self._files, PrivateFiles):
            self._files.room.charge(nbytes, what)

    @property
    def grows(self) -> bool:
        """True if memory is taken when it is written to, and not when it is allocated."""
        return self.device.type == "cpu" and self._files is None

    @property
    def page(self) -> int:
        """Bytes that are taken at once."""
        return mmap.PAGESIZE if self.kind == "shared" else _HUGE_PAGE

    def reserve(self, nbytes: int) -> None:
        """Put the next blocks of "shared", ``nbytes`` in total, into one segment; pages are not committed yet."""
        if not self.is_attached:
            try:
                self.segment = SharedMemory.create(nbytes)
            except DoesNotFitError as error:
                raise self._not_provided(nbytes, "all rows", error) from error

    def _not_provided(self, nbytes: int, name: str, error: Exception) -> DoesNotFitError:
        return DoesNotFitError(
            f"{self.owner} needs {size_text(nbytes)} for {name}, which the system does not provide: {error}"
            f"{_address_limit()}. Nothing was allocated. {NEED_LESS.format(larger='large enough')}"
        )

    def warn_if_larger(self, nbytes: int, what: str) -> None:
        """Warn of ``nbytes`` that are taken as rows come, if there is not enough RAM for all of them now."""
        ram = capacity.free_ram() if nbytes >= capacity.MUCH else None
        if ram is not None and nbytes > ram[0]:
            warn_caller(
                f"{self.owner} takes {size_text(nbytes)} when it is full, for {what}, and {size_text(ram[0])} are free "
                f"in RAM ({ram[1]}). Memory is taken as rows come; what does not fit then is refused, and what is held "
                f"stays. {NEED_LESS.format(larger='large enough')}"
            )

    def require(self, nbytes: int, what: str) -> None:
        """Refuse what cannot fit, before any of it is allocated.

        Args:
            nbytes: The bytes that are to be allocated.
            what: What they are for: "1,000,000 transitions of 16 environments".

        Raises:
            DoesNotFitError: (a MemoryError) with the bytes needed, the bytes free, and what to do.
        """
        if self._files is None:
            if nbytes >= capacity.MUCH:
                advice = NEED_LESS.format(larger="large enough")
                capacity.require_memory(self.owner, nbytes, what, self.device, advice)
            return
        nbytes -= self._files.unmapped_bytes()  # they need no new space
        free = free_disk(self._files.path)
        if nbytes > free:
            raise DoesNotFitError(
                f"{self.owner} needs {size_text(nbytes)} for {what}, and {size_text(free)} are free on the disk of "
                f"{self._files.path}. Nothing was allocated. {NEED_LESS.format(larger='larger')}"
            )

    def zeros(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, most: int = 0, is_late: bool = False
    ) -> Tensor:
        """A block of zeros, whose pages are committed when they are first written. It is never an inference tensor.

        If :meth:`open` returned True, a "mapped" block is what its file holds.

        Args:
            name: The block's name, unique among the blocks of this backing.
            shape: Its shape, time first.
            dtype: Its dtype.
            most: To how many rows it may be extended. A "mapped" block has more than ``shape[0]`` rows if it was.
            is_late: It may be allocated when there are rows already.
        """
        shape = tuple(shape)
        if self._files is not None:
            return self._files.map(name, shape, dtype, most=most, is_late=is_late)
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            if nbytes == 0 or self.device.type != "cpu":
                return allocate(shape, dtype, self.device)
            return self._carve(shape, dtype) if self.kind == "shared" else lazy_zeros(shape, dtype)
        except (OSError, OverflowError, RuntimeError, DoesNotFitError) as error:
            raise self._not_provided(nbytes, name, error) from error

    def _carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        segment, nbytes = self.segment, SharedMemory.bytes_of([(shape, dtype)])
        if segment is None or segment.left < nbytes:
            segment = SharedMemory.create(nbytes)
        return segment.carve(shape, dtype)

    def extend(self, name: str, tensor: Tensor, rows: int) -> Tensor:
        """The same block with ``rows`` rows, the new ones zero.

        Args:
            name: The name that the block was allocated with.
            tensor: The block. Use the result instead: writes to one need not be visible in the other.
            rows: Rows of the result, at least those of the block.

        Raises:
            DoesNotFitError: (a MemoryError) if there is not enough memory for it.
        """
        if rows < len(tensor):
            raise InvalidInputError(f"{name} has {len(tensor)} rows and cannot be extended to {rows}")
        if self.grows:
            self._require_more(
                rows * math.prod(tensor.shape[1:]) * tensor.itemsize, f"the table {name!r} of {rows:,} entries"
            )
        longer = self.zeros(name, (rows, *tensor.shape[1:]), tensor.dtype)
        if self._files is None:
            longer[: len(tensor)].copy_(tensor)
        return longer[:rows]  # a file may have more, of a run that was killed when it had extended only some

    def _require_more(self, nbytes: int, what: str) -> None:
        ram = capacity.free_ram() if nbytes >= capacity.MUCH else None
        if ram is not None and nbytes > ram[0]:
            raise DoesNotFitError(
                f"{self.owner} needs {size_text(nbytes)} for {what}, and {size_text(ram[0])} are free in RAM ({ram[1]})"
                f". {REFUSED} {NEED_LESS.format(larger='large enough')}"
            )

    def open(self, schema: Mapping[str, Any], rows: RowFiles | None = None) -> bool:
        """Lock the folder of "mapped"; see :meth:`rlstore.engine.disk.mapped.MappedFiles.open`.

        Returns:
            True if a storage of this schema is there: :meth:`zeros` then returns its blocks.
        """
        return self._files is not None and self._files.open(schema, rows)

    def break_seal(self) -> None:
        """Rows of "mapped" are about to be written in another order than one after another."""
        if self._files is not None:
            self._files.break_seal()

    def holds(self, name: str) -> bool:
        """True if :meth:`zeros` would return a block of this name from an earlier run."""
        return self._files is not None and self._files.holds(name)

    def unusable(self, name: str, how: str) -> SnapshotError:
        """The error for a block from an earlier run that holds what cannot be."""
        if self._files is None:
            raise RuntimeError(f"{name} of {self.owner} is not in a file")
        return self._files.unusable(name, how)

    def close(self, *, still: bool = True) -> None:
        """Release the folder of "mapped": another storage may open it. The blocks stay valid while referenced.

        Args:
            still: Nobody can write any more.
        """
        if self._files is not None:
            self._files.close(still=still)

    def __reduce__(self) -> tuple[Any, ...]:
        return Backing, (self.owner, "ram", self.device)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in RAM, of which pages are taken when they are first written."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _SMALL or not hasattr(mmap, "MAP_ANONYMOUS"):
        return allocate(shape, dtype, torch.device("cpu"))
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return tensor_over(memory, shape, dtype)


def _address_limit() -> str:
    """What limits the address space of this process, if anything does, for errors."""
    try:
        import resource  # not on every system
    except ImportError:
        return ""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        return f" (the address space of this process is limited to {most:,} bytes: ulimit -v)"
    try:
        is_strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return ""
    return " (the system reserves no more memory than it has: vm.overcommit_memory is 2)" if is_strict else ""
