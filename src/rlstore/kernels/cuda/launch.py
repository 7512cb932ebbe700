"""Launching Triton's kernels at a third of the usual cost: what cannot change between two calls is bound once.

An ordinary launch looks at every argument anew, to find the compiled kernel that fits it. Here the first launch with
arguments of one kind compiles the kernel, and the later ones hand raw addresses to what was compiled.

What that relies on, of the kernels:

- constants (``tl.constexpr``) come last in the signature;
- numbers are annotated ``tl.int64`` or ``tl.float64`` and named in ``do_not_specialize``, so that their values do not
  matter;
- a launcher serves arguments of one kind: as many tensors, of the same dtypes, in the same tuples.

Where the memory of a tensor does not begin at a multiple of 16 bytes, and where Triton is not as we know it, the launch
is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What the launch of a compiled kernel depends on here, in Triton 3.6 to 3.9.
_NEEDED = ("run", "function", "packed_metadata")
_ALIGNMENT_BITS = 15

Argument = Tensor | float | tuple[Tensor, ...]


class Launcher:
    """A kernel, ready to be launched with arguments of one kind.

    Args:
        kernel: What ``triton.jit`` gives.
        constants: Its constants, in the order of its signature.
        num_warps: Groups of 32 threads that run one program.
    """

    def __init__(self, kernel: Any, constants: tuple[Any, ...] = (), num_warps: int = 4) -> None:
        self._kernel, self._constants, self._num_warps = kernel, constants, num_warps
        self._bound: dict[int, Callable[..., None]] = {}  # by the device's number

    def __call__(self, grid: tuple[int, int, int], device: torch.device, *arguments: Argument) -> None:
        """Launch on the current stream of ``device``, which all tensors are on.

        Args:
            grid: How many programs; none are launched if one of the three is 0.
            device: Where.
            arguments: What comes before the constants.
        """
        if 0 in grid:
            return
        if device.type != "cuda":  # Triton's interpreter, which takes any memory
            self._kernel[grid](*arguments, *self._constants)
            return
        index = device.index or 0
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, device, *arguments)
            return
        bound = self._bound.get(index)
        if bound is not None:
            addresses, bits = _addresses(arguments)
            if not bits & _ALIGNMENT_BITS:
                bound(*grid, torch._C._cuda_getCurrentRawStream(index), addresses)
                return
        compiled = self._kernel[grid](*arguments, *self._constants, num_warps=self._num_warps)
        if bound is None and not _addresses(arguments)[1] & _ALIGNMENT_BITS:
            self._bind(index, compiled)

    def _bind(self, index: int, compiled: Any) -> None:
        if not all(hasattr(compiled, name) for name in _NEEDED):
            return
        run, function, metadata, constants = compiled.run, compiled.function, compiled.packed_metadata, self._constants

        def launch(x: int, y: int, z: int, stream: int, addresses: list[Any]) -> None:
            run(x, y, z, stream, function, metadata, None, None, None, *addresses, *constants)

        self._bound[index] = launch


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is no smaller; Triton's own function takes a launch's time."""
    return 1 << max(number - 1, 0).bit_length()


def _addresses(arguments: tuple[Argument, ...]) -> tuple[list[Any], int]:
    """The arguments with addresses for tensors, and all the addresses' bits."""
    given: list[Any] = []
    bits = 0
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            bits |= address
            given.append(address)
        elif isinstance(argument, tuple):
            inner = tuple([tensor.data_ptr() for tensor in argument])
            for address in inner:
                bits |= address
            given.append(inner)
        else:
            given.append(argument)
    return given, bits
