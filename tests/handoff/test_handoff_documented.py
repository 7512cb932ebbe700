"""DistributedStorage as documented: actors write into shared tensors, two queues carry the numbers of the slots."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch
from gymnasium import spaces
from handoff_helpers import FORK, STEPS, assert_is_rollout, finish, make, row_values

from rlstore import DistributedStorage, InvalidInputError, SlotQueue


def act_as_documented(storages, states, free_queue, full_queue, first) -> None:
    number = first
    while (index := free_queue.get()) is not None:
        for t in range(STEPS + 1):
            for key, value in row_values(number, t).items():
                storages[key][index][t, ...] = torch.as_tensor(value)[None, None]
        states[index][0][...] = torch.full((2, 1, 5), number / 8)
        full_queue.put(index)
        number += 1


@pytest.mark.parametrize("ours", [True, False], ids=["SlotQueue", "SimpleQueue"])
def test_two_learner_threads_share_the_queues(ours):
    storage = make()
    free, full = (SlotQueue(4), SlotQueue(4)) if ours else (FORK.SimpleQueue(), FORK.SimpleQueue())
    arguments = (storage.storages, storage.init_actor_state_storages, free, full)
    actors = [FORK.Process(target=act_as_documented, args=(*arguments, i * 100), daemon=True) for i in range(2)]
    for actor in actors:
        actor.start()
    for index in range(4):
        free.put(index)
    batches = []

    def learn():
        for _ in range(8):
            batches.append(storage.sample("cpu", 2, free, full, *arguments[:2]))

    threads = [threading.Thread(target=learn) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(batches) == 16
    seen = []
    for batch, states in batches:
        numbers = (batch["episode_step"][0] // (STEPS + 1)).tolist()
        for column, number in enumerate(numbers):
            assert_is_rollout(batch, column, number)
            assert torch.equal(states[0][:, column], torch.full((2, 5), number / 8))
        seen += numbers
    assert len(set(seen)) == 32
    for first in (0, 100):  # what each actor wrote, without a gap
        own = sorted(number for number in seen if first <= number < first + 100)
        assert own == list(range(first, first + len(own)))
    for _ in actors:
        free.put(None)
    finish(*actors)


class Failing(queue.Queue):
    def get(self):
        if self.qsize() == 1:
            raise ConnectionError("mine")
        return super().get()


@pytest.mark.parametrize("last", [9, -1, None, "0", 1.0])
def test_what_is_no_slot_is_refused_and_every_number_goes_back(last):
    storage, free, full = make(), queue.Queue(), queue.Queue()
    for index in (2, last):
        full.put(index)
    with pytest.raises(InvalidInputError, match="is no slot; there are 0 to 3"):
        storage.sample("cpu", 2, free, full, storage.storages, storage.init_actor_state_storages)
    assert [full.get(), full.get()] == [2, last]
    assert free.empty()


def test_a_queue_that_fails_keeps_its_numbers():
    storage, free, full = make(), queue.Queue(), Failing()
    for index in (2, 1, 0):
        full.put(index)
    with pytest.raises(ConnectionError, match="mine"):
        storage.sample("cpu", 3, free, full, storage.storages, storage.init_actor_state_storages)
    assert sorted(full.queue) == [0, 1, 2]
    assert free.empty()


def test_learners_of_different_mappings_do_not_wait_for_each_other():
    """One lock for each mapping: a learner that waits for rollouts holds only its own."""
    one, other = ({"x": [torch.tensor([float(i)])]} for i in range(2))
    waiting, entered, full = queue.Queue(), threading.Event(), queue.Queue()

    class Slow:
        def get(self):
            entered.set()
            return waiting.get()

    thread = threading.Thread(target=DistributedStorage.sample, args=("cpu", 1, queue.Queue(), Slow(), one, [()]))
    thread.start()
    assert entered.wait(30)
    full.put(0)
    batch, states = DistributedStorage.sample("cpu", 1, queue.Queue(), full, other, [()])
    assert (batch["x"].tolist(), states) == ([[1.0]], ())
    waiting.put(0)
    thread.join(30)
    assert not thread.is_alive()


def test_add_writes_a_step_or_nothing():
    storage = make()
    values = row_values(2, 1)
    actor_output = {key: torch.as_tensor(values[key])[None, None] for key in ("policy_outputs", "baseline", "action")}
    env_output = {key: np.asarray(value)[None, None] for key, value in values.items() if key not in actor_output}
    storage.add(3, 1, actor_output, env_output)
    for key, value in values.items():
        expected = torch.as_tensor(value).to(storage.storages[key][3].dtype)
        assert torch.equal(storage.storages[key][3][1], expected), key
    before = {key: tensors[3].clone() for key, tensors in storage.storages.items()}
    for arguments in (
        (3, 1, {**actor_output, "baseline": torch.zeros(2)}, env_output),
        (4, 1, actor_output, env_output),
        (3, STEPS + 1, actor_output, env_output),
        (3, 1, [1], env_output),
        (3, 1, {"other": 1}, None),
    ):
        with pytest.raises(InvalidInputError):
            storage.add(*arguments)
    assert all(torch.equal(storage.storages[key][3], before[key]) for key in before)
    with pytest.raises(TypeError, match="index, timestep, actor_output and env_output"):
        storage.add(3, 1)
    storage.add(3, 1, None, {"reward": 5})
    assert storage.storages["reward"][3][1] == 5


@pytest.mark.parametrize(
    ("space", "action", "outputs"),
    [
        (spaces.Discrete(6), ((), torch.int64), 6),
        ({"shape": (6,), "type": "Discrete", "range": [0, 5]}, ((), torch.int64), 6),
        (spaces.Box(-1, 1, (3,)), ((3,), torch.float32), 6),
        ({"shape": [3], "type": "Box", "range": [-1, 1]}, ((3,), torch.float32), 6),
        (spaces.MultiDiscrete([2, 5]), ((2,), torch.int64), 7),
        (spaces.MultiBinary(4), ((4,), torch.int64), 4),
    ],
)
def test_the_keys_follow_from_the_spaces(space, action, outputs):
    storage = DistributedStorage({"shape": (4, 84, 84)}, space, num_steps=2, num_storages=3)
    scalar = {
        "reward": torch.float32,
        "terminated": torch.bool,
        "truncated": torch.bool,
        "episode_return": torch.float32,
        "episode_step": torch.int32,
        "baseline": torch.float32,
    }
    forms = {key: (tuple(tensors[1].shape), tensors[1].dtype) for key, tensors in storage.storages.items()}
    assert forms == {
        "obs": ((3, 4, 84, 84), torch.uint8),
        **{key: ((3,), dtype) for key, dtype in scalar.items()},
        "last_action": ((3, *action[0]), action[1]),
        "policy_outputs": ((3, outputs), torch.float32),
        "action": ((3, *action[0]), action[1]),
    }
    assert all(len(tensors) == 3 and tensors[2].is_shared() for tensors in storage.storages.values())
    assert list(storage.init_actor_state_storages) == [(), (), ()]
    # slots begin on cache lines of their own
    for tensors in storage.storages.values():
        starts = [tensor.data_ptr() for tensor in tensors]
        assert all(start % 64 == 0 for start in starts)
        assert starts[1] - starts[0] >= tensors[0].nbytes


def test_what_cannot_be_made_is_refused():
    box, discrete = spaces.Box(0, 1, (2,)), spaces.Discrete(2)
    for given, told in [
        ({"num_steps": 0}, "num_steps"),
        ({"num_storages": 0}, "num_storages"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"timeout": -1}, "timeout"),
        ({"state_shapes": (2, 5)}, "state_shapes"),
        ({"state_shapes": ((0, 5),)}, "state_shapes"),
        ({"action_space": None}, "go together"),
    ]:
        with pytest.raises(InvalidInputError, match=told):
            DistributedStorage(**{"observation_space": box, "action_space": discrete, **given})
    with pytest.raises(NotImplementedError, match="Text"):
        DistributedStorage(box, spaces.Text(3))
    with pytest.raises(MemoryError, match="Give a smaller num_storages"):
        DistributedStorage({"shape": (1000, 1000, 1000)}, discrete, num_steps=100, num_storages=100)
