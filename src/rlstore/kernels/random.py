"""Random numbers as a pure function of a seed and a counter, in torch: the same as in ``csrc/random.h``."""

from __future__ import annotations

import torch
from torch import Tensor

# The constants of SplitMix64 (Steele, Lea and Flood 2014), as the signed numbers that torch multiplies.
_STEP, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def take_units(generator: Tensor, count: int) -> Tensor:
    """The next ``count`` numbers of a generator, which moves on: multiples of 2^-53 in [0, 1).

    Args:
        generator: int64 ``[seed, draws made]``.
        count: How many.

    Returns:
        float64 ``[count]`` where the generator is.
    """
    if generator.dtype != torch.int64 or generator.numel() != 2:
        raise ValueError("a generator is int64 [seed, draws made]")
    seed, made = generator.unbind()
    bits = seed + (made + torch.arange(1, count + 1, device=generator.device)) * _STEP
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    bits = bits ^ _shift(bits, 31)
    generator[1] += count
    return _shift(bits, 11).double() * 2.0**-53


def take_below(generator: Tensor, count: int, limit: int) -> Tensor:
    """The next ``count`` whole numbers from 0 to ``limit - 1``, int64 ``[count]``."""
    return (take_units(generator, count) * limit).long().clamp(max=limit - 1)


def _shift(bits: Tensor, places: int) -> Tensor:
    """To the right, with zeros coming in whatever the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
