"""Journals: the thread, failures of the disk, the end of a storage and of a process, forks, copies."""

from __future__ import annotations

import copy
import errno
import gc
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
from gymnasium import spaces

from rlstore import (
    DecoupledRolloutStorage,
    DiskFullError,
    DistributedStorage,
    InvalidInputError,
    Journal,
    RateLimit,
    ReplayStorage,
    RolloutStorage,
    SnapshotError,
    Storage,
    StorageClosedError,
)
from rlstore.engine.disk import journal as journals
from rlstore.engine.disk import snapshot
from rlstore.engine.disk.directory import Directory
from rlstore.engine.rows import saved_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
BOX, MOVES = spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(9)
NEVER = 1e6  # seconds


def make(folder, kind=ReplayStorage, **options):
    given = {"storage_size": 64, "seed": 0, **options} if kind is ReplayStorage else options
    return kind(BOX, MOVES, journal=folder if folder is None else Journal(folder, NEVER), **given)


def play(storage, steps, begin=0):
    """Steps of one long episode; the observation is the number of the step, and so is the reward."""
    for step in range(begin, begin + steps):
        storage.add([[float(step)]], [0], [float(step)], [False], [False], {}, [[step + 1.0]])


def rewards_in(folder):
    return rewards_of(Storage.load(folder))


def rewards_of(storage):
    data = storage.get_all_buffer_data()
    return data["rewards"].flatten().tolist() if data else []


class Ticks:
    """The waits of journals: a commit is made when it is told to, and is over when the next wait begins."""

    def __init__(self, monkeypatch):
        self._told, self._waiting = threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(journals, "_wait", self._wait)

    def _wait(self, closing, seconds):
        self._waiting.release()
        while not closing.is_set():
            if self._told.acquire(timeout=0.01):
                return False
        return True

    def begin(self):
        """The thread has begun to wait."""
        self._waiting.acquire()

    def tick(self, times=1):
        for _ in range(times):
            self._told.release()
            self._waiting.acquire()


@pytest.fixture
def ticks(monkeypatch):
    return Ticks(monkeypatch)


# ---------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": 3}, "path is 3; Journal needs the path of a folder, a string or a Path"),
        ({"path": "j", "interval": 0}, "interval is 0; Journal needs a finite number of seconds above 0"),
        ({"path": "j", "interval": -1.5}, "interval is -1.5; Journal needs a finite number of seconds above 0"),
        ({"path": "j", "interval": float("nan")}, "interval is nan; Journal needs a finite number"),
        ({"path": "j", "interval": float("inf")}, "interval is inf; Journal needs a finite number"),
        ({"path": "j", "interval": True}, "interval is True; Journal needs a finite number"),
        ({"path": "j", "interval": "2"}, "interval is '2'; Journal needs a finite number"),
        ({"path": "j", "fsync": 1}, "fsync is 1; Journal needs True or False"),
    ],
    ids=str,
)
def test_a_journal_that_cannot_be_is_refused(given, words):
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        Journal(**given)


KINDS = {
    "replay": lambda **given: make(None, **given) if not given else ReplayStorage(BOX, MOVES, **given),
    "decoupled": lambda **given: DecoupledRolloutStorage(BOX, MOVES, num_steps=2, num_envs=1, **given),
    "rollout": lambda **given: RolloutStorage("rl", None, 2, None, None, **given),
    "distributed": lambda **given: DistributedStorage(BOX, MOVES, num_steps=2, num_storages=2, **given),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_refused_that_holds_something_or_is_in_use(kind, tmp_path):
    make = KINDS[kind]
    with pytest.raises(InvalidInputError, match=r"journal is 3; .* needs the path of a folder, or a Journal"):
        make(journal=3)
    first = make(journal=tmp_path / "journal")
    with pytest.raises(InvalidInputError, match="in use by another storage"):
        make(journal=tmp_path / "journal")
    assert repr(first.journal) == f"journal of {type(first).__name__} in '{tmp_path / 'journal'}': open"
    first.journal.close()
    assert repr(first.journal).endswith(": closed")
    before = sorted(path.name for path in (tmp_path / "journal").iterdir())
    with pytest.raises(InvalidInputError, match=r"already holds .* load it: \w+\.load\(path, journal=path\)"):
        make(journal=tmp_path / "journal")
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == before
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("")
    with pytest.raises(InvalidInputError, match=r"holds other files: \['thesis.tex'\]"):
        make(journal=tmp_path / "foreign")
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.tex"]


def test_loading_goes_on_in_the_folder_or_in_another_one(tmp_path):
    storage = make(tmp_path / "one")
    play(storage, 3)
    storage.close()
    storage = Storage.load(tmp_path / "one", journal=tmp_path / "two")
    assert rewards_in(tmp_path / "two") == [0.0, 1.0, 2.0]  # from the beginning
    play(storage, 1, 3)
    storage.close()
    assert (rewards_in(tmp_path / "one"), rewards_in(tmp_path / "two")) == ([0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0])
    with pytest.raises(InvalidInputError, match="already holds"):
        Storage.load(tmp_path / "one", journal=tmp_path / "two")
    storage = Storage.load(tmp_path / "two", journal=tmp_path / "two")
    with pytest.raises(InvalidInputError, match="in use"):
        Storage.load(tmp_path / "two", journal=tmp_path / "two")
    assert Storage.load(tmp_path / "two").journal is None  # reading needs no lock
    storage.close()
    make(None).save(tmp_path / "saved")
    storage = Storage.load(tmp_path / "saved", journal=tmp_path / "saved")  # a snapshot becomes a journal
    play(storage, 2)
    storage.close()
    assert rewards_in(tmp_path / "saved") == [0.0, 1.0]


class Counting(Storage):
    """A class of a user, with the methods that saving needs."""

    def __init__(self, size, device="cpu"):
        super().__init__(size, device, seed=0)
        self.numbers = torch.zeros(size)

    create_factory = init_tensors = get_all_buffer_data = insert_data_slice = insert_transition = None
    before_gradients = after_gradients = generate_batches = reset = update_storage_parameter = None

    def _settings(self):
        return {"size": self.max_size}

    @classmethod
    def _from_settings(cls, settings, device):
        return cls(settings["size"], device)

    def _state(self):
        return {}, {"numbers": self.numbers}

    def _set_state(self, numbers, reader):
        reader.read_into("numbers", self.numbers)


def test_a_class_of_a_user_gets_a_journal_by_loading(tmp_path):
    Counting(3).save(tmp_path / "journal")
    storage = Storage.load(tmp_path / "journal", journal=tmp_path / "journal")
    storage.numbers[1] = 5.0
    storage.journal.commit()
    assert Storage.load(tmp_path / "journal").numbers.tolist() == [0.0, 5.0, 0.0]
    storage.journal.close()


# ---------------------------------------------------------------------------------------------------- the thread


def test_the_thread_commits_what_came(tmp_path, ticks):
    storage = make(tmp_path / "journal")
    ticks.begin()
    newest = 0
    for steps in (5, 1, 80):
        play(storage, steps, newest)
        assert rewards_in(tmp_path / "journal") == list(range(newest))
        newest += steps
        ticks.tick()
        assert rewards_in(tmp_path / "journal") == list(range(max(0, newest - 64), newest))
    identity = manifest_of(tmp_path / "journal")
    ticks.tick()
    assert manifest_of(tmp_path / "journal") == identity  # nothing came
    storage.close()


def manifest_of(folder):
    return (folder / "manifest.json").read_bytes()


def test_threads_add_while_others_commit(tmp_path, ticks):
    """Every commit is a state that there was: rows without a gap, up to some step."""
    storage = make(tmp_path / "journal", storage_size=400)
    ticks.begin()
    adding = threading.Thread(target=play, args=(storage, 1000))
    adding.start()
    while adding.is_alive():
        ticks.tick()
        found = rewards_in(tmp_path / "journal")
        newest = int(found[-1]) + 1 if found else 0
        assert found == [float(step) for step in range(max(0, newest - 400), newest)]
    adding.join()
    storage.close()
    assert rewards_in(tmp_path / "journal") == list(range(600, 1000))


def test_a_wait_for_a_rate_limit_does_not_hold_commits_back(tmp_path):
    storage = make(tmp_path / "journal", rate_limit=RateLimit(1.0, min_size=2, tolerance=8), batch_size=2)
    adding = threading.Thread(target=play, args=(storage, 20))
    adding.start()
    while len(rewards_in(tmp_path / "journal")) < 10:  # of ten steps, the eleventh has to wait for samples
        storage.journal.commit()
    assert adding.is_alive()
    while len(storage) < 20:  # then nothing would end a wait for more
        storage.sample()
    adding.join()
    storage.close()
    assert rewards_in(tmp_path / "journal") == list(range(20))


def test_writers_of_other_processes_are_committed_in_whole_rows(tmp_path):
    storage = make(tmp_path / "journal", memory="shared", storage_size=300)
    writer = storage.writer()
    child = multiprocessing.get_context("fork").Process(target=lambda: (play(writer, 600), writer.close()))
    child.start()
    while child.is_alive():
        storage.journal.commit()
        found = rewards_in(tmp_path / "journal")
        newest = int(found[-1]) + 1 if found else 0
        assert found == [float(step) for step in range(max(0, newest - 300), newest)]
    child.join()
    storage.close()
    assert rewards_in(tmp_path / "journal") == list(range(300, 600))


# ---------------------------------------------------------------------------------------------------- failures


@contextmanager
def failing(name, number=errno.EIO):
    """A function of the system that fails."""

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, name, fail)
        yield


CALLS = {
    "full, rows": ("pwritev", errno.ENOSPC, DiskFullError),
    "full, space reserved": ("posix_fallocate", errno.ENOSPC, DiskFullError),
    "fsync": ("fsync", errno.EIO, OSError),
    "rename": ("replace", errno.EIO, OSError),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_commit_that_fails_leaves_the_one_before_and_is_tried_again(call, tmp_path, ticks):
    name, number, kind = CALLS[call]
    folder = tmp_path / "journal"
    storage = make(folder)
    ticks.begin()
    play(storage, 10)
    ticks.tick()
    play(storage, 5, 10)
    with failing(name, number):
        with pytest.warns(RuntimeWarning, match="Adding goes on") as warned:
            ticks.tick(3)
        (warning,) = warned  # of three failures the first is told
        assert str(folder) in str(warning.message)
        assert "nothing that came after 20" in str(warning.message)
        play(storage, 5, 15)
        assert isinstance(storage.journal.error, kind)
        with pytest.raises(kind):
            storage.journal.commit()
        assert rewards_in(folder) == list(range(10))
        play(storage, 5, 20)
    files = {path.name for path in folder.glob("rows-*")}
    ticks.tick()
    assert storage.journal.error is None
    assert rewards_in(folder) == list(range(25))
    assert {path.name for path in folder.glob("rows-*")} - files  # what was written when it failed is not appended to
    play(storage, 60, 25)
    storage.close()
    assert rewards_in(folder) == list(range(21, 85))


def test_a_journal_whose_first_commit_fails_leaves_nothing_behind(tmp_path):
    def running():
        registry = weakref.finalize._registry
        return {found for found in registry if registry[found].func is journals._finish}

    before = running()
    with failing("posix_fallocate", errno.ENOSPC), pytest.raises(DiskFullError) as caught:
        make(tmp_path / "journal")
    after = running()
    del caught  # its traceback refers to the storage, as one that ends the program does
    assert after <= before
    play(make(tmp_path / "journal"), 1)  # its folder is free


def test_rows_are_written_anew_only_where_the_disk_has_room_for_them(tmp_path, monkeypatch):
    """Else a disk that has room for what came could not take it."""
    monkeypatch.setattr(snapshot, "_MOST_RECORDS", 3)
    monkeypatch.setattr(saved_rows, "free_disk", lambda path: room)
    storage, room, folder = make(tmp_path / "journal"), 0, tmp_path / "journal"
    for step in range(6):
        play(storage, 1, step)
        storage.journal.commit()
    assert [path.name for path in folder.glob("rows-*")] == ["rows-000001.bin"]
    assert rewards_in(folder) == list(range(6))
    room = 1 << 40
    play(storage, 1, 6)
    storage.journal.commit()
    assert [path.name for path in folder.glob("rows-*")] == ["rows-000002.bin"]
    assert rewards_in(folder) == list(range(7))
    storage.close()


def test_rows_that_somebody_removed_are_committed_again(tmp_path):
    storage = make(tmp_path)
    play(storage, 3)
    storage.journal.commit()
    (tmp_path / "rows-000001.bin").unlink()
    storage.journal.commit()  # although nothing has changed
    assert rewards_in(tmp_path) == [0.0, 1.0, 2.0]
    storage.close()


def test_what_was_there_stays_until_it_is_known_that_the_new_commit_is(tmp_path, monkeypatch):
    storage = make(tmp_path)
    play(storage, 3)
    storage.journal.commit()
    before = {path for path in tmp_path.iterdir() if path.name.startswith(("rows-", "tensors-"))}
    storage.reset()
    play(storage, 2, 3)  # nothing of the commit before is needed

    def fail(directory, beside, name):
        os.replace(directory.path / beside, directory.path / name)
        raise OSError(errno.EIO, "Input/output error")  # as the fsync of the folder

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "replace", fail)
        with pytest.raises(OSError, match="Input/output"):
            storage.journal.commit()
    assert before < set(tmp_path.iterdir())
    play(storage, 1, 5)
    storage.journal.commit()
    assert before & set(tmp_path.iterdir()) == set()
    assert rewards_in(tmp_path) == [3.0, 4.0, 5.0]
    storage.close()


def test_a_streak_that_ended_is_told_again(tmp_path, ticks):
    storage = make(tmp_path / "journal")
    ticks.begin()
    for begin in (0, 1):
        play(storage, 1, begin)
        with failing("fsync"), pytest.warns(RuntimeWarning, match="failed: OSError"):
            ticks.tick()
        ticks.tick()
    storage.close()


def test_where_warnings_are_errors_the_thread_goes_on(tmp_path, ticks):
    storage = make(tmp_path / "journal")
    ticks.begin()
    play(storage, 1)
    with failing("fsync"):
        ticks.tick()  # all warnings are errors in tests
    assert isinstance(storage.journal.error, OSError)
    ticks.tick()
    assert rewards_in(tmp_path / "journal") == [0.0]
    storage.close()


def test_a_folder_that_was_removed_is_made_again(tmp_path, ticks):
    folder = tmp_path / "run" / "journal"
    storage = make(folder)
    ticks.begin()
    play(storage, 10)
    ticks.tick()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("in the way")
    play(storage, 1, 10)
    with pytest.warns(RuntimeWarning, match="Adding goes on"):
        ticks.tick()
    (tmp_path / "run").unlink()
    ticks.tick()
    assert rewards_in(folder) == list(range(11))
    shutil.rmtree(folder)
    other = make(None)
    other.save(folder)  # not ours any more
    play(storage, 1, 11)
    end = storage.journal._end
    with pytest.warns(RuntimeWarning, match="replaced by another one"):
        ticks.tick()
    assert not end.alive  # one is enough, however often it is tried
    assert rewards_in(folder) == []
    shutil.rmtree(folder)
    storage.close()
    assert rewards_in(folder) == list(range(12))


def test_an_interrupted_commit_holds_no_rows(tmp_path, monkeypatch):
    """As Ctrl-C may, between the cut and the write."""
    storage = make(tmp_path / "journal")
    play(storage, 3)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(storage.journal._writer), "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            storage.journal.commit()
    assert storage._rows.holds == []
    storage.close()
    assert rewards_in(tmp_path / "journal") == [0.0, 1.0, 2.0]


def test_a_last_commit_that_fails_is_raised_and_everything_is_closed(tmp_path):
    storage = make(tmp_path / "journal")
    play(storage, 3)
    with failing("fsync"), pytest.raises(OSError, match="Input/output"):
        storage.close()
    with pytest.raises(StorageClosedError, match="is closed; nothing was committed"):
        storage.journal.commit()
    storage.close()
    assert rewards_in(tmp_path / "journal") == []
    make(None).save(tmp_path / "journal")  # nobody has the folder


# ---------------------------------------------------------------------------------------------------- the end


def test_closing_commits_and_releases_the_folder(tmp_path):
    storage = make(tmp_path / "journal")
    thread = storage.journal._thread
    play(storage, 3)
    storage.close()
    thread.join()
    assert rewards_in(tmp_path / "journal") == [0.0, 1.0, 2.0]
    Storage.load(tmp_path / "journal", journal=tmp_path / "journal").close()


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_storage_that_is_collected_is_committed(in_a_cycle, tmp_path):
    storage = make(tmp_path / "journal")
    thread, gone = storage.journal._thread, weakref.ref(storage)
    play(storage, 3)
    if in_a_cycle:
        storage.itself = storage
    del storage
    if in_a_cycle:
        gc.collect()
    assert gone() is None
    thread.join()
    assert rewards_in(tmp_path / "journal") == [0.0, 1.0, 2.0]


def test_a_collected_storage_warns_if_its_last_commit_fails(tmp_path):
    storage = make(tmp_path / "journal")
    play(storage, 3)
    with failing("fsync"), pytest.warns(RuntimeWarning, match="It was the last one"):
        del storage
    assert rewards_in(tmp_path / "journal") == []


def test_a_shallow_copy_that_is_collected_does_not_end_the_journal(tmp_path):
    storage = make(tmp_path / "journal")
    gone = weakref.ref(copy.copy(storage))
    assert gone() is None
    play(storage, 1)
    storage.journal.commit()
    assert rewards_in(tmp_path / "journal") == [0.0]
    storage.close()


PROGRAM = """
import sys, threading
from gymnasium import spaces
import rlstore

folder = rlstore.Journal(sys.argv[1], 1e6)
storage = rlstore.ReplayStorage(
    spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(9), storage_size=64, batch_size=2, num_workers=2, journal=folder
)

def play(begin, end):
    for step in range(begin, end):
        storage.add([[float(step)]], [0], [float(step)], [False], [False], {}, [[step + 1.0]])

def go_on():
    threading.main_thread().join()
    play(3, 7)

play(0, 3)
storage.sample()
threading.Thread(target=go_on).start()
"""


def test_the_end_of_an_interpreter_commits_what_its_threads_added_last(tmp_path):
    subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM, tmp_path / "journal"], check=True, timeout=100)
    assert rewards_in(tmp_path / "journal") == list(range(7))


def test_the_end_of_an_interpreter_commits(tmp_path):
    storage = make(tmp_path / "journal")
    play(storage, 3)
    at_exit = storage.journal._end
    assert at_exit.atexit
    at_exit()
    assert rewards_in(tmp_path / "journal") == [0.0, 1.0, 2.0]
    with pytest.raises(StorageClosedError):
        storage.journal.commit()


def test_the_end_of_a_process_of_multiprocessing_commits(tmp_path):
    def work():
        storage = make(tmp_path / "journal", num_workers=2, batch_size=2)
        kept.append(storage)  # so that it is not collected before
        play(storage, 3)
        storage.sample()

    kept = []
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert rewards_in(tmp_path / "journal") == [0.0, 1.0, 2.0]


# ---------------------------------------------------------------------------------------------------- copies, forks


def test_a_copy_has_no_journal(tmp_path):
    storage = make(tmp_path / "journal")
    play(storage, 2)
    copies = [copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))]
    assert [one.journal for one in copies] == [None, None]
    play(copies[0], 3, 2)
    gone = weakref.ref(copies.pop(0))
    assert gone() is None
    storage.journal.commit()
    assert rewards_in(tmp_path / "journal") == [0.0, 1.0]
    storage.close()


def test_a_forked_child_leaves_the_journal_to_its_parent(tmp_path):
    storage = make(tmp_path / "journal")
    play(storage, 2)
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        told = b"no"
        os.close(theirs[1])  # so that the end of the parent ends the child
        try:
            play(storage, 3, 2)  # a copy, in memory of its own
            with pytest.raises(InvalidInputError, match=f"forked, and the journal .* process {os.getppid()}"):
                storage.journal.commit()
            storage.close()
            multiprocessing.util._exit_function()
            told = b"ok"
        finally:
            os.write(ours[1], told)
            os.read(theirs[0], 1)
            os._exit(0)
    assert os.read(ours[0], 2) == b"ok"
    assert rewards_in(tmp_path / "journal") == []
    storage.close()
    Storage.load(tmp_path / "journal", journal=tmp_path / "journal").close()  # the child does not have the lock
    os.write(theirs[1], b".")
    os.waitpid(child, 0)
    assert rewards_in(tmp_path / "journal") == [0.0, 1.0]


def test_a_save_that_the_parent_is_about_holds_no_child_back(tmp_path):
    storage = make(tmp_path / "journal")
    play(storage, 64)
    with storage._still():
        cut = storage._rows_for(storage.journal._writer)
        cut.hold()
    child = os.fork()
    if child == 0:
        play(storage, 100, 64)
        os._exit(int(storage._rows.holds != [] or rewards_of(storage) != list(range(100, 164))))
    assert os.waitpid(child, 0)[1] == 0
    assert storage._rows.holds == [cut]
    cut.close(None)
    storage.close()


def test_there_is_nothing_to_load_where_nothing_was_committed(tmp_path):
    with pytest.raises(SnapshotError, match="there is no snapshot"):
        Storage.load(tmp_path / "journal", journal=tmp_path / "journal")
    assert not (tmp_path / "journal").exists()
