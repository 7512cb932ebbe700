"""What adapters share that take and serve transitions as TensorDicts: entries by key, and how n-step windows end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlstore.engine.batches.pipeline import Gather, Request
from rlstore.errors import InvalidInputError
from rlstore.replay.core import ReplayCore
from rlstore.storage import Sample

Key = str | tuple[str, ...]


def entry(data: Any, key: Key, name: str) -> Tensor:
    """The tensor under a key of a TensorDict.

    Args:
        data: What the caller gave.
        key: The key, a tuple for a nested one.
        name: What the caller's argument is called.

    Raises:
        InvalidInputError: If it is no TensorDict, or lacks the key.
    """
    if not isinstance(data, TensorDictBase):
        raise InvalidInputError(f"{name} is a {type(data).__name__}; give a TensorDict. Nothing was written.")
    value = data.get(key, None)
    if not isinstance(value, Tensor):
        held = sorted(map(str, data.keys(include_nested=True, leaves_only=True)))
        raise InvalidInputError(f"{name} has no tensor {key!r}; it holds {held}. Nothing was written.")
    return value


def insert_steps(storage: ReplayCore, steps: Sample) -> Tensor:
    """Append steps ``[steps, envs, ...]`` with the keys of the vocabulary; returns their row ids, ``[steps, envs]``."""
    with storage._guard:  # so that the newest rows are these
        before = 0 if storage._rows is None else storage._rows.written.clone()
        storage.insert_data_slice(steps)
        ring = storage._ring_of()
        count = int((ring.written - before).amax())
        first = (ring.written - count) * ring.lanes + torch.arange(ring.lanes, device=ring.device)
        rows: Tensor = first + ring.lanes * torch.arange(count, device=ring.device).unsqueeze(1)
        return rows


def sample_windows(
    storage: ReplayCore, batch_size: int, asked: Sequence[Request]
) -> tuple[dict[str, Any], Tensor, tuple[Tensor, ...]]:
    """A random batch of transitions by the names of the vocabulary, and how their n-step windows end.

    Args:
        storage: The storage.
        batch_size: The number of transitions.
        asked: Parts of the last step of each window.

    Returns:
        The batch; the steps of each window, int64 ``[batch]``: ``n_step``, or less at the end of the episode and at the
        newest row; and what was asked for.
    """
    with storage._guard:  # the rows must not be overwritten in between
        batch = next(iter(storage.generate_batches(1, batch_size)))
        ring, n_step, rows = storage._ring_of(), storage._view.fold[0], batch["rows"]
        last = rows.to(ring.device)
        if n_step == 1:
            steps = torch.ones_like(last)
        else:
            first, stop = torch.empty_like(last), torch.empty_like(last)
            ring.kernel.bounds(last, first, stop)
            steps = (stop - last // ring.lanes).clamp(max=n_step)
            last = torch.add(last, steps - 1, alpha=ring.lanes)
        ends = Gather(ring, asked, 1, 1.0)(last) if asked else ()
    return batch, steps.to(rows.device), tuple(tensor.to(rows.device) for tensor in ends)
