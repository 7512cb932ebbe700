"""Tensors that a storage makes: its blocks, and the outputs that it hands out."""

from __future__ import annotations

import math
import mmap
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from rlstore.kernels import unheld_state

# The most that is kept for the next epoch or the next update; beyond it memory matters more than speed.
KEEP_BYTES = 256 << 20
_HUGE_PAGE = 2 << 20
# The same for what lies on CUDA, and the most that is gathered there in one launch: these parts of the device's memory.
_CUDA_KEEP_PART, _CUDA_AHEAD_PART = 16, 256

Allocator = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
# The tensors of a batch, and the tensors whose memory they lie in: themselves, or a piece that they were cut from.
Made = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: float = 0.0) -> Tensor:
    """A filled tensor that is never an inference tensor, whatever mode the caller is in.

    An inference tensor could not be written in place, nor take part in a backward pass, once the mode is left.
    """
    with torch.inference_mode(False):
        return torch.full(tuple(shape), fill, dtype=dtype, device=device)


def allocate_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As :func:`allocate`, with whatever was in the memory before: for outputs that are written at once."""
    if not torch.is_inference_mode_enabled():
        return torch.empty(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype, device=device)


def allocate_huge(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As :func:`allocate_empty`, in pages of 2 MiB where the system gives them: for large outputs that serve again."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE_PAGE or device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return allocate_empty(shape, dtype, device)
    # One page more, of which what comes before the first boundary is never touched.
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        first = -whole.data_ptr() % _HUGE_PAGE
        made = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=first)
        return made.view(tuple(shape)).data  # no view of another tensor: those that hold the memory are counted


@cache
def keep_bytes_on_cuda(device: torch.device) -> int:
    """:data:`KEEP_BYTES` for a CUDA device."""
    return int(torch.cuda.get_device_properties(device).total_memory) // _CUDA_KEEP_PART


@cache
def ahead_bytes(device: torch.device) -> int:
    """The most that is gathered ahead on a CUDA device, in one launch."""
    return int(torch.cuda.get_device_properties(device).total_memory) // _CUDA_AHEAD_PART


class Recycler:
    """Hands out CPU tensors whose memory may have served before, and is held by nobody now.

    Fresh memory costs a page fault every four kilobytes, which takes longer than gathering into it. So the outputs of
    an update are remembered, and their memory serves again once the caller has let go of all of it: of the tensors, of
    views of them, of arrays and graphs that hold them.

    Args:
        allocate: What makes fresh memory.
    """

    def __init__(self, allocate: Allocator = allocate_empty) -> None:
        self._allocate = allocate
        self._spares: dict[tuple[torch.Size, torch.dtype], deque[Tensor]] = {}
        self._used: set[int] = set()  # ids of the spares that have served since begin()
        self._addresses: dict[int, int] = {}  # of each spare; one that moved is shared with another process
        self._bytes = 0

    def begin(self) -> None:
        """Begin an update: what the one before it did not use is let go."""
        used = [spare for spares in self._spares.values() for spare in spares if id(spare) in self._used]
        self._spares, self._used, self._bytes = {}, set(), sum(spare.nbytes for spare in used)
        self._addresses = {id(spare): self._addresses[id(spare)] for spare in used}
        for spare in used:
            self._spares.setdefault((spare.shape, spare.dtype), deque()).append(spare)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor with whatever was in its memory before."""
        if device.type != "cpu" or not _CAN_COUNT:
            return allocate_empty(shape, dtype, device)
        spares = self._spares.setdefault((torch.Size(shape), dtype), deque())
        for _ in range(len(spares)):
            spare = spares[0]
            spares.rotate(-1)  # the one that served longest ago is the likeliest to be free
            if spare.data_ptr() == self._addresses[id(spare)] and _count_holders(spare) == _UNHELD:
                self._used.add(id(spare))
                return spare.detach()  # a tensor of its own on the same memory, by which a holder is seen
        fresh = self._allocate(shape, dtype, device)
        if self._bytes + fresh.nbytes > KEEP_BYTES:
            return fresh
        spares.append(fresh)
        self._addresses[id(fresh)] = fresh.data_ptr()
        self._used.add(id(fresh))
        self._bytes += fresh.nbytes
        return fresh.detach()

    def __getstate__(self) -> dict[str, object]:
        return Recycler(self._allocate).__dict__  # a copy makes outputs of its own


class Arena:
    """Tensors cut from one piece of memory, for a batch of many tensors whose shapes change from update to update.

    Args:
        nbytes: Bytes of all tensors together.
        count: How many there will be.
        device: Where.
        empty: What makes the piece.
    """

    def __init__(self, nbytes: int, count: int, device: torch.device, empty: Allocator) -> None:
        # Rounded up to an eighth of its power of two, so that a piece serves again when the next need differs a little.
        needed = nbytes + count * _ALIGNMENT
        grain = max(1 << max(needed.bit_length() - 4, 0), _ALIGNMENT)
        self.piece = empty((-(-needed // grain) * grain,), torch.uint8, device)
        self._typed: dict[torch.dtype, Tensor] = {}  # the whole piece, seen as each dtype
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next tensor."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.empty(shape, dtype, device)
        if dtype not in self._typed:
            self._typed[dtype] = self.piece.view(dtype)
        strides, count = [], 1
        for size in reversed(shape):
            strides.append(count)
            count *= size
        first = self._used
        self._used += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        # Through .data, so that each has a version counter of its own: autograd is to see them as tensors apart.
        return self._typed[dtype].as_strided(tuple(shape), strides[::-1], first // dtype.itemsize).data


_ALIGNMENT = 64


class Pieces:
    """How tensors of some shapes lie in pieces of memory, those of one dtype in one piece: few calls make many tensors.

    Args:
        shapes: The shape of each tensor.
        dtypes: The dtype of each tensor.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        self._dtypes = list(dict.fromkeys(dtypes))
        self.places = tuple([self._dtypes.index(dtype) for dtype in dtypes])  # the piece that each tensor lies in
        # The shapes of the tensors in each piece, and of the gaps from the end of one to the beginning of the next.
        self._cuts: list[list[tuple[int, ...]]] = [[] for _ in self._dtypes]
        self._parts = []  # the piece that each tensor lies in, and which part of it that is
        for shape, place in zip(shapes, self.places, strict=True):
            self._parts.append((place, len(self._cuts[place])))
            self._cuts[place].append(tuple(shape))
            gap = -math.prod(shape) % _PIECE_ENTRIES
            if gap:
                self._cuts[place].append((gap,))
        self._lengths = [sum(map(math.prod, cuts)) for cuts in self._cuts]
        self.nbytes = sum(length * dtype.itemsize for length, dtype in zip(self._lengths, self._dtypes, strict=True))
        # One piece without gaps is cut into the tensors as they are asked for.
        self._in_order = [self._parts] == [[(0, index) for index in range(len(cuts))] for cuts in self._cuts]
        self._cutters = [_cutter(cuts) for cuts in self._cuts]

    def empty(self, device: torch.device, count: int = 1) -> list[tuple[Tensor, ...]]:
        """New pieces for the tensors ``count`` times over, flat."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.empty(device, count)
        by_place = []
        for length, dtype in zip(self._lengths, self._dtypes, strict=True):
            first = torch.empty(length, dtype=dtype, device=device)
            # One that is like another, and a number for a shape, take the least time.
            by_place.append([first, *[first.new_empty(length) for _ in range(count - 1)]])
        return list(zip(*by_place, strict=True))

    def cut(self, pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The tensors, in the order of their shapes, no views of a piece: a caller may change each in any way."""
        if self._in_order:
            return tuple(self._cutters[0](pieces[0]))
        parts = [cut(piece) for cut, piece in zip(self._cutters, pieces, strict=True)]
        return tuple([parts[place][index] for place, index in self._parts])


_PIECE_ENTRIES = 16  # tensors of a piece begin at multiples of this


@lru_cache(64)
def pieces_for(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> Pieces:
    """:class:`Pieces`, made once for what is asked for again and again."""
    return Pieces(shapes, dtypes)


def _cutter(shapes: list[tuple[int, ...]]) -> Callable[[Tensor], list[Tensor]]:
    """What cuts a flat piece into tensors of these shapes, one after another."""
    # What cuts at once gives a tensor without entries another shape.
    if _AUTOGRAD is not None and all(map(math.prod, shapes)):
        return partial(_cut_at_once, _AUTOGRAD, [_template(shape) for shape in shapes])
    return partial(_cut_one_by_one, shapes)


def _cut_one_by_one(shapes: list[tuple[int, ...]], piece: Tensor) -> list[Tensor]:
    with torch.inference_mode(False):
        parts = torch.unsafe_split_with_sizes(piece, list(map(math.prod, shapes)))
        return [part.view(shape).data for part, shape in zip(parts, shapes, strict=True)]


def _cut_at_once(autograd: torch._C.DispatchKeySet, templates: list[Tensor], piece: Tensor) -> list[Tensor]:
    # A compiler knows nothing of what follows, nor does a mode that makes tensors of another kind.
    if torch.compiler.is_compiling() or type(piece) is not Tensor:
        return _cut_one_by_one([tuple(template.shape) for template in templates], piece)
    # Autograd does not look, and so makes nothing a view of the piece.
    with torch._C._ExcludeDispatchKeyGuard(autograd):
        return torch._C._nn.unflatten_dense_tensors(piece, templates)


@lru_cache(1024)
def _template(shape: tuple[int, ...]) -> Tensor:
    """A tensor without memory that tells a shape. It is kept, so it is an ordinary one, whatever the caller's mode."""
    with torch._C._DisableTorchDispatch():
        return allocate_empty(shape, torch.float32, torch.device("meta"))


def _find_autograd() -> torch._C.DispatchKeySet | None:
    """What makes autograd look away from a call; None where torch, which promises none of it, has it no longer."""
    try:
        names = ("AutogradCPU", "AutogradCUDA", "ADInplaceOrView")
        one, other, views = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
        with torch._C._DisableTorchDispatch():  # tried with ordinary tensors, whatever mode this is imported in
            piece = allocate_empty((2,), torch.float32, torch.device("cpu"))
            tensors = _cut_at_once(one | other | views, [_template((1,))] * 2, piece)
            tensors[0].zero_()
    except (AttributeError, RuntimeError, TypeError):
        return None
    is_plain = all(tensor._base is None for tensor in tensors) and tensors[1]._version == piece._version == 0
    return one | other | views if is_plain else None


_AUTOGRAD = _find_autograd()


class KeptBatch:
    """The tensors of a batch, to be handed out again, the very same ones, as long as nobody could tell.

    That is so if nobody holds any of them, nor a view of it, an array, a graph or its storage; if nobody has changed it
    in place, as its version counter tells, or has given it another shape or other memory; and if nothing clings to it,
    neither a gradient nor a hook nor an attribute.

    Args:
        tensors: The tensors, which nobody else holds yet.
        pieces: The tensors whose memory they lie in.
    """

    def __init__(self, tensors: tuple[Tensor, ...], pieces: tuple[Tensor, ...]) -> None:
        self.nbytes = sum([piece.nbytes for piece in pieces])
        self._tensors, self._pieces = tensors, pieces
        self._storages = tuple([piece.untyped_storage() for piece in pieces])
        self._state = unheld_state(tensors, self._storages)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, in a tuple of their own: who holds it is seen to hold them."""
        return (*self._tensors,)

    def is_untouched(self) -> bool:
        """True if they may be handed out again."""
        return self._state is not None and unheld_state(self._tensors, self._storages) == self._state


def _tells_holders() -> bool:
    """True if whoever holds a tensor is seen: Python and torch count holders, and neither promises how."""
    ways: tuple[Callable[[Tensor], object], ...] = (
        lambda tensor: tensor,
        lambda tensor: tensor[:1],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor * tensor.new_ones(1).requires_grad_(),
    )
    with torch.inference_mode(False), torch.enable_grad():
        tensors = (torch.ones(2, device="cpu"),)
        try:
            kept = KeptBatch(tensors, tensors)
        except (AttributeError, TypeError, RuntimeError):
            return False
        for hold in ways:
            held = hold(tensors[0])
            if kept.is_untouched():
                return False
            del held
    return kept.is_untouched()


# Where holders cannot be told nothing is handed out twice.
CAN_KEEP = _tells_holders()

# Not every torch tells how many hold a storage; without it nothing is used twice.
_CAN_COUNT = hasattr(torch._C, "_storage_Use_Count")


def _count_holders(tensor: Tensor) -> tuple[int, int]:
    """How many tensors hold a tensor's memory, and how many hold the Python object of its storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _count_when_unheld() -> tuple[int, int]:
    tensor = torch.empty(1)
    return _count_holders(tensor) if _CAN_COUNT else (0, 0)


_UNHELD = _count_when_unheld()
