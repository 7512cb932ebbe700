"""The numbers of ``stats()``: what a storage measures of itself, and how those of several storages become one.

A storage measures numbers by the names that ``stats()`` has for them. What a number is says how it is joined with that
of another storage: plain numbers are added, of a :class:`Ratio` both parts are, of a :class:`Least` or a :class:`Most`
the smaller or larger is taken. Numbers may be tensors of one element: those of a device are copied together, so that it
is waited for once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = int | float | Tensor


class Ratio(NamedTuple):
    """``total / number``; nothing, if the number is 0."""

    total: Number
    number: Number


class Least(NamedTuple):
    """The smallest of some values; infinite if there are none."""

    value: Number


class Most(NamedTuple):
    """The largest of some values; ``-inf`` if there are none."""

    value: Number


Measures: TypeAlias = dict[str, Number | Ratio | Least | Most]

# The newest transitions whose observations are looked at for what is not finite, and the numbers in them.
_NEWEST, _NEWEST_NUMBERS = 1 << 14, 1 << 22


def spread(name: str, values: Tensor, taken: Tensor) -> Measures:
    """The mean, the smallest and the largest of some values, without a wait for the device.

    Args:
        name: What they are called.
        values: Numbers ``[n]``.
        taken: Which of them count, bool ``[n]``.
    """
    if not len(values):
        return {}
    values = values if values.dtype.is_floating_point else values.double()
    return {
        f"{name}_mean": Ratio(torch.where(taken, values, 0.0).sum(dtype=torch.float64), taken.count_nonzero()),
        f"{name}_min": Least(torch.where(taken, values, math.inf).amin()),
        f"{name}_max": Most(torch.where(taken, values, -math.inf).amax()),
    }


def held(transitions: Number, capacity: int, nbytes: int) -> Measures:
    """How full a storage is.

    Args:
        transitions: Those that it holds.
        capacity: How many it can hold.
        nbytes: The bytes of its memory.
    """
    return {
        "transitions": transitions,
        "capacity": capacity,
        "fill": Ratio(transitions, capacity),
        "bytes": nbytes,
    }


def used(inserts: Number, samples: int) -> Measures:
    """How much came in and went out: transitions ever added, and entries of all batches that were served."""
    return {"inserts": inserts, "samples": samples, "samples_per_insert": Ratio(samples, inserts)}


def episodes(
    lengths: Tensor,
    returns: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    is_whole: Tensor,
    is_over: Tensor | None = None,
) -> Measures:
    """The episodes that are held, and the returns and lengths of those that ended and are held completely.

    Args:
        lengths: Steps of each that are held, int64 ``[n]``; those with none are not counted.
        returns: The sums of their rewards, ``[n, *reward_shape]``; not reported if a reward is more than a number.
        terminated: bool ``[n]``, as all others.
        truncated: See :class:`rlstore.episodes.Episodes`.
        is_whole: See there.
        is_over: See there; None where no episode can be broken off.
    """
    is_held = lengths > 0
    ended = (terminated | truncated) & is_held
    complete = ended & is_whole
    measures: Measures = {
        "episodes": is_held.count_nonzero(),
        "episodes_open": (is_held & ~(ended if is_over is None else is_over)).count_nonzero(),
        "episodes_terminated": (terminated & is_held).count_nonzero(),
        "episodes_truncated": (truncated & is_held).count_nonzero(),
        "episodes_complete": complete.count_nonzero(),
        **spread("length", lengths, complete),
    }
    if is_over is not None:
        measures["episodes_broken"] = (is_held & is_over & ~ended).count_nonzero()
    if returns.numel() == len(returns):
        totals = returns.flatten()
        measures.update(spread("return", totals, complete & totals.isfinite()))
    return measures


def newest_steps(held: int, lanes: int, numbers: int) -> int:
    """Of how many steps the observations are looked at for what is not finite, at least 1.

    Args:
        held: Steps that there are.
        lanes: Environments.
        numbers: Numbers in the observation of one of them.
    """
    return max(min(held, _NEWEST // lanes, _NEWEST_NUMBERS // (lanes * max(numbers, 1))), 1)


def count_nonfinite(values: Tensor, is_held: Tensor) -> Tensor:
    """How many numbers are not finite among values ``[*is_held.shape, ...]`` that are held."""
    held = is_held.view(*is_held.shape, *[1] * (values.dim() - is_held.dim()))
    return (~values.isfinite() & held).count_nonzero()


def nonfinite(rewards: Tensor, observations: Sequence[Tensor], lanes: int) -> Measures:
    """How many numbers are not finite among rewards, and the observations of the newest steps if they are floats.

    Args:
        rewards: ``[steps, ...]``.
        observations: Their leaves, ``[steps, ...]`` each.
        lanes: Environments in a step.
    """
    floats = [leaf for leaf in observations if leaf.is_floating_point()]
    newest = newest_steps(len(rewards), lanes, sum(math.prod(leaf.shape[1:]) for leaf in floats) // lanes)
    found = [(~leaf[-newest:].isfinite()).count_nonzero() for leaf in floats]
    observed: Measures = {"nonfinite_observations": torch.stack(found).sum()} if found else {}
    return {"nonfinite_rewards": (~rewards.isfinite()).count_nonzero(), **observed}


def invalid(counts: Tensor | None) -> Measures:
    """The rewards and the actions that were stored although they are invalid, int64 ``[2]``; None if none can be."""
    return {} if counts is None else {"invalid_rewards": counts[0], "invalid_actions": counts[1]}


def joined(parts: Iterable[Measures]) -> Measures:
    """The measures of several storages, in plain numbers, as those of one."""
    whole: Measures = {}
    for part in parts:
        for name, value in part.items():
            whole[name] = _joined(whole[name], value) if name in whole else value
    return whole


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, Ratio):
        return Ratio(one.total + other.total, one.number + other.number)
    if isinstance(one, (Least, Most)):
        choose = min if isinstance(one, Least) else max
        return type(one)(choose(one.value, other.value))
    return one + other


def on_host(measures: Measures) -> Measures:
    """The same measures in plain numbers; a device is waited for once."""
    tensors = [number for value in measures.values() for number in _numbers(value) if isinstance(number, Tensor)]
    copied = iter(torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else ())

    def plain(number: Number) -> int | float:
        if not isinstance(number, Tensor):
            return number
        return next(copied) if number.dtype.is_floating_point else int(next(copied))

    made: Measures = {}
    for name, value in measures.items():
        numbers = [plain(number) for number in _numbers(value)]
        made[name] = type(value)(*numbers) if isinstance(value, tuple) else numbers[0]
    return made


def flat(measures: Measures) -> dict[str, int | float]:
    """What ``stats()`` returns, from plain numbers: what is not finite, as a mean of nothing, is left out."""
    found: dict[str, Any] = {}
    for name, value in measures.items():
        if isinstance(value, Ratio):
            told = value.total / value.number if value.number else math.nan
        else:
            (told,) = _numbers(value)
        if math.isfinite(told):
            found[name] = told
    return found


def _numbers(value: Number | Ratio | Least | Most) -> tuple[Number, ...]:
    return value if isinstance(value, tuple) else (value,)
