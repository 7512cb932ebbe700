"""What is particular to saving RolloutStorage and DecoupledRolloutStorage, and loading by class and device."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from rollout_ids import ENVS, STEPS, build, fill, hidden_of, ids_of_step, observations_of, transition_of
from tensordict import TensorDict

from rlstore import DecoupledRolloutStorage, NotReadyError, RolloutStorage, SnapshotError, Storage

GOLDEN = Path(__file__).parent / "cases" / "snapshots_v1"


def saved(storage, tmp_path, **options):
    storage.save(tmp_path / "snapshot")
    return Storage.load(tmp_path / "snapshot", **options)


def assert_same_blocks(one, other):
    """Every block, whole: also the rows that are left from an earlier rollout."""
    assert list(one._ring.blocks) == list(other._ring.blocks)
    for name, block in one._ring.blocks.items():
        torch.testing.assert_close(other._ring.blocks[name], block, rtol=0, atol=0, equal_nan=True, msg=name)


# ---------------------------------------------------------------------------------------------------- rollouts


def lstm(step, ids):
    return (hidden_of(ids), (hidden_of(ids, 2), hidden_of(ids, 2, -1.0))) if step % 2 == 0 else (None, None)


def test_recurrent_batches_come_out_the_same(tmp_path):
    storage = build(seed=1)
    fill(storage, hidden=lstm)
    storage.clear()
    fill(storage, 3, offset=1000, hidden=lstm)  # the other three rows hold the states of the rollout before
    loaded = saved(storage, tmp_path)
    assert_same_blocks(storage, loaded)
    # A step without hidden states leaves those that were saved in its row: both rollouts must have the same.
    for one in (storage, loaded):
        for step in (3, 4, 5):
            one.add_transition(transition_of(ids_of_step(step, 1000)))
    assert_same_blocks(storage, loaded)
    batches = [list(one.recurrent_mini_batch_generator(2, 2)) for one in (storage, loaded)]
    for first, second in zip(*batches, strict=True):
        assert torch.equal(first.masks, second.masks)
        assert torch.equal(first.hidden_states[0], second.hidden_states[0])
        for part in (0, 1):
            assert torch.equal(first.hidden_states[1][part], second.hidden_states[1][part])
        assert (first.observations == second.observations).all()


def test_values_by_hand(tmp_path):
    """Not only the same as before: what was put in."""
    storage = build(seed=2)
    fill(storage, 4)
    loaded = saved(storage, tmp_path)
    assert (loaded.step, loaded.num_envs, loaded.num_transitions_per_env) == (4, ENVS, STEPS)
    ids = torch.cat([ids_of_step(step) for step in range(4)]).reshape(4, ENVS, 1)
    assert (loaded.observations[:4] == observations_of(ids)).all()
    assert torch.equal(loaded.rewards[:4], ids + 0.375)
    assert torch.equal(loaded.returns[:4], ids + 1000.0)
    assert torch.equal(loaded.distribution_params[1][:4], ids + 3000.0)
    assert loaded.saved_hidden_state_a is None
    assert not loaded.rewards[4:].any()


def test_observations_of_every_form(tmp_path):
    example = torch.arange(6.0).reshape(2, 3)
    forms = {
        "tensor": example,
        "tuple": (example, TensorDict({"a": example.int()}, [2])),
        "dict": {"z": example, "a": {"$deep": example.to(torch.bfloat16)}},
    }
    for name, obs in forms.items():
        storage = RolloutStorage("distillation", 2, 3, obs, [1])
        loaded = saved(storage, tmp_path / name)
        assert loaded._observations.paths == storage._observations.paths
        assert_same_blocks(storage, loaded)


def test_what_callers_put_into_the_attributes_is_saved(tmp_path):
    storage = build()
    fill(storage, hidden=lambda step, ids: (hidden_of(ids), None))
    storage.advantages = torch.full((STEPS, ENVS, 1), 7.0)
    storage.observations["policy"] = torch.full((STEPS, ENVS, 3), 8.0)
    storage.saved_hidden_state_a[0] = torch.full((STEPS, 1, ENVS, 3), 9.0)
    loaded = saved(storage, tmp_path)
    assert loaded.advantages.eq(7).all()
    assert loaded.observations["policy"].eq(8).all()
    assert loaded.saved_hidden_state_a[0].eq(9).all()


def test_truncation_and_what_follows_the_newest_step(tmp_path):
    class Actor:
        def get_values(self, observations):
            return observations["policy"][:, :1] * 2

    def sample(step):
        ids = ids_of_step(step, envs=2)
        return {
            "observations": {"policy": ids},
            "actions": ids,
            "rewards": ids,
            "terminated": torch.tensor([False, False]),
            "truncated": torch.tensor([step == 1, False]),
            "next_observations": {"policy": ids + 2},
            "values": ids,
            "log_probs": ids,
            "final_values": torch.tensor([[5.0], [float("nan")]]),
        }

    storage = RolloutStorage.create_factory(3, gamma=0.5, lam=1.0)()
    for step in range(3):
        storage.insert_transition(sample(step))
    loaded = saved(storage, tmp_path)
    for one in (storage, loaded):
        one.before_gradients(Actor())
    # env 0: r = 0, 2, 4; cut after step 1 with a final value of 5; then V = 2 * 6.
    # env 1: r = 1, 3, 5; then V = 2 * 7.
    first = [0 + 0.5 * (2 + 0.5 * 5), 2 + 0.5 * 5, 4 + 0.5 * 12]
    second = [1 + 0.5 * (3 + 0.5 * (5 + 0.5 * 14)), 3 + 0.5 * (5 + 0.5 * 14), 5 + 0.5 * 14]
    assert loaded.returns[..., 0].T.tolist() == [first, second]
    assert_same_blocks(storage, loaded)


def test_a_new_distribution_is_refused_after_loading_as_before(tmp_path):
    storage = build()
    transition = transition_of(ids_of_step(0))
    transition.distribution_params = None
    storage.add_transition(transition)
    loaded = saved(storage, tmp_path)
    for one in (storage, loaded):
        with pytest.raises(ValueError, match="earlier steps of this rollout had none"):
            one.add_transition(transition_of(ids_of_step(1)))


# ---------------------------------------------------------------------------------------------------- decoupled


def add_ids(storage, step):
    ids = torch.arange(2.0) + step * 2
    flags = torch.tensor([step == 3, False])
    storage.add(ids.view(2, 1), ids.long() % 4, ids, flags, ~flags, ids.view(2, 1) + 2, -ids, ids / 2, ids / 4)


@pytest.mark.parametrize(
    "observation_space",
    [spaces.Box(-9, 9, (1,)), {"shape": (1,)}, {"shape": [1], "dtype": np.float64}],
    ids=["gymnasium", "mapping", "mapping with a dtype"],
)
def test_spaces_come_back(observation_space, tmp_path):
    storage = DecoupledRolloutStorage(
        observation_space, {"shape": (4,), "type": "Discrete", "range": [0, 3]}, "cpu", 4, 2, 0.5, 0.25, seed=4
    )
    for step in range(4):
        add_ids(storage, step)
    loaded = saved(storage, tmp_path)
    assert loaded.action_space == {"shape": (4,), "type": "Discrete", "range": [0, 3]}
    if isinstance(observation_space, spaces.Space):
        assert loaded.observation_space == observation_space
    assert (loaded.discount, loaded.gae_lambda, loaded.num_steps, loaded.num_envs) == (0.5, 0.25, 4, 2)
    assert loaded.obs.dtype == storage.obs.dtype
    assert_same_blocks(storage, loaded)
    # The flags of the last step are those before the first of the next rollout, by the storage that was loaded too.
    for one in (storage, loaded):
        add_ids(one, 4)
    assert loaded.terminateds[0].tolist() == [1, 0]
    assert loaded.truncateds[0].tolist() == [0, 1]
    assert_same_blocks(storage, loaded)


def test_the_same_batches_from_the_same_generator(tmp_path):
    storage = DecoupledRolloutStorage(spaces.Box(-9, 9, (1,)), spaces.Discrete(4), "cpu", 4, 2, seed=4)
    for step in range(4):
        add_ids(storage, step)
    storage.returns = storage.advantages = torch.zeros(4, 2)
    list(storage.sample(2))
    loaded = saved(storage, tmp_path)
    for first, second in zip(storage.sample(2), loaded.sample(2), strict=True):
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)


# ---------------------------------------------------------------------------------------------------- class and device


def test_each_class_loads_its_own(tmp_path):
    build().save(tmp_path / "rollout")
    assert type(RolloutStorage.load(tmp_path / "rollout")) is RolloutStorage
    assert type(Storage.load(str(tmp_path / "rollout"))) is RolloutStorage
    words = r"holds a rlstore.RolloutStorage, and DecoupledRolloutStorage.load\(\) was called"
    with pytest.raises(SnapshotError, match=words):
        DecoupledRolloutStorage.load(tmp_path / "rollout")


class Mine(RolloutStorage):
    """A class of a user, made in the same way."""


class MineToo(Mine):
    """Another."""


def test_a_class_of_a_user_comes_back(tmp_path):
    storage = MineToo("rl", 2, 3, TensorDict({"a": torch.zeros(2, 1)}, [2]), [1])
    storage.save(tmp_path / "mine")
    for base in (Storage, RolloutStorage, Mine, MineToo):
        assert type(base.load(tmp_path / "mine")) is MineToo


def edit(path, **changes):
    """Change fields of a manifest, whose checksum is left out."""
    manifest = {**json.loads(path.read_text()), **changes}
    del manifest["crc32"]
    path.write_text(json.dumps(manifest))


def test_a_class_that_is_not_imported_is_named(tmp_path):
    build().save(tmp_path / "rollout")
    path = tmp_path / "rollout" / "manifest.json"
    edit(path, **{"class": "os.path.Rollout"})
    with pytest.raises(SnapshotError, match=r"holds a os.path.Rollout, and no class of that name is imported"):
        Storage.load(tmp_path / "rollout")


def abstract_methods():
    return {name: lambda self, *args: None for name in Storage.__abstractmethods__}


def test_a_class_without_the_hooks_says_what_is_needed(tmp_path):
    kind = type("Bare", (Storage,), {**abstract_methods(), "__init__": lambda self: None})
    with pytest.raises(NotImplementedError, match=r"Bare cannot be saved\. Implement _settings\(\), _state\("):
        kind().save(tmp_path / "bare")
    assert not (tmp_path / "bare").exists()


class Notes(Storage):
    """A storage that never calls its base's constructor, with hooks of its own."""

    def __init__(self, size):
        self.max_size = size
        self.notes = torch.zeros(size, dtype=torch.int64)

    def _settings(self):
        return {"size": self.max_size}

    @classmethod
    def _from_settings(cls, settings, device):
        return cls(**settings)

    def _state(self):
        return {"word": "hello"}, {"notes": self.notes}

    def _set_state(self, numbers, reader):
        self.word = numbers["word"]
        reader.read_into("notes", self.notes)


for name, method in abstract_methods().items():
    setattr(Notes, name, method)
Notes.__abstractmethods__ = frozenset()


def test_a_class_with_hooks_of_its_own(tmp_path):
    notes = Notes(3)
    notes.notes[:] = torch.tensor([4, 5, 6])
    loaded = saved(notes, tmp_path)
    assert type(loaded) is Notes
    assert (loaded.word, loaded.notes.tolist()) == ("hello", [4, 5, 6])


def test_a_device_that_is_not_here(tmp_path):
    storage = build()
    storage.save(tmp_path / "rollout")
    path = tmp_path / "rollout" / "manifest.json"
    edit(path, device="cuda:63")
    with pytest.raises(
        SnapshotError, match=r"was saved on 'cuda:63', which is not available here.*load\(path, device=\"cpu\"\)"
    ):
        Storage.load(tmp_path / "rollout")
    loaded = Storage.load(tmp_path / "rollout", device="cpu")
    assert loaded.device == "cpu"
    assert_same_blocks(storage, loaded)
    with pytest.raises(ValueError, match="cuda:64"):
        Storage.load(tmp_path / "rollout", device="cuda:64")


def test_the_device_is_as_it_was_given(tmp_path):
    assert saved(build(), tmp_path).device == "cpu"
    assert saved(build(), tmp_path, device=torch.device("cpu")).device == torch.device("cpu")


def test_a_storage_that_waits_for_its_first_sample(tmp_path):
    for create in (RolloutStorage.create_factory(5, gamma=0.5), DecoupledRolloutStorage.create_factory(5)):
        loaded = saved(create(), tmp_path)
        assert (loaded.max_size, len(loaded)) == (5, 0)
        assert "waits for its first sample" in repr(loaded)
        with pytest.raises(NotReadyError):
            loaded.before_gradients(object())


# ---------------------------------------------------------------------------------------------------- the format


def golden_rollout():
    storage = build(steps=3, gamma=0.5, lam=0.25, seed=6)
    fill(storage, 2, hidden=lambda step, ids: (hidden_of(ids), None))
    storage.returns[2:] = storage.advantages[2:] = 0.0  # what nobody had written was zero then
    return storage


def golden_decoupled():
    observation_space = spaces.Dict({"a": spaces.Box(np.array([-1.5, 0]), np.array([3, np.inf]), dtype=np.float64)})
    storage = DecoupledRolloutStorage(observation_space, spaces.MultiDiscrete([3, 4]), "cpu", 2, 2, 0.5, seed=7)
    for step in range(2):
        ids = torch.arange(2.0) + step * 2
        obs = [{"a": torch.stack([ids + lead, -ids - lead], -1).double()} for lead in (0, 2)]
        actions = torch.stack([ids % 3, ids % 4], -1)
        storage.add(obs[0], actions, ids, ids == 3, ids == 0, obs[1], -ids, ids / 2, ids / 4)
    storage.returns[:] = storage.advantages[:] = 0.0
    return storage


GOLDENS = {"rollout": golden_rollout, "decoupled": golden_decoupled}


@pytest.mark.parametrize("name", GOLDENS)
def test_snapshots_of_format_version_1_can_be_loaded(name):
    """They were written when the format was made. If one cannot be loaded any more, the format needs a new version."""
    loaded, expected = Storage.load(GOLDEN / name), GOLDENS[name]()
    assert type(loaded) is type(expected)
    assert json.loads((GOLDEN / name / "manifest.json").read_text())["version"] == 1
    assert_same_blocks(expected, loaded)
    assert loaded._settings() == expected._settings()
    assert torch.equal(loaded._generator.get_state(), expected._generator.get_state())
    assert loaded._ring.counters() == expected._ring.counters()


@pytest.mark.parametrize("name", GOLDENS)
def test_what_is_written_now_is_format_version_1(name, tmp_path):
    """The same manifest and the same tensors as when the format was made: other versions of rlstore must read them."""
    GOLDENS[name]().save(tmp_path)
    now, then = (json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path, GOLDEN / name))
    assert now.pop("crc32") == zlib.crc32(json.dumps(now, indent=1).encode())  # older manifests have none
    assert now.pop("id")  # nor this
    assert now == then
    file = now["file"]["name"]
    assert (tmp_path / file).read_bytes() == (GOLDEN / name / file).read_bytes()


if __name__ == "__main__":  # makes the folders of the test above, for a new version of the format
    for name, make in GOLDENS.items():
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        make().save(GOLDEN / name)
        (GOLDEN / name / "lock").unlink()
