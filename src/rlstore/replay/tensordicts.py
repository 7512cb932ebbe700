"""What adapters share that take and serve transitions as TensorDicts: entries by key, and how n-step windows end."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlstore.engine.batches.pipeline import Gather, Part, Request
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


class WindowEnds(NamedTuple):
    """How the n-step windows of a batch end, ``[batch, 1]`` each.

    Attributes:
        steps: The steps of the window: ``n_step``, or less at the end of the episode and at the newest row; int64.
        terminated: The last of them terminated the episode; bool.
        truncated: The episode was truncated after the last of them; bool.
    """

    steps: Tensor
    terminated: Tensor
    truncated: Tensor


_FLAGS = tuple(Request(part, 0, (1,), torch.bool) for part in (Part.TERMINATED, Part.TRUNCATED))


def sample_with_ends(storage: ReplayCore, batch_size: int) -> tuple[dict[str, Any], WindowEnds]:
    """A random batch of transitions, by the names of the vocabulary, and how their windows end."""
    with storage._guard:  # the rows must not be overwritten in between
        batch = next(iter(storage.generate_batches(1, batch_size)))
        ring, fold, rows = storage._ring_of(), storage._view.fold, batch["rows"]
        held = rows.to(ring.device)
        terminated, truncated = Gather(ring, _FLAGS, *fold)(held)
        first, stop = torch.empty_like(held), torch.empty_like(held)
        ring.kernel.bounds(held, first, stop)
        steps = (stop - held // ring.lanes).clamp(max=fold[0]).unsqueeze(1)
    return batch, WindowEnds(*(tensor.to(rows.device) for tensor in (steps, terminated, truncated)))
