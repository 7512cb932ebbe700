"""How often each row was drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.memory.backing import lazy_zeros
from rlstore.engine.memory.tensors import allocate
from rlstore.engine.rows.episode_ring import EpisodeRing


class DrawCounts:
    """The number of draws of each row that is held.

    A count is kept with the row it is for: the count of a row that was overwritten is not taken for that of the row
    in its place, so nothing has to follow what is written.

    Args:
        ring: The rows.
    """

    def __init__(self, ring: EpisodeRing) -> None:
        self._lanes, self._steps = ring.lanes, ring.steps
        places = (ring.lanes * ring.steps,)
        is_lazy = ring.device.type == "cpu"
        self._counts, self._rows = (
            lazy_zeros(places, dtype) if is_lazy else allocate(places, dtype, ring.device)
            for dtype in (torch.int32, torch.int64)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the counts when all rows were drawn."""
        return self._counts.nbytes + self._rows.nbytes

    def add(self, rows: Tensor) -> Tensor:
        """Count a batch, int64 ``[n]``, in which a row may come several times: the draws so far, int64 ``[n]``."""
        place = self._places(rows)
        numbered = rows + 1  # 0: no row
        known = self._rows[place] == numbered
        self._counts[place] = torch.where(known, self._counts[place], 0)
        self._rows[place] = numbered
        self._counts.index_add_(0, place, torch.ones_like(place, dtype=torch.int32))
        return self._counts[place].long()

    def take_back(self, rows: Tensor) -> None:
        """A batch that was counted was not served."""
        place = self._places(rows)
        self._counts.index_add_(0, place, torch.full_like(place, -1, dtype=torch.int32))

    def _places(self, rows: Tensor) -> Tensor:
        return rows % self._lanes * self._steps + rows // self._lanes % self._steps

    def of_held(self, ring: EpisodeRing) -> Tensor:
        """The draws of the rows that are held now, int32 ``[places]`` in the order of memory; 0 of others."""
        extent = ring.reached(self._steps)
        counts, rows = (kept.view(self._lanes, self._steps)[:, :extent] for kept in (self._counts, self._rows))
        before = ((ring.written - ring.held()) * self._lanes).unsqueeze(1)  # the number of the last row that is not
        return torch.where(rows > before, counts, 0).flatten()

    def clear(self) -> None:
        """No row was drawn yet."""
        self._counts.zero_()
        self._rows.zero_()

    def state(self) -> dict[str, Tensor]:
        """All counts and the rows they are for, by name."""
        return {"draw counts": self._counts, "drawn rows": self._rows}

    def set_state(self, reader: SnapshotReader) -> None:
        """Put back what :meth:`state` returned."""
        for name, counts in self.state().items():
            reader.read_into(name, counts)
        if bool((self._counts < 0).any()):
            raise reader.unusable("draw counts", "a row was drawn less often than never")
