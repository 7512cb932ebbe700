"""MixedReplay: batches of which one part is drawn from one replay storage, and the rest from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rlstore.engine.checks import check_fraction, check_positive
from rlstore.engine.guard import uninterrupted
from rlstore.engine.rows.schema import as_tensor, dtype_name
from rlstore.errors import InvalidCallError, InvalidInputError, UnknownParameterError

_Batch = TypeVar("_Batch", bound=tuple[Any, ...])
_Served = TypeVar("_Served", bound=tuple[Any, ...], covariant=True)
_SETTINGS = ("n_step", "discount", "sequence_length", "burn_in")  # that have to be the same
_UNCHANGED = "No priority was changed."


class Replay(Protocol[_Served]):
    """What is needed of a storage: every replay storage has it."""

    def sample(self, batch_size: int | None = None) -> _Served:
        """A random batch."""
        ...

    def update(self, *args: Any) -> None:
        """Set the priorities of rows."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Numbers of the storage for a logger."""
        ...

    def _require_written(self, rows: Tensor) -> None:
        """Refuse rows that the storage never had."""
        ...

    @property
    def draw_total(self) -> float:
        """The total that draws are proportional to; 0 if there is nothing to draw."""
        ...


def _fixed(name: str, doc: str) -> Any:
    """An argument of a mixture as an attribute that cannot be assigned."""

    def refuse(mixed: MixedReplay[Any], value: object) -> None:
        raise UnknownParameterError(
            f"{name!r} of a MixedReplay is fixed when it is made: make another one. What can be changed is "
            "['share', 'batch_size']. Nothing was changed."
        )

    return property(attrgetter(f"_{name}"), refuse, doc=doc)


class MixedReplay(Generic[_Batch]):
    """Batches of which a share is an agent's own experience, and the rest a dataset.

    Both are replay storages of the same class, with the same fields, and each goes on as without the other: the agent
    adds to ``online``, and ``offline`` was made with ``from_episodes``, say::

        mixed = MixedReplay(online, offline, share=0.5, batch_size=256)
        batch = mixed.sample()  # 128 transitions of each, those of online first
        mixed.update(batch.rows, priorities)  # of storages with priorities

    A batch has ``round(share * batch_size)`` rows or windows of ``online`` (half a row is rounded up), which come
    first, and the others are of ``offline``. Until there is something to draw in ``online``, all are of ``offline``.

    In ``batch.rows`` those of ``offline`` are negative: row r of it is ``-1 - r``. So ``update`` knows whose each row
    is, in any order. Weights correct for what priorities do within each of the storages, and the largest of each part
    is 1; the share itself is not corrected.

    Args:
        online: The storage of the agent's own experience.
        offline: The storage of the dataset.
        share: The part of each batch that is drawn from ``online``, from 0 to 1. The attribute can be changed.
        batch_size: Rows, or windows, in a batch. The attribute can be changed.
    """

    online: Replay[_Batch] = _fixed("online", "The storage of the agent's own experience.")
    offline: Replay[_Batch] = _fixed("offline", "The storage of the dataset.")

    def __init__(
        self, online: Replay[_Batch], offline: Replay[_Batch], share: float = 0.5, batch_size: int = 256
    ) -> None:
        if online is offline:
            raise InvalidInputError("online and offline are the same storage; MixedReplay needs two")
        _require_alike(online, offline)
        self._online, self._offline = online, offline
        self.batch_size = batch_size
        self.share = share
        self._has_begun = self._were_alike = False

    @property
    def share(self) -> float:
        """The part of each batch that is drawn from ``online``."""
        return self._share

    @share.setter
    def share(self, share: float) -> None:
        check_fraction("MixedReplay", share=share)
        self._share = float(share)

    @property
    def batch_size(self) -> int:
        """Rows, or windows, in a batch."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        check_positive("MixedReplay", batch_size=batch_size)
        self._batch_size = int(batch_size)

    def sample(self, batch_size: int | None = None) -> _Batch:
        """Draw a random batch of ``batch_size``, or (None) of the one that was given at first."""
        size = self._batch_size
        if batch_size is not None:
            check_positive("sample()", batch_size=batch_size)
            size = int(batch_size)
        own = int(self._share * size + 0.5)
        if own and not self._has_begun:
            self._has_begun = self._online.draw_total > 0  # asked no longer than needed: on CUDA it waits
            own = own if self._has_begun else 0
        if own == size:
            return self._online.sample(size)
        other = _marked(self._offline.sample(size - own))
        return other if own == 0 else self._joined(self._online.sample(own), other)

    def _joined(self, first: _Batch, second: _Batch) -> _Batch:
        if not self._were_alike:
            _require_alike_batches(first, second)
            self._were_alike = True
        pairs = zip(_names(first), first, second, strict=True)
        made: Any = type(first)
        joined: _Batch = made._make(_joined(a, b, 1 if name == "hidden_states" else 0) for name, a, b in pairs)
        return joined

    def update(self, *args: Any) -> None:
        """Set priorities, ``update(rows, priorities)``, in the storages that the rows are of.

        Either all are set or, if a priority is invalid or a row was never written, none. Storages that draw uniformly
        ignore it. On CUDA the host waits for the device.

        Args:
            *args: ``rows`` of batches, int64 ``[n]``, and ``priorities``, finite and not negative, ``[n]`` or
                ``[n, 1]``.
        """
        if len(args) != 2:
            raise InvalidCallError(f"update() takes rows and priorities; {len(args)} arguments were given")
        rows, priorities = (as_tensor(given, name) for given, name in zip(args, ("rows", "priorities"), strict=True))
        rows, values = rows.flatten(), priorities.flatten()
        if rows.dtype.is_floating_point or rows.dtype == torch.bool or rows.dtype.is_complex:
            raise InvalidInputError(f"rows are {rows.dtype}; give the whole numbers that a batch has. {_UNCHANGED}")
        if len(rows) != len(values):
            raise InvalidInputError(
                f"priorities are {tuple(priorities.shape)} for {len(rows)} rows; give one for each. {_UNCHANGED}"
            )
        invalid = (~(values.float().isfinite() & (values >= 0))).nonzero().flatten().tolist()
        if invalid:
            raise InvalidInputError(
                f"priority {invalid[0]} of {len(rows)} (row {int(rows[invalid[0]])}) is {values[invalid[0]].item()}; "
                f"priorities must be finite (as float32) and >= 0. {_UNCHANGED}"
            )
        own = rows >= 0
        parts = [
            (storage, ids, values[mask.to(values.device)])
            for storage, ids, mask in ((self._online, rows[own], own), (self._offline, -1 - rows[~own], ~own))
            if len(ids)
        ]
        for storage, ids, _ in parts:  # both before one of them changes anything
            name = "online" if storage is self._online else "offline, which has -1 - row in a batch"
            try:
                storage._require_written(ids)
            except InvalidInputError as error:
                raise InvalidInputError(f"{name}: {error}") from error
        with uninterrupted():
            for storage, ids, part in parts:
                storage.update(ids, part)

    def stats(self) -> dict[str, int | float]:
        """The numbers of ``stats()`` of both storages, as ``online_fill`` and ``offline_fill``, and the ``share``."""
        parts = (("online", self._online), ("offline", self._offline))
        told = {f"{part}_{name}": value for part, storage in parts for name, value in storage.stats().items()}
        return {"share": self._share, **told}

    def __repr__(self) -> str:
        return (
            f"MixedReplay(batches of {self.batch_size}, {self._share:g} of each online: {self._online!r}, "
            f"offline: {self._offline!r})"
        )


def _names(batch: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = batch._fields
    return names


def _marked(batch: _Batch) -> _Batch:
    """A batch of the offline storage, whose rows say that they are."""
    made: Any = batch
    marked: _Batch = made._replace(rows=-1 - made.rows) if "rows" in _names(batch) else batch
    return marked


def _joined(first: Any, second: Any, axis: int) -> Any:
    """Two tensors, or nests of tensors, one behind the other."""
    if first is None:
        return None
    if isinstance(first, tuple):
        return tuple(_joined(a, b, axis) for a, b in zip(first, second, strict=True))
    parts: Any = (first, second)
    return torch.cat(parts, axis)


def _require_alike(online: Any, offline: Any) -> None:
    """Refuse storages whose batches mean different things."""
    if type(online) is not type(offline):
        raise InvalidInputError(
            f"online is a {type(online).__name__} and offline a {type(offline).__name__}; their batches differ. Give "
            "two storages of the same class."
        )
    for name in _SETTINGS:
        first, second = getattr(online, name, None), getattr(offline, name, None)
        if first != second:
            raise InvalidInputError(
                f"{name} is {first} in online and {second} in offline; a batch needs one meaning. Make both storages "
                f"with the same {name}."
            )


def _require_alike_batches(first: Any, second: Any) -> None:
    """Refuse batches that do not have the same fields."""
    forms = [
        dict(form for name, value in zip(_names(b), b, strict=True) for form in _forms(name, value))
        for b in (first, second)
    ]
    for name in {**forms[0], **forms[1]}:
        own, other = (form.get(name, "not there") for form in forms)
        if own != other:
            raise InvalidInputError(
                f"{name} is {own} in a batch of online and {other} in one of offline; the two storages need the same "
                "fields, dtype and device. Nothing was changed."
            )


def _forms(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The name and the form of each tensor of a field of a batch, without the axis of the batch."""
    if isinstance(value, Mapping):  # a TensorDict
        for key, leaf in value.items():
            yield from _forms(f'{name}["{key}"]', leaf)
    elif isinstance(value, tuple):
        for index, leaf in enumerate(value):
            yield from _forms(f"{name}[{index}]", leaf)
    elif isinstance(value, Tensor):
        shape = list(value.shape)
        del shape[1 if name.startswith("hidden_states") else 0]
        yield name, f"{tuple(shape)} {dtype_name(value.dtype)} on {value.device}"
