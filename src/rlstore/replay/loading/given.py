"""What a caller gives: arrays of steps, one after another, or an episode; checked as a whole, and cut into pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.rows.schema import Field, Structure
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError
from rlstore.replay.loading.names import NOTHING
from rlstore.replay.loading.steps import Array, Flags, Steps, as_array, as_numpy, held, is_held_as_it_is, joined

_FLAGS = ("terminated", "truncated")
_HOST = torch.device("cpu")
# Of rows that are written at a time, where they are as they are held, and where they are copied for it.
_READY_BYTES, _COPIED_BYTES = 1 << 30, 32 << 20


class Given:
    """Arrays ``[steps, ...]`` of one environment after another, or of a single episode.

    What comes after a step is the next entry of ``next_observations`` or, without them, of ``observations``. At the
    end of an episode the latter is not known. A step that terminated stays, and its own observation stands for the
    final one, which nothing is learnt from. A step that was truncated is left out, and so is the last one if it did not
    terminate: their targets would need it. The step before a truncated one is then truncated instead.

    Args:
        values: The arrays, by the names of the vocabulary.
        fields: The fields of the storage.
        is_episode: Whether it is a single episode: then there may be one more observation, or ``final_observations``,
            and its flags may be two values.
        refuses_nan: Refuse observations and actions that are NaN.

    Raises:
        InvalidInputError: If lengths differ, or an episode ends in the middle.
    """

    def __init__(
        self, values: Mapping[str, Any], fields: StepFields, *, is_episode: bool, refuses_nan: bool = True
    ) -> None:
        self._fields, self._is_episode, self._refuses_nan = fields, is_episode, refuses_nan
        structure, leaves = fields.structure, fields.observations
        self._columns = [as_array(value, field.name) for field, value in _columns(values, fields)]
        self._observations = _leaves(structure, leaves, values["observations"])
        following, final = values.get("next_observations"), values.get("final_observations")
        self._following = None if following is None else _leaves(fields.next_structure, leaves, following, "next_")
        self._steps = self._count(values)
        self._finals: list[Array] | None = None
        if final is not None and following is None and not self._is_longer:
            self._finals = _leaves(structure, leaves, final, "final_")
            self._check_finals(self._finals)
        self.terminated, self.truncated = (self._flags(values, name) for name in _FLAGS)
        if is_episode:
            self._check_end()
        self._lacks_finals = self._following is None and self._finals is None and not self._is_longer
        self._taken = self._leave_out() if self._lacks_finals else None

    @property
    def lost(self) -> int:
        """Steps that are left out."""
        return 0 if self._taken is None else self._steps - int(np.count_nonzero(self._taken))

    # ---------------------------------------------------------------------------------------------- reading

    def _count(self, values: Mapping[str, Any]) -> int:
        """The number of steps, which all arrays have; of an episode there may be one more observation."""
        fields, steps = self._fields, size_of(self._columns[1])
        self._is_longer = self._is_episode and all(size_of(leaf) == steps + 1 for leaf in self._observations)
        named = list(zip(fields.observations, self._observations, strict=True))
        if self._following is not None:
            named += zip(map(_following_of, fields.observations), self._following, strict=True)
        named += zip(fields.columns, self._columns, strict=True)
        sizes = {field.name: size_of(value) for field, value in named}
        flags = {name: size_of(values[name]) for name in _FLAGS if name in values}
        sizes.update({name: size for name, size in flags.items() if size or not self._is_episode})
        if not steps:
            raise InvalidInputError(f"there are no steps: {_told(sizes)}. {NOTHING}")
        observed = steps + 1 if self._is_longer else steps
        needed = dict.fromkeys(list(sizes)[: len(fields.observations)], observed)
        if any(size != needed.get(name, steps) for name, size in sizes.items()):
            more = " (or one more, the last of them after the last step)" if self._is_episode else ""
            raise InvalidInputError(
                f"arrays of unequal length: {_told(sizes)}; there has to be an entry for each step, and as many "
                f"observations{more}. {NOTHING}"
            )
        return steps

    def _check_finals(self, finals: list[Array]) -> None:
        for leaf, final in zip(self._observations, finals, strict=True):
            if leaf.shape[1:] != final.shape:
                raise InvalidInputError(
                    f"final_observations are {tuple(final.shape)}, and observations {tuple(leaf.shape)}; the former "
                    f"are one observation, without an axis for steps. {NOTHING}"
                )

    def _flags(self, values: Mapping[str, Any], name: str) -> Flags:
        """End flags ``[steps]``, 0 or 1; of an episode they may be one value, which is that of its last step."""
        value = values.get(name, False)
        if value is False:
            return np.zeros(self._steps, np.uint8)
        if self._is_episode and not size_of(value):
            value = [False] * (self._steps - 1) + [value]
        if getattr(value, "dtype", None) == np.bool_ and value.shape == (self._steps,):
            return np.ascontiguousarray(value).view(np.uint8)
        field = Field(name, (), torch.uint8, "the rewards", is_flag=True)
        flags: Flags = field.fit(value, self._steps, _HOST, self._steps).numpy()
        return flags

    def _check_end(self) -> None:
        ended = (self.terminated | self.truncated)[:-1]
        if ended.any():
            raise InvalidInputError(
                f"there are {self._steps} steps, and an end is flagged in step {int(ended.argmax())}; give episodes "
                f"one by one. Arrays with many of them are for from_arrays(). {NOTHING}"
            )

    def _leave_out(self) -> Flags:
        """Leave out the steps whose next observation is not known, and let those before them be truncated."""
        ended = self.terminated | self.truncated
        lost = self.truncated & ~self.terminated & 1
        self.truncated = self.truncated & self.terminated
        self.truncated[:-1] |= lost[1:] & ~ended[:-1] & 1
        lost[-1] |= ~self.terminated[-1] & 1
        return (lost ^ 1).astype(np.uint8)

    # ---------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Refuse values that do not fit, and observations and actions that are NaN.

        Raises:
            InvalidInputError: If one does not fit; the message names it.
        """
        columns = list(zip(self._fields.columns, self._columns, strict=True))
        observed = list(zip(self._fields.observations, self._observations, strict=True))
        if self._following is not None:
            observed += zip(map(_following_of, self._fields.observations), self._following, strict=True)
        if self._finals is not None:
            observed += [(field, final[None]) for (field, _), final in zip(observed, self._finals, strict=True)]
        for field, value in (*columns, *observed):
            _check(field, value)
        for field, value in (*columns[:1], *observed) if self._refuses_nan else ():
            _refuse_nan(field, value)

    # ---------------------------------------------------------------------------------------------- pieces

    def pieces(self, *, alone: bool, copied: bool) -> Iterator[Steps]:
        """Whole episodes, one after another: each ``alone``, or many at a time; fewer if they will be ``copied``."""
        if self._is_episode:
            yield from self._piece(0, self._steps)
            return
        most, first, last = 1 if alone else self._most_at_once(copied), 0, 0
        for stop in self._stops().tolist():
            # Nothing follows the very last step: its episode is copied, and no more.
            is_end = self._lacks_finals and stop == self._steps
            if last > first and (stop - first > most or is_end):
                yield from self._piece(first, last)
                first = last
            last = stop
        yield from self._piece(first, last)

    def _stops(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One past the last step of each episode."""
        ended = self.terminated | self.truncated
        if self._taken is not None:
            ended |= self._taken ^ 1
        ended[-1] = 1
        stops: np.ndarray[Any, np.dtype[np.int64]] = np.flatnonzero(ended.view(np.bool_)) + 1
        return stops

    def _most_at_once(self, copied: bool) -> int:
        """The steps to write at a time: fewer where values are converted or copied, in memory that is taken for it."""
        named = [*zip(self._fields.observations, self._observations, strict=True)]
        named += zip(self._fields.columns, self._columns, strict=True)
        nbytes = sum(field.dtype.itemsize * math.prod(field.shape) for field, _ in named)
        is_ready = not copied and all(is_held_as_it_is(field, value) for field, value in named)
        return max((_READY_BYTES if is_ready else _COPIED_BYTES) // max(nbytes, 1), 1)

    def _piece(self, first: int, stop: int) -> Iterator[Steps]:
        taken = None if self._taken is None else self._taken[first:stop]
        if taken is not None and not taken.any():
            return
        observed = zip(self._fields.observations, range(len(self._observations)), strict=True)
        pairs = [self._observed(field, index, first, stop) for field, index in observed]
        columns = zip(self._fields.columns, self._columns, strict=True)
        yield Steps(
            [before for before, _ in pairs],
            [after for _, after in pairs],
            [held(field, column[first:stop]) for field, column in columns],
            self.terminated[first:stop],
            self.truncated[first:stop],
            None if taken is None or taken.all() else taken,
            self._lacks_finals,
        )

    def _observed(self, field: Field, index: int, first: int, stop: int) -> tuple[Array, Array]:
        """A leaf of the observations before and after some steps, in the same memory where they follow one another."""
        leaf = self._observations[index]
        if self._following is not None:
            return held(field, leaf[first:stop]), held(field, self._following[index][first:stop])
        if stop < len(leaf):
            chain = leaf[first : stop + 1]
        else:
            chain = joined([leaf[first:], leaf[-1:] if self._finals is None else self._finals[index][None]])
        chain = held(field, chain)
        return chain[:-1], chain[1:]


def _following_of(field: Field) -> Field:
    """The field of the observations after each step."""
    return Field("next_" + field.name, field.shape, field.dtype, field.origin)


def _told(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def size_of(value: Any) -> int:
    """The entries of an array or a list; 0 of a single value."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    return len(value) if isinstance(value, (list, tuple)) else 0


def _leaves(structure: Structure, fields: list[Field], value: Any, before: str = "") -> list[Array]:
    leaves = structure.leaves(value)
    return [as_array(leaf, f"{before}{field.name}") for field, leaf in zip(fields, leaves, strict=True)]


def _columns(values: Mapping[str, Any], fields: StepFields) -> Iterator[tuple[Field, Any]]:
    """The values of all columns; recurrent states are ``[steps, layers, hidden]``, for an LSTM a pair of them."""
    states = values.get("hidden_states")
    hidden = states if isinstance(states, (tuple, list)) else () if states is None else (states,)
    if len(hidden) != len(fields.hidden_shapes):
        raise InvalidInputError(
            f"hidden_states holds {len(hidden)} states; this storage holds {len(fields.hidden_shapes)}, fixed by its "
            f"hidden_shape. {NOTHING}"
        )
    given = (values["actions"], values["rewards"], *hidden, *(values[name] for name in fields.extra_names))
    return zip(fields.columns, given, strict=True)


def _check(field: Field, value: Array) -> None:
    """Refuse a value that a field cannot hold. It is looked at only where that may depend on it."""
    given, needed = tuple(value.shape[1:]), field.shape
    if given != needed and {given, needed} != {(), (1,)}:
        raise InvalidInputError(
            f"{field.name} of a step are {given} {_name(value.dtype)}; this storage holds {needed} "
            f"{_name(field.dtype)}, fixed by {field.origin}. {NOTHING}"
        )
    if field.rule is not None or not (is_held_as_it_is(field, value) or _is_rounded(field, value)):
        # What is converted for it is not held all at once.
        size = max(_COPIED_BYTES // max(field.dtype.itemsize * math.prod(field.shape), 1), 1)
        for first in range(0, len(value), size):
            part = value[first : first + size]
            try:
                field.fit(part, len(part), _HOST, len(part))
            except InvalidInputError as error:
                counted = f"counted from step {first:,}, " if first else ""
                raise InvalidInputError(f"{counted}{error}") from error


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _is_rounded(field: Field, value: Array) -> bool:
    """Whether all of a value fits, if only because floats may be rounded."""
    is_float = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
    return is_float and field.dtype.is_floating_point and value.shape[1:] == field.shape


def _refuse_nan(field: Field, value: Array) -> None:
    if not _has_nan(value):
        return
    place = np.argwhere(np.isnan(as_numpy(value)))[0].tolist()
    raise InvalidInputError(
        f"{field.name}{place} is nan, and so would be all parameters of a network that learns from it. Leave the "
        f"episode out, or give a number instead. {NOTHING}"
    )


def _has_nan(value: Array) -> bool:
    """Whether a value is NaN: then, and only then, the sum of their squares is. It needs no memory of its own."""
    if isinstance(value, Tensor):
        flat = value.reshape(-1)
        return value.is_floating_point() and bool(torch.isnan(torch.dot(flat, flat)))
    with np.errstate(all="ignore"):
        flat = value.reshape(-1)
        return value.dtype.kind == "f" and bool(np.isnan(np.dot(flat, flat)))
