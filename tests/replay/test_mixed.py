"""MixedReplay: whose rows a batch holds, in which order, and where priorities go."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rlstore
from rlstore import (
    InvalidInputError,
    MixedReplay,
    NotReadyError,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
)

OFFLINE = 1000  # added to every number of the offline storage


def made(kind, *, first=0, steps=40, num_envs=2, **arguments):
    """A storage whose observation is ``first + 2 * step + env``, the action 0.5 more, the reward twice that."""
    space = spaces.Dict({"a": spaces.Box(-1e6, 1e6, (2,), np.float32), "b": spaces.Box(-1e6, 1e6, (), np.float64)})
    arguments = {"storage_size": 60, "extra_fields": {"costs": ((), torch.float32)}, "seed": 3, **arguments}
    storage = kind(space, spaces.Box(-1e6, 1e6, (1,), np.float32), num_envs=num_envs, **arguments)
    for step in range(steps):
        ids = first + np.arange(num_envs, dtype=np.float32) + 2 * step
        now, then = ({"a": np.stack([at, -at], 1), "b": at.astype(np.float64)} for at in (ids, ids + 2))
        flags = np.zeros(num_envs, bool)
        storage.add(now, ids[:, None] + 0.5, ids * 2, flags, flags, {}, then, costs=ids * 3)
    return storage


def pair(kind, **arguments):
    return made(kind, **arguments), made(kind, first=OFFLINE, **arguments)


def check_rows(batch):
    """Every row of a batch of transitions is one transition of one storage; returns which storage, True for online."""
    at = batch.observations["a"][:, 0]
    assert torch.equal(batch.observations["a"][:, 1], -at)
    assert torch.equal(batch.observations["b"].float(), at)
    assert torch.equal(batch.next_observations["a"][:, 0], at + 2)
    assert torch.equal(batch.actions[:, 0], at + 0.5)
    assert torch.equal(batch.rewards[:, 0], at * 2)
    assert torch.equal(batch.costs[:, 0], at * 3)
    assert batch.observations.batch_size == at.shape
    return at < OFFLINE


@pytest.mark.parametrize(
    ("share", "size", "own"),
    [(0.5, 256, 128), (0.5, 7, 4), (0.25, 10, 3), (0.1, 4, 0), (0.0, 8, 0), (1.0, 8, 8), (0.3, 1, 0), (0.5, 1, 1)],
)
def test_a_batch_has_the_share_of_each_storage_online_first(share, size, own):
    mixed = MixedReplay(*pair(ReplayStorage), share=share, batch_size=size)
    is_own = check_rows(mixed.sample())
    assert is_own.tolist() == [True] * own + [False] * (size - own)


def test_the_parts_are_what_each_storage_would_have_drawn():
    mixed, (online, offline) = MixedReplay(*pair(ReplayStorage), share=0.25), pair(ReplayStorage)
    for _ in range(3):
        batch, own, other = mixed.sample(8), online.sample(2), offline.sample(6)
        assert type(batch) is type(own)
        for name in ("actions", "rewards", "discounts", "costs"):
            assert torch.equal(getattr(batch, name), torch.cat([getattr(own, name), getattr(other, name)]))


def test_until_online_has_something_all_is_of_offline():
    online, offline = pair(ReplayStorage, steps=0)[0], made(ReplayStorage, first=OFFLINE)
    mixed = MixedReplay(online, offline, batch_size=6)
    assert not check_rows(mixed.sample()).any()
    online.insert_data_slice(made(ReplayStorage, steps=1).get_all_buffer_data())
    assert check_rows(mixed.sample()).tolist() == [True] * 3 + [False] * 3
    with pytest.raises(NotReadyError, match="holds no data yet"):
        MixedReplay(offline, made(ReplayStorage, steps=0), batch_size=6).sample()


def test_share_can_be_changed():
    mixed = MixedReplay(*pair(ReplayStorage), batch_size=10)
    mixed.share = 0.9
    assert check_rows(mixed.sample()).sum() == 9


def test_priorities_go_to_the_storage_of_each_row():
    online, offline = pair(PrioritizedReplayStorage, alpha=1.0, beta=1.0)
    mixed = MixedReplay(online, offline, batch_size=16)
    batch = mixed.sample()
    is_own = check_rows(batch)
    assert torch.equal(batch.rows >= 0, is_own)
    assert torch.equal(batch.weights, torch.ones(16, 1))
    both = {row: (online if row >= 0 else offline) for row in batch.rows.tolist()}
    order = torch.randperm(16)
    wanted = {int(row): 1.0 + i for i, row in enumerate(batch.rows[order].tolist())}
    mixed.update(batch.rows[order], torch.arange(16).unsqueeze(1) + 1.0)
    for row, storage in both.items():
        held = row if row >= 0 else -1 - row
        assert storage.priorities([held]).item() == wanted[row]
        value = storage[held]["observations"]["a"][0].item()
        assert (value < OFFLINE) == (row >= 0)
    assert online.stale_updates == offline.stale_updates == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300, -1.0])
def test_one_invalid_priority_changes_none(bad):
    online, offline = pair(PrioritizedReplayStorage)
    mixed = MixedReplay(online, offline, batch_size=4)
    rows = mixed.sample().rows
    before = [s.priorities(s.held_rows()) for s in (online, offline)]
    with pytest.raises(InvalidInputError, match=r"priority 3 of 4 \(row -\d+\) is .* No priority was changed"):
        mixed.update(rows, [5.0, 5.0, 5.0, bad])
    assert all(torch.equal(s.priorities(s.held_rows()), old) for s, old in zip((online, offline), before, strict=True))


@pytest.mark.parametrize("bad", [10**6, -(10**6)])
def test_one_unknown_row_changes_no_priority_of_either_storage(bad):
    online, offline = pair(PrioritizedReplayStorage)
    mixed = MixedReplay(online, offline, batch_size=4)
    rows = torch.cat([mixed.sample().rows, torch.tensor([bad])])
    before = [s.priorities(s.held_rows()) for s in (online, offline)]
    with pytest.raises(InvalidInputError, match=r"^o(n|ff)line.* never written.* No priority was changed"):
        mixed.update(rows, [5.0] * 5)
    with pytest.raises(InvalidInputError, match=r"finite .* No priority was changed"):
        mixed.update(rows[:4], [5.0, 5.0, 5.0, 1e39])  # in float32 it is infinite
    assert all(torch.equal(s.priorities(s.held_rows()), old) for s, old in zip((online, offline), before, strict=True))


def test_sequences_are_joined_along_the_batch():
    arguments = {"sequence_length": 5, "hidden_shape": (2, 3), "num_envs": 2}

    def storage(first):
        box = spaces.Box(-1e6, 1e6, (1,), np.float32)
        kept = SequenceReplayStorage(box, spaces.Discrete(3), storage_size=40, seed=1, **arguments)
        for step in range(20):
            ids = torch.full((2,), float(first + step))
            state = (ids[0] + torch.zeros(2, 2, 3)).clone()
            kept.add(ids[:, None], [1, 1], ids, [0, 0], [0, 0], {}, ids[:, None] + 1, hidden_states=state)
        return kept

    batch = MixedReplay(storage(0), storage(OFFLINE), share=0.5, batch_size=6).sample()
    first = batch.observations[:, 0, 0]
    assert (first < OFFLINE).tolist() == [True] * 3 + [False] * 3
    assert torch.equal(batch.observations[..., 0], first[:, None] + torch.arange(5))
    assert torch.equal(batch.rewards[..., 0], batch.observations[..., 0])
    assert batch.hidden_states.shape == (2, 6, 3)
    assert torch.equal(batch.hidden_states, first[None, :, None].expand(2, 6, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_step": 3}, "n_step is 1 in online and 3 in offline"),
        ({"discount": 0.9}, r"discount is 0.99 in online and 0.9 in offline"),
    ],
)
def test_targets_have_one_meaning(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        MixedReplay(made(ReplayStorage), made(ReplayStorage, **arguments))


def test_other_refusals():
    online, offline = pair(ReplayStorage)
    with pytest.raises(InvalidInputError, match="the same storage"):
        MixedReplay(online, online)
    with pytest.raises(InvalidInputError, match="online is a ReplayStorage and offline a PrioritizedReplayStorage"):
        MixedReplay(online, made(PrioritizedReplayStorage))
    for share in (-0.1, 1.5, float("nan"), "half", True):
        with pytest.raises(InvalidInputError, match="share"):
            MixedReplay(online, offline, share=share)
    for size in (0, 2.5, None):
        with pytest.raises(InvalidInputError, match="batch_size"):
            MixedReplay(online, offline, batch_size=size)
    mixed = MixedReplay(online, offline)
    with pytest.raises(InvalidInputError, match="share"):
        mixed.share = 2
    assert mixed.share == 0.5
    with pytest.raises(rlstore.StorageError, match="takes rows and priorities; 1 arguments"):
        mixed.update([1])
    with pytest.raises(InvalidInputError, match=r"priorities are \(2,\) for 1 rows"):
        mixed.update([1], [1.0, 2.0])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dtype": torch.float16}, r'observations\["a"\] is \(2,\) float32 on cpu .* and \(2,\) float16'),
        ({"extra_fields": {"costs": ((), torch.float64)}}, r"costs is \(1,\) float32 .* and \(1,\) float64"),
    ],
)
def test_batches_of_other_fields_are_refused(other, message):
    with pytest.raises(InvalidInputError, match=message):
        MixedReplay(made(ReplayStorage), made(ReplayStorage, **other), batch_size=4).sample()


def test_stats_has_the_numbers_of_both():
    online, offline = pair(ReplayStorage)
    online.sample(3)
    mixed = MixedReplay(online, offline, share=0.25, batch_size=8)
    mixed.sample()
    numbers = mixed.stats()
    assert numbers["share"] == 0.25
    assert (numbers["online_samples"], numbers["offline_samples"]) == (3 + 2, 6)
    assert {name: value for name, value in numbers.items() if name.startswith("offline_")} == {
        f"offline_{name}": value for name, value in offline.stats().items()
    }
    assert len(numbers) == 1 + len(online.stats()) + len(offline.stats())


def test_repr_says_what_is_mixed():
    online, offline = pair(ReplayStorage)
    mixed = MixedReplay(online, offline, share=0.25, batch_size=8)
    assert repr(mixed) == f"MixedReplay(batches of 8, 0.25 of each online: {online!r}, offline: {offline!r})"
