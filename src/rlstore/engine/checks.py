"""Checks of plain arguments; each error names the argument, what was given and what is needed."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from operator import index

import numpy as np
import torch

from rlstore.errors import InvalidCallError, InvalidInputError


def check_positive(owner: str, **sizes: object) -> None:
    """Refuse sizes that are not whole numbers of at least 1, by name."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise InvalidInputError(f"{name} is {size!r}; {owner} needs a whole number of at least 1")
        if size >= 2**63:
            raise InvalidInputError(f"{name} is {size}; {owner} needs a whole number below 2**63")


def check_count(owner: str, name: str, value: object) -> int:
    """A whole number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInputError(f"{name} is {value!r}; {owner} needs a whole number that is not negative")
    return value


def check_counted(owner: str, name: str, value: object) -> int:
    """What a file says was counted, from which one must be able to count on in 64 bits."""
    count = check_count(owner, name, value)
    if count > 2**62:
        raise InvalidInputError(f"{name} is {count}; {owner} needs a whole number of at most 2**62")
    return count


def check_fraction(owner: str, **fractions: object) -> None:
    """Refuse numbers outside [0, 1], by name: discounts, lambdas."""
    for name, value in fractions.items():
        if type(value) is float and 0 <= value <= 1:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= float(value) <= 1:
            raise InvalidInputError(f"{name} is {value!r}; {owner} needs a number between 0 and 1")


def check_number(owner: str, **numbers: object) -> None:
    """Refuse what is no number, or is NaN, by name: arguments of kernels, which say less about it."""
    for name, value in numbers.items():
        try:
            is_number = not isinstance(value, str) and not math.isnan(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            is_number = False
        if not is_number:
            raise InvalidInputError(f"{name} is {value!r}; {owner} needs a number")


def check_seconds(owner: str, **times: object) -> None:
    """Refuse timeouts that are not a number of seconds of at least 0, or infinity."""
    for name, seconds in times.items():
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float, np.number)) or not float(seconds) >= 0:
            raise InvalidInputError(f"{name} is {seconds!r}; {owner} needs a number of seconds that is not negative")


def check_name(owner: str, name: object) -> None:
    """Refuse a name that is neither a string nor None."""
    if name is not None and not isinstance(name, str):
        raise InvalidInputError(f"name is {name!r}; {owner} needs a string, or None")


def check_path(owner: str, name: str, path: object, what: str = "a folder") -> str:
    """The path of a folder, or of what else it has to be, as a string."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise InvalidCallError(f"{name} is {path!r}; {owner} needs the path of {what}, a string or a Path")
    if "\0" in os.fspath(path):
        raise InvalidInputError(f"{name} is {os.fspath(path)!r}, with a zero byte; {owner} needs the path of {what}")
    return os.fspath(path)


def check_shape(owner: str, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of whole numbers that are not negative."""
    try:
        sizes = tuple(index(size) for size in shape)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name} is {shape!r}; {owner} needs a sequence of whole numbers") from error
    if any(size < 0 for size in sizes):
        raise InvalidInputError(f"{name} is {sizes}; {owner} needs sizes that are not negative")
    return sizes


_AUTORESETS = ("NextStep", "SameStep", "Disabled")


def check_autoreset(owner: str, mode: object, *, otherwise: str = "") -> str:
    """The value of an autoreset mode, given as Gymnasium's ``AutoresetMode`` or as its value.

    Args:
        owner: Who needs it, for errors.
        mode: What was given.
        otherwise: What else may be given, for errors.
    """
    value = getattr(mode, "value", mode)
    if not isinstance(value, str) or value not in _AUTORESETS:
        raise InvalidInputError(f"autoreset is {mode!r}; {owner} knows {list(_AUTORESETS)}{otherwise}")
    return value


def check_device(owner: str, device: str | torch.device) -> torch.device:
    """The device as tensors have it, with its index on CUDA, if torch supports it and it is available."""
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(
            f"device is {device!r}; {owner} needs one that torch supports, as 'cpu' or 'cuda:0'"
        ) from error
    if known.type == "meta":
        raise InvalidInputError(f"device is {device!r}, which has no memory; {owner} needs one that holds data")
    if known.type == "cuda" and (known.index or 0) >= torch.cuda.device_count():
        raise InvalidInputError(
            f"device is {device!r}; torch sees {torch.cuda.device_count()} CUDA devices on this machine"
        )
    try:
        return torch.empty(1, device=known).device
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise InvalidInputError(f"device is {device!r}, which is not available on this machine: {error}") from error


def check_seed(owner: str, seed: object) -> int:
    """The seed, or one drawn from torch's default generator, so that ``torch.manual_seed`` determines it."""
    if seed is None:
        return int(torch.randint(2**62, ()).item())
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 2**63:
        raise InvalidInputError(f"seed is {seed!r}; {owner} needs a whole number from 0 up to 2**63 - 1, or None")
    return int(seed)
