"""What every storage does: it is saved, loaded, and goes on as if nothing had happened."""

from __future__ import annotations

import pytest
import torch
from rollout_model import SIZE, collect, leaves, make, same_data
from storages import NUM_ENVS, Actor

from rlstore import NotReadyError, Storage


def same_batches(one, other):
    """Both serve the same batches to the bit, in the same order, and go on drawing in the same way."""
    for arguments in ((3, None, 2), (2, 4)):
        served = [list(storage.generate_batches(*arguments)) for storage in (one, other)]
        for first, second in zip(*served, strict=True):
            same_data(first, second)


def same_storage(one, other):
    assert type(one) is type(other)
    assert (len(one), repr(one)) == (len(other), repr(other))
    same_data(one.get_all_buffer_data(), other.get_all_buffer_data())


def empty(case, storage):
    pass


def midway(case, storage):
    collect(case, storage, first=3, steps=3)


def complete(case, storage):
    collect(case, storage, first=7)


def computed(case, storage):
    complete(case, storage)
    storage.before_gradients(Actor(), None)


def drawn_from(case, storage):
    computed(case, storage)
    next(storage.generate_batches(3, None))


def spent(case, storage):
    computed(case, storage)
    storage.after_gradients(None, None, {})


def midway_in_the_next(case, storage):
    spent(case, storage)
    collect(case, storage, first=30, steps=2)


def emptied(case, storage):
    computed(case, storage)
    storage.reset()


def changed(case, storage):
    for name, value in zip(case.discount_names, (0.25, 0.125), strict=False):
        storage.update_storage_parameter(name, value)
    storage.update_storage_parameter(case.size_name, SIZE + 2)
    collect(case, storage, first=5, steps=2)


MOMENTS = [empty, midway, complete, computed, drawn_from, spent, midway_in_the_next, emptied, changed]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_loaded_storage_goes_on_exactly(case, moment, tmp_path):
    storage, _ = make(case)
    moment(case, storage)
    storage.save(tmp_path / "snapshot")
    loaded = Storage.load(tmp_path / "snapshot")
    same_storage(storage, loaded)
    # to the end of the rollout, through learning, and through another rollout
    for first in (50, 80):
        begun = 0 if moment is spent or first == 80 else len(storage) // NUM_ENVS
        collect(case, storage, loaded, first=first, steps=storage.max_size - begun)
        for one in (storage, loaded):
            one.before_gradients(Actor(), None)
        same_storage(storage, loaded)
        same_batches(storage, loaded)
        for one in (storage, loaded):
            one.after_gradients(None, None, {})


def test_saving_changes_nothing(case, tmp_path):
    storage, _ = make(case)
    twin, _ = make(case)
    for one in (storage, twin):
        computed(case, one)
    storage.save(tmp_path / "snapshot")
    same_storage(storage, twin)
    same_batches(storage, twin)


def test_a_loaded_storage_is_apart_from_its_snapshot(case, tmp_path):
    storage, _ = make(case)
    complete(case, storage)
    storage.save(tmp_path / "snapshot")
    loaded = Storage.load(tmp_path / "snapshot")
    loaded.reset()
    collect(case, loaded, first=60)
    same_storage(storage, Storage.load(tmp_path / "snapshot"))


def test_loading_takes_nothing_from_the_generator_of_torch(case, tmp_path):
    storage, _ = make(case)
    storage.save(tmp_path / "snapshot")
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Storage.load(tmp_path / "snapshot")
    assert torch.equal(torch.rand(1), expected)


def test_what_is_loaded_in_inference_mode_can_be_used_outside(case, tmp_path):
    storage, _ = make(case)
    computed(case, storage)
    storage.save(tmp_path / "snapshot")
    with torch.inference_mode():
        loaded = Storage.load(tmp_path / "snapshot")
    for name, leaf in leaves(loaded.get_all_buffer_data()):
        assert not leaf.is_inference(), name
    for one in (storage, loaded):
        one.after_gradients(None, None, {})
    collect(case, storage, loaded, first=20)
    same_storage(storage, loaded)


def test_the_actor_and_the_algorithm_are_not_saved(case, tmp_path):
    storage, _ = make(case, actor=Actor(), algorithm=object())
    complete(case, storage)
    storage.save(tmp_path / "snapshot")
    loaded = Storage.load(tmp_path / "snapshot")
    if case.computes_targets:
        with pytest.raises(NotReadyError, match="needs an actor"):
            loaded.before_gradients()
