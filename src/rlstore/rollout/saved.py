"""How rollouts are saved and restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.rows.schema import Field, Structure
from rlstore.rollout.core import OnPolicyStorage
from rlstore.rollout.transition import TransitionLayout, group_blocks


class SavedOnPolicyStorage(OnPolicyStorage):
    """An on-policy storage whose state is its ring.

    Blocks are saved whole: what a new rollout has not yet overwritten can still be read.
    """

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        self._follow_callers()
        if self._ring is None:
            return {"spent": self._spent}, {}
        return {"spent": self._spent, "ring": self._ring.counters()}, dict(self._ring.blocks)

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        self._spent = numbers["spent"]
        if self._ring is not None:
            self._ring.set_counters(numbers["ring"])
            for name, block in self._ring.blocks.items():
                reader.read_into(name, block)


_AnyRollout = TypeVar("_AnyRollout", bound="SavedRollout")


class SavedRollout(SavedOnPolicyStorage):
    """What is particular to RolloutStorage: optional fields, and the observations that follow the newest step."""

    training_type: str
    num_envs: int | None
    actions_shape: Any
    gamma: float
    lam: float
    _layout: TransitionLayout
    _last_observations: list[Tensor] | None

    def _settings(self) -> dict[str, Any]:
        return {
            "training_type": self.training_type,
            "num_envs": self.num_envs,
            "num_transitions_per_env": self.max_size,
            "obs": None if self._ring is None else saved_leaves(self),
            "actions_shape": None if self.actions_shape is None else list(self.actions_shape),
            "gamma": self.gamma,
            "lam": self.lam,
        }

    @classmethod
    def _from_settings(cls: type[_AnyRollout], settings: Mapping[str, Any], device: str | torch.device) -> _AnyRollout:
        obs = settings["obs"]
        if obs is not None:
            structure, fields = saved_observations(obs, "observations")
            lanes = settings["num_envs"]
            examples = [torch.zeros((lanes, *field.shape), dtype=field.dtype) for field in fields]
            obs = structure.build(examples, (lanes,))
        make: Any = cls
        made: _AnyRollout = make(**{**settings, "obs": obs}, device=device, seed=0)
        return made

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        numbers, tensors = super()._state()
        following = self._last_observations
        numbers["following"] = following is not None
        for index, leaf in enumerate(following or ()):
            tensors[f"last_observations[{index}]"] = leaf
        if self._ring is not None:
            numbers["groups"] = dict(self._layout.groups)
        return numbers, tensors

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        if self._ring is not None:
            groups: dict[str, int] = numbers["groups"]
            rows = {
                group: tuple(
                    torch.zeros(reader.shape(block)[1:], dtype=reader.dtype(block))
                    for block in group_blocks(group, count)
                )
                for group, count in groups.items()
            }
            columns, _ = self._layout.first_met(rows)
            self._ring.extend(columns)
            self._layout.groups.update(groups)
        super()._set_state(numbers, reader)
        if numbers["following"]:
            names = [f"last_observations[{index}]" for index in range(len(self._observations.paths))]
            self._last_observations = [reader.tensor(name, self._torch_device) for name in names]


def saved_leaves(storage: OnPolicyStorage) -> dict[str, Any]:
    """The observations of a storage as settings, for :func:`saved_observations`."""
    blocks = storage._ready_ring().blocks
    leaves = [blocks[name] for name in storage._observations.names]
    return {
        "paths": [list(path) for path in storage._observations.paths],
        "shapes": [list(leaf.shape[2:]) for leaf in leaves],
        "dtypes": [leaf.dtype for leaf in leaves],
    }


def saved_observations(settings: Mapping[str, Any], name: str) -> tuple[Structure, list[Field]]:
    """The structure and the fields of the observations of a storage that was saved."""
    structure = Structure([tuple(path) for path in settings["paths"]], name)
    parts = zip(structure.names, settings["shapes"], settings["dtypes"], strict=True)
    return structure, [Field(leaf, tuple(shape), dtype, "the snapshot") for leaf, shape, dtype in parts]
