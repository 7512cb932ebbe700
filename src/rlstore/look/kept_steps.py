"""The steps of episodes that are kept on disk, as they are read one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.disk.episode_files import EpisodeReader
from rlstore.engine.rows.schema import is_observation
from rlstore.episodes import Listing
from rlstore.errors import RowNotHeldError
from rlstore.replay.held_steps import structure_of

_OBSERVED = {"observations": 0, "next_observations": 1}  # and how far behind its row it is


class KeptSteps:
    """The steps in the files of ``save_snapshot``, as :class:`~rlstore.episodes.HeldSteps`.

    Rows are counted from the first step of the oldest episode on. Of a file no more is read than is asked for, so its
    checksum is not looked at. An episode that its storage removes meanwhile is not held any more.

    Args:
        reader: The episodes.

    Attributes:
        envs: The environments that they came from.
        row_bytes: The bytes of a step.
    """

    lanes, device = 1, torch.device("cpu")

    def __init__(self, reader: EpisodeReader) -> None:
        self._reader, self._entries = reader, reader.entries()
        self._lengths = torch.tensor([entry.steps for entry in self._entries], dtype=torch.int64)
        self._firsts = self._lengths.cumsum(0) - self._lengths
        self._is_gone = torch.zeros(len(self._entries), dtype=torch.bool)
        self._leaves = [name for name in reader.forms if is_observation(name)]
        columns = [name for name in reader.forms if name not in self._leaves]
        self._structure = structure_of(self._leaves)
        self.names = (*_OBSERVED, *columns)
        self.scalars = frozenset(name for name in columns if reader.forms[name][0] == () and name != "actions")
        self.envs = len({entry.lane for entry in self._entries})
        self.row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in reader.forms.values())

    def rows(self) -> Tensor:
        """The rows of the episodes that are there, oldest first, int64."""
        return torch.arange(int(self._lengths.sum()))[~self._is_gone.repeat_interleave(self._lengths)]

    def read(self, rows: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Copies of some fields of rows, ``[*rows.shape, ...]`` each.

        Raises:
            RowNotHeldError: (an IndexError) if any of the rows is not held.
        """
        wanted = rows.flatten()
        if len(wanted) and not (int(wanted.min()) >= 0 and int(wanted.max()) < int(self._lengths.sum())):
            raise RowNotHeldError(f"a row is none of the {int(self._lengths.sum()):,} that there are")
        named = {}
        for name in names:
            leaves = self._leaves if name in _OBSERVED else [name]
            tensors = self._gathered(leaves, wanted, _OBSERVED.get(name, 0))
            tensors = [tensor.reshape((*rows.shape, *tensor.shape[1:])) for tensor in tensors]
            is_nested = name in _OBSERVED
            whole = self._structure.build(tensors, rows.shape) if is_nested else tensors[0]
            named[name] = whole.unsqueeze(-1) if name in self.scalars else whole
        return named

    def final_observations(self, row: Tensor, is_over: bool) -> Any:
        """What followed a row; at the end of an episode that is its final observation."""
        return self.read(row, ("next_observations",))["next_observations"]

    def _gathered(self, leaves: Sequence[str], rows: Tensor, behind: int) -> list[Tensor]:
        forms = self._reader.forms
        found = [torch.empty((len(rows), *forms[leaf][0]), dtype=forms[leaf][1]) for leaf in leaves]
        episodes = torch.searchsorted(self._firsts, rows, right=True) - 1
        for episode in episodes.unique().tolist():
            places = (episodes == episode).nonzero().flatten()
            tensors = self._read(episode, leaves)
            steps = rows[places] - self._firsts[episode] + behind
            for target, leaf in zip(found, leaves, strict=True):
                target[places] = tensors[leaf][steps]
        return found

    def _read(self, episode: int, names: Sequence[str]) -> dict[str, Tensor]:
        try:
            return self._reader.read_some(self._entries[episode], names)
        except FileNotFoundError:
            self._is_gone[episode] = True
            number = self._entries[episode].number
            raise RowNotHeldError(f"episode {number} is not in the folder any more. Nothing was read.") from None

    def listing(self) -> Listing:
        """The episodes that are there."""
        parts = []
        for episode in range(len(self._entries)):
            try:
                read = self._read(episode, ("rewards", "terminated", "truncated"))
            except RowNotHeldError:
                continue
            ends = (bool(read["terminated"][-1]), bool(read["truncated"][-1]))
            parts.append((episode, read["rewards"].double().sum(0), *ends))
        numbers = torch.tensor([part[0] for part in parts], dtype=torch.int64)
        lanes = torch.tensor([entry.lane for entry in self._entries], dtype=torch.int64)
        terminated, truncated = (torch.tensor([part[at] for part in parts], dtype=torch.bool) for at in (2, 3))
        returns = torch.stack([part[1] for part in parts]) if parts else torch.empty(0, dtype=torch.float64)
        whole = torch.ones(len(parts), dtype=torch.bool)
        return Listing(
            self._firsts[numbers], lanes[numbers], self._lengths[numbers], returns, terminated, truncated, whole, whole
        )
