"""NStepReplayStorage: batches prepared ahead (num_workers, fetch_every, pin_memory), and the thread that does it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from nstep_steps import fill, ids_of, make_step, make_storage, table

from rlstore import NStepReplayStorage

WORKERS = [0, 4]


def ids_in(batch):
    return sorted(table(batch))


def threads_of_storages():
    """The threads that were started since the tests began, by whatever."""
    return {thread for thread in threading.enumerate() if thread is not threading.main_thread()}


@pytest.fixture(autouse=True)
def no_thread_is_left(request):
    """After every test in this file: what its storages started has ended."""
    before, failures = threads_of_storages(), request.session.testsfailed
    yield
    if request.session.testsfailed > failures:
        return  # its traceback holds its storages
    if threads_of_storages() - before:
        gc.collect()
    for thread in threads_of_storages() - before:
        thread.join(timeout=60)
        assert not thread.is_alive(), thread


# ------------------------------------------------------------------------------------------------- reproducible


def a_run(num_workers, *, seed=0, fetch_every=1000, disturb=False):
    """Adds and samples in turn, wrapping twice; every number that was served."""
    storage = make_storage(2, 10, batch_size=24, num_workers=num_workers, seed=seed, fetch_every=fetch_every)
    drawn = []
    for step in range(30):
        storage.add(**make_step(step, 2, terminated=(0,) if step % 7 == 3 else ()))
        for _ in range(step % 3):
            batch = storage.sample()
            drawn.append([tensor.tolist() for tensor in batch])
            if disturb:
                for tensor in batch:
                    tensor.fill_(-1)
    storage.close()
    return drawn


@pytest.mark.parametrize(("num_workers", "fetch_every"), [(0, 1000), (1, 4), (4, 1), (4, 1000)])
def test_a_seed_gives_the_same_batches_whatever_the_timing(num_workers, fetch_every):
    switch = sys.getswitchinterval()
    runs = []
    try:
        # How often Python changes threads moves every race there is.
        for interval in (switch, 1e-6, 0.5):
            sys.setswitchinterval(interval)
            runs.append(a_run(num_workers, fetch_every=fetch_every, disturb=interval == 0.5))
    finally:
        sys.setswitchinterval(switch)
    assert runs[0] == runs[1] == runs[2]
    assert runs[0] != a_run(num_workers, fetch_every=fetch_every, seed=1)


def test_batches_are_the_same_however_many_are_prepared():
    """As long as nothing is added in between."""
    runs = []
    for num_workers in (0, 1, 4):
        storage = make_storage(2, 10, batch_size=24, num_workers=num_workers, seed=3)
        fill(storage, 10, terminated=(1,))
        runs.append([[tensor.tolist() for tensor in storage.sample()] for _ in range(12)])
        storage.close()
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_every_batch_was_true_when_it_was_drawn(num_workers):
    """Windows of the newest rows may be short for their age, but no row is mixed with one that was written over it."""
    storage = make_storage(1, 6, batch_size=64, num_workers=num_workers, seed=0, n_step=3, discount=0.5)
    for step in range(60):
        storage.add(**make_step(step, 1))
        for _ in range(2):
            for number, (action, reward, discount, after) in table(storage.sample()).items():
                assert action == number
                taken = after - number
                assert 1 <= taken <= 3
                assert discount == 0.5**taken
                assert reward == sum((number + i + 0.25) * 0.5**i for i in range(taken))
    storage.close()


def test_more_workers_than_transitions_is_fine():
    storage = make_storage(1, batch_size=3, num_workers=16)
    storage.add(**make_step(0, 1))
    for _ in range(40):
        assert ids_in(storage.sample()) == [1]
    storage.close()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_the_iterator_prepares_ahead_as_well(num_workers):
    storage = make_storage(batch_size=16, num_workers=num_workers, seed=0)
    fill(storage, 5)
    for _ in range(10):
        assert next(storage.replay_iter).observations.shape == (16, 2)
    storage.close()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_batch_of_another_size_does_not_disturb_those_prepared(num_workers):
    storage = make_storage(batch_size=16, num_workers=num_workers, seed=0)
    fill(storage, 5)
    asked = ((3,), (), (40,), (16,), ())
    assert [len(storage.sample(*size).rewards) for size in asked] == [3, 16, 40, 16, 16]
    storage.close()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_reset_throws_away_what_was_prepared(num_workers):
    storage = make_storage(batch_size=16, num_workers=num_workers)
    fill(storage, 5)
    storage.sample()
    storage.reset()
    with pytest.raises(ValueError, match=r"(?i)empty|no data|nothing"):
        storage.sample()
    fill(storage, 1, first=40)
    for _ in range(6):
        assert set(ids_in(storage.sample())) <= {81, 82}
    storage.close()


# ------------------------------------------------------------------------------------------------- age


@pytest.mark.parametrize(("num_workers", "fetch_every"), [(1, 1), (2, 5), (4, 2)])
def test_a_batch_prepared_fetch_every_or_more_steps_ago_is_drawn_anew(num_workers, fetch_every):
    for age in range(fetch_every + 2):
        storage = make_storage(1, 64, batch_size=256, num_workers=num_workers, fetch_every=fetch_every, seed=0)
        storage.add(**make_step(0, 1))
        assert ids_in(storage.sample()) == [1]  # the next ones are drawn now, from this one transition
        fill(storage, age, first=1)
        everything = list(range(1, age + 2))
        assert ids_in(storage.sample()) == (everything if age >= fetch_every else [1])
        storage.close()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_with_fetch_every_1_a_batch_is_always_fresh(num_workers):
    storage = make_storage(2, 8, batch_size=400, num_workers=num_workers, fetch_every=1)
    for step in range(12):
        storage.add(**make_step(step))
        for _ in range(3):
            newest = range(max(0, step - 7), step + 1)
            assert ids_in(storage.sample()) == [int(i) for kept in newest for i in ids_of(kept).tolist()]
    storage.close()


def test_without_workers_a_batch_is_always_fresh():
    storage = make_storage(1, 64, batch_size=512, num_workers=0, fetch_every=1000)
    for step in range(20):
        storage.add(**make_step(step, 1))
        assert ids_in(storage.sample()) == list(range(1, step + 2))


@pytest.mark.parametrize("num_workers", [1, 4])
def test_new_data_are_served_after_as_many_batches_as_were_prepared(num_workers):
    storage = make_storage(1, 64, batch_size=256, num_workers=num_workers, fetch_every=1000, seed=0)
    storage.add(**make_step(0, 1))
    storage.sample()
    storage.add(**make_step(1, 1))
    drawn = [ids_in(storage.sample()) for _ in range(num_workers + 3)]
    assert drawn == [[1]] * num_workers + [[1, 2]] * 3
    storage.close()


def test_numbers_that_are_no_numbers_of_steps_or_batches_are_refused():
    for fetch_every in (0, -1, 1.5, None, "1000", True):
        with pytest.raises(ValueError, match="fetch_every"):
            make_storage(fetch_every=fetch_every)
    for num_workers in (-1, 1.5, None, "4", True):
        with pytest.raises(ValueError, match="num_workers"):
            make_storage(num_workers=num_workers)


# ------------------------------------------------------------------------------------------------- pinned memory


@pytest.mark.parametrize("num_workers", WORKERS)
def test_pinned_memory_is_harmless_on_the_cpu(num_workers):
    pinned, plain = (
        make_storage(batch_size=16, num_workers=num_workers, pin_memory=pin, seed=0) for pin in (True, False)
    )
    for storage in (pinned, plain):
        fill(storage, 5)
    assert (pinned.pin_memory, plain.pin_memory) == (True, False)
    for _ in range(3):
        for mine, other in zip(pinned.sample(), plain.sample(), strict=True):
            assert mine.device == torch.device("cpu")
            assert torch.equal(mine, other)
    pinned.close()
    plain.close()


# ------------------------------------------------------------------------------------------------- the thread's end


@pytest.mark.parametrize("num_workers", WORKERS)
def test_close_ends_the_background_work(num_workers):
    before = threads_of_storages()
    storage = make_storage(batch_size=16, num_workers=num_workers)
    fill(storage, 5)
    storage.sample()
    storage.close()
    assert threads_of_storages() <= before
    storage.close()  # once more does no harm


def test_nothing_is_started_for_a_storage_that_prepares_nothing():
    before = threads_of_storages()
    storage = make_storage(num_workers=0)
    fill(storage, 5)
    storage.sample()
    assert threads_of_storages() <= before


@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_storage_that_is_forgotten_is_collected_with_its_thread(num_workers):
    before = threads_of_storages()
    storage = make_storage(batch_size=16, num_workers=num_workers)
    fill(storage, 5)
    storage.sample()
    gone = weakref.ref(storage)
    del storage
    gc.collect()
    assert gone() is None
    for thread in threads_of_storages() - before:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_many_storages_leave_nothing_behind():
    before = threads_of_storages()
    for _ in range(30):
        storage = make_storage(1, batch_size=4, num_workers=2)
        storage.add(**make_step(0, 1))
        storage.sample()
    del storage
    gc.collect()
    for thread in threads_of_storages() - before:
        thread.join(timeout=60)
    assert threads_of_storages() <= before


HEAD = """
import json, os, sys
import numpy as np, torch
from gymnasium import spaces
from rlstore import NStepReplayStorage

def make(**options):
    given = {"storage_size": 64, "batch_size": 8, "num_workers": 4, "seed": 0, **options}
    return NStepReplayStorage(spaces.Box(-1e9, 1e9, (2,)), spaces.Discrete(9), **given)

def add(storage, step):
    here = np.array([[step, -step]], np.float32)
    storage.add(here, [step % 9], [float(step)], [False], [False], {}, here + np.array([[1, -1]], np.float32))
"""


def run_script(body):
    """Run a script in a Python of its own; its output, once it has ended well and said nothing on stderr."""
    # From Python 3.12 on, a fork beside any other thread gives a warning, and torch has threads of its own.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", HEAD + body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_program_ends_from_within_a_function_and_with_an_exception_under_way():
    out = run_script("""
def main():
    storage = make(num_workers=4)
    keep.append(storage)
    for step in range(20):
        add(storage, step)
        storage.sample()
    raise SystemExit(0)
keep = []
try:
    main()
finally:
    print("leaving")
""")
    assert out == "leaving\n"


def test_a_storage_works_on_both_sides_of_a_fork():
    """The child has the same data, draws the same batches, and a thread of its own; neither side hears of the other."""
    out = run_script("""
storage = make(num_workers=4)
for step in range(20):
    add(storage, step)
storage.sample()

def go_on():
    said = []
    for step in range(20, 25):
        said.append([int(x) for x in storage.sample().observations[:, 0]])
        add(storage, step)
    return said

child = os.fork()
said = go_on()
if child == 0:
    with open(1, "w", closefd=False) as out:
        out.write(json.dumps(said) + "\\n")
    storage.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
print(json.dumps(said))
storage.close()
""")
    child, parent = out.splitlines()
    assert child == parent
    assert len(json.loads(child)) == 5


def test_the_documented_defaults_work_in_a_plain_loop():
    storage = NStepReplayStorage(make_storage().observation_space, make_storage().action_space, storage_size=100)
    for step in range(150):
        storage.add(**make_step(step, 1))
        assert storage.update({}) is None
        assert storage.sample().rewards.shape == (256, 1)
    assert len(storage) == 100
    storage.close()
