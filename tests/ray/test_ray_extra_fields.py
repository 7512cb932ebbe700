"""Extra fields travel with their steps: from the writer into the shards of every kind of storage, and into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from ray_local import serve_locally
from ray_play import ACTIONS, OBSERVATIONS, ids_of, step_of

from rlstore import (
    DecoupledRolloutStorage,
    DistributedStorage,
    HindsightReplayStorage,
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    RolloutStorage,
    SequenceReplayStorage,
)

EXTRA = {"costs": ((), torch.float32), "task_id": ((2,), torch.int64)}
ENVS, STEPS, SHARDS, BATCH = 4, 12, 2, 4


def extra_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The extra fields of the transitions with these ids."""
    return {"costs": -ids.float(), "task_id": torch.stack([ids, 2 * ids], -1)}


def sample_of(shard: int, step: int, **more: Any) -> dict[str, Any]:
    sample = step_of(shard, step, ENVS)
    return {**sample, **extra_of(sample["actions"]), **more}


def goals(sample: dict[str, Any]) -> dict[str, Any]:
    names = ("observation", "achieved_goal", "desired_goal")
    nests = {key: dict.fromkeys(names, sample[key]) for key in ("observations", "next_observations")}
    return {**sample, **nests}


def on_policy(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "values": torch.zeros(ENVS), "log_probs": torch.zeros(ENVS)}


def with_parameters(sample: dict[str, Any]) -> dict[str, Any]:
    sample = on_policy({**sample, "distribution_params": (torch.zeros(ENVS, 1),)})
    return {**sample, "actions": sample["actions"].unsqueeze(1)}


GOALS = Dict({key: Box(-1e9, 1e9, (2,), np.float32) for key in ("observation", "achieved_goal", "desired_goal")})
REPLAY = (400, OBSERVATIONS, ACTIONS, ENVS)


def distance(achieved: Any, desired: Any, info: Any) -> Any:
    return (achieved - desired).sum(-1)


KINDS: dict[str, tuple[Any, Any]] = {
    "replay": (lambda: ReplayStorage.create_factory(*REPLAY, extra_fields=EXTRA), dict),
    "prioritized": (lambda: PrioritizedReplayStorage.create_factory(*REPLAY, extra_fields=EXTRA), dict),
    "n-step": (lambda: NStepReplayStorage.create_factory(*REPLAY, n_step=3, extra_fields=EXTRA), dict),
    "sequence": (
        lambda: SequenceReplayStorage.create_factory(*REPLAY, sequence_length=5, extra_fields=EXTRA),
        dict,
    ),
    "hindsight": (
        lambda: HindsightReplayStorage.create_factory(
            400, GOALS, ACTIONS, ENVS, compute_reward=distance, extra_fields=EXTRA
        ),
        goals,
    ),
    "rollout": (lambda: RolloutStorage.create_factory(STEPS, extra_fields=EXTRA), with_parameters),
    "decoupled": (
        lambda: DecoupledRolloutStorage.create_factory(STEPS, extra_fields=EXTRA),
        lambda sample: on_policy({**sample, "adv_preds": torch.zeros(ENVS)}),
    ),
    "distributed": (
        lambda: DistributedStorage.create_factory(STEPS, num_storages=ENVS, batch_size=ENVS, extra_fields=EXTRA),
        dict,
    ),
}


class Critic:
    def get_values(self, observations: Any) -> torch.Tensor:
        return torch.zeros(ENVS, 1)


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


@pytest.fixture
def filled(monkeypatch, kind):
    """Two shards with the steps of one writer each."""
    factory, sample = KINDS[kind]
    served = serve_locally(monkeypatch, factory(), SHARDS)
    writers = [served.writer(batch_steps=5) for _ in range(SHARDS)]
    for step in range(STEPS):
        for writer in writers:
            writer.add(sample(sample_of(writer.place.shard, step)))
    for writer in writers:
        writer.close()
    if kind in ("rollout", "decoupled"):
        served.each("before_gradients", Critic())
    return served


def test_batches_hold_the_extra_fields_of_their_rows(filled, kind):
    written = set().union(*[ids_of(number, STEPS, ENVS) for number in range(SHARDS)])
    seen: set[int] = set()
    with filled.learner(BATCH, prefetch=1, seed=0) as learner:
        for _ in range(10):
            batch = next(learner)
            ids = batch["actions"].long()
            ids = ids.squeeze(-1) if kind in ("rollout", "decoupled") else ids
            expected = extra_of(ids)
            assert torch.equal(batch["costs"], expected["costs"].unsqueeze(-1))
            assert torch.equal(batch["task_id"], expected["task_id"])
            assert batch["costs"].dtype == torch.float32
            assert batch["task_id"].dtype == torch.int64
            seen |= set(ids.flatten().tolist())
            lead = {"sequence": (BATCH, 5), "distributed": (STEPS, BATCH)}.get(kind, (BATCH,))
            assert ids.shape == lead
            shards = (ids >= 1_000_000).long()
            rows = batch["rows"]
            assert torch.equal(rows[:, 0], shards[:, 0] if kind == "sequence" else shards.flatten())
    assert seen <= written
    assert len(seen) > ENVS * SHARDS


def test_a_step_without_an_extra_field_or_with_an_unknown_one_is_refused(filled, kind):
    _, sample = KINDS[kind]
    before = filled.report()
    if kind in ("rollout", "decoupled"):
        filled.each("reset")
    complete = sample(sample_of(0, STEPS))
    missing = {name: value for name, value in complete.items() if name != "costs"}
    for wrong, name in ((missing, "costs"), ({**complete, "speed": torch.zeros(ENVS)}, "speed")):
        writer = filled.writer(batch_steps=1)
        writer.add(wrong)
        with pytest.raises(InvalidInputError, match=name):
            writer.flush()
        assert writer.lost == ENVS
        writer.close()
    after = filled.report()
    assert (after.inserted, after.limiter_inserted) == (before.inserted, before.limiter_inserted)
