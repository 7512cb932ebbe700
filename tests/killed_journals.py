"""Storages that journal and save in the background are killed at any moment; what they leave is judged beside a twin.

A seed decides which calls a process makes. Whoever judges what it left makes the same calls on a twin, which was never
saved: what is loaded from the journal is, to the bit, the twin after some number of calls, and at least after those
that a commit is known to hold; what is loaded from the snapshot is the twin at the moment of a call of ``save``. Every
row is also held against a plain model. Then the process goes on with what was loaded, the twin from the same call, and
so on, round after round.

    python tests/killed_journals.py KIND [ROUNDS [SEED [FAULT]]]
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from called_worlds import WORLDS, World
from killed_storages import forked
from resumed_training import digest

from rlstore import Journal, Storage

INTERVALS = (0.002, 0.01, 0.05)  # seconds from one commit of the journal to the next
FAULTS = ("", "disk full", "fsync")


# ---------------------------------------------------------------------------------------------------- who is killed


class Log:
    """What a process has done, in memory that outlives it. Numbers of calls count those that had returned."""

    def __init__(self) -> None:
        self._words = np.frombuffer(mmap.mmap(-1, 8 * 4096), np.int64)

    def _word(place: int) -> Any:  # noqa: N805 - makes a property
        def get(self: Log) -> int:
            return int(self._words[place])

        def set_(self: Log, value: int) -> None:
            self._words[place] = value

        return property(get, set_)

    ready = _word(0)  # 1 when the storage is there, and journals
    calls = _word(1)
    committed = _word(2)  # the calls that a commit holds which has returned
    commits = _word(3)
    failed = _word(4)  # commits that raised
    saved = _word(5)  # the saves that are known to be complete
    begun = _word(6)  # the saves that were begun

    def begin_save(self) -> None:
        self._words[7 + self.begun] = self.calls
        self.begun += 1

    def saves(self) -> list[int]:
        """The calls before each save that may be the newest complete one."""
        return [int(calls) for calls in self._words[7 + max(self.saved - 1, 0) : 7 + self.begun]]


class Faults:
    """A disk that fails, at times.

    Args:
        kind: "disk full", "fsync", or "" for none.
        random_: Decides when.
        folder: What is in it is on the disk.
    """

    def __init__(self, kind: str, random_: random.Random, folder: Path) -> None:
        self.kind, self.is_on, self._random = kind, False, random_
        self._hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        files = [path for path in folder.rglob("*") if path.is_file()]
        self._synced = {path.stat().st_ino: path.read_bytes() for path in files}
        # This process will be killed, and the machine will not: it need not wait for the disk.
        os.fsync = self.fsync if kind == "fsync" else lambda descriptor: os.sched_yield()

    def turn(self) -> None:
        """Begin or end."""
        self.is_on = not self.is_on
        if self.kind == "disk full":
            # A file that would grow beyond this is refused, as on a disk that is full.
            self.limit(self._random.choice((0, 500, 5_000, 20_000)) if self.is_on else self._hard)

    def limit(self, nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, self._hard))

    def end(self) -> None:
        """Be whole, so that an error can be told."""
        self.limit(self._hard)

    def fsync(self, descriptor: int) -> None:
        """Fails at times; then what was written since the last time that it did not is lost."""
        found = os.fstat(descriptor)
        is_file = os.path.isfile(f"/proc/self/fd/{descriptor}")
        if self.is_on and self._random.random() < 0.3:
            if is_file:
                with open(f"/proc/self/fd/{descriptor}", "r+b") as file:
                    file.write(self._synced.get(found.st_ino, b"").ljust(found.st_size, b"\0")[: found.st_size])
            raise OSError(errno.EIO, "the disk has failed")
        if is_file:
            self._synced[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()


class Process:
    """What the process does that is killed: calls, commits, saves in the background, and a journal all the while."""

    def __init__(self, world: World, log: Log, seed: str, folder: Path, fault: str) -> None:
        self._world, self._log, self._folder = world, log, folder
        self._random, self._around = random.Random(seed), random.Random(f"{seed}, around")
        self._fault, self._save, self._had_fault = fault, None, False

    def run(self, begin: Callable[[World], None]) -> None:
        """Go on until somebody kills it."""
        faults = Faults(self._fault, self._around, self._folder)
        try:
            begin(self._world)
            self._log.ready = 1
            while True:
                self._do_something_else(faults)
                self._world.call(self._random)
                self._log.calls += 1
        finally:
            faults.end()

    def _do_something_else(self, faults: Faults) -> None:
        what = self._around.random()
        if what < 0.02:
            self._commit(faults)
        elif what < 0.04:
            self._begin_save()
        elif what < 0.06 and faults.kind:
            faults.turn()
            self._had_fault = True
        if self._save is not None and self._save.done:
            if self._save.error is None:
                self._log.saved = self._log.begun
            elif not self._had_fault or not isinstance(self._save.error, OSError):
                raise self._save.error
            self._save, self._had_fault = None, faults.is_on

    def _commit(self, faults: Faults) -> None:
        calls = self._log.calls
        try:
            self._world.storage.journal.commit()
        except OSError:
            if not faults.is_on:  # it must succeed again as soon as the disk does
                raise
            self._log.failed += 1
            return
        self._log.committed = calls
        self._log.commits += 1

    def _begin_save(self) -> None:
        if self._save is None:
            self._log.begin_save()
            try:
                self._save = self._world.storage.save(self._folder / "saved", background=True)
            except OSError:
                if not self._had_fault:
                    raise


# ---------------------------------------------------------------------------------------------------- who judges


class Rounds:
    """Round after round a process goes on with what the one before it left, and is killed.

    Args:
        name: Of a world.
        folder: For the journal and the snapshot.
        seed: Decides everything but the moments of the kills.
        fault: One of FAULTS.
        calls: That a process makes at most before it is killed, but for a few.

    Attributes:
        counts: What has happened, for a report.
    """

    def __init__(self, name: str, folder: Path, seed: int = 0, fault: str = "", calls: int = 300) -> None:
        self.name, self._folder, self._seed, self._fault, self._calls = name, folder, seed, fault, calls
        self._journal, self._snapshot = folder / "journal 0", folder / "saved"
        self.world = WORLDS[name]()
        self.world.storage = self.world.make()
        self._saved: World | None = None  # as it was when the snapshot was saved that is there
        self._begin: Callable[[World], None] = self._start
        self.counts = {"rounds": 0, "calls": 0, "lost": 0, "commits": 0, "failed": 0, "saves": 0, "from a snapshot": 0}

    def _settings(self) -> Journal:
        random_ = random.Random(f"{self._seed}, {self.counts['rounds']}, journal")
        is_synced = self._fault == "fsync" or random_.random() < 0.5
        return Journal(self._journal, interval=random_.choice(INTERVALS), fsync=is_synced)

    def _start(self, world: World) -> None:
        world.storage = world.make(journal=self._settings())

    def _go_on(self, world: World) -> None:
        world.storage = Storage.load(self._journal, journal=self._settings())

    def _go_on_from_snapshot(self, world: World) -> None:
        world.storage = Storage.load(self._snapshot, journal=self._settings())

    def play(self) -> None:
        """A round: begin or go on, kill, judge."""
        seed, log = f"{self.name}, {self._seed}, {self.counts['rounds']}", Log()
        self._kill(Process(self.world, log, seed, self._folder, self._fault), log, random.Random())
        self.counts["rounds"] += 1
        if not (self._journal / "manifest.json").exists():
            assert not log.ready, "a storage that journals has no commit"
            return
        self._judge(log, random.Random(seed))

    def _kill(self, process: Process, log: Log, random_: random.Random) -> None:
        # Some are killed before they have done anything.
        wanted = random_.randrange(-self._calls // 50, self._calls)
        child = forked(lambda: process.run(self._begin))
        while log.calls < wanted:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), f"{self.name}: the process ended by itself"
            os.sched_yield()
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    def _judge(self, log: Log, random_: random.Random) -> None:
        """Find the calls after which the twin is what was loaded, from the journal and from the snapshot."""
        journaled, saved = Storage.load(self._journal), self._load_saved()
        state, saved_state = (None if one is None else self.world.state(one) for one in (journaled, saved))
        found: World | None = None
        found_saved = self._saved if not log.saved and self._is_saved(saved_state) else None
        saves = log.saves()
        for calls in range(log.calls + 2):  # one more may be done that did not return
            here = self.world.state(self.world.storage) if calls >= log.committed or calls in saves else None
            if found is None and here == state and calls >= log.committed:
                found, lost = self.world.twin(), log.calls - calls
            if found_saved is None and here == saved_state and calls in saves:
                found_saved = self.world.twin()
            self.world.call(random_)
        what = f"{self.name}, seed {self._seed}, round {self.counts['rounds']}"
        assert found is not None, f"{what}: not what was committed, {log.committed} of {log.calls} calls or more"
        assert found_saved is not None or (saved is None and not log.saved), f"{what}: not what was saved after {saves}"
        self._compare(found, journaled)
        if saved is not None and found_saved is not self._saved:
            assert found_saved is not None
            self._compare(found_saved, saved)
        self._count(log, lost)
        self.world, self._saved, self._begin = found, found_saved, self._go_on
        if self._saved is not None and self.counts["rounds"] % 7 == 0:
            self._continue_from_snapshot()

    def _is_saved(self, state: str | None) -> bool:
        return self._saved is not None and self._saved.state(self._saved.storage) == state

    def _load_saved(self) -> Any:
        if (self._snapshot / "manifest.json").exists():
            return Storage.load(self._snapshot)
        return None

    def _compare(self, world: World, loaded: Any) -> None:
        """What was loaded is what the world has, and goes on as that does."""
        twin, other = world.twin(), world.twin()
        other.storage = loaded
        for one in (twin, other):
            random_ = random.Random(0)
            for _ in range(12):
                one.call(random_)
        assert twin.state(twin.storage) == other.state(loaded)
        data, expected = (one.storage.get_all_buffer_data() for one in (other, twin))
        differing = [name for name in expected if digest(data[name]) != digest(expected[name])]
        assert not differing, f"{[(name, data[name], expected[name]) for name in differing]}"
        other.judge(loaded)
        if self.counts["rounds"] % 10 == 0:
            loaded.save(self._folder / "again")
            assert twin.state(Storage.load(self._folder / "again")) == other.state(loaded)
        close = getattr(loaded, "close", None)
        if close is not None:
            close()

    def _continue_from_snapshot(self) -> None:
        assert self._saved is not None
        self.world = self._saved.twin()
        shutil.rmtree(self._journal)
        self._journal = self._folder / f"journal {self.counts['rounds']}"
        self._begin = self._go_on_from_snapshot
        self.counts["from a snapshot"] += 1

    def _count(self, log: Log, lost: int) -> None:
        for name, count in (("calls", log.calls), ("lost", lost), ("commits", log.commits), ("failed", log.failed)):
            self.counts[name] += count
        self.counts["saves"] += log.saved


def kill(name: str, folder: Path, rounds: int, seed: int = 0, fault: str = "", calls: int = 300) -> dict[str, int]:
    """So many :class:`Rounds`; what has happened in them."""
    played = Rounds(name, folder, seed, fault, calls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that episodes are broken off, and forks of processes with threads
        for _ in range(rounds):
            played.play()
    return played.counts


def main(name: str, rounds: str = "300", seed: str = "0", fault: str = "") -> None:
    """The program."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(name, fault, kill(name, Path(folder), int(rounds), int(seed), fault))


if __name__ == "__main__":
    main(*sys.argv[1:])
