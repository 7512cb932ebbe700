"""The arguments that all replay storages have in common."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rlstore.engine.checks import check_autoreset, check_count, check_path, check_positive, check_seconds
from rlstore.engine.disk.journal import Journal, as_journal
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike
from rlstore.errors import InvalidInputError

_MEMORIES = ("device", "ram", "shared", "mapped")


@dataclass
class Options:
    """The arguments that all replay storages have in common; the storages document them."""

    observation_space: SpaceLike | None
    action_space: SpaceLike | None
    device: str | torch.device
    storage_size: int
    num_envs: int | None
    batch_size: int
    dtype: torch.dtype | None
    frame_stack: int
    stack_axis: int | None
    reward_shape: Sequence[int]
    autoreset: Any
    memory: str
    path: str | os.PathLike[str] | None
    seed: int | None
    rate_limit: RateLimit | None
    timeout: float
    num_workers: int
    pin_memory: bool
    fetch_every: int
    extra_fields: ExtraFields | None
    allow_nonfinite_rewards: bool
    sample_info: bool
    journal: str | os.PathLike[str] | Journal | None  # no part of a snapshot, which cannot choose folders

    SAVED: ClassVar[tuple[str, ...]] = (
        *("dtype", "frame_stack", "stack_axis", "reward_shape", "autoreset", "memory", "timeout", "num_workers"),
        *("pin_memory", "fetch_every", "allow_nonfinite_rewards", "sample_info", "path", "rate_limit"),
    )

    def check(self, owner: str) -> None:
        """Refuse what cannot be, and make values plain."""
        check_positive(owner, storage_size=self.storage_size, batch_size=self.batch_size, fetch_every=self.fetch_every)
        check_count(owner, "num_workers", self.num_workers)
        check_seconds(owner, timeout=self.timeout)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise InvalidInputError(
                f"dtype is {self.dtype!r}; {owner} serves observations as a float dtype, or None: as stored"
            )
        if self.autoreset is not None:
            self.autoreset = check_autoreset(owner, self.autoreset, otherwise=", or None to tell by the data")
        if self.path is not None:
            check_path(owner, "path", self.path)
        if self.memory not in _MEMORIES:
            raise InvalidInputError(f"memory is {self.memory!r}; {owner} knows {list(_MEMORIES)}")
        self.timeout, self.pin_memory = float(self.timeout), bool(self.pin_memory)
        self.allow_nonfinite_rewards, self.sample_info = bool(self.allow_nonfinite_rewards), bool(self.sample_info)
        self.journal = as_journal(owner, self.journal)
        self.storage_size, self.batch_size = int(self.storage_size), int(self.batch_size)

    def settings(self) -> dict[str, Any]:
        """Those that a snapshot holds under "options"."""
        limit = self.rate_limit
        saved = {name: getattr(self, name) for name in self.SAVED}
        saved["path"] = None if self.path is None else os.fspath(self.path)
        saved["rate_limit"] = limit and (limit.samples_per_insert, limit.min_size, limit.tolerance)
        # Only if it is not as in snapshots of earlier versions.
        usual = [name for name in ("allow_nonfinite_rewards", "sample_info") if not saved[name]]
        return {name: value for name, value in saved.items() if name not in usual}
