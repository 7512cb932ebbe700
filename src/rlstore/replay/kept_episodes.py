"""Finished episodes of replay, kept on disk as they end and found again by the next run."""

from __future__ import annotations

import os
from collections import deque

import torch
from torch import Tensor

from rlstore.engine.batches.pipeline import Gather, Part, Request
from rlstore.engine.disk.episode_files import Entry, EpisodeFiles
from rlstore.engine.rows.appender import Appender
from rlstore.engine.rows.episode_ring import RESUMED, EpisodeRing
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError


class KeptEpisodes:
    """Writes each episode of a ring when it ends.

    Args:
        owner: Whose they are, for errors.
        path: The folder.
        ring: The rows.
        fields: What a row holds.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str], ring: EpisodeRing, fields: StepFields) -> None:
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
        self._whole = Gather(ring, [*observed, *columns, *flags], 1, 1.0)
        self._last = Gather(ring, following, 1, 1.0)

    def restore(self, appender: Appender) -> None:
        """Append the episodes on disk that the ring can hold; those that it cannot hold are removed."""
        ring = self._ring
        room = [ring.steps] * ring.lanes
        try:
            entries = self._files.entries()
            wanted = set()
            for entry in reversed(entries):
                lane = entry.lane % ring.lanes
                if room[lane] > 0:
                    wanted.add(entry.number)
                room[lane] -= entry.steps
            for entry in entries:
                if entry.number in wanted:
                    lane = entry.lane % ring.lanes
                    self._restore(appender, entry, lane)
                    self._stops[lane].append((int(ring.written[lane]), entry.number))
        except BaseException:
            self.close()
            raise
        for entry in entries:  # once all others are known to be whole
            if entry.number not in wanted:
                self._files.remove(entry.number)
        self.mark()

    def _restore(self, appender: Appender, entry: Entry, lane: int) -> None:
        episode = self._files.read(entry)
        try:
            self._append(appender, episode, lane)
        except InvalidInputError as error:
            raise self._files.damaged(entry.number, error) from error

    def _append(self, appender: Appender, episode: dict[str, Tensor], lane: int) -> None:
        """Append an episode ``[steps, ...]``, of observations one more, to a lane."""
        ring, names = self._ring, [field.name for field in self._fields.observations]
        # What is on disk was accepted once: what a rule would refuse by now is written behind its back.
        ruled = [column for column in self._fields.columns if column.rule is not None]
        nothing = torch.zeros(len(episode["terminated"]), dtype=torch.bool)
        valid = {column.name: column.without(episode[column.name], nothing) for column in ruled}
        columns = [valid.get(column.name, episode[column.name]) for column in self._fields.columns]
        observations, following = [episode[name][:-1] for name in names], [episode[name][1:] for name in names]
        order = [*observations, *following, *columns, episode["terminated"], episode["truncated"]]
        mask = torch.arange(ring.lanes) == lane
        for step in range(len(episode["terminated"])):
            row = [tensor[step].unsqueeze(0).expand(ring.lanes, *tensor.shape[1:]) for tensor in order]
            values = [value.to(ring.device).contiguous() for value in row]
            appender.write((*values, mask, *values[len(names) : 2 * len(names)], None))
            ring.after_end.fill_(RESUMED)  # no reset step follows from what is on disk
            newest = int(ring.written[lane] - 1) % ring.rows
            for column in ruled:
                ring.blocks[column.name][lane, newest] = episode[column.name][step]

    @property
    def unfinished(self) -> int:
        """Rows held of episodes that are not on disk, because they have not ended."""
        return int(torch.minimum(self._ring.written - self._kept, self._ring.held()).sum())

    def mark(self) -> None:
        """Rows written so far are on disk already, or belong to episodes that are not over."""
        self._kept.copy_(self._ring.written)

    def count_again(self) -> None:
        """The ring was filled from a snapshot: the files are taken to end with its newest rows, one after another."""
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
            # An episode whose rows are all overwritten in memory is removed from disk.
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
        """Release the folder."""
        self._files.close()
