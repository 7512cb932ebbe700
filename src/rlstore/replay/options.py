"""What every replay storage can be told besides its own arguments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypedDict

import torch

from rlstore.engine.processes.limiter import RateLimit

MEMORIES = ("device", "ram", "shared", "mapped")


class StorageOptions(TypedDict, total=False):
    """What every replay storage can be told besides its own arguments.

    Attributes:
        dtype: The dtype of served observations; None serves them as they are stored.
        frame_stack: Frames stacked in an observation. Each is stored once, and stacks are put together on reading.
        stack_axis: The axis of the frames; None takes the last one of three if it is shorter than the first, else 0.
        reward_shape: The shape of one reward; ``()`` for a number.
        autoreset: What the environments do after an end, as gymnasium's ``AutoresetMode`` or its value; None tells by
            the data: the final observation once more, with a reward of 0 and no flag, is a reset step.
        memory: "device": that of the device. "ram": the host's, whatever the device. "shared": RAM that other
            processes can have too. "mapped": files in the folder ``path``, which may be larger than RAM, and are found
            again by the next storage that is made with the same arguments.
        path: The folder of "mapped".
        seed: The seed of everything drawn at random; None draws one from torch's own generator.
        rate_limit: A limit on samples for each insert, which holds adding and sampling back; None for none.
        timeout: Seconds after which a wait is given up, for the rate limit or for writers to pause.
    """

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


class ReplayOptions(StorageOptions, total=False):
    """:class:`StorageOptions`, and how batches are prepared in the background.

    Attributes:
        num_workers: Batches prepared ahead in the background; 0 for none.
        pin_memory: Whether batches for a CUDA device go through page-locked memory.
        fetch_every: A batch prepared this many or more added steps ago is thrown away and drawn anew.
    """

    num_workers: int
    pin_memory: bool
    fetch_every: int


# The names of all options.
OPTIONS = {*StorageOptions.__annotations__, *ReplayOptions.__annotations__}
