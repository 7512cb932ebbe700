"""The steps of a storage as a dataset of torch, for supervised learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import Dataset, get_worker_info

from rlstore.episodes import HeldSteps
from rlstore.errors import InvalidInputError


class StepDataset(Dataset[dict[str, Any]]):
    """Steps that a storage holds, from :meth:`Storage.as_dataset <rlstore.Storage.as_dataset>`.

    Entry i is a dict of what is stored of step i, without a leading axis. A ``DataLoader`` gathers each batch in one
    call; with ``collate_fn=dict`` it passes it on as it is::

        loader = torch.utils.data.DataLoader(storage.as_dataset(), batch_size=256, shuffle=True, collate_fn=dict)
        for batch in loader:
            loss = (policy(batch["observations"]) - batch["actions"]).square().mean()

    No worker is needed, since a batch is one gather. Forked workers can read what lies in RAM, and in shared memory to
    which nobody writes; a dataset cannot be pickled.

    Attributes:
        rows: The row id of each entry, int64 ``[len]``.
    """

    def __init__(self, steps: HeldSteps, rows: torch.Tensor, names: Sequence[str]) -> None:
        self._steps, self.rows, self._names = steps, rows, names

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The fields of one step.

        Raises:
            RowNotHeldError: (an IndexError) if it was overwritten since the dataset was made.
        """
        return self._read(self.rows[index])

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        """The fields of several steps, ``[len(indices), ...]`` each; ``DataLoader`` calls it for a batch."""
        return _Batch(self._read(self.rows[indices]))

    def _read(self, rows: torch.Tensor) -> dict[str, Any]:
        if self._steps.device.type != "cpu" and get_worker_info() is not None:
            raise InvalidInputError(
                f"the data are on {self._steps.device}, and workers cannot read them there: give num_workers=0"
            )
        return self._steps.read(rows, self._names)

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            "a dataset of a storage cannot be sent to another process. Give the DataLoader num_workers=0: a batch is "
            'gathered in one call. Or give it multiprocessing_context="fork".'
        )


class _Batch(dict[str, Any]):
    """A batch of a dataset, which explains itself to torch's default collation: that asks for the entry 0."""

    def __missing__(self, key: object) -> NoReturn:
        if isinstance(key, str):
            raise KeyError(key)
        raise InvalidInputError(
            "a dataset of a storage gathers whole batches, which need no collation: give the DataLoader collate_fn=dict"
        )
