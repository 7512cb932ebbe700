"""Finished episodes of replay, kept on disk as they end and found again by the next run."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from rlstore.engine.batches.transitions import Part, Request, TransitionGather
from rlstore.engine.disk.episode_files import EpisodeFiles
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.replay.fields import ReplayFields


class KeptEpisodes:
    """Writes each episode of a ring when it ends.

    Args:
        owner: Whose they are, for errors.
        path: The folder.
        ring: The rows.
        fields: What a row holds.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str], ring: EpisodeRing, fields: ReplayFields) -> None:
        described = {
            field.name: [list(field.shape), str(field.dtype)] for field in [*fields.observations, *fields.columns]
        }
        self._files = EpisodeFiles(owner, path, described)
        self._ring, self._fields = ring, fields
        self._kept = ring.written.clone()  # by lane, the rows that are on the disk already
        # By lane, the episodes on the disk: one past the last row of each, and its number.
        self._stops: list[deque[tuple[int, int]]] = [deque() for _ in range(ring.lanes)]
        observed = [Request(Part.OBSERVATION, i, f.shape, f.dtype) for i, f in enumerate(fields.observations)]
        following = [Request(Part.NEXT_OBSERVATION, i, f.shape, f.dtype) for i, f in enumerate(fields.observations)]
        columns = [Request(Part.COLUMN, i, c.shape, c.dtype) for i, c in enumerate(fields.columns)]
        flags = [Request(part, 0, (), torch.bool) for part in (Part.TERMINATED, Part.TRUNCATED)]
        self._whole = TransitionGather(ring, [*observed, *columns, *flags], 1, 1.0)
        self._last = TransitionGather(ring, following, 1, 1.0)

    def restore(self, put: Callable[[dict[str, Tensor], int], None]) -> None:
        """Hand the episodes on the disk that the ring can hold to ``put``, as steps ``[steps, ...]`` and a lane.

        Those that it cannot hold are removed.
        """
        ring, names = self._ring, [field.name for field in self._fields.observations]
        room = [ring.steps] * ring.lanes
        entries = self._files.entries()
        wanted = []
        for entry in reversed(entries):
            lane = entry.lane % ring.lanes
            if room[lane] > 0:
                wanted.append(entry.number)
            room[lane] -= entry.steps
        for number, _, lane in entries:
            if number not in wanted:
                self._files.remove(number)
                continue
            episode = self._files.read(number)
            for name in names:
                episode[f"next {name}"] = episode[name][1:]
                episode[name] = episode[name][:-1]
            put(episode, lane % ring.lanes)
            self._stops[lane % ring.lanes].append((int(ring.written[lane % ring.lanes]), number))
        self.mark()

    def mark(self) -> None:
        """What was written so far is on the disk already, or goes on."""
        self._kept.copy_(self._ring.written)

    def count_anew(self) -> None:
        """The ring was filled from elsewhere: the files are taken to end with its newest rows, one after another."""
        self.mark()
        ends = self._ring.written.tolist()
        self._stops = [deque() for _ in ends]
        for number, steps, env in reversed(self._files.entries()):
            lane = env % self._ring.lanes
            self._stops[lane].appendleft((ends[lane], number))
            ends[lane] -= steps

    def follow(self) -> None:
        """Write the episodes that ended since."""
        ring = self._ring
        newest = ring.written - 1
        lanes = torch.arange(ring.lanes, device=ring.device)
        slots = ring.blocks["episode"][lanes, newest.clamp(min=0) % ring.rows].long()
        start, stop = ring.episodes[slots, 0], ring.episodes[slots, 1]
        # Up to the newest row if its episode is over, else up to where that began: what came before was broken off.
        until = torch.where(stop == ring.written, stop, start)
        for lane in ((until > self._kept) & (ring.written > ring.begun)).nonzero().flatten().tolist():
            self._write_until(lane, int(until[lane]))
            # What is overwritten in memory to its last row is let go on the disk.
            stops, oldest = self._stops[lane], int(ring.written[lane]) - ring.steps
            while stops and stops[0][0] <= oldest:
                self._files.remove(stops.popleft()[1])

    def _write_until(self, lane: int, until: int) -> None:
        ring = self._ring
        oldest = int(ring.written[lane] - ring.held()[lane])
        time = max(int(self._kept[lane]), oldest)
        while time < until:
            slot = int(ring.blocks["episode"][lane, time % ring.rows])
            stop = int(ring.episodes[slot, 1])
            self._write(lane, time, stop)
            time = stop
        self._kept[lane] = until

    def _write(self, lane: int, first: int, stop: int) -> None:
        rows = torch.arange(first, stop, device=self._ring.device) * self._ring.lanes + lane
        count = len(self._fields.observations)
        tensors = [tensor.cpu() for tensor in self._whole(rows)]
        last = [tensor.cpu() for tensor in self._last(rows[-1:])]
        names = [field.name for field in [*self._fields.observations, *self._fields.columns]]
        episode = dict(zip([*names, "terminated", "truncated"], tensors, strict=True))
        episode.update({name: torch.cat([episode[name], end]) for name, end in zip(names[:count], last, strict=True)})
        whole = {name: tensor.contiguous() for name, tensor in episode.items()}
        self._stops[lane].append((stop, self._files.write(whole, stop - first, lane)))

    def close(self) -> None:
        """Let go of the folder."""
        self._files.close()
