"""DistributedStorage.sample as its document has it: any mapping, any queue, copies, slots given back after copying."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from distributed_ids import DISCRETE, LSTM, WORLDS, ListQueue, rollouts_in, write
from torch import multiprocessing

from rlstore import DistributedStorage, SlotQueue

CPU = torch.device("cpu")
UNTIL = 20.0  # seconds that a thread may take
A_WHILE = 0.1  # seconds in which something that must not happen would have happened


def filled(world, num_storages=5, first=100):
    """A storage whose slot ``i`` holds rollout ``first + i``."""
    storage = world.make(num_storages)
    for index in range(num_storages):
        write(world, storage.storages, storage.init_actor_state_storages, index, first + index)
    return storage


def sampled(storage, free, full, batch_size, **others):
    return storage.sample(
        device=CPU,
        batch_size=batch_size,
        free_queue=free,
        full_queue=full,
        storages=storage.storages,
        init_actor_state_storages=storage.init_actor_state_storages,
        **others,
    )


# ------------------------------------------------------------------------------------------------- what is served


@pytest.mark.parametrize(
    ("world", "order"),
    list(zip([*WORLDS.values(), LSTM], [[3], [4, 0, 2], [2, 1, 0, 4, 3]] * 2, strict=True)),
    ids=[*WORLDS, "lstm"],
)
def test_slots_come_in_the_order_of_the_queue_side_by_side_on_axis_1(world, order):
    storage = filled(world)
    free, full = ListQueue(), ListQueue([*order, 7, 8])
    batch, states = sampled(storage, free, full, len(order))
    assert isinstance(batch, dict)
    assert rollouts_in(world, batch, states) == [100 + index for index in order]
    assert sorted(free.items) == sorted(order)
    assert full.items == [7, 8]


def test_it_is_called_on_the_class_and_on_the_instance_by_name_and_by_place():
    storage = filled(LSTM)
    storages, states = storage.storages, storage.init_actor_state_storages
    for owner in (DistributedStorage, storage):
        for given in ((), (threading.Lock(),)):
            free, full = ListQueue(), ListQueue([1, 4])
            found = owner.sample(CPU, 2, free, full, storages, states, *given)
            assert rollouts_in(LSTM, *found) == [101, 104]
            by_name = {"free_queue": free, "full_queue": ListQueue([0, 2]), "storages": storages}
            others = {"lock": given[0]} if given else {}
            found = owner.sample(device="cpu", batch_size=2, init_actor_state_storages=states, **by_name, **others)
            assert rollouts_in(LSTM, *found) == [100, 102]
            assert sorted(free.items) == [0, 1, 2, 4]


def test_states_are_joined_on_axis_1_and_belong_to_the_slots_of_the_batch():
    storage = filled(LSTM)
    _, states = sampled(storage, ListQueue(), ListQueue([4, 1, 3]), 3)
    assert isinstance(states, tuple)
    assert [tuple(state.shape) for state in states] == [(2, 3, 5), (2, 3, 5)]
    for column, rollout in enumerate((104, 101, 103)):
        for state, expected in zip(states, LSTM.states([rollout]), strict=True):
            assert torch.equal(state[:, column : column + 1], expected)


def test_without_states_an_empty_tuple_is_served():
    storage = filled(DISCRETE)
    _, states = sampled(storage, ListQueue(), ListQueue([0, 1]), 2)
    assert states == ()


class OverwritingQueue(ListQueue):
    """A free queue with very fast actors: what is given back is written over at once, states first."""

    def __init__(self, storages, states):
        super().__init__()
        self.storages, self.states = storages, states

    def put(self, item):
        for state in self.states[item]:
            state.fill_(-1)
        for key in self.storages:
            self.storages[key][item].fill_(1)
        super().put(item)


@pytest.mark.parametrize(("ours", "order"), [(True, [2]), (True, [1, 4, 2, 0]), (False, [3, 0])])
def test_slots_are_given_back_only_when_all_was_copied_states_included(ours, order):
    storage = filled(LSTM)
    storages = storage.storages if ours else dict(storage.storages)
    states = storage.init_actor_state_storages
    free, full = OverwritingQueue(storages, states), ListQueue(order)
    found = DistributedStorage.sample(CPU, len(order), free, full, storages, states)
    assert rollouts_in(LSTM, *found) == [100 + index for index in order]
    assert sorted(free.items) == sorted(order)


@pytest.mark.parametrize("world", [LSTM, DISCRETE], ids=["lstm", "plain"])
def test_a_batch_that_is_kept_is_never_written_over(world):
    storage = world.make(4)
    kept = []
    for rollout in range(0, 80, 2):
        order = [rollout % 4, (rollout + 1) % 4]
        for index, number in zip(order, (rollout, rollout + 1), strict=True):
            write(world, storage.storages, storage.init_actor_state_storages, index, number)
        batch, states = sampled(storage, ListQueue(), ListQueue(order), 2)
        kept.append((rollout, batch, states) if rollout % 6 else (rollout, dict(batch), states))
        del batch, states
        if rollout % 10 == 0:
            kept.pop()  # some are let go
    for rollout, batch, states in kept:
        assert rollouts_in(world, batch, states) == [rollout, rollout + 1]


def test_what_a_learner_does_to_a_batch_stays_with_it():
    storage = filled(LSTM)
    for _ in range(3):
        batch, states = sampled(storage, ListQueue(), ListQueue([1, 2]), 2)
        assert rollouts_in(LSTM, batch, states) == [101, 102]
        for tensor in (*batch.values(), *states):
            tensor.fill_(1)
            assert not tensor.requires_grad


def test_a_batch_of_inference_mode_is_followed_by_ones_to_learn_from():
    storage = filled(LSTM)
    with torch.inference_mode():
        found = sampled(storage, ListQueue(), ListQueue([1, 2]), 2)
        assert rollouts_in(LSTM, *found) == [101, 102]
        del found
    batch, states = sampled(storage, ListQueue(), ListQueue([3, 2]), 2)
    weight = torch.ones(1, requires_grad=True)
    ((batch["reward"] * weight).sum() + (states[0] * weight).sum()).backward()
    batch["reward"].add_(1)
    assert not batch["obs"].is_inference()


# ------------------------------------------------------------------------------------------------- any mapping


class OtherMapping(Mapping):
    """A mapping of somebody else's."""

    def __init__(self, content):
        self._content = content

    def __getitem__(self, key):
        return self._content[key]

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)


FOREIGN = {
    "dict of lists": lambda content: {key: list(block) for key, block in content.items()},
    "dict of tuples": lambda content: {key: tuple(block) for key, block in content.items()},
    "dict of blocks": dict,
    "another mapping": lambda content: OtherMapping({key: list(block) for key, block in content.items()}),
    "not contiguous": lambda content: {
        key: [torch.stack([slot, slot], -1)[..., 0] for slot in block] for key, block in content.items()
    },
}


@pytest.mark.parametrize("form", FOREIGN)
def test_any_mapping_of_any_keys_works(form):
    numbers = torch.arange(6 * 3, dtype=torch.float32).view(6, 3)
    content = {
        "frames": numbers.view(6, 3, 1, 1).expand(6, 3, 2, 2).to(torch.uint8).contiguous(),
        "anything": numbers.double() / 3,
        "flag": numbers % 2 == 0,
        "half": numbers.half(),
    }
    states = [(torch.full((2, 1, 3), float(index)), torch.full((1, 1, 4), -float(index))) for index in range(6)]
    free = ListQueue()
    batch, joined = DistributedStorage.sample(CPU, 3, free, ListQueue([5, 0, 2]), FOREIGN[form](content), states)
    assert set(batch) == set(content)
    for key, block in content.items():
        assert batch[key].dtype == block.dtype
        assert torch.equal(batch[key], torch.stack([block[5], block[0], block[2]], dim=1))
    assert [state[0, :, 0].tolist() for state in joined] == [[5, 0, 2], [-5, 0, -2]]
    assert [tuple(state.shape) for state in joined] == [(2, 3, 3), (1, 3, 4)]
    assert sorted(free.items) == [0, 2, 5]


def test_our_mapping_with_another_s_states_works():
    storage = filled(DISCRETE)
    states = [(torch.full((2, 1, 3), float(index)),) for index in range(5)]
    batch, joined = DistributedStorage.sample(CPU, 2, ListQueue(), ListQueue([3, 1]), storage.storages, states)
    assert rollouts_in(DISCRETE, batch) == [103, 101]
    assert joined[0][1, :, 2].tolist() == [3, 1]


def test_indices_of_numpy_are_taken_and_given_back():
    storage = filled(DISCRETE)
    free = ListQueue()
    batch, _ = sampled(storage, free, ListQueue([np.int64(3), np.int64(1)]), 2)
    assert rollouts_in(DISCRETE, batch) == [103, 101]
    assert sorted(int(index) for index in free.items) == [1, 3]


# ------------------------------------------------------------------------------------------------- any queue


def queues(kind, num_storages):
    context = multiprocessing.get_context("fork")
    makers = {
        "SimpleQueue": context.SimpleQueue,
        "Queue": context.Queue,
        "queue.Queue": queue.Queue,
        "SlotQueue": lambda: SlotQueue(num_storages),
    }
    return makers[kind](), makers[kind]()


@pytest.mark.parametrize("kind", ["SimpleQueue", "Queue", "queue.Queue", "SlotQueue"])
def test_the_queues_of_this_world_work(kind):
    storage = LSTM.make(4)
    free, full = queues(kind, 4)
    for index in range(4):
        free.put(index)
    served = []
    for rollout in range(0, 12, 2):
        for number in (rollout, rollout + 1):
            index = free.get()
            write(LSTM, storage.storages, storage.init_actor_state_storages, index, number)
            full.put(index)
        served += rollouts_in(LSTM, *sampled(storage, free, full, 2))
    assert served == list(range(12))
    assert sorted(free.get() for _ in range(4)) == [0, 1, 2, 3]
    if kind == "Queue":
        for one in (free, full):
            one.close()
            one.join_thread()


def test_a_slot_queue_is_first_in_first_out_and_passes_none_on():
    slots = SlotQueue(4)
    assert slots.empty()
    for item in (2, None, 0):
        slots.put(item)
    assert slots.qsize() == 3
    assert not slots.empty()
    assert [slots.get() for _ in range(3)] == [2, None, 0]
    assert slots.empty()
    slots.put(3)
    assert (slots.get(timeout=1.0), slots.qsize()) == (3, 0)


# ------------------------------------------------------------------------------------------------- locks


class RecordingLock:
    """A lock that writes down when it is held."""

    def __init__(self, record):
        self._lock, self._record = threading.Lock(), record

    def acquire(self, *args, **kwargs):
        taken = self._lock.acquire(*args, **kwargs)
        self._record.append("lock")
        return taken

    def release(self):
        self._record.append("unlock")
        self._lock.release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *details):
        self.release()


class RecordingQueue(ListQueue):
    def __init__(self, record, name, items=()):
        super().__init__(items)
        self._record, self._name = record, name

    def get(self):
        self._record.append(f"get {self._name}")
        return super().get()

    def put(self, item):
        self._record.append(f"put {self._name}")
        super().put(item)


def test_indices_are_taken_while_the_given_lock_is_held():
    storage, record = filled(LSTM), []
    free, full = RecordingQueue(record, "free"), RecordingQueue(record, "full", [1, 2, 3])
    sampled(storage, free, full, 3, lock=RecordingLock(record))
    assert record[:4] == ["lock", "get full", "get full", "get full"]
    assert record.count("unlock") == record.count("lock") == 1
    assert record.count("put free") == 3
    assert "get free" not in record
    assert "put full" not in record


class SlowQueue(ListQueue):
    """The second ``get`` waits to see whether another thread comes for its own."""

    def __init__(self, items):
        super().__init__(items)
        self.threads, self.first, self.another = [], threading.Event(), threading.Event()

    def get(self):
        me = threading.current_thread()
        if self.threads and self.threads[0] is not me:
            self.another.set()
        self.threads.append(me)
        self.first.set()
        if len(self.threads) == 2:
            self.another.wait(A_WHILE)
        return super().get()


def in_thread(target, *args):
    """A thread and the list in which its result will lie."""
    found = []
    thread = threading.Thread(target=lambda: found.append(target(*args)), daemon=True)
    thread.start()
    return thread, found


def joined(*threads):
    for thread in threads:
        thread.join(UNTIL)
        assert not thread.is_alive()


@pytest.mark.parametrize("ours", [True, False], ids=["our mapping", "a dict"])
def test_without_a_lock_two_threads_on_one_mapping_take_turns(ours):
    storage = filled(LSTM, 6)
    storages = storage.storages if ours else dict(storage.storages)
    full, free = SlowQueue([0, 1, 2, 3, 4, 5]), queue.Queue()
    take = (DistributedStorage.sample, CPU, 3, free, full, storages, storage.init_actor_state_storages)
    one, first = in_thread(*take)
    assert full.first.wait(UNTIL)
    other, second = in_thread(*take)
    joined(one, other)
    assert not full.threads[1:3].count(other)
    assert rollouts_in(LSTM, *first[0]) == [100, 101, 102]
    assert rollouts_in(LSTM, *second[0]) == [103, 104, 105]
    assert sorted(free.queue) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ours", [True, False], ids=["our mapping", "a dict"])
def test_without_a_lock_two_mappings_do_not_wait_for_one_another(ours):
    waiting, other = filled(LSTM), filled(LSTM, first=200)
    forms = [one.storages if ours else dict(one.storages) for one in (waiting, other)]
    empty = queue.Queue()
    states = waiting.init_actor_state_storages
    thread, found = in_thread(DistributedStorage.sample, CPU, 2, ListQueue(), empty, forms[0], states)
    empty.put(3)  # the second index does not come yet
    quick, done = in_thread(
        DistributedStorage.sample, CPU, 2, ListQueue(), ListQueue([1, 0]), forms[1], other.init_actor_state_storages
    )
    try:
        joined(quick)
        assert rollouts_in(LSTM, *done[0]) == [201, 200]
        assert thread.is_alive()
    finally:
        empty.put(2)
    joined(thread)
    assert rollouts_in(LSTM, *found[0]) == [103, 102]


# ------------------------------------------------------------------------------------------------- a list of storages


@pytest.mark.parametrize("ours", [False, True], ids=["plain tensors", "parts of ours"])
def test_storages_may_be_a_list_with_a_mapping_for_each_slot(ours):
    storage = filled(LSTM)
    slots = [{key: storage.storages[key][index] for key in storage.storages} for index in range(5)]
    if not ours:
        slots = [{key: tensor.clone() for key, tensor in slot.items()} for slot in slots]
    states = storage.init_actor_state_storages
    free, full = ListQueue(), ListQueue([4, 1, 3])
    found = DistributedStorage.sample(CPU, 2, free, full, slots, states)
    assert rollouts_in(LSTM, *found) == [104, 101]
    assert (free.items, full.items) == ([4, 1], [3])
    slots[4]["reward"].zero_()  # what was served is a copy
    assert rollouts_in(LSTM, *found) == [104, 101]
    found = DistributedStorage.sample(CPU, 1, free, full, tuple(slots), [])
    assert found[1] == ()
    assert torch.equal(found[0]["baseline"][:, 0], slots[3]["baseline"])


def test_a_list_of_storages_that_do_not_fit_is_refused_and_the_slots_are_given_back():
    storage = filled(DISCRETE)
    slots = [{key: storage.storages[key][index] for key in storage.storages} for index in range(3)]
    free, full = ListQueue(), ListQueue([0, 1])
    for wrong, words in (
        ([slots[0], {"reward": slots[1]["reward"]}], r"storages\[1\] has the keys"),
        ([slots[0], slots[1]["reward"]], r"storages\[1\] is a Tensor"),
        (slots[:1], "1 is no slot"),
        ([], "0 is no slot"),
    ):
        with pytest.raises(ValueError, match=words):
            DistributedStorage.sample(CPU, 2, free, full, wrong, [])
        assert (free.items, sorted(full.items)) == ([], [0, 1])
        full.items.sort()


@pytest.mark.parametrize("layers", [1, 2])
def test_initial_states_may_be_a_list_of_tensors_as_documented(layers):
    storage = filled(DISCRETE)
    states = [torch.full((layers, 1, 3), float(index)) for index in range(5)]
    _, joined = DistributedStorage.sample(CPU, 3, ListQueue(), ListQueue([4, 0, 2]), storage.storages, states)
    (state,) = joined
    assert state.shape == (layers, 3, 3)
    assert state[:, :, 0].tolist() == [[4, 0, 2]] * layers
