"""Saves of replay that write what changed, and saves in the background.

The observation of each (step, env) is its own number, so that a row from elsewhere cannot pass.
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import threading
import warnings

import pytest
import torch
from gymnasium import spaces

from rlstore import DiskFullError, DoesNotFitError, NotReadyError, PrioritizedReplayStorage, ReplayStorage, Storage
from rlstore.engine.disk import segments, snapshot
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.snapshot import SavedRows, SavedSegment, SnapshotReader
from rlstore.engine.rows import saved_rows

ENVS, STEPS = 3, 20


def make(kind=ReplayStorage, **options):
    options = {"storage_size": STEPS * ENVS, "num_envs": ENVS, "batch_size": 16, "seed": 0, **options}
    return kind(spaces.Box(-1e9, 1e9, (2,)), spaces.Discrete(3), **options)


def observation(step):
    """That of every environment before a step."""
    return (torch.arange(ENVS).unsqueeze(1) + 1000.0 * step).expand(ENVS, 2).contiguous()


def add(storage, steps, mask=None):
    """Episodes end every seven steps, in each environment at another one."""
    for step in steps:
        ended = (torch.arange(ENVS) + step) % 7 == 0
        rewards = observation(step)[:, 0].clone()
        arguments = (observation(step), torch.arange(ENVS), rewards, ended, ended & False, {}, observation(step + 1))
        storage.add(*arguments, mask=mask)


def held(storage):
    """Everything, as the naive reader of the storage sees it."""
    data = storage.get_all_buffer_data()
    return {name: data[name].tolist() for name in sorted(data)}


def expect(steps):
    """What a storage holds after these steps and no others."""
    storage = make()
    add(storage, steps)
    return held(storage)


def ranges(folder):
    """The rows of each record: by segment, the first and one past the last row of each environment."""
    with SnapshotReader(folder) as reader:
        form = (ENVS,), torch.int64
        return [
            (segment, record.tensor("first", *form).tolist(), record.tensor("stop", *form).tolist())
            for segment, record in reader.records()
        ]


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name.startswith("rows-")}


@pytest.fixture
def small_segments(monkeypatch):
    """A segment takes about two records."""
    for module in (segments, snapshot):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 1500)


# ---------------------------------------------------------------------------------------------------- what is written


def test_a_save_again_writes_the_rows_since(tmp_path):
    storage = make()
    add(storage, range(12))
    storage.save(tmp_path)
    assert ranges(tmp_path) == [(0, [0] * ENVS, [12] * ENVS)]
    before = (tmp_path / "rows-000001.bin").read_bytes()
    add(storage, range(12, 15))
    storage.save(tmp_path)
    assert ranges(tmp_path)[1:] == [(0, [12] * ENVS, [15] * ENVS)]
    assert (tmp_path / "rows-000001.bin").read_bytes()[: len(before)] == before
    assert held(Storage.load(tmp_path)) == held(storage) == expect(range(15))


def test_a_save_without_change_writes_no_rows(tmp_path):
    storage = make()
    add(storage, range(9))
    storage.save(tmp_path)
    before = sizes(tmp_path)
    storage.save(tmp_path)
    assert sizes(tmp_path) == before


def test_rows_that_were_overwritten_since_are_not_written(tmp_path):
    storage = make()
    add(storage, range(12))
    storage.save(tmp_path)
    add(storage, range(12, 50))
    storage.save(tmp_path)
    assert ranges(tmp_path) == [(0, [30] * ENVS, [50] * ENVS)]
    assert sorted(sizes(tmp_path)) == ["rows-000002.bin"]
    assert held(Storage.load(tmp_path)) == expect(range(50))


def test_a_loaded_storage_goes_on_in_its_folder(tmp_path):
    storage = make()
    add(storage, range(12))
    storage.save(tmp_path)
    loaded = Storage.load(tmp_path)
    add(loaded, range(12, 14))
    loaded.save(tmp_path)
    assert ranges(tmp_path)[1:] == [(0, [12] * ENVS, [14] * ENVS)]
    add(storage, range(12, 16))
    storage.save(tmp_path)  # another storage has saved there: all of it
    assert ranges(tmp_path) == [(0, [0] * ENVS, [16] * ENVS)]
    assert held(Storage.load(tmp_path)) == expect(range(16))


def test_each_folder_gets_what_it_lacks(tmp_path):
    storage = make()
    for step in range(12):
        add(storage, [step])
        storage.save(tmp_path / "ab"[step % 2])
    # A record without rows has the ends of episodes whose last rows were saved before.
    assert [stop[0] for _, first, stop in ranges(tmp_path / "a") if first != stop] == [1, 3, 5, 7, 9, 11]
    assert [stop[0] for _, first, stop in ranges(tmp_path / "b") if first != stop] == [2, 4, 6, 8, 10, 12]
    assert held(Storage.load(tmp_path / "a")) == expect(range(11))
    assert held(Storage.load(tmp_path / "b")) == expect(range(12))


def test_segments_that_hold_nothing_needed_are_removed(tmp_path, small_segments):
    storage, seen = make(), []
    for step in range(90):
        add(storage, [step])
        if step % 3 == 2:
            storage.save(tmp_path)
            seen.append(sizes(tmp_path))
            assert held(Storage.load(tmp_path)) == expect(range(step + 1))
    assert max(len(files) for files in seen) <= 7
    assert sorted(seen[-1])[0] > sorted(seen[10])[0] > "rows-000001.bin"


def test_an_environment_that_stands_still_does_not_keep_all_segments(tmp_path, small_segments, monkeypatch):
    monkeypatch.setattr(snapshot, "_MOST_RECORDS", 40)
    storage = make()
    add(storage, range(5))
    moving = torch.tensor([True, True, False])
    for step in range(5, 90):
        add(storage, [step], mask=moving)
        storage.save(tmp_path)
        assert len(ranges(tmp_path)) <= 41
    twin = make()
    add(twin, range(5))
    add(twin, range(5, 90), mask=moving)
    assert held(Storage.load(tmp_path)) == held(twin)


def test_after_a_reset_what_was_before_is_not_needed(tmp_path):
    storage = make()
    add(storage, range(12))
    storage.save(tmp_path)
    storage.reset()
    storage.save(tmp_path)
    assert (held(Storage.load(tmp_path)), sizes(tmp_path)) == ({}, {})
    add(storage, range(100, 104))
    storage.save(tmp_path)
    assert held(Storage.load(tmp_path)) == expect(range(100, 104))


def test_an_end_that_came_after_its_row_was_saved(tmp_path):
    """The next step does not continue the episode: its last row, saved before, gets a final observation."""
    storage = make()
    add(storage, range(1, 4))
    storage.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        add(storage, range(50, 53))
    storage.save(tmp_path)
    assert ranges(tmp_path)[1:] == [(0, [3] * ENVS, [3] * ENVS), (0, [3] * ENVS, [6] * ENVS)]
    data = Storage.load(tmp_path).get_all_buffer_data()
    assert data["next_observations"][2, :, 0].tolist() == [4000.0, 4001.0, 4002.0]
    assert held(Storage.load(tmp_path)) == held(storage)


def test_priorities_are_those_of_the_last_save(tmp_path):
    storage = make(PrioritizedReplayStorage)
    add(storage, range(12))
    storage.save(tmp_path)
    rows = torch.tensor([4, 7, 20])
    storage.update(rows, torch.tensor([3.0, 5.0, 0.5]))
    storage.save(tmp_path)
    assert torch.equal(Storage.load(tmp_path).priorities(torch.arange(36)), storage.priorities(torch.arange(36)))


# ---------------------------------------------------------------------------------------------------- failures


def fail_at(monkeypatch, point, error):
    """Have the n-th of the calls that change the disk raise an error; counts the calls."""
    calls = itertools.count()

    def failing(original):
        def call(*args, **kwargs):
            if next(calls) == point:
                raise error
            return original(*args, **kwargs)

        return call

    for name in ("replace", "fsync", "posix_fallocate", "unlink", "pwritev", "ftruncate"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    monkeypatch.setattr(Directory, "create", failing(Directory.create))
    return calls


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_point_leaves_the_old_or_the_new_rows(number, tmp_path, small_segments):
    storage = make()
    add(storage, range(9))
    for point in itertools.count():
        first, folder = 9 + 3 * point, tmp_path / "snapshot"
        storage.save(folder)
        add(storage, range(first, first + 3))
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_at(patch, point, OSError(number, os.strerror(number)))
            error = None
            try:
                storage.save(folder)
            except OSError as caught:
                error = caught
            came_to_it = next(calls) > point
        assert isinstance(error, DiskFullError) == (error is not None and number == errno.ENOSPC)
        found = held(Storage.load(folder))
        assert found == expect(range(first + 3)) or (error is not None and found == expect(range(first)))
        if not came_to_it:
            break
    assert point > 8


def test_a_file_is_closed_once(tmp_path, small_segments, small_chunks, monkeypatch):
    """The second time it may be a file of somebody else."""
    storage = make()
    add(storage, range(20))
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and fail())

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        storage.save(tmp_path)


def test_rows_whose_file_was_removed_are_written_again(tmp_path):
    storage = make()
    add(storage, range(9))
    storage.save(tmp_path)
    (tmp_path / "rows-000001.bin").unlink()  # as something that cleans up old files
    add(storage, range(9, 12))
    storage.save(tmp_path)
    assert held(Storage.load(tmp_path)) == expect(range(12))


def test_after_an_error_nothing_is_appended_to_the_same_file(tmp_path, monkeypatch):
    """When fsync has failed, nobody knows what of the file is on the disk."""
    storage = make()
    add(storage, range(9))
    storage.save(tmp_path)
    add(storage, range(9, 12))
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 2, OSError(errno.EIO, "Input/output error"))
        with pytest.raises(OSError, match="Input/output"):
            storage.save(tmp_path)
    storage.save(tmp_path)
    assert ranges(tmp_path) == [(0, [0] * ENVS, [9] * ENVS), (1, [9] * ENVS, [12] * ENVS)]
    assert held(Storage.load(tmp_path)) == expect(range(12))


# ---------------------------------------------------------------------------------------------------- in the background


@pytest.fixture
def small_chunks(monkeypatch):
    """A record has one row of each environment."""
    monkeypatch.setattr(saved_rows, "_CHUNK_BYTES", 1)


@pytest.fixture
def gate(monkeypatch):
    """Writing waits for it."""
    gate, append = threading.Event(), segments.SegmentFile.append

    def wait_and_append(file, record):
        assert gate.wait(30)
        append(file, record)

    monkeypatch.setattr(segments.SegmentFile, "append", wait_and_append)
    yield gate
    gate.set()


@pytest.mark.parametrize("kind", [ReplayStorage, PrioritizedReplayStorage])
def test_a_save_in_the_background_is_that_of_the_moment(kind, tmp_path, small_chunks, gate):
    storage, twin = make(kind), make(kind)
    for each in (storage, twin):
        add(each, range(33))
        each.sample()
    saving = storage.save(tmp_path, background=True)
    add(storage, range(33, 90))  # every row is overwritten, and twice
    storage.sample()
    storage.reset()
    assert not saving.done
    gate.set()
    saving.wait()
    assert (saving.done, saving.error) == (True, None)
    loaded = Storage.load(tmp_path)
    assert held(loaded) == held(twin) == expect(range(33))
    for one, other in zip(loaded.sample(), twin.sample(), strict=True):
        assert one is other is None or torch.equal(one, other)


def insert_again(storage):
    """All that it holds, without a moment in which others get the guard."""
    storage.insert_data_slice(storage.get_all_buffer_data())


@pytest.mark.parametrize("change", [lambda storage: add(storage, range(33, 60)), ReplayStorage.reset, insert_again])
def test_whoever_is_too_far_ahead_waits_for_the_disk(change, tmp_path, small_chunks, gate, monkeypatch):
    waits = threading.Event()

    class Watched(threading.Event):
        def wait(self, timeout=None):
            waits.set()
            return super().wait(timeout)

    monkeypatch.setattr(saved_rows, "_MOST_BYTES_AHEAD", 1)
    monkeypatch.setattr(saved_rows, "Event", Watched)
    storage = make()
    add(storage, range(33))
    saving = storage.save(tmp_path, background=True)
    changing = threading.Thread(target=change, args=(storage,))
    changing.start()
    assert waits.wait(30)
    assert changing.is_alive()
    gate.set()
    changing.join()
    saving.wait()
    assert held(Storage.load(tmp_path)) == expect(range(33))
    if change is insert_again:
        assert held(storage)["rewards"] == expect(range(33))["rewards"]
    else:
        assert held(storage) == ({} if change is ReplayStorage.reset else expect(range(60)))


def test_records_grow_while_nobody_adds(tmp_path, monkeypatch):
    storage = make()
    add(storage, range(33))
    row = sum(block.shape[2] for block in saved_rows._blocks(storage._rows).values())
    monkeypatch.setattr(saved_rows, "_CHUNK_BYTES", row * ENVS)
    monkeypatch.setattr(saved_rows, "_LARGE_CHUNK_BYTES", 7 * row * ENVS)
    storage.save(tmp_path / "alone")
    stops = (14, 15, 16, 17, 24, 31, 33)  # it takes a few to be sure that nobody adds
    assert [stop for _, _, stop in ranges(tmp_path / "alone")] == [[n] * ENVS for n in stops]
    append = segments.SegmentFile.append
    more = iter(range(33, 60))

    def add_meanwhile(file, record):
        append(file, record)
        add(storage, itertools.islice(more, 1))

    monkeypatch.setattr(segments.SegmentFile, "append", add_meanwhile)
    storage.save(tmp_path / "beside")
    assert [stop for _, _, stop in ranges(tmp_path / "beside")] == [[n] * ENVS for n in range(14, 34)]
    assert held(Storage.load(tmp_path / "alone")) == held(Storage.load(tmp_path / "beside")) == expect(range(33))


def test_of_a_row_in_several_records_the_last_one_counts(tmp_path, monkeypatch):
    storage = make()
    add(storage, range(33))
    records = saved_rows.RowCut.records

    def with_others_before(cut):
        for record in records(cut):
            yield {**record, "records": torch.full_like(record["records"], 7)}
            yield record

    monkeypatch.setattr(saved_rows.RowCut, "records", with_others_before)
    storage.save(tmp_path)
    assert held(Storage.load(tmp_path)) == expect(range(33))


def test_two_saves_at_once(tmp_path, small_chunks, gate):
    storage = make()
    add(storage, range(33))
    one = storage.save(tmp_path / "one", background=True)
    add(storage, range(33, 40))
    other = storage.save(tmp_path / "other", background=True)
    add(storage, range(40, 70))
    gate.set()
    one.wait()
    other.wait()
    assert held(Storage.load(tmp_path / "one")) == expect(range(33))
    assert held(Storage.load(tmp_path / "other")) == expect(range(40))
    assert held(storage) == expect(range(70))


def test_an_error_in_the_background_is_told(tmp_path, monkeypatch):
    storage = make()
    add(storage, range(9))
    storage.save(tmp_path)
    add(storage, range(9, 12))

    def fail(file, record):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(segments.SegmentFile, "append", fail)
        saving = storage.save(tmp_path, background=True)
        with pytest.raises(DiskFullError, match="the disk is full"):
            saving.wait()
    assert isinstance(saving.error, DiskFullError)
    assert [str(warning.message) for warning in warned if "failed" in str(warning.message)]
    assert held(Storage.load(tmp_path)) == expect(range(9))
    add(storage, range(12, 60))  # nothing holds it back
    storage.save(tmp_path)
    assert held(Storage.load(tmp_path)) == expect(range(60))


def test_a_folder_is_for_one_save_at_a_time(tmp_path, gate):
    storage = make()
    add(storage, range(9))
    with pytest.raises(ValueError, match=r"background is 'no'; save\(\) needs True or False"):
        storage.save(tmp_path, background="no")
    saving = storage.save(tmp_path, background=True)
    with pytest.raises(ValueError, match=r"in use by .* a save in the background, .* wait\(\) for that save"):
        storage.save(tmp_path)
    with pytest.raises(NotReadyError, match="not complete after 0 seconds"):
        saving.wait(0)
    gate.set()
    saving.wait()
    storage.save(tmp_path)


def test_a_forked_process_cannot_wait_for_the_save_of_its_parent(tmp_path, gate):
    storage = make()
    add(storage, range(9))
    saving = storage.save(tmp_path, background=True)
    child = os.fork()
    if child == 0:
        try:
            saving.wait()
        except NotReadyError:
            add(storage, range(9, 60))  # the child's own copy: nothing holds it
            os._exit(0 if held(storage) == expect(range(60)) else 2)
        os._exit(1)
    gate.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    saving.wait()
    assert held(Storage.load(tmp_path)) == expect(range(9))


def test_writers_go_on_while_a_save_is_written(tmp_path, small_chunks, gate):
    storage = make(memory="shared")
    with storage.writer() as writer:
        add(writer, range(33))
        saving = storage.save(tmp_path, background=True)
        add(writer, range(33, 90))
        gate.set()
        saving.wait()
        assert held(Storage.load(tmp_path)) == expect(range(33))
        assert held(storage) == expect(range(90))


def add_from_a_process(writer, storage_is_saved):
    """Add 33 steps, and after the event others that overwrite them; returns the process, and an event of the first."""
    context = multiprocessing.get_context("fork")
    added = context.Event()

    def work():
        with writer:
            add(writer, range(33))
            added.set()
            assert storage_is_saved.wait(30)
            add(writer, range(33, 250))

    process = context.Process(target=work)
    process.start()
    assert added.wait(30)
    return process


@pytest.mark.parametrize("background", [True, False])
def test_adds_of_another_process_do_not_wait_for_the_disk(background, tmp_path, small_chunks, gate):
    storage, go = make(memory="shared"), multiprocessing.get_context("fork").Event()
    process = add_from_a_process(storage.writer(), go)
    saves = [lambda: storage.save(tmp_path, background=True).wait(), lambda: storage.save(tmp_path)]
    saving = threading.Thread(target=saves[not background])
    saving.start()
    while not storage._rows.holds:
        assert saving.is_alive()
    go.set()
    process.join(30)
    assert process.exitcode == 0  # every row was overwritten, and its spare, too
    assert saving.is_alive()
    gate.set()
    saving.join(30)
    assert held(Storage.load(tmp_path)) == expect(range(33))
    assert held(storage) == expect(range(250))
    storage.close()


def test_adds_of_another_process_wait_for_the_disk_when_memory_ends(tmp_path, small_chunks, gate, monkeypatch):
    monkeypatch.setattr(saved_rows, "_MOST_BYTES_AHEAD", 1)
    storage, go = make(memory="shared"), multiprocessing.get_context("fork").Event()
    process = add_from_a_process(storage.writer(), go)
    saving = storage.save(tmp_path, background=True)
    go.set()
    process.join(0.2)
    assert process.is_alive()
    gate.set()
    saving.wait()
    process.join(30)
    assert process.exitcode == 0
    assert held(Storage.load(tmp_path)) == expect(range(33))
    assert held(storage) == expect(range(250))
    storage.close()


def test_a_writer_that_begins_during_a_save_does_not_change_what_is_saved(tmp_path, small_chunks, gate):
    storage = make(memory="shared")
    add(storage, range(33))
    saving = storage.save(tmp_path, background=True)
    with storage.writer() as writer:
        adding = threading.Thread(target=add, args=(writer, range(33, 250)))
        adding.start()
        adding.join(0.3)
        gate.set()
        saving.wait()
        adding.join(30)
    assert held(Storage.load(tmp_path)) == expect(range(33))
    assert held(storage) == expect(range(250))
    storage.close()


def test_a_save_whose_thread_cannot_start_holds_nothing(tmp_path, monkeypatch):
    storage = make()
    add(storage, range(33))

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DoesNotFitError, match="start new thread"):
            storage.save(tmp_path, background=True)
    assert storage._rows.holds == []
    storage.save(tmp_path)  # nobody has the folder
    assert held(Storage.load(tmp_path)) == expect(range(33))


def test_many_rows_are_not_written_anew_because_of_their_records():
    """40 GiB are some 20,000 records of 2 MiB."""
    count, size = 640, 64 << 20
    saved = [SavedSegment(f"rows-{number:06}.bin", size, torch.zeros(1), size >> 21) for number in range(count)]
    assert SavedRows("id", torch.zeros(1), saved).are_mostly_needed(count * size)
    for segment in saved:
        segment.records = 1000  # of 64 KiB
    assert not SavedRows("id", torch.zeros(1), saved).are_mostly_needed(count * size)
