"""Launching Triton's kernels at a small part of the usual cost: what cannot change between two calls is bound once.

An ordinary launch inspects every argument, to find the compiled kernel that fits it. Here the first launch with
arguments of one kind compiles the kernel, and later ones are made in C++, which passes the tensors' addresses to the
driver: an add to a storage takes 25 us instead of 51. Tensors that are the same at every launch are given as
:class:`Fixed`: their addresses are looked up once.

This relies, of our kernels, on:

- constants (``tl.constexpr``) come last in the signature;
- numbers are annotated ``tl.int64`` or ``tl.float64`` and named in ``do_not_specialize``, so that their values do not
  matter;
- a launcher serves arguments of one kind: as many tensors, of the same dtypes, in the same tuples.

Of Triton: that a kernel takes what its signature names, 8 bytes each, then the addresses of two kinds of scratch memory
that none of ours needs. The driver is asked whether it does (CUDA 12.4 and later) before a kernel is bound. Where
anything differs from this, and where the memory of a tensor does not begin at a multiple of 16 bytes, the launch is an
ordinary one.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.kernels._native import BoundKernel
from rlstore.kernels._native import Fixed as Fixed  # exported: launches are given it
from rlstore.kernels._native import count_readable as count_readable

_ALIGNMENT = 16
_SCRATCH_ADDRESSES = 2
# The metadata of a kernel that is launched with a grid, threads and parameters, and with nothing else.
_PLAIN = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}

_LONG_SECONDS = 1.0  # of compiling, after which it is said why calls take so long


class Compiling:
    """The time that first launches took, in which Triton compiles kernels or loads those that it has kept."""

    def __init__(self) -> None:
        self.seconds, self.is_said = 0.0, False

    def add(self, seconds: float) -> None:
        """Count a launch, and say once that kernels are being compiled."""
        self.seconds += seconds
        if self.seconds > _LONG_SECONDS and not self.is_said:
            self.is_said = True
            logging.getLogger("rlstore").warning(
                "rlstore: kernels for this GPU are being compiled, %.1f seconds so far. Each is compiled when it is "
                "first used with tensors of one kind; Triton keeps them for later runs (TRITON_CACHE_DIR).",
                self.seconds,
            )


_COMPILING = Compiling()

Argument = Tensor | float | Fixed | tuple[Tensor | Fixed, ...]


class Launcher:
    """A kernel, ready to be launched with arguments of one kind.

    Args:
        kernel: What ``triton.jit`` gives.
        constants: Its constants, in the order of its signature.
        num_warps: Groups of 32 threads that run one program.
    """

    def __init__(self, kernel: Any, constants: tuple[Any, ...] = (), num_warps: int = 4) -> None:
        self._kernel, self._constants, self._num_warps = kernel, constants, num_warps
        self._bound: dict[torch.device, BoundKernel | None] = {}  # None if it cannot be bound
        self._compiled: list[Any] = []  # what was bound, so that it stays loaded

    def __call__(self, grid: tuple[int, int, int], device: torch.device, *arguments: Argument) -> None:
        """Launch on the current stream of ``device``, which all tensors are on.

        Args:
            grid: How many programs; none are launched if one of the three is 0.
            device: Where.
            arguments: What comes before the constants.
        """
        bound = self._bound.get(device)  # first: device.type makes a new string at every access
        if (bound is not None and bound.launch(grid, arguments)) or 0 in grid:
            return
        arguments = expanded(arguments)
        if device.type != "cuda":  # Triton's interpreter, which takes any memory
            self._kernel[grid](*arguments, *self._constants)
            return
        index = device.index or 0
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, device, *arguments)
            return
        begun = time.monotonic()
        compiled = self._kernel[grid](*arguments, *self._constants, num_warps=self._num_warps)
        _COMPILING.add(time.monotonic() - begun)
        if device not in self._bound:
            parts = list(_flat(arguments))
            if _are_aligned(parts):
                self._bound[device] = _bind(compiled, index, len(parts))
                self._compiled.append(compiled)

    def bound(self, device: torch.device) -> BoundKernel | None:
        """The compiled kernel, once a launch on a device has bound it."""
        return self._bound.get(device)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is no smaller; Triton's own function takes a launch's time."""
    return 1 << max(number - 1, 0).bit_length()


def expanded(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as Triton takes them: what is in a :class:`Fixed` in its place."""
    parts: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Fixed):
            parts.extend(argument.arguments)
        else:
            parts.append(expanded(argument) if isinstance(argument, tuple) else argument)
    return tuple(parts)


def _bind(compiled: Any, index: int, count: int) -> BoundKernel | None:
    """What launches a compiled kernel of ``count`` parameters; None if anything about it is unknown."""
    try:
        function, metadata = compiled.function, compiled.metadata
        kinds = "".join(_kind(part) for part in _flat(compiled.src.signature.values()) if part != "constexpr")
        driver = ctypes.CDLL("libcuda.so.1")
        sizes = [8] * (count + _SCRATCH_ADDRESSES)
        is_known = len(kinds) == count and _parameter_sizes(driver, function, len(sizes) + 1) == sizes
        if not is_known or any(getattr(metadata, name) != value for name, value in _PLAIN.items()):
            return None
        functions = _address(driver.cuCtxGetDevice), _address(driver.cuLaunchKernel)
        return BoundKernel(*functions, function, 32 * metadata.num_warps, metadata.shared, kinds, index)
    except (AttributeError, OSError, TypeError, ValueError):  # another Triton, no driver, another kind of part
        return None


def _kind(part: str) -> str:
    """What BoundKernel calls a parameter of a type of Triton's; it refuses what it does not know."""
    return "p" if part.startswith("*") else {"i64": "i", "fp64": "f"}.get(part, "?")


def _parameter_sizes(driver: Any, function: int, most: int) -> list[int]:
    """The bytes of each parameter of a loaded kernel, of ``most`` of them at most."""
    sizes = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for place in range(most):
        out = ctypes.byref(offset), ctypes.byref(size)
        if driver.cuFuncGetParamInfo(ctypes.c_void_p(function), ctypes.c_size_t(place), *out):
            break
        sizes.append(size.value)
    return sizes


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _flat(parts: Iterable[Any]) -> Iterator[Any]:
    """The parts, and in the place of each tuple what is in it."""
    for part in parts:
        if isinstance(part, tuple):
            yield from _flat(part)
        else:
            yield part


def _are_aligned(parts: Sequence[Any]) -> bool:
    return not any(isinstance(part, Tensor) and part.data_ptr() % _ALIGNMENT for part in parts)
