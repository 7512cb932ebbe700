"""Rollout after rollout in the same memory: nothing grows, and nothing is allocated but the batches that are served."""

from __future__ import annotations

import gc
import os
import tracemalloc

import pytest
import torch
from gymnasium import spaces
from soak import soak
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlstore import DecoupledRolloutStorage, RolloutStorage

STEPS, ENVS, WIDTH, BATCHES = 16, 32, 64, 4
ROLLOUT_BYTES = STEPS * ENVS * WIDTH * 4  # the observations alone: 128 kB


class Rollouts:
    """The documented loop of RolloutStorage; the tensors of a step are made once and written over."""

    def __init__(self, **options):
        self.obs = TensorDict({"policy": torch.zeros(ENVS, WIDTH)}, batch_size=[ENVS])
        self.storage = RolloutStorage("rl", ENVS, STEPS, self.obs, [3], "cpu", seed=0, **options)
        self.step = RolloutStorage.Transition()
        self.step.observations = self.obs
        self.step.actions, self.step.rewards = torch.zeros(ENVS, 3), torch.zeros(ENVS)
        self.step.dones = torch.zeros(ENVS, dtype=torch.bool)
        self.step.values, self.step.actions_log_prob = torch.zeros(ENVS, 1), torch.zeros(ENVS, 1)
        self.step.distribution_params = (torch.zeros(ENVS, 3), torch.ones(ENVS, 3))
        self.last_values = torch.zeros(ENVS, 1)

    def collect(self):
        self.storage.clear()
        for number in range(STEPS):
            self.step.rewards.fill_(number)
            self.storage.add_transition(self.step)

    def compute(self):
        self.storage.compute_returns(self.last_values, 0.99, 0.95)

    def serve(self, epochs=1):
        for batch in self.storage.mini_batch_generator(BATCHES, epochs):
            batch.advantages.add_(1)


class RecurrentRollouts(Rollouts):
    """The same with the recurrent state of an LSTM and a GRU."""

    def __init__(self):
        super().__init__()
        self.step.hidden_states = ((torch.zeros(1, ENVS, 8), torch.zeros(1, ENVS, 8)), torch.zeros(1, ENVS, 8))
        self.step.dones[3] = True

    def serve(self, epochs=1):
        for batch in self.storage.recurrent_mini_batch_generator(BATCHES, epochs):
            batch.advantages.add_(1)


class DecoupledRollouts:
    """The documented loop of DecoupledRolloutStorage."""

    def __init__(self):
        box = spaces.Box(-1.0, 1.0, (WIDTH,))
        self.storage = DecoupledRolloutStorage(box, spaces.Discrete(4), "cpu", STEPS, ENVS, seed=0)
        names = ("actions", "rewards", "log_probs", "values", "adv_preds", "final_values")
        self.step = {name: torch.zeros(ENVS) for name in names}
        self.step |= {name: torch.zeros(ENVS, WIDTH) for name in ("obs", "next_obs")}
        self.step |= {name: torch.zeros(ENVS, dtype=torch.bool) for name in ("terminateds", "truncateds")}
        self.last_values = torch.zeros(ENVS)

    def collect(self):
        for number in range(STEPS):
            self.step["rewards"].fill_(number)
            self.storage.add(**self.step)

    def compute(self):
        self.storage.compute_returns_and_advantages(self.last_values)

    def serve(self, epochs=1):
        for _ in range(epochs):
            for batch in self.storage.sample(BATCHES):
                batch.advantages.add_(1)
        self.storage.update()


class TenMethods:
    """The trainer's loop through the ten methods."""

    def __init__(self):
        self.storage = RolloutStorage.create_factory(STEPS, seed=0)("cpu", self, None)
        scalars = {name: torch.zeros(ENVS) for name in ("rewards", "values", "log_probs")}
        flags = {name: torch.zeros(ENVS, dtype=torch.bool) for name in ("terminated", "truncated")}
        obs = {"policy": torch.zeros(ENVS, WIDTH)}
        self.sample = {
            "observations": obs,
            "next_observations": obs,
            "actions": torch.zeros(ENVS, 3),
            **scalars,
            **flags,
        }

    def get_values(self, observations):
        return observations["policy"].sum(-1)

    def collect(self):
        for number in range(STEPS):
            self.sample["rewards"].fill_(number)
            self.storage.insert_transition(self.sample)

    def compute(self):
        self.storage.before_gradients()

    def serve(self, epochs=1):
        for batch in self.storage.generate_batches(BATCHES, None, epochs):
            batch["advantages"].add_(1)
        self.storage.after_gradients({}, {})


LOOPS = [Rollouts, RecurrentRollouts, DecoupledRollouts, TenMethods]


def run(loop, rollouts):
    for _ in range(rollouts):
        loop.collect()
        loop.compute()
        loop.serve(epochs=2)


class Allocations(TorchDispatchMode):
    """Counts the bytes of every storage that a torch operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.bytes += tensor.untyped_storage().nbytes()
        return result


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors():
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def blocks_of(storage):
    names = ("rewards", "actions", "values", "returns", "advantages", "dones", "terminateds", "truncateds", "adv_preds")
    return {name: getattr(storage, name).data_ptr() for name in names if hasattr(storage, name)}


@pytest.fixture(scope="module", params=LOOPS, ids=lambda loop: loop.__name__)
def loop(request):
    """A loop that has come to its steady state."""
    loop = request.param()
    run(loop, 30)
    return loop


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
@pytest.mark.parametrize("rollouts", [50, pytest.param(2000, marks=pytest.mark.torture)])
def test_resident_memory_is_flat_over_many_rollouts(loop, rollouts):
    gc.collect()
    before = resident_bytes()
    run(loop, rollouts)
    gc.collect()
    # If a rollout, or the batches of one, were kept each time, it would be 6 MB and more.
    assert resident_bytes() - before < 4 << 20


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="resident memory is read from /proc")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_at_work_together_leave_memory_flat_and_the_counts_right():
    """The long form is in tests/torture."""
    soak(500)


def test_no_python_object_is_left_behind(loop):
    gc.collect()
    tracemalloc.start()
    try:
        run(loop, 60)  # until objects made before tracing, which are not counted, have been replaced by counted ones
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run(loop, 60)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # An object kept for each rollout, a tensor for instance, would be 6 kB at least.
    assert after - before < 4096


def test_no_tensor_is_left_behind(loop):
    before, blocks = live_tensors(), blocks_of(loop.storage)
    run(loop, 5)
    assert live_tensors() == before
    assert blocks_of(loop.storage) == blocks


@pytest.mark.parametrize("make", [Rollouts, RecurrentRollouts, DecoupledRollouts])
def test_steps_and_targets_are_written_where_there_is_memory_already(make):
    loop = make()
    run(loop, 3)
    with Allocations() as allocated:
        loop.collect()
    assert allocated.bytes < ENVS * STEPS  # less than a byte for each row
    with Allocations() as allocated:
        loop.compute()
    assert allocated.bytes < ENVS * STEPS * 4  # less than a block of scalars


@pytest.mark.parametrize("make", LOOPS)
def test_serving_allocates_the_batches_and_the_order_of_their_rows(make):
    loop = make()
    run(loop, 3)
    loop.collect()
    loop.compute()
    with Allocations() as allocated:
        loop.serve()
    # The native gather makes its outputs without torch's dispatcher, so that this is all that is left besides them.
    assert allocated.bytes < ENVS * STEPS * (8 + 8 + 8)


@pytest.mark.parametrize("make", [Rollouts, DecoupledRollouts])
def test_the_bytes_of_a_storage_are_those_of_its_data(make):
    storage = make().storage
    run_bytes = (STEPS + 1) * ENVS * (WIDTH * 4 + 20 * 4)
    held = sum(block.nbytes for block in storage._ring.blocks.values())
    assert ROLLOUT_BYTES < held < run_bytes  # the observation after a step is not stored a second time
