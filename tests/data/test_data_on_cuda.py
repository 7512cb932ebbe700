"""On CUDA, data are taken in and given out as on the CPU."""

import warnings

import pytest
import torch
from data_episodes import CASES, episode_of, flat
from experience import BOX, CONTINUOUS, D4RL, KINDS, STEPS, assert_same, episodes, fill, held, without_row_ids

from rlstore import MixedReplay, PrioritizedReplayStorage, ReplayStorage
from rlstore.data import read_npz, write_npz

DEVICE = torch.device("cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loaded_episodes_are_those_on_the_cpu(case, num_envs):
    given = [episode_of(case.form, index, length) for index, length in enumerate([5, 1, 7, 2, 6, 3])]
    size = {"storage_size": 40 * num_envs, "num_envs": num_envs}
    one, other = (
        case.kind.from_episodes(given, case.form.space, **case.given(**size, device=d)) for d in (DEVICE, "cpu")
    )
    assert len(one) == 24
    assert_same(held(one), held(other))
    for _ in range(3):
        for served, expected in zip(flat(one.sample()), flat(other.sample()), strict=True):
            assert served.device.type == DEVICE.type
            torch.testing.assert_close(served.cpu(), expected)


@pytest.mark.parametrize("name", KINDS)
def test_files_hold_what_is_on_the_device(name, tmp_path):
    kind, observation_space, action_space, options = KINDS[name]
    storage = kind(
        observation_space, action_space, device=DEVICE, storage_size=2 * STEPS, num_envs=2, batch_size=2, **options
    )
    fill(storage, name)
    assert_same(held(storage), episodes(name))
    write_npz(storage, tmp_path / "file.npz")
    again = kind.from_episodes(read_npz(tmp_path / "file.npz"), device=DEVICE, num_envs=2, batch_size=2, **options)
    assert_same(without_row_ids(again), without_row_ids(storage))


def test_arrays_without_what_follows():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps that are left out
        found, expected = (ReplayStorage.from_arrays(D4RL, device=device) for device in (DEVICE, "cpu"))
    assert_same(held(found), held(expected))


def test_batches_of_two_storages():
    mixed = MixedReplay(
        *(PrioritizedReplayStorage(BOX, CONTINUOUS, device=DEVICE, storage_size=64, seed=seed) for seed in (0, 1)),
        batch_size=32,
    )
    for first, storage in ((0, mixed.online), (1000, mixed.offline)):
        for step in range(64):
            at = torch.full((2,), float(first + step), device=DEVICE)
            storage.add(at, at[:1].expand(3) % 9, at[0], False, False, {}, at + 1)
    batch = mixed.sample()
    ids = batch.observations[:, 0]
    assert torch.equal(ids < 1000, batch.rows >= 0)
    assert (ids < 1000).tolist() == [True] * 16 + [False] * 16
    assert torch.equal(batch.rewards[:, 0], ids)
    mixed.update(batch.rows, ids / 1000 + 1)
    for rows, storage in ((batch.rows[:16], mixed.online), (-1 - batch.rows[16:], mixed.offline)):
        values = storage[rows]["observations"][:, 0] / 1000 + 1
        torch.testing.assert_close(storage.priorities(rows), values**0.6)


def test_a_page_of_what_is_on_the_device(tmp_path):
    storage = ReplayStorage(BOX, CONTINUOUS, device=DEVICE, storage_size=64)
    for step in range(40):
        at = torch.full((2,), float(step), device=DEVICE)
        storage.add(at, at[:1].expand(3) % 9, at[0], step == 20, False, {}, at + 1)
    storage.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000
