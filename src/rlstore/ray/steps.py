"""Steps on their way from a writer to a shard: stacked ``[steps, envs, ...]``, an array for each tensor of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlstore.engine.rows.finals import fit_final
from rlstore.engine.rows.schema import Field, Structure, as_tensor, can_hold, dtype_name
from rlstore.errors import InvalidInputError
from rlstore.ray.wire import Array, Packed, own_tensors, pack
from rlstore.storage import Sample


class Steps(NamedTuple):
    """Steps as Ray moves them.

    Attributes:
        fields: What each entry of the samples held, ``[steps, ...]``.
        present: For each entry, the steps whose sample had it, bool ``[steps]``.
        steps: How many.
        num_envs: The environments of each.
    """

    fields: dict[str, Packed]
    present: dict[str, Array]
    steps: int
    num_envs: int


def each_step(steps: Steps) -> Iterator[tuple[Sample, int]]:
    """The samples, and the transitions that each stands for."""
    columns = {name: _unbind(own_tensors(packed), steps.steps) for name, packed in steps.fields.items()}
    for step in range(steps.steps):
        sample = {name: column[step] for name, column in columns.items() if steps.present[name][step]}
        masks = sample.get("masks")
        yield sample, steps.num_envs if masks is None else int((masks != 0).sum())


def _unbind(nest: Any, steps: int) -> Sequence[Any]:
    """A nest of tensors ``[steps, ...]`` as the nest of each step."""
    if isinstance(nest, Tensor):
        return nest.unbind(0)
    if isinstance(nest, dict):
        parts = {key: _unbind(part, steps) for key, part in nest.items()}
        return [{key: part[step] for key, part in parts.items()} for step in range(steps)]
    if isinstance(nest, tuple) and nest:
        return list(zip(*(_unbind(part, steps) for part in nest), strict=True))
    return [nest] * steps


def _flatten(nest: Any, name: str, leaves: list[tuple[str, Any]]) -> Any:
    """The form of a nest, and its leaves by name; None is part of the form."""
    if isinstance(nest, (Mapping, TensorDictBase)):
        return {key: _flatten(nest[key], f'{name}["{key}"]', leaves) for key in nest.keys()}  # noqa: SIM118
    if isinstance(nest, tuple):
        return tuple(_flatten(part, f"{name}[{index}]", leaves) for index, part in enumerate(nest))
    if nest is None:
        return None
    leaves.append((name, nest))
    return "tensor"


def _unflatten(form: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(form, dict):
        return {key: _unflatten(part, leaves) for key, part in form.items()}
    if isinstance(form, tuple):
        return tuple(_unflatten(part, leaves) for part in form)
    return None if form is None else next(leaves)


class _Stacked:
    """One entry of the samples, stacked. The first sample that has it fixes its form."""

    def __init__(self, name: str, value: Any, steps: int) -> None:
        self._name = name
        found: list[tuple[str, Any]] = []
        self._form = _flatten(value, name, found)
        tensors = [as_tensor(leaf, leaf_name) for leaf_name, leaf in found]
        self.stacks = [torch.empty((steps, *tensor.shape), dtype=tensor.dtype) for tensor in tensors]
        unbound = [stack.unbind(0) for stack in self.stacks]
        self.rows = [[rows[step] for rows in unbound] for step in range(steps)]  # the leaves of each step
        self.present = np.zeros(steps, dtype=bool)

    def fit(self, value: Any) -> list[Tensor]:
        """The tensors of a value, or an error; nothing is written."""
        if isinstance(value, Tensor) and self._form == "tensor" and not value.requires_grad:
            row = self.rows[0][0]
            if value.dtype == row.dtype and value.shape == row.shape:
                return [value]  # as nearly all are
        found: list[tuple[str, Any]] = []
        form = _flatten(value, self._name, found)
        if form != self._form:
            raise InvalidInputError(
                f"{self._name} has the form {form}; this writer sends {self._form}, fixed by its first sample. "
                "Nothing was added."
            )
        fitted = []
        for stack, (name, leaf) in zip(self.stacks, found, strict=True):
            given = as_tensor(leaf, name)
            if given.shape != stack.shape[1:] or not can_hold(given, stack.dtype):
                raise InvalidInputError(
                    f"{name} is {tuple(given.shape)} {dtype_name(given.dtype)}; this writer sends "
                    f"{tuple(stack.shape[1:])} {dtype_name(stack.dtype)}, fixed by its first sample. Nothing was added."
                )
            fitted.append(given)
        return fitted

    def nest(self, steps: int) -> Any:
        """The first steps, in the form of the samples."""
        return _unflatten(self._form, iter([stack[:steps] for stack in self.stacks]))


class StepBuffer:
    """Room for some steps of a writer.

    Args:
        steps: How many.
        num_envs: The environments of each; None takes as many as the first sample has.
    """

    def __init__(self, steps: int, num_envs: int | None) -> None:
        self.steps, self.num_envs, self.transitions = 0, num_envs, 0
        self._room = steps
        self._fields: dict[str, _Stacked] = {}

    @property
    def is_full(self) -> bool:
        """True if no step has room any more."""
        return self.steps == self._room

    def add(self, sample: Sample) -> None:
        """Copy a sample in, or refuse it whole."""
        if not isinstance(sample, Mapping):
            raise InvalidInputError(f"a sample is a {type(sample).__name__}; give a dict. Nothing was added.")
        given = {name: value for name, value in sample.items() if value is not None}
        if "observations" not in given:
            raise InvalidInputError("a sample needs 'observations'. Nothing was added.")
        num_envs = self._check_envs(given["observations"])
        if "final_observations" in given:
            given["final_observations"] = _whole_final(given, num_envs)
        new = {name: _Stacked(name, value, self._room) for name, value in given.items() if name not in self._fields}
        fields = {**self._fields, **new}
        fitted = {name: fields[name].fit(value) for name, value in given.items()}
        for name, leaves in fitted.items():
            for row, leaf in zip(fields[name].rows[self.steps], leaves, strict=True):
                row.copy_(leaf)
            fields[name].present[self.steps] = True
        masks = fitted.get("masks")
        self.transitions += num_envs if masks is None else int((masks[0] != 0).sum())
        self._fields, self.num_envs = fields, num_envs
        self.steps += 1

    def _check_envs(self, observations: Any) -> int:
        leaves: list[tuple[str, Any]] = []
        _flatten(observations, "observations", leaves)
        shape = as_tensor(leaves[0][1], leaves[0][0]).shape if leaves else ()
        if not shape or (self.num_envs is not None and shape[0] != self.num_envs):
            raise InvalidInputError(
                f"observations are {tuple(shape)}; they have to begin with "
                f"{self.num_envs or 'the number of'} environments of this writer. Nothing was added."
            )
        return int(shape[0])

    def packed(self) -> Steps:
        """The steps for Ray."""
        fields = {name: pack(stacked.nest(self.steps)) for name, stacked in self._fields.items()}
        present = {name: stacked.present[: self.steps] for name, stacked in self._fields.items()}
        return Steps(fields, present, self.steps, self.num_envs or 0)

    def clear(self) -> None:
        """Make room; the form of the samples stays."""
        for stacked in self._fields.values():
            stacked.present[:] = False
        self.steps = self.transitions = 0


def _whole_final(given: Sample, num_envs: int) -> Any:
    """Final observations ``[envs, ...]``: where none is given, the next observation, which then is the last one."""
    following = given.get("next_observations", given["observations"])
    leaves: list[tuple[str, Any]] = []
    form = _flatten(following, "final_observations", leaves)
    shown = [as_tensor(leaf, name).cpu() for name, leaf in leaves]
    fields = [
        Field(name, tuple(leaf.shape[1:]), leaf.dtype, "next_observations")
        for (name, _), leaf in zip(leaves, shown, strict=True)
    ]
    structure = Structure.of(following, "final_observations")
    *found, has = fit_final("final_observations", given["final_observations"], structure, fields, num_envs)
    whole = [
        torch.where(has.view(-1, *[1] * (leaf.dim() - 1)), final, leaf)
        for final, leaf in zip(found, shown, strict=True)
    ]
    return _unflatten(form, iter(whole))
