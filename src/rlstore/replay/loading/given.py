"""What a caller gives: arrays of steps, one after another, or an episode; checked as a whole, and cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.rows.schema import Field, Structure
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError
from rlstore.replay.loading.names import NOTHING
from rlstore.replay.loading.steps import Array, Flags, Steps, as_array, fitted, following_of, joined

_HOST = torch.device("cpu")


class Given:
    """Arrays ``[steps, ...]`` of one environment after another, or of a single episode.

    What comes after a step is the next entry of ``next_observations`` or, without them, of ``observations``. At the
    end of an episode the latter is not known. A step that terminated stays, and its own observation stands for the
    final one, which nothing is learnt from. A step that was truncated is left out, and so is the last one if it did not
    terminate: their targets would need it. The step before a truncated one is then truncated instead.

    Args:
        values: The arrays, by the names of the vocabulary.
        fields: The fields of the storage.
        what: What errors call them.
        is_episode: Whether it is a single episode: then there may be one more observation, or ``final_observations``,
            and its flags may be two values.
        refuses_nan: Refuse observations and actions that are NaN.

    Attributes:
        lost: Steps that are left out.

    Raises:
        InvalidInputError: If lengths differ, or an episode ends in the middle.
    """

    def __init__(
        self, values: Mapping[str, Any], fields: StepFields, what: str, *, is_episode: bool, refuses_nan: bool = True
    ) -> None:
        self._fields, self._what, self._is_episode, self._refuses_nan = fields, what, is_episode, refuses_nan
        self._columns = [as_array(value, field.name) for field, value in _columns(values, fields)]
        self._read_observations(values)
        self._steps = self._count(values)
        self.terminated, self.truncated = (self._flags(values, name) for name in ("terminated", "truncated"))
        if is_episode:
            self._check_end()
        self._taken = self._leave_out() if self._following is None else None

    def __len__(self) -> int:
        return self._steps

    @property
    def lost(self) -> int:
        """Steps that are left out."""
        return 0 if self._taken is None else self._steps - int(np.count_nonzero(self._taken))

    # ---------------------------------------------------------------------------------------------- reading

    def _read_observations(self, values: Mapping[str, Any]) -> None:
        """Take the leaves of the observations, and what follows each."""
        structure, fields = self._fields.structure, self._fields.observations
        observations, steps = _leaves(structure, fields, values["observations"]), _size(self._columns[1])
        self._observations, self._following = observations, None
        following, final = values.get("next_observations"), values.get("final_observations")
        is_longer = self._is_episode and all(_size(leaf) == steps + 1 for leaf in observations)
        if is_longer:
            self._observations = [leaf[:-1] for leaf in observations]
        if following is not None:
            self._following = _leaves(self._fields.next_structure, fields, following, "next_")
        elif is_longer:
            self._following = [leaf[1:] for leaf in observations]
        elif final is not None:
            ends = _leaves(structure, fields, final, "final_")
            self._following = [self._with_end(leaf, end) for leaf, end in zip(observations, ends, strict=True)]

    def _with_end(self, leaf: Array, end: Array) -> Array:
        """What follows each observation, up to the final one."""
        if not _size(leaf) or leaf.shape[1:] != end.shape:
            raise InvalidInputError(
                f"{self._what} has final_observations {tuple(end.shape)} and observations {tuple(leaf.shape)}; the "
                f"former are one observation, without an axis for steps. {NOTHING}"
            )
        return joined(leaf[1:], end[None])

    def _count(self, values: Mapping[str, Any]) -> int:
        """The number of steps, which all arrays have."""
        observed = [*self._observations, *(self._following or ())]
        counts = {field.name: _size(value) for field, value in zip(self._fields.columns, self._columns, strict=True)}
        names = [field.name for field in self._fields.observations]
        names += [f"next_{name}" for name in names] if self._following is not None else []
        counts = {**dict(zip(names, map(_size, observed), strict=True)), **counts}
        steps = counts["rewards"]
        if set(counts.values()) != {steps}:
            more = " (or one more, the last of them the final observation)" if self._is_episode else ""
            raise InvalidInputError(
                f"{self._what} has arrays of unequal length: {counts}; each needs an entry for every step, and "
                f"observations as many{more}. {NOTHING}"
            )
        if not steps:
            raise InvalidInputError(f"{self._what} has no steps. {NOTHING}")
        return steps

    def _flags(self, values: Mapping[str, Any], name: str) -> Flags:
        """End flags ``[steps]``, 0 or 1; of an episode they may be one value, which is that of its last step."""
        value = values.get(name, False)
        if value is False:
            return np.zeros(self._steps, np.uint8)
        if self._is_episode and not _size(value):
            value = [False] * (self._steps - 1) + [value]
        field = Field(name, (), torch.uint8, "the rewards", is_flag=True)
        flags: Flags = fitted(field, value, self._steps, _HOST).numpy()
        return flags

    def _check_end(self) -> None:
        inside = np.flatnonzero((self.terminated | self.truncated)[:-1])
        if len(inside):
            raise InvalidInputError(
                f"{self._what} has {self._steps} steps and ends after step {inside[0]}; give episodes one by one. "
                f"Arrays with many of them are for from_arrays(). {NOTHING}"
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
            after = map(following_of, self._fields.observations)
            observed += zip(after, self._following, strict=True)
        try:
            for field, value in (*columns, *observed):
                _check(field, value, self._steps)
            for field, value in (*columns[:1], *observed) if self._refuses_nan else ():
                _refuse_nan(field, value)
        except InvalidInputError as error:
            raise InvalidInputError(f"{self._what}: {error}") from error

    # ---------------------------------------------------------------------------------------------- pieces

    def lengths(self) -> list[int]:
        """The transitions of each episode, as the end flags tell them; those without any are left out."""
        stops = self._stops()
        taken = np.ones(self._steps, np.int64) if self._taken is None else self._taken.astype(np.int64)
        counts: list[int] = np.add.reduceat(taken, np.r_[0, stops[:-1]]).tolist()
        return [count for count in counts if count]

    def _stops(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One past the last step of each episode."""
        ended = self.terminated | self.truncated
        if self._taken is not None:
            ended |= 1 - self._taken
        ended[-1] = 1
        stops: np.ndarray[Any, np.dtype[np.int64]] = np.flatnonzero(ended) + 1
        return stops

    def pieces(self, most: int) -> Iterator[Steps]:
        """Whole episodes, one after another: as many at a time as have ``most`` steps, and at least one."""
        first, last = 0, 0
        for stop in self._stops().tolist():
            if last > first and stop - first > most:
                yield from self._piece(first, last)
                first = last
            last = stop
        yield from self._piece(first, last)

    def _piece(self, first: int, stop: int) -> Iterator[Steps]:
        taken, lacks_finals = None, self._following is None
        if self._following is not None:
            following = [leaf[first:stop] for leaf in self._following]
        else:
            assert self._taken is not None
            if stop == self._steps and not self._taken[-1]:
                stop -= 1  # nothing follows it
            if not self._taken[first:stop].any():
                return
            taken = self._taken[first:stop]
            following = [self._rest(leaf, first, stop) for leaf in self._observations]
        yield Steps(
            [leaf[first:stop] for leaf in self._observations],
            following,
            [column[first:stop] for column in self._columns],
            self.terminated[first:stop],
            self.truncated[first:stop],
            None if taken is None or taken.all() else taken,
            lacks_finals,
        )

    def _rest(self, leaf: Array, first: int, stop: int) -> Array:
        """The next entries; behind the last of all, that itself."""
        return leaf[first + 1 : stop + 1] if stop < self._steps else joined(leaf[first + 1 :], leaf[-1:])


def _size(value: Any) -> int:
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


def _check(field: Field, value: Array, steps: int) -> None:
    """Refuse a value that a field cannot hold; what is of its shape and dtype, and obeys no rule, is not looked at."""
    is_ready = tuple(value.shape) == (steps, *field.shape) and _name(value.dtype) == _name(field.dtype)
    if not is_ready or field.rule is not None:
        fitted(field, value, steps, _HOST)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_nan(field: Field, value: Array) -> None:
    if not _has_nan(value):
        return
    place = np.argwhere(np.isnan(np.asarray(value)))[0].tolist()
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
