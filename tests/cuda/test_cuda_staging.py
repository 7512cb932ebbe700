"""On a GPU: batches from storages on the host, taken by streams that are busy, and let go of early."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstore import DistributedStorage, NStepReplayStorage, ReplayStorage
from rlstore.engine.batches.staging import Staging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

WIDTH, BATCH, ENVS, STEPS = 512, 1024, 8, 40


def busy(milliseconds: float = 2.0) -> None:
    """Keep the current stream busy for a while."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def replay(**options) -> ReplayStorage:
    """Rows whose every number tells their id: what is seen is it, what follows is the next one of the environment."""
    space = spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)
    storage = ReplayStorage(
        space, spaces.Box(-np.inf, np.inf, (1,), np.float32), "cuda", ENVS * STEPS, ENVS, BATCH, seed=0, **options
    )
    ended = torch.zeros(ENVS, dtype=torch.bool)
    for step in range(STEPS):
        ids = step * ENVS + torch.arange(ENVS, dtype=torch.float32)
        seen, shown = (values[:, None].expand(ENVS, WIDTH).contiguous() for values in (ids, ids + ENVS))
        storage.add(seen, ids[:, None], 2 * ids, ended, ended, {}, shown)
    return storage


def wrong(batch) -> torch.Tensor:
    """How many numbers of a batch are not those of its ids, on the device; what is looked at is launched late."""
    busy()
    ids = batch.actions
    parts = ((batch.observations, ids), (batch.next_observations, ids + ENVS), (batch.rewards, 2 * ids))
    found = sum((part != expected).sum() for part, expected in parts)
    return found + (ids >= ENVS * STEPS).sum() + (ids < 0).sum()


HOST = {"memory": "ram", "pin_memory": True}
KINDS = {
    "page-locked, prepared ahead": {**HOST, "num_workers": 3},
    "page-locked, at once": HOST,
    "pageable, prepared ahead": {"memory": "ram", "num_workers": 2},
    "on the device, prepared ahead": {"num_workers": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_many_batches_in_flight_on_a_busy_stream_hold_what_was_drawn(kind):
    storage, learner = replay(**KINDS[kind]), torch.cuda.Stream()
    learner.wait_stream(torch.cuda.current_stream())  # which has added the rows, if they are on the device
    with torch.cuda.stream(learner):
        # Nothing waits for the device in between, and each batch is let go of before it is looked at.
        mistakes = [wrong(storage.sample()) for _ in range(40)]
        total = torch.stack(mistakes).sum()
    torch.cuda.synchronize()
    assert int(total) == 0
    storage.close()


@pytest.mark.parametrize("kind", KINDS)
def test_two_learner_streams_take_batches_in_turn(kind):
    storage, streams = replay(**KINDS[kind]), [torch.cuda.Stream() for _ in range(2)]
    mistakes = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for turn in range(30):
        with torch.cuda.stream(streams[turn % 2]):
            mistakes.append(wrong(storage.sample()))
    torch.cuda.synchronize()
    assert int(torch.stack(mistakes).sum()) == 0
    storage.close()


def test_rows_added_between_batches_are_served_whole():
    storage = replay(**KINDS["page-locked, prepared ahead"])
    ended, mistakes = torch.zeros(ENVS, dtype=torch.bool), []
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(STEPS, 2 * STEPS):
            ids = step * ENVS + torch.arange(ENVS, dtype=torch.float32)
            seen, shown = (values[:, None].expand(ENVS, WIDTH).contiguous() for values in (ids, ids + ENVS))
            storage.add(seen, ids[:, None], 2 * ids, ended, ended, {}, shown)
            batch = storage.sample()
            busy(0.5)
            mistakes.append((batch.observations != batch.actions).sum() + (batch.rewards != 2 * batch.actions).sum())
            del batch
    torch.cuda.synchronize()
    assert int(torch.stack(mistakes).sum()) == 0
    storage.close()


def test_batches_that_are_converted_on_the_device_are_ready_when_taken():
    space = spaces.Box(0, 255, (3, 64, 64), np.uint8)
    storage = NStepReplayStorage(
        space, spaces.Box(-300, 300, (1,), np.float32), "cuda", 200, 1, 128, num_workers=3, dtype=torch.float16
    )
    never = torch.zeros(1, dtype=torch.bool)
    for step in range(200):
        seen, shown = (torch.full((1, 3, 64, 64), value, dtype=torch.uint8) for value in (step, step + 1))
        storage.add(seen, torch.tensor([[float(step)]]), torch.zeros(1), never, never, {}, shown)
    mistakes = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(30):
            observations, actions = storage.sample()[:2]
            assert observations.dtype == torch.float16
            busy()
            mistakes.append((observations.float() != actions[:, :, None, None]).sum())
            del observations, actions
    torch.cuda.synchronize()
    assert int(torch.stack(mistakes).sum()) == 0
    storage.close()


def test_page_locked_memory_is_not_filled_again_before_it_is_copied():
    stage, taken = Staging(torch.device("cuda", 0)), []
    stage.send((torch.zeros(1).pin_memory(),))
    with torch.cuda.stream(stage._stream):
        busy(50)  # no copy begins before all batches were made
    for number in range(20):
        host = torch.empty(1 << 20, pin_memory=True)
        host.fill_(number)
        taken.append(stage.send((host,)))
        del host
    sums = [(sent.receive()[0] != number).sum() for number, sent in enumerate(taken)]
    assert int(torch.stack(sums).sum()) == 0


def test_memory_of_a_batch_let_go_of_early_is_not_copied_into_while_it_is_read():
    stage, learner = Staging(torch.device("cuda", 0)), torch.cuda.Stream()
    mistakes = []
    with torch.cuda.stream(learner):
        for number in range(20):
            (tensor,) = stage.send((torch.full((1 << 20,), float(number)).pin_memory(),)).receive()
            busy(5)
            mistakes.append((tensor != number).sum())
            del tensor  # long before it is looked at; the next copy must not take its memory
    torch.cuda.synchronize()
    assert int(torch.stack(mistakes).sum()) == 0


@pytest.mark.parametrize("prefetch", [0, 3])
def test_rollouts_prefetched_for_a_busy_stream_are_whole(prefetch):
    storage = DistributedStorage(
        spaces.Box(0, 255, (3, 32, 32), np.uint8), spaces.Discrete(4), "cuda", 5, 8, 2, state_shapes=((1, 4),)
    )
    actor, learner, mistakes = storage.actor(), storage.learner(prefetch=prefetch), []
    with torch.cuda.stream(torch.cuda.Stream()):
        for first in range(0, 60, 2):
            for number in (first, first + 1):
                with actor.rollout(version=number) as written:
                    written["obs"][:], written["reward"][:] = number, float(number)
                    written.set_states([torch.full((1, 1, 4), float(number))])
            batch = next(learner)
            expected = torch.tensor([first, first + 1], device="cuda", dtype=torch.float32)
            busy()
            mistakes.append((batch["obs"].float() != expected[None, :, None, None, None]).sum())
            mistakes.append((batch["reward"] != expected).sum() + (batch.states[0] != expected[None, :, None]).sum())
            assert batch.versions.tolist() == [first, first + 1]
            del batch
    torch.cuda.synchronize()
    assert int(torch.stack(mistakes).sum()) == 0
    learner.close()
    storage.close()
