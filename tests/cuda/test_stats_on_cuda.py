"""The numbers of storages on a device: they are those of the CPU, and the host waits for them once."""

from __future__ import annotations

import copy
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from gymnasium import spaces

from rlstore import DecoupledRolloutStorage, PrioritizedReplayStorage, ReplayStorage, SequenceReplayStorage, kernels
from rlstore.engine import measures
from rlstore.fragments import find_fragments
from rlstore.kernels import cuda
from rlstore.replay.measures import measured_rows

BOX, MOVES = spaces.Box(-9, 9, (1,)), spaces.Discrete(5)
ENVS = 5


@pytest.fixture
def on_triton(monkeypatch, device):
    """A function that gives the device of the storages; without a GPU the CPU has its kernels from then on."""

    def switch() -> torch.device:
        if device.type == "cpu":
            monkeypatch.setitem(kernels._VERSIONS, "cpu", cuda.OPERATIONS)
        return device

    return switch


def filled(kind, device, invalid=False, **options):
    """Ten steps, and perhaps in one of them two rewards that are not finite and an action outside of its space."""
    given = {"storage_size": 7 * ENVS, "num_envs": ENVS, "batch_size": 4, "seed": 3, "autoreset": "Disabled", **options}
    storage = kind(BOX, MOVES, device, **given)
    none = torch.zeros(ENVS, dtype=torch.bool, device=device)
    every, obs = torch.arange(ENVS, device=device), torch.zeros(ENVS, 1, device=device)
    for step in range(10):
        rewards, actions = every + float(step), every.clone()
        if invalid and step == 3:
            rewards[:2], actions[4] = torch.tensor([math.nan, math.inf], device=device), 7
        storage.add(obs, actions, rewards, (every + step) % 4 == 0, none, {}, obs, mask=every != step % ENVS)
    return storage


@pytest.mark.parametrize("options", [{}, {"sequence_length": 3}], ids=["rows", "windows"])
def test_replay_tells_what_it_tells_on_the_cpu(options, on_triton):
    kind, told = SequenceReplayStorage if options else PrioritizedReplayStorage, []
    for place in (lambda: torch.device("cpu"), on_triton):
        device = place()
        storage = filled(kind, device, sample_info=True, alpha=1.0, **options)
        for _ in range(2):
            rows = storage.sample().rows
            storage.update(torch.cat([rows, rows[:1] * 0]), torch.arange(5.0, device=device))  # of which one is stale
        told.append(storage.stats())
    expected, found = told
    assert type(storage._ring_of().kernel) is cuda.OPERATIONS["EpisodeRing"]
    assert (found.pop("invalid_rewards"), found.pop("invalid_actions")) == (0, 0)
    assert found.pop("bytes") >= expected.pop("bytes")  # there may be room for more episodes
    assert found == pytest.approx(expected, rel=1e-5)
    assert (expected["stale_updates"], expected["samples"], expected["transitions"]) == (2, 8, 35)


def test_what_kernels_counted_is_told(on_triton):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a later step tells of them, too
        found = filled(ReplayStorage, on_triton(), invalid=True).stats()
    names = ("invalid_rewards", "invalid_actions", "nonfinite_rewards", "transitions", "inserts")
    assert [found[name] for name in names] == [2, 1, 2, 7 * ENVS, 8 * ENVS]


def rollout(device):
    storage = DecoupledRolloutStorage(BOX, MOVES, device, num_steps=4, num_envs=ENVS)
    obs, zeros = torch.zeros(ENVS, 1, device=device), torch.zeros(ENVS, device=device)
    flags = torch.zeros(ENVS, dtype=torch.bool, device=device)
    for step in range(4):
        rewards = torch.full((ENVS,), math.nan if step == 2 else 1.0, device=device)
        storage.add(obs, zeros, rewards, flags if step % 2 else ~flags, flags, obs, zeros, zeros, zeros)
    return storage


def test_what_kernels_counted_of_rollouts_is_told_whoever_writes_the_next_row(on_triton):
    storage = rollout(on_triton())
    assert storage.stats()["invalid_rewards"] == ENVS
    storage.rewards = torch.zeros_like(storage.rewards)  # rows are written by another kernel from now on
    assert (storage.stats()["invalid_rewards"], storage.stats()["nonfinite_rewards"]) == (ENVS, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "build",
    [
        lambda: filled(ReplayStorage, "cuda", True, sample_info=True),
        lambda: filled(PrioritizedReplayStorage, "cuda", sample_info=True),
        lambda: filled(SequenceReplayStorage, "cuda", sequence_length=3, alpha=0.5),
        lambda: rollout("cuda"),
    ],
    ids=["uniform", "prioritized", "sequences", "rollout"],
)
def test_the_host_waits_for_the_device_once(build):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage = build()
        storage.stats()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            storage.stats()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in caught if "synchronizing" in str(warning.message)]) == 1


# ------------------------------------------------------------------------------------------ tensors without any data


def without_data(value):
    """The same, with tensors that nobody can look into: to wait for one is an error."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: without_data(part) for name, part in value.items()}
    return [without_data(part) for part in value] if isinstance(value, list) else value


def on_no_device(thing, **more):
    twin = copy.copy(thing)
    twin.__dict__ = {**{name: without_data(value) for name, value in vars(thing).items()}, **more}
    return twin


@pytest.mark.parametrize("options", [{}, {"sequence_length": 3}], ids=["rows", "windows"])
def test_no_number_of_replay_is_looked_at_before_the_end(options):
    kind = SequenceReplayStorage if options else PrioritizedReplayStorage
    storage = kind(BOX, MOVES, storage_size=40, num_envs=ENVS, alpha=0.5, sample_info=True, **options)
    nothing = torch.zeros(2, dtype=torch.int64, device="meta")
    kernel = SimpleNamespace(invalid=nothing, settle=lambda: None, dropped=lambda: nothing[0])
    ring = on_no_device(storage._rows, device=torch.device("meta"), _kernel=kernel, _parts=[])
    sampler = storage._sampler
    tree = on_no_device(sampler.tree, _ring=ring, _kernel=kernel)
    parts = {"tree": tree, "_ring": ring, "_counts": on_no_device(sampler._counts)}
    if options:
        parts["_windows"] = on_no_device(sampler._windows, _ring=ring)
    found = {**measured_rows(ring), **on_no_device(sampler, **parts).measure()}
    assert {
        "return_mean",
        "row_age_max",
        "invalid_actions",
        "draws_never",
        "priority_min",
        "stale_updates",
    } <= found.keys()
    numbers = [number for value in found.values() for number in measures._numbers(value)]
    assert len(numbers) > 25
    assert all(isinstance(number, torch.Tensor) and number.is_meta and number.numel() == 1 for number in numbers)


def test_no_number_of_a_rollout_is_looked_at_before_the_end():
    flags, rewards = torch.zeros(4, ENVS, dtype=torch.bool, device="meta"), torch.zeros(4, ENVS, device="meta")
    found = measures.episodes(**find_fragments(flags, flags, rewards, flags, flags[0])._asdict())
    found.update(measures.nonfinite(rewards, [torch.zeros(4, ENVS, 3, device="meta")], ENVS))
    numbers = [number for value in found.values() for number in measures._numbers(value)]
    assert len(numbers) > 10
    assert all(isinstance(number, torch.Tensor) and number.is_meta and number.numel() == 1 for number in numbers)


def test_tensors_are_brought_to_the_host_together(monkeypatch):
    """Whole numbers stay whole, and every number is at its place."""
    found, stacked = {"a": torch.tensor(3), "b": measures.Ratio(torch.tensor(1.5), 2), "c": 4}, []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda tensors: stacked.append(len(tensors)) or stack(tensors))
    brought = measures.on_host({**found, "d": measures.Most(torch.tensor(7, dtype=torch.int32))})
    assert brought == {"a": 3, "b": measures.Ratio(1.5, 2), "c": 4, "d": measures.Most(7)}
    assert [type(value) for value in (brought["a"], brought["c"])] == [int, int]
    assert stacked == [3]
