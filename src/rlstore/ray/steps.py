"""Steps on their way from a writer to a shard: stacked ``[steps, envs, ...]``, in few pieces, and large ones once."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlstore.engine.rows.finals import fit_final
from rlstore.engine.rows.schema import as_tensor, can_hold, dtype_name, fields_of_example
from rlstore.errors import InvalidInputError
from rlstore.ray.wire import Array, Packed, bits_dtype, bits_of, build, own_tensors, read_only
from rlstore.storage import Sample

# Ray moves tensors of this size without a copy; smaller ones travel together, which costs less than one object each.
_LARGE_BYTES = 1 << 15

# To compare smaller observations takes longer than to send them twice.
_CHAINED_BYTES = 1 << 10

_ALIGNMENT = 16


class Steps(NamedTuple):
    """Steps as Ray transfers them.

    Attributes:
        header: A pickled :class:`_Header`, which is the same for many calls.
        small: The stacks of small tensors, one after another.
        large: Those of large tensors.
        present: Of entries that some of the samples lack, the steps that have it, bool ``[steps]``.
        breaks: If next observations are not sent: the steps whose next observations are not the observations of the
            step after it.
        broken: The next observations of these steps, for each tensor ``[breaks, envs, ...]``.
    """

    header: bytes
    small: bytes
    large: list[Array]
    present: dict[str, Array]
    breaks: list[int]
    broken: list[Array]


class _Header(NamedTuple):
    """What the pieces of :class:`Steps` are.

    Attributes:
        steps: The number of steps.
        num_envs: The environments of each.
        chained: If True there is one observation more than steps, and no next observations: they are those that follow.
        entries: Of each entry its form, and the dtype and the shape of each of its tensors at one step.
    """

    steps: int
    num_envs: int
    chained: bool
    entries: dict[str, tuple[Any, list[tuple[torch.dtype, tuple[int, ...]]]]]


class Chunk(NamedTuple):
    """Steps as they have arrived.

    Attributes:
        fields: The entries of the samples by name, ``[steps, ...]``; read-only.
        present: Of entries that some of the samples lack, the steps that have it, bool ``[steps]``.
        steps: The number of steps.
        num_envs: The environments of each.
    """

    fields: dict[str, Packed]
    present: dict[str, Array]
    steps: int
    num_envs: int

    @classmethod
    def of(cls, sent: Steps) -> Chunk:
        """What was sent."""
        header: _Header = pickle.loads(sent.header)
        large, offset, fields = iter(sent.large), 0, {}
        for name, (form, tensors) in header.entries.items():
            rows = header.steps + (header.chained and name == "observations")
            arrays: list[Array] = []
            for dtype, shape in tensors:
                size = rows * math.prod(shape) * dtype.itemsize
                if size >= _LARGE_BYTES:
                    arrays.append(next(large))
                else:
                    bits = np.frombuffer(sent.small, np.uint8, size, offset).view(bits_dtype(dtype))
                    arrays.append(bits.reshape(rows, *shape))
                    offset += _padded(size)
            fields[name] = Packed(form, [dtype for dtype, _ in tensors], arrays)
        if header.chained:
            chain = fields["observations"]
            fields["observations"] = chain._replace(arrays=[array[:-1] for array in chain.arrays])
            fields["next_observations"] = chain._replace(arrays=_following(chain.arrays, sent))
        return cls(fields, sent.present, header.steps, header.num_envs)

    @property
    def transitions(self) -> int:
        """The number of transitions, if all samples have masks or none has."""
        masks = self.fields.get("masks")
        return self.steps * self.num_envs if masks is None else int(np.count_nonzero(masks.arrays[0]))

    def whole(self) -> Sample:
        """The entries as one sample, ``[steps, ...]``; its tensors must not be written."""
        return {
            name: build(packed.form, (read_only(*part) for part in zip(packed.arrays, packed.dtypes, strict=True)))
            for name, packed in self.fields.items()
        }

    def each(self) -> Iterator[tuple[Sample, int]]:
        """The samples, in memory of their own, and the number of transitions in each."""
        columns = {name: _unstack(packed, self.steps) for name, packed in self.fields.items()}
        for step in range(self.steps):
            has = {name for name in columns if name not in self.present or self.present[name][step]}
            sample = {name: column[step] for name, column in columns.items() if name in has}
            masks = sample.get("masks")
            yield sample, self.num_envs if masks is None else int((masks != 0).sum())


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _following(chains: Sequence[Array], sent: Steps) -> list[Array]:
    """The next observations of steps whose observations are ``[steps + 1, ...]`` with the last of the next ones."""
    following = [chain[1:] for chain in chains]
    if sent.breaks:
        following = [array.copy() for array in following]
        for array, broken in zip(following, sent.broken, strict=True):
            array[sent.breaks] = broken
    return following


def _unstack(packed: Packed, steps: int) -> Sequence[Any]:
    """The value of an entry at each step."""
    columns = [tensor.unbind(0) for tensor in own_tensors(packed)]
    if packed.form == ("tensor",):
        return columns[0]
    rows = zip(*columns, strict=True) if columns else [()] * steps
    return [build(packed.form, iter(row)) for row in rows]


def _describe(nest: Any, name: str, leaves: list[tuple[str, Any]]) -> Any:
    """The form of an entry of a sample for :func:`build`, and its leaves by name; TensorDicts become dicts."""
    if isinstance(nest, (Mapping, TensorDictBase)):
        keys = nest.keys()
        return ("dict", {key: _describe(nest[key], f'{name}["{key}"]', leaves) for key in keys})
    if isinstance(nest, tuple):
        return ("tuple", [_describe(part, f"{name}[{index}]", leaves) for index, part in enumerate(nest)])
    if nest is None:
        return ("value", None)
    leaves.append((name, nest))
    return ("tensor",)


class _Entry:
    """One entry of the samples, stacked ``[rows, ...]``. The first sample that has it fixes its form.

    Args:
        name: The name of the entry.
        value: The first value.
        rows: The number of values for which there is memory.
        chain: The observations, if these are next observations: their memory is that of the observations one step
            later, where both have the same form and are large.
    """

    def __init__(self, name: str, value: Any, rows: int, chain: _Entry | None = None) -> None:
        self._name = name
        leaves: list[tuple[str, Any]] = []
        self.form = _describe(value, name, leaves)
        self._parts = [part for part, _ in leaves]
        tensors = [as_tensor(leaf, part) for part, leaf in leaves]
        self.tensors = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        self.is_chained = chain is not None and self._can_share(chain)
        self._stacks: list[Tensor]
        if chain is not None and self.is_chained:
            self._stacks = [stack[1:] for stack in chain._stacks]
        else:
            self._stacks = [torch.empty((rows, *shape), dtype=dtype) for dtype, shape in self.tensors]
        self.bits = [bits_of(stack) for stack in self._stacks]
        # The array that is copied as it is; there is none of dtypes that numpy does not know.
        is_plain = self.form == ("tensor",) and torch.from_numpy(self.bits[0]).dtype == tensors[0].dtype
        self._plain = (self.bits[0].dtype, self.tensors[0][1]) if is_plain else None
        self.present = np.zeros(rows, dtype=bool)

    def _can_share(self, chain: _Entry) -> bool:
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.tensors)
        return (self.form, self.tensors) == (chain.form, chain.tensors) and size >= _CHAINED_BYTES

    def fit(self, value: Any) -> Sequence[Array | Tensor]:
        """The tensors of a value as :meth:`write` takes them, or an error; nothing is written."""
        if type(value) is np.ndarray and self._plain == (value.dtype, value.shape):
            return (value,)  # the usual case, on every add
        leaves: list[tuple[str, Any]] = []
        if _describe(value, self._name, leaves) != self.form:
            raise InvalidInputError(
                f"{self._name} consists of {[part for part, _ in leaves]}; this writer sends {self._parts}, fixed by "
                "its first sample. Nothing was added."
            )
        fitted = []
        for (dtype, shape), (part, leaf) in zip(self.tensors, leaves, strict=True):
            given = as_tensor(leaf, part)
            if given.shape != shape or not can_hold(given, dtype):
                raise InvalidInputError(
                    f"{part} is {tuple(given.shape)} {dtype_name(given.dtype)}; this writer sends "
                    f"{shape} {dtype_name(dtype)}, fixed by its first sample. Nothing was added."
                )
            fitted.append(given)
        return fitted

    def write(self, row: int, fitted: Sequence[Array | Tensor]) -> None:
        """Write a value that fits."""
        for stack, bits, value in zip(self._stacks, self.bits, fitted, strict=True):
            if isinstance(value, np.ndarray):
                bits[row] = value
            else:
                stack[row].copy_(value)
        self.present[row] = True

    def holds(self, row: int, fitted: Sequence[Array | Tensor]) -> bool:
        """True if the memory of a row holds a value that fits, bit for bit."""
        for bits, (dtype, _), value in zip(self.bits, self.tensors, fitted, strict=True):
            given = value if isinstance(value, np.ndarray) else bits_of(value.cpu().to(dtype))
            if not _same_bits(bits[row], given):
                return False
        return True


def _same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays of the same shape and dtype are the same bit for bit; 0.0 is not -0.0, and a NaN is itself."""
    word = np.uint64 if one.nbytes % 8 == 0 else np.uint8
    words, others = (np.ascontiguousarray(array).reshape(-1).view(word) for array in (one, other))
    return bool((words == others).all())


class StepBuffer:
    """Memory for some steps of a writer.

    Where large observations continue those of the step before, only one of the two is sent.

    Args:
        capacity: The number of steps.
        num_envs: The environments of each; None takes the number from the first sample.
    """

    def __init__(self, capacity: int, num_envs: int | None) -> None:
        self.steps, self.num_envs, self.transitions = 0, num_envs, 0
        self._capacity = capacity
        self._entries: dict[str, _Entry] = {}
        self._breaks: list[int] = []
        self._broken: list[list[Array]] = []
        self._headers: dict[tuple[int, int], bytes] = {}

    @property
    def is_full(self) -> bool:
        """True if it holds as many steps as it can."""
        return self.steps == self._capacity

    def add(self, sample: Sample) -> None:
        """Copy a sample; if it is refused nothing changes."""
        if not isinstance(sample, Mapping):
            raise InvalidInputError(f"a sample is a {type(sample).__name__}; give a dict. Nothing was added.")
        given = {name: value for name, value in sample.items() if value is not None}
        if "observations" not in given:
            raise InvalidInputError("a sample needs 'observations'. Nothing was added.")
        num_envs = self._check_envs(given["observations"])
        if "final_observations" in given:
            given["final_observations"] = _without_gaps(given, num_envs)
        entries = self._entries if given.keys() <= self._entries.keys() else self._with_new(given)
        fitted = {name: entries[name].fit(value) for name, value in given.items()}
        if self._continues(entries, fitted["observations"]):
            entries["observations"].present[self.steps] = True
        else:
            entries["observations"].write(self.steps, fitted["observations"])
        for name, values in fitted.items():
            if name != "observations":
                entries[name].write(self.steps, values)
        masks = fitted.get("masks")
        self.transitions += num_envs if masks is None else int((masks[0] != 0).sum())
        self._entries, self.num_envs = entries, num_envs
        self.steps += 1

    def _check_envs(self, observations: Any) -> int:
        shape = getattr(observations, "shape", None)
        if shape and shape[0] == self.num_envs:
            return int(shape[0])
        leaves: list[tuple[str, Any]] = []
        _describe(observations, "observations", leaves)
        shape = as_tensor(leaves[0][1], leaves[0][0]).shape if leaves else ()
        if not shape or (self.num_envs is not None and shape[0] != self.num_envs):
            raise InvalidInputError(
                f"observations are {tuple(shape)}; they have to begin with "
                f"{self.num_envs or 'the number of'} environments of this writer. Nothing was added."
            )
        return int(shape[0])

    def _with_new(self, given: Sample) -> dict[str, _Entry]:
        """The entries, with those that these samples are the first to have."""
        rows = self._capacity + 1  # that of the last next observation
        entries = dict(self._entries)
        for name in sorted(given.keys() - entries.keys(), key=list(given).index):
            if name != "next_observations":
                entries[name] = _Entry(name, given[name], rows)
        if "next_observations" in given and "next_observations" not in entries:
            # Only from the first step on: earlier observations were written without regard to next ones.
            chain = None if self._entries else entries["observations"]
            entries["next_observations"] = _Entry("next_observations", given["next_observations"], rows, chain)
        return entries

    def _continues(self, entries: dict[str, _Entry], observations: Sequence[Array | Tensor]) -> bool:
        """Whether observations are the next ones of the step before, and so are in their place already.

        If they are not, these next ones are set aside.
        """
        following = entries.get("next_observations")
        if following is None or not following.is_chained or self.steps == 0:
            return False
        if entries["observations"].holds(self.steps, observations):
            return True
        self._breaks.append(self.steps - 1)
        self._broken.append([bits[self.steps - 1].copy() for bits in following.bits])
        return False

    def packed(self) -> Steps:
        """The steps for Ray."""
        following = self._entries.get("next_observations")
        chained = following is not None and following.is_chained
        small, large, steps = [], [], self.steps
        for name, entry in self._entries.items():
            if chained and name == "next_observations":
                continue
            rows = steps + (chained and name == "observations")
            for bits in entry.bits:
                if rows * bits[0].nbytes >= _LARGE_BYTES:
                    large.append(bits[:rows])
                else:
                    small.append(bits[:rows].tobytes())
                    small.append(bytes(_padded(len(small[-1])) - len(small[-1])))
        present = {name: entry.present[:steps] for name, entry in self._entries.items()}
        lacking = {name: steps_of for name, steps_of in present.items() if not steps_of.all()}
        broken = [np.stack(rows) for rows in zip(*self._broken, strict=True)]
        return Steps(self._header(chained=chained), b"".join(small), large, lacking, self._breaks, broken)

    def _header(self, *, chained: bool) -> bytes:
        key = self.steps, len(self._entries)  # entries are only added
        if key not in self._headers:
            entries = {
                name: (entry.form, entry.tensors)
                for name, entry in self._entries.items()
                if not (chained and name == "next_observations")
            }
            self._headers = {key: pickle.dumps(_Header(self.steps, self.num_envs or 0, chained, entries))}
        return self._headers[key]

    def clear(self) -> None:
        """Discard the steps; the form of the samples stays fixed."""
        for entry in self._entries.values():
            entry.present[:] = False
        self.steps = self.transitions = 0
        self._breaks, self._broken = [], []


def _without_gaps(given: Sample, num_envs: int) -> Any:
    """Final observations ``[envs, ...]``: the next observation where none is given, which then is the final one."""
    following = given.get("next_observations", given["observations"])
    structure, fields = fields_of_example(following, "final_observations", 1, "next_observations")
    *finals, has = fit_final("final_observations", given["final_observations"], structure, fields, num_envs)
    shown = [
        as_tensor(leaf, name).cpu() for leaf, name in zip(structure.leaves(following), structure.names, strict=True)
    ]
    filled = [
        torch.where(has.view(-1, *[1] * (leaf.dim() - 1)), final, leaf)
        for final, leaf in zip(finals, shown, strict=True)
    ]
    return structure.build(filled, (num_envs,))
