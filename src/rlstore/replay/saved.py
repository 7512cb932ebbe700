"""How replay is saved and restored."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from rlstore.engine.batches.staging import received
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.processes.limiter import RateLimit
from rlstore.replay.prepare import Drawn
from rlstore.replay.sharing import SharedReplay

_AnyReplay = TypeVar("_AnyReplay", bound="SavedReplay")


class SavedReplay(SharedReplay):
    """Replay that can be saved: its rows, counters and generator, and the batches that were prepared ahead."""

    # Arguments of the class that it keeps as attributes of the same name.
    _own_settings: ClassVar[tuple[str, ...]] = ()

    def _settings(self) -> dict[str, Any]:
        names = ("observation_space", "action_space", "storage_size", "num_envs", "batch_size", *self._own_settings)
        options: dict[str, Any] = {name: value for name, value in self._options.items() if name != "seed"}
        if options.get("path") is not None:
            options["path"] = os.fspath(options["path"])
        options["autoreset"] = self._autoreset
        if options.get("rate_limit") is not None:
            options["rate_limit"] = dataclasses.astuple(options["rate_limit"])
        if self._replay is not None and self._replay.backing.kind == "ram" and self._memory == "mapped":
            options.update(memory="ram", path=None)  # a copy of such a storage lies in RAM
        learnt = None
        if self._replay is not None and self.observation_space is None:  # from the first sample
            learnt = self._fields.described()
        return {**{name: getattr(self, name) for name in names}, "options": options, "learnt": learnt}

    @classmethod
    def _from_settings(cls: type[_AnyReplay], settings: Mapping[str, Any], device: str | torch.device) -> _AnyReplay:
        given = {name: value for name, value in settings.items() if name not in ("options", "learnt")}
        options = dict(settings["options"])
        if options.get("rate_limit") is not None:
            options["rate_limit"] = RateLimit(*options["rate_limit"])
        make: Any = cls
        storage: _AnyReplay = make(**given, **options, device=device, seed=0)
        if settings["learnt"] is not None:
            storage._fields.read_described(settings["learnt"])
            storage._allocate(settings["num_envs"])
        return storage

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        numbers: dict[str, Any] = {"added": self._added, "warned": self._warned, "limit": self._limit_state()}
        tensors = {"random": self._random}
        if self._replay is None:
            return numbers, tensors
        prepared = [] if self._ahead is None else self._ahead.prepared()
        # What a writer overwrote meanwhile is None, and would be drawn anew.
        prepared = [(drawn, added, received(batch)) for drawn, added, batch in prepared if batch is not None]
        numbers["prepared"] = [{"added": added, "tensors": len(batch)} for _, added, batch in prepared]
        for index, (drawn, _, batch) in enumerate(prepared):
            parts = {name: value for name, value in drawn._asdict().items() if value is not None}
            parts.update({str(k): tensor for k, tensor in enumerate(batch)})
            tensors.update({f"prepared {index} {name}": value for name, value in parts.items()})
        return numbers, {**tensors, **self._replay.state()}

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        self._added, self._warned = numbers["added"], numbers["warned"]
        self._random = reader.tensor("random", "cpu" if self._replay is None else self._replay.device)
        if self._replay is None:
            return
        self._replay.set_state(reader.shape, reader.read_into, reader.names)
        self._set_limit_state(numbers.get("limit"))
        self._restored(reader)
        for index, job in enumerate(numbers["prepared"]):
            fields = {
                name: reader.tensor(f"prepared {index} {name}", self._replay.device)
                for name in Drawn._fields
                if f"prepared {index} {name}" in reader.names
            }
            names = [f"prepared {index} {k}" for k in range(job["tensors"])]
            batch = tuple(reader.tensor(name, self._torch_device) for name in names)
            if self._ahead is not None:
                self._ahead.put(Drawn(**fields), job["added"], batch)

    def _restored(self, reader: SnapshotReader) -> None:
        """The ring was filled: what goes with it can be."""
