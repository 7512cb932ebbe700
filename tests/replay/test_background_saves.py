"""What is saved in the background is the state at the moment of the call, whatever becomes of the storage meanwhile."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from resumed_training import digest

from rlstore import ReplayStorage, Storage
from rlstore.engine.rows import episode_ring

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

from programs import ARGUMENTS, BOX, DISCRETE, fill

pytestmark = [
    pytest.mark.filterwarnings("ignore:the observations of an environment"),
    pytest.mark.filterwarnings(
        r"ignore:a step of environment \d begins with the observation in which its episode had ended"
    ),
]
MEMORIES = ["ram", "shared", "mapped"]


def make(memory, folder):
    path = folder / "rows" if memory == "mapped" else None
    return ReplayStorage(BOX, DISCRETE, **ARGUMENTS, memory=memory, path=path)


def load(folder):
    return Storage.load(folder / "saved", folders={"path": folder / "loaded"} if (folder / "rows").exists() else None)


def add(storage, folder):
    fill(storage, 35, 80)


def reset(storage, folder):
    storage.reset()
    fill(storage, 100, 115)


def add_by_a_writer(storage, folder):
    with storage.writer() as writer:
        fill(writer, 35, 235)


def close(storage, folder):
    memory = storage._options.memory
    storage.close()
    other = make(memory, folder)
    fill(other, 35, 80)
    other.close()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("change", [add, reset, add_by_a_writer, close], ids=lambda change: change.__name__)
@pytest.mark.parametrize("steps", [15, 35], ids=["not full", "wrapped"])
def test_the_state_of_the_call_is_saved(memory, change, steps, tmp_path):
    storage = make(memory, tmp_path)
    fill(storage, 0, steps)
    expected = digest(storage.get_all_buffer_data())
    with storage._guard:  # the thread that saves can copy no row before all is done
        save = storage.save(tmp_path / "saved", background=True)
        change(storage, tmp_path)
    save.wait()
    loaded = load(tmp_path)
    assert digest(loaded.get_all_buffer_data()) == expected
    loaded.close()
    storage.close()


def test_ctrl_c_when_its_thread_has_begun_leaves_the_folder_to_the_save(tmp_path, monkeypatch):
    storage, start = make("ram", tmp_path), threading.Thread.start
    fill(storage, 0, 5)

    def start_and_interrupt(thread):
        start(thread)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have turned off
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                storage.save(tmp_path / "saved", background=True)
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in threading.enumerate():
        if thread.name == "rlstore save":
            thread.join(60)
    assert digest(Storage.load(tmp_path / "saved").get_all_buffer_data()) == digest(storage.get_all_buffer_data())
    fill(storage, 5, 10)
    assert len(storage) > 0


def test_steps_and_their_count_are_of_one_moment(tmp_path):
    """The count was raised after the guard was released: in between another thread saw a row that was not counted."""
    storage = make("ram", tmp_path)
    seen, stop = set(), threading.Event()

    def look():
        while not stop.is_set():
            with storage._guard:
                seen.add(storage._appender.added - int(storage._ring_of().written[0]))

    thread = threading.Thread(target=look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        values, none = torch.zeros(3, 1), torch.zeros(3, dtype=torch.bool)
        for _ in range(3000):
            storage.add(values, torch.zeros(3, dtype=torch.int64), torch.zeros(3), none, none, {}, values)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert seen == {0}


@pytest.mark.parametrize("compared", [1, 6, 1000])
def test_a_table_of_episodes_that_became_shorter(compared, tmp_path, monkeypatch):
    """In shared memory only the entries are saved that are in use: earlier records of the folder know of more."""
    monkeypatch.setattr(episode_ring, "_COMPARED", compared)
    storage, added = make("shared", tmp_path), 0
    none = torch.zeros(3, dtype=torch.bool)
    for adds, ends in ((90, True), (18, False), (3, True)):
        for step in range(added, added + adds):
            values, ended = torch.full((3, 1), float(step)), none if not ends else ~none
            storage.add(values, torch.zeros(3, dtype=torch.int64), torch.zeros(3), ended, none, {}, values + 1)
        added += adds
        ring = storage._rows
        at_first = ring._free_at_first(len(ring.free_slots))
        is_first = (ring.free_slots == at_first).all(1)[: int(ring.free_count.min())].tolist()
        unused = is_first.index(False) if False in is_first else len(is_first)
        assert ring.used_slots() == ring.slots - 3 * min(unused, len(ring.free_slots) - 1)
        storage.save(tmp_path / "saved")
        loaded = Storage.load(tmp_path / "saved")
        assert loaded.get_all_buffer_data()["observations"][:, 0, 0].tolist() == list(range(added - 20, added))
        storage.close()
        storage = loaded
    storage.close()
