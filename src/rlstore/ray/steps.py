"""Steps on their way from a writer to a shard: stacked ``[steps, envs, ...]``, in few pieces, and large ones once."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.rows.finals import fit_final
from rlstore.engine.rows.schema import as_tensor, can_hold, dtype_name, fields_of_example
from rlstore.errors import InvalidInputError
from rlstore.ray.wire import Array, Packed, bits_dtype, bits_of, build, own_tensors, read_only
from rlstore.storage import Sample

# Ray moves tensors of this size without a copy; smaller ones travel together, which costs less than one object each.
_LARGE_BYTES = 1 << 15

# To compare smaller observations takes longer than to send them twice.
_SHARED_BYTES = 1 << 10

# An axis of observations that is longer is none of frames.
_MOST_FRAMES = 16

# The memory that steps may take so that more of them are sent in one call.
_CALL_BYTES = 4 << 20

_ALIGNMENT = 16


class Steps(NamedTuple):
    """Steps as Ray transfers them.

    Attributes:
        header: A pickled :class:`_Header`, which is the same for many calls.
        small: The stacks of small tensors, one after another.
        large: Those of large tensors, and frames.
        places: For each tensor of observations that is sent as frames: at which frame its observations begin, and at
            which its next observations, int64 ``[2, steps]``.
        present: Of entries that some of the samples lack, the steps that have it, bool ``[steps]``.
    """

    header: bytes
    small: bytes
    large: list[Array]
    places: list[Array]
    present: dict[str, Array]


class _Form(NamedTuple):
    """One tensor of an entry.

    Attributes:
        dtype: Its dtype.
        shape: Its shape at one step.
        depth: 0, or the frames of which it consists: then it is sent as frames, together with next observations.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    depth: int = 0

    @property
    def bytes(self) -> int:
        """The size of a value."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Header(NamedTuple):
    """What the pieces of :class:`Steps` are.

    Attributes:
        steps: The number of steps.
        num_envs: The environments of each.
        entries: Of each entry the form of the nest, and of each of its tensors.
    """

    steps: int
    num_envs: int
    entries: dict[str, tuple[Any, list[_Form]]]


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
        large, places, offset, fields = iter(sent.large), iter(sent.places), 0, {}
        following: list[Array] = []  # the next observations that come with frames of observations
        for name, (form, tensors) in header.entries.items():
            arrays: list[Array] = []
            for tensor in tensors:
                size = header.steps * tensor.bytes
                if tensor.depth and name == "observations":
                    observations, after = _stacked(next(large), next(places), tensor.depth)
                    arrays.append(observations)
                    following.append(after)
                elif tensor.depth:
                    arrays.append(following.pop(0))
                elif size >= _LARGE_BYTES:
                    arrays.append(next(large))
                else:
                    bits = np.frombuffer(sent.small, np.uint8, size, offset).view(bits_dtype(tensor.dtype))
                    arrays.append(bits.reshape(header.steps, *tensor.shape))
                    offset += _padded(size)
            fields[name] = Packed(form, [tensor.dtype for tensor in tensors], arrays)
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


def _stacked(frames: Array, places: Array, depth: int) -> tuple[Array, Array]:
    """The observations and the next observations ``[steps, envs, ...]`` that begin at these places of frames."""

    def stacks(at: Array) -> Array:
        if depth > 1:
            return np.ascontiguousarray(frames[at[:, None] + np.arange(depth)].swapaxes(1, 2))
        first, last = int(at[0]), int(at[-1])
        is_range = last - first == len(at) - 1 and bool((np.diff(at) == 1).all())
        return frames[first : last + 1] if is_range else frames[at]

    at, after = places
    if (at[1:] != after[:-1]).any():
        return stacks(at), stacks(after)
    chain = stacks(np.append(at, after[-1]))
    return chain[:-1], chain[1:]


def _unstack(packed: Packed, steps: int) -> Sequence[Any]:
    """The value of an entry at each step."""
    columns = [tensor.unbind(0) for tensor in own_tensors(packed)]
    if packed.form == ("tensor",):
        return columns[0]
    rows = zip(*columns, strict=True) if columns else [()] * steps
    return [build(packed.form, iter(row)) for row in rows]


def _describe(nest: Any, name: str, leaves: list[tuple[str, Any]]) -> Any:
    """The form of an entry of a sample for :func:`build`, and its leaves by name; TensorDicts become dicts."""
    if isinstance(nest, Mapping):
        keys = nest.keys()
        return ("dict", {key: _describe(nest[key], f'{name}["{key}"]', leaves) for key in keys})
    if isinstance(nest, tuple):
        return ("tuple", [_describe(part, f"{name}[{index}]", leaves) for index, part in enumerate(nest)])
    if nest is None:
        return ("value", None)
    leaves.append((name, nest))
    return ("tensor",)


class _Stack:
    """The values of one tensor, ``[steps, ...]``.

    Args:
        form: The tensor.
        steps: The steps for which there is memory.
    """

    def __init__(self, form: _Form, steps: int) -> None:
        self.form = form
        self._stack = torch.empty((steps, *form.shape), dtype=form.dtype)
        self.bits = bits_of(self._stack)

    def write(self, step: int, value: Array | Tensor) -> None:
        """Write a value that fits."""
        if isinstance(value, np.ndarray):
            self.bits[step] = value
        else:
            self._stack[step].copy_(value)


class _Frames:
    """One tensor of large observations and next observations: what is the same, bit for bit, is held and sent once.

    Observations that are the next ones of the step before are those. Where an observation consists of frames, and the
    next one of all but the first of these and a new one, only the new one is appended.

    Args:
        form: The tensor.
        steps: The steps for which there is memory.
    """

    def __init__(self, form: _Form, steps: int) -> None:
        self.form, self._used = form, 0
        envs, *rest = form.shape
        frame = rest[1:] if form.depth > 1 else rest
        # Memory that is not written takes no space.
        self._frames = bits_of(torch.empty((2 * steps * form.depth, envs, *frame), dtype=form.dtype))
        self._places = np.zeros((2, steps), np.int64)

    def write(self, step: int, value: Array | Tensor) -> None:
        """Write the observations of a step."""
        frames, before = self._frames_of(value), int(self._places[1, step - 1])
        if step == 0 or not _same_bits(self._frames[before : before + self.form.depth], frames):
            before = self._append(frames)
        self._places[:, step] = before

    def write_next(self, step: int, value: Array | Tensor) -> None:
        """Write the next observations of a step, after its observations."""
        frames, depth, at = self._frames_of(value), self.form.depth, int(self._places[0, step])
        if _same_bits(self._frames[at + 1 : at + depth], frames[:-1]):  # observations are always the last frames
            self._append(frames[-1:])
            self._places[1, step] = at + 1
        else:
            self._places[1, step] = self._append(frames)

    def _frames_of(self, value: Array | Tensor) -> Array:
        bits = value if isinstance(value, np.ndarray) else bits_of(value.cpu().to(self.form.dtype).contiguous())
        return bits.swapaxes(0, 1) if self.form.depth > 1 else bits[None]

    def _append(self, frames: Array) -> int:
        first, self._used = self._used, self._used + len(frames)
        self._frames[first : self._used] = frames
        return first

    def packed(self, steps: int) -> tuple[Array, Array]:
        """The frames and the places of the first steps."""
        return self._frames[: self._used], self._places[:, :steps]

    def clear(self) -> None:
        """Discard all frames."""
        self._used = 0


class _Entry:
    """One entry of the samples. The first sample that has it fixes its form.

    Args:
        name: The name of the entry.
        value: The first value.
        steps: The steps for which there is memory.
    """

    def __init__(self, name: str, value: Any, steps: int) -> None:
        self._name, leaves = name, list[tuple[str, Any]]()
        self.nest = _describe(value, name, leaves)
        self._parts = [part for part, _ in leaves]
        tensors = [as_tensor(leaf, part) for part, leaf in leaves]
        self.tensors: list[_Stack | _Frames] = [
            _Stack(_Form(tensor.dtype, tuple(tensor.shape)), steps) for tensor in tensors
        ]
        self._write = [tensor.write for tensor in self.tensors]
        # The array that is copied as it is; there is none of dtypes that numpy does not know.
        bits = bits_dtype(tensors[0].dtype) if self.nest == ("tensor",) else None
        is_plain = bits is not None and torch.from_numpy(np.empty(0, bits)).dtype == tensors[0].dtype
        self._plain = (bits, self.forms[0].shape) if is_plain else None
        self.present = np.zeros(steps, dtype=bool)

    @property
    def forms(self) -> list[_Form]:
        """Its tensors at one step."""
        return [tensor.form for tensor in self.tensors]

    @property
    def step_bytes(self) -> int:
        """What is sent of a usual step; of next observations nothing, where they are those that follow."""
        is_next = self._name == "next_observations"
        return sum(form.bytes if not form.depth else 0 if is_next else form.bytes // form.depth for form in self.forms)

    def is_like(self, other: _Entry) -> bool:
        """Whether two entries have the same form."""
        return (self.nest, self.forms) == (other.nest, other.forms)

    def share(self, following: _Entry, observations: Any, next_observations: Any) -> None:
        """Hold large observations, and next observations of the same form, as frames; these are the first ones."""
        steps, fitted = len(self.present), zip(self.fit(observations), following.fit(next_observations), strict=True)
        for i, (one, other) in enumerate(fitted):
            form = self.forms[i]
            if form.bytes >= _SHARED_BYTES:
                frames = _Frames(form._replace(depth=_depth(one, other)), steps)
                self.tensors[i] = following.tensors[i] = frames
                self._write[i], following._write[i] = frames.write, frames.write_next

    def fit(self, value: Any) -> Sequence[Array | Tensor]:
        """The tensors of a value as :meth:`write` takes them, or an error; nothing is written."""
        if type(value) is np.ndarray and self._plain == (value.dtype, value.shape):
            return (value,)  # the usual case, on every add
        leaves: list[tuple[str, Any]] = []
        if _describe(value, self._name, leaves) != self.nest:
            raise InvalidInputError(
                f"{self._name} consists of {[part for part, _ in leaves]}; this writer sends {self._parts}, fixed by "
                "its first sample. Nothing was added."
            )
        fitted = []
        for form, (part, leaf) in zip(self.forms, leaves, strict=True):
            given = as_tensor(leaf, part)
            if given.shape != form.shape or not can_hold(given, form.dtype):
                raise InvalidInputError(
                    f"{part} is {tuple(given.shape)} {dtype_name(given.dtype)}; this writer sends "
                    f"{form.shape} {dtype_name(form.dtype)}, fixed by its first sample. Nothing was added."
                )
            fitted.append(given)
        return fitted

    def write(self, step: int, fitted: Sequence[Array | Tensor]) -> None:
        """Write a value that fits."""
        for write, value in zip(self._write, fitted, strict=True):
            write(step, value)
        self.present[step] = True


def _depth(observation: Array | Tensor, following: Array | Tensor) -> int:
    """The frames of observations ``[envs, frames, ...]`` if the next ones are the same frames and a new one, else 1."""
    one, other = (
        part if isinstance(part, np.ndarray) else bits_of(part.cpu().contiguous()) for part in (observation, following)
    )
    if one.ndim < 3 or one.shape[1] > _MOST_FRAMES or not _same_bits(one[:, 1:], other[:, :-1]):
        return 1
    return int(one.shape[1])


def _same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays of the same shape and dtype are the same bit for bit; 0.0 is not -0.0, and a NaN is itself."""
    word = np.uint64 if one.nbytes % 8 == 0 else np.uint8
    words, others = (np.ascontiguousarray(array).reshape(-1).view(word) for array in (one, other))
    return bool((words == others).all())


def _new_entries(given: Sample, names: Iterable[str], steps: int) -> dict[str, _Entry]:
    """The entries of a sample, which is the first to have them."""
    new = {name: _Entry(name, given[name], steps) for name in names}
    # Observations without next ones before them are held by themselves.
    observations, following = new.get("observations"), new.get("next_observations")
    if observations is not None and following is not None and observations.is_like(following):
        observations.share(following, given["observations"], given["next_observations"])
    return new


class StepBuffer:
    """Memory for some steps of a writer.

    Args:
        capacity: The number of steps.
        num_envs: The environments of each; None takes the number from the first sample.
        growth: It may hold up to so many times as many steps, if they are small.
    """

    def __init__(self, capacity: int, num_envs: int | None, growth: int = 1) -> None:
        self.steps, self.num_envs, self.transitions = 0, num_envs, 0
        self._capacity, self._growth = capacity, growth
        self._entries: dict[str, _Entry] = {}
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
        fitted = {"observations": entries["observations"].fit(given.pop("observations"))}  # written first
        fitted |= {name: entries[name].fit(value) for name, value in given.items()}
        for name, values in fitted.items():
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
        """The entries, with those that this sample is the first to have."""
        if not self._entries:
            step = sum(entry.step_bytes for entry in _new_entries(given, given, 0).values())
            self._capacity *= min(max(_CALL_BYTES // max(self._capacity * step, 1), 1), self._growth)
        new = [name for name in given if name not in self._entries]
        return {**self._entries, **_new_entries(given, new, self._capacity)}

    def packed(self) -> Steps:
        """The steps for Ray."""
        small: list[bytes] = []
        large: list[Array] = []
        places: list[Array] = []
        for name, entry in self._entries.items():
            for tensor in entry.tensors:
                if isinstance(tensor, _Stack):
                    bits = tensor.bits[: self.steps]
                    if bits.nbytes >= _LARGE_BYTES:
                        large.append(bits)
                    else:
                        small += bits.tobytes(), bytes(_padded(bits.nbytes) - bits.nbytes)
                elif name == "observations":
                    frames, at = tensor.packed(self.steps)
                    large.append(frames)
                    places.append(at)
        present = {name: entry.present[: self.steps] for name, entry in self._entries.items()}
        lacking = {name: has for name, has in present.items() if not has.all()}
        return Steps(self._header(), b"".join(small), large, places, lacking)

    def _header(self) -> bytes:
        key = self.steps, len(self._entries)  # entries are only added
        if key not in self._headers:
            entries = {name: (entry.nest, entry.forms) for name, entry in self._entries.items()}
            self._headers = {key: pickle.dumps(_Header(self.steps, self.num_envs or 0, entries))}
        return self._headers[key]

    def clear(self) -> None:
        """Discard the steps; the form of the samples stays fixed."""
        for entry in self._entries.values():
            entry.present[:] = False
            for tensor in entry.tensors:
                if isinstance(tensor, _Frames):
                    tensor.clear()
        self.steps = self.transitions = 0


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
