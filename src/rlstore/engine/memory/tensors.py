"""Memory for tensors: blocks of storages, and outputs that reuse memory no tensor uses any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from rlstore.kernels import OutputPool

# The most memory that a Recycler keeps while nobody uses it.
KEEP_BYTES = 512 << 20
# The part of a CUDA device's memory that is gathered in one launch, at most.
_CUDA_AHEAD_PART = 256

Allocator = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
GroupAllocator = Callable[[Sequence[Sequence[int]], Sequence[torch.dtype], torch.device], tuple[Tensor, ...]]


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


def allocate_group(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[Tensor, ...]:
    """:func:`allocate_empty` for several tensors."""
    return tuple([allocate_empty(shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)])


@cache
def ahead_bytes(device: torch.device) -> int:
    """The most that is gathered ahead on a CUDA device, in one launch."""
    return int(torch.cuda.get_device_properties(device).total_memory) // _CUDA_AHEAD_PART


class Recycler:
    """Allocates CPU tensors in memory of earlier ones that no tensor, view, array or graph uses any more.

    New memory costs a page fault for every four kilobytes, which takes longer than gathering into it. Memory of 2 MiB
    and more is in huge pages where the system has them. Each tensor tells when its memory is free again, whoever drops
    it, in whichever thread; what serves next is what came back last, and may still be in the cache.
    """

    def __init__(self) -> None:
        self._pool = OutputPool(KEEP_BYTES)

    @property
    def idle_bytes(self) -> int:
        """Memory that is kept and used by nobody."""
        return self._pool.idle_bytes

    def begin(self) -> None:
        """Begin an update: memory that the one before it did not use is released."""
        self._pool.begin()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor with whatever was in its memory before."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.empty(shape, dtype, device)
        if device.type != "cpu" or dtype not in _DLPACK_TYPES:
            return allocate_empty(shape, dtype, device)
        return self._pool.empty(tuple(shape), *_DLPACK_TYPES[dtype])

    def empty_group(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> tuple[Tensor, ...]:
        """:meth:`empty` for several tensors."""
        return tuple([self.empty(shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)])

    def __reduce__(self) -> tuple[type[Recycler], tuple[()]]:
        return Recycler, ()  # a copy shares no memory


# The code of each dtype in DLPack, and its bits.
_DLPACK_TYPES = {
    torch.bool: (6, 8),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
}


class Arena:
    """Tensors cut from one piece of memory, for a batch of many tensors whose shapes change from update to update.

    Args:
        nbytes: Bytes of all tensors together.
        count: How many there will be.
        device: The device.
        empty: Allocates the piece.
    """

    def __init__(self, nbytes: int, count: int, device: torch.device, empty: Allocator) -> None:
        # Rounded up to an eighth of its power of two, so that a piece is recycled if the next size differs a little.
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
        # Through .data, so that each has a version counter of its own: for autograd they are independent.
        return self._typed[dtype].as_strided(tuple(shape), strides[::-1], first // dtype.itemsize).data


_ALIGNMENT = 64


class Pieces:
    """How tensors of some shapes are arranged in pieces of memory, one for each dtype: few calls make many tensors.

    Args:
        shapes: The shape of each tensor.
        dtypes: The dtype of each tensor.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        self._dtypes = list(dict.fromkeys(dtypes))
        self.places = tuple([self._dtypes.index(dtype) for dtype in dtypes])  # the piece that holds each tensor
        # The shapes of the tensors in each piece, and of the gaps from the end of one to the beginning of the next.
        self._cuts: list[list[tuple[int, ...]]] = [[] for _ in self._dtypes]
        self._parts = []  # the piece that holds each tensor, and which part of it that is
        for shape, place in zip(shapes, self.places, strict=True):
            self._parts.append((place, len(self._cuts[place])))
            self._cuts[place].append(tuple(shape))
            gap = -math.prod(shape) % _PIECE_ENTRIES
            if gap:
                self._cuts[place].append((gap,))
        self._lengths = [sum(map(math.prod, cuts)) for cuts in self._cuts]
        self.nbytes = sum(length * dtype.itemsize for length, dtype in zip(self._lengths, self._dtypes, strict=True))
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
        """The tensors, in the order of their shapes; each has a version counter of its own and is no view."""
        parts = [cut(piece) for cut, piece in zip(self._cutters, pieces, strict=True)]
        return tuple([parts[place][index] for place, index in self._parts])


_PIECE_ENTRIES = 16  # tensors of a piece begin at multiples of this


@lru_cache(64)
def pieces_for(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> Pieces:
    """:class:`Pieces`, made once for what is asked for again and again."""
    return Pieces(shapes, dtypes)


def _cutter(shapes: list[tuple[int, ...]]) -> Callable[[Tensor], list[Tensor]]:
    """What cuts a flat piece into tensors of these shapes, one after another."""
    # The call that cuts all of them at once gives a tensor without entries another shape.
    if _AUTOGRAD is not None and all(map(math.prod, shapes)):
        return partial(_cut_at_once, _AUTOGRAD, [_template(shape) for shape in shapes])
    return partial(_cut_one_by_one, shapes)


def _cut_one_by_one(shapes: list[tuple[int, ...]], piece: Tensor) -> list[Tensor]:
    with torch.inference_mode(False):
        parts = torch.unsafe_split_with_sizes(piece, list(map(math.prod, shapes)))
        return [part.view(shape).data for part, shape in zip(parts, shapes, strict=True)]


def _cut_at_once(autograd: torch._C.DispatchKeySet, templates: list[Tensor], piece: Tensor) -> list[Tensor]:
    """:func:`_cut_one_by_one` by private functions of torch.

    What it buys: on an H200 five epochs of four mini-batches of 24 x 4096 rows took 0.66 ms in a version with it, and
    1.08 in one without.
    """
    # Neither a compiler nor a mode that makes tensors of another kind knows these functions.
    if torch.compiler.is_compiling() or type(piece) is not Tensor:
        return _cut_one_by_one([tuple(template.shape) for template in templates], piece)
    with torch._C._ExcludeDispatchKeyGuard(autograd):  # so that none of them becomes a view of the piece
        return torch._C._nn.unflatten_dense_tensors(piece, templates)


@lru_cache(1024)
def _template(shape: tuple[int, ...]) -> Tensor:
    """A tensor without memory that has a shape; an ordinary one, whatever the caller's mode, because it is kept."""
    with torch._C._DisableTorchDispatch():
        return allocate_empty(shape, torch.float32, torch.device("meta"))


def _find_autograd() -> torch._C.DispatchKeySet | None:
    """What excludes autograd from a call; None in a torch whose private functions are not as we know them."""
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
