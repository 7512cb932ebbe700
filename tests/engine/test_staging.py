"""Batches on their way to a device: on streams that run as early or as late as they may, all read what was sent."""

import copy
import pickle
import threading
from collections import deque
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDict

from rlstore.engine.batches import staging
from rlstore.engine.batches.prefetch import Prefetch
from rlstore.engine.batches.staging import Staged, Staging, converted, launched, received
from rlstore.engine.guard import new_guard

CUDA, GARBAGE = torch.device("cuda", 0), "garbage"


class Event:
    def __init__(self):
        self.recorded, self.synchronized = False, False

    def synchronize(self):
        self.synchronized = True


class Stream:
    """A queue of work that runs when the test says so."""

    def __init__(self):
        self.work = deque()

    def record_event(self):
        event = Event()
        self.work.append(lambda: setattr(event, "recorded", True) or True)
        return event

    def wait_event(self, event):
        self.work.append(lambda: event.recorded)

    def launch(self, work):
        self.work.append(lambda: work() or True)

    def run(self):
        """As much as can run: a wait for an event that was not recorded stops it."""
        while self.work and self.work[0]():
            self.work.popleft()


class Cuda:
    """What staging uses of torch.cuda, for one thread."""

    def __init__(self):
        self.learner, self.made = Stream(), []
        self.current = self.learner

    def Stream(self, device):
        assert device == CUDA
        self.made.append(Stream())
        return self.made[-1]

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, device):
        assert device == CUDA
        return self.current


class OnHost:
    def __init__(self, cuda, value):
        self.cuda, self.value = cuda, value

    def to(self, device, *, non_blocking):
        assert (device, non_blocking) == (CUDA, True)
        made = OnDevice(self.cuda)
        self.cuda.current.launch(lambda: setattr(made, "value", self.value))
        return made


class OnDevice:
    device = CUDA

    def __init__(self, cuda):
        self.cuda, self.value, self.streams = cuda, GARBAGE, []

    def to(self, dtype):
        made = OnDevice(self.cuda)
        self.cuda.current.launch(lambda: setattr(made, "value", (dtype, self.value)))
        return made

    def record_stream(self, stream):
        self.streams.append(stream)

    def read(self):
        """Read by the current stream; what it sees is known when that has run."""
        seen = []
        self.cuda.current.launch(lambda: seen.append(self.value))
        return seen


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    monkeypatch.setattr(staging, "cuda", fake)
    return fake


def run_learners_first(cuda, *learners):
    """Every learner runs as far as it can before each copy."""
    side = cuda.made[0]
    while side.work:
        for stream in learners:
            stream.run()
        side.work.popleft()()
    for stream in learners:
        stream.run()
        assert not stream.work


def test_a_learner_reads_only_what_was_copied_however_early_it_runs(cuda):
    stage = Staging(CUDA)
    sent = [stage.send((OnHost(cuda, 2 * i), OnHost(cuda, 2 * i + 1))) for i in range(5)]
    assert not cuda.learner.work  # nothing that the learner launches waits for copies that it has not taken
    seen = [[tensor.read() for tensor in batch.receive()] for batch in sent]
    run_learners_first(cuda, cuda.learner)
    assert seen == [[[2 * i], [2 * i + 1]] for i in range(5)]
    assert len(cuda.made) == 1


def test_batches_taken_by_two_streams_wait_on_each(cuda):
    stage, other = Staging(CUDA), Stream()
    first, second = (stage.send((OnHost(cuda, i),)) for i in range(2))
    with cuda.stream(other):
        (tensor,) = second.receive()
        of_other = tensor.read()
    (mine,) = first.receive()
    of_learner = mine.read()
    run_learners_first(cuda, other, cuda.learner)
    assert (of_other, of_learner) == ([1], [0])
    assert (tensor.streams, mine.streams) == ([other], [cuda.learner])


def test_what_one_stream_took_another_can_take_too(cuda):
    sent, other = Staging(CUDA).send((OnHost(cuda, 7),)), Stream()
    (tensor,) = sent.receive()
    with cuda.stream(other):
        (same,) = sent.receive()
        seen = same.read()
    run_learners_first(cuda, other, cuda.learner)
    assert same is tensor
    assert seen == [7]
    assert tensor.streams == [cuda.learner, other]


def test_a_batch_is_converted_before_it_is_ready(cuda):
    sent = Staging(CUDA).send((OnHost(cuda, 1), OnHost(cuda, 2)), (torch.float16, None))
    seen = [tensor.read() for tensor in sent.receive()]
    run_learners_first(cuda, cuda.learner)
    assert seen == [[(torch.float16, 1)], [2]]


def test_every_tensor_of_a_nest_is_sent_and_kept_for_the_stream_that_takes_it(cuda):
    nest = {"a": OnHost(cuda, 1), "b": [OnHost(cuda, 2), (OnHost(cuda, 3), None)], "c": 4}
    moved = Staging(CUDA).send(nest).receive()
    leaves = [moved["a"], moved["b"][0], moved["b"][1][0]]
    assert (moved["b"][1][1], moved["c"]) == (None, 4)
    assert all(leaf.streams == [cuda.learner] for leaf in leaves)
    seen = [leaf.read() for leaf in leaves]
    run_learners_first(cuda, cuda.learner)
    assert seen == [[1], [2], [3]]


def test_what_one_stream_computes_another_takes_later(cuda):
    other, tensor = Stream(), OnDevice(cuda)
    cuda.current.launch(lambda: setattr(tensor, "value", 5))
    prepared = launched((tensor,), (torch.bfloat16,))
    with cuda.stream(other):
        (taken,) = received(prepared)
        seen = taken.read()
    other.run()
    assert seen == []
    cuda.learner.run()
    other.run()
    assert seen == [(torch.bfloat16, 5)]
    assert taken.streams == [other]


def test_a_copy_of_what_is_on_its_way_waits_and_is_there(cuda):
    event = Event()
    for copied in (
        copy.deepcopy(Staged((torch.arange(3),), event)),
        pickle.loads(pickle.dumps(Staged((torch.arange(3),)))),
    ):
        assert torch.equal(copied.receive()[0], torch.arange(3))
    assert event.synchronized
    assert isinstance(pickle.loads(pickle.dumps(Staging(CUDA))), Staging)


def test_other_devices_get_plain_copies():
    stage, data = Staging(torch.device("cpu")), torch.arange(4.0)
    nested = TensorDict({"x": data}, batch_size=[4])
    given = received(stage.send({"plain": data, "nested": nested, "number": 3}))
    assert torch.equal(given["plain"], data)
    assert torch.equal(given["nested"]["x"], data)
    assert given["number"] == 3
    assert received(data) is data


def test_a_batch_sent_in_inference_mode_can_be_trained_on():
    data = torch.arange(4.0)
    with torch.inference_mode():
        (sent,) = Staging(torch.device("cpu")).send((data,), (torch.float64,)).receive()
    assert sent.dtype == torch.float64
    assert not sent.is_inference()


def test_tensors_that_are_where_they_are_wanted_are_only_converted():
    one, two = torch.arange(3), torch.arange(3)
    assert converted((one, two), ()) == (one, two)
    kept, cast = converted((one, two), (None, torch.float32))
    assert kept is one
    assert cast.dtype == torch.float32


def test_what_returns_at_once_is_prepared_in_the_calling_thread():
    threads = []

    def prepare(drawn):
        threads.append(threading.current_thread())
        return -drawn

    ahead, numbers = Prefetch(2, 100, prepare, new_guard(), in_background=False), iter(range(100))
    assert [ahead.take(0, lambda: next(numbers)) for _ in range(3)] == [(0, 0), (1, -1), (2, -2)]
    assert next(numbers) == 5
    assert set(threads) == {threading.current_thread()}
    ahead.close()
