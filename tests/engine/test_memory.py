"""Memory that serves again only when nobody holds it, and tensors that are plain whatever the caller's mode."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from rlstore.engine.memory import tensors as memory
from rlstore.engine.memory.tensors import Recycler, allocate, allocate_empty

CPU = torch.device("cpu")


@pytest.mark.parametrize("inference", [True, False])
def test_what_is_allocated_is_never_an_inference_tensor(inference):
    with torch.inference_mode(inference):
        made = [allocate((2, 3), torch.float32, CPU), allocate_empty((2, 3), torch.int16, CPU)]
        made.append(Recycler().empty((2, 3), torch.float32, CPU))
    for tensor in made:
        assert not tensor.is_inference()
        tensor.zero_()
    assert [tensor.dtype for tensor in made] == [torch.float32, torch.int16, torch.float32]


def test_allocate_fills():
    assert allocate((2,), torch.float32, CPU).tolist() == [0.0, 0.0]
    assert allocate((2,), torch.uint8, CPU, 7).tolist() == [7, 7]
    assert allocate((2,), torch.float64, CPU, torch.nan).isnan().all()


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_that_nobody_holds_serves_again():
    recycler = Recycler()
    first = recycler.empty((100,), torch.float32, CPU)
    place = address(first)
    del first
    assert address(recycler.empty((100,), torch.float32, CPU)) == place


HOLDERS = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[10:],
    "a part": lambda tensor: torch.unsafe_split(tensor, 50)[1],
    "a detached one": lambda tensor: tensor.detach(),
    "an array": lambda tensor: tensor.numpy(),
    "a graph": lambda tensor: tensor * torch.ones(100, requires_grad=True),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_somebody_holds_does_not_serve_again(holder):
    recycler = Recycler()
    for _ in range(3):
        recycler.begin()
        tensor = recycler.empty((100,), torch.float32, CPU).fill_(3.0)
        held = HOLDERS[holder](tensor)
        del tensor
        recycler.empty((100,), torch.float32, CPU).fill_(-1.0)
        recycler.begin()
        recycler.empty((100,), torch.float32, CPU).fill_(-1.0)
        assert set(held.tolist()) == {3.0}


def test_tensors_held_together_have_memory_of_their_own():
    recycler = Recycler()
    for _ in range(3):
        recycler.begin()
        tensors = [recycler.empty((50,), torch.float32, CPU) for _ in range(4)]
        assert len({address(tensor) for tensor in tensors}) == 4


def test_a_shape_and_a_dtype_have_memory_of_their_own():
    recycler = Recycler()
    for shape, dtype in [((4, 2), torch.float32), ((2, 4), torch.float32), ((4, 2), torch.int32), ((0,), torch.bool)]:
        made = recycler.empty(shape, dtype, CPU)
        assert tuple(made.shape) == shape
        assert made.dtype == dtype
        made.fill_(1)


def test_what_an_update_did_not_use_is_let_go():
    recycler = Recycler()
    recycler.empty((128,), torch.float32, CPU)
    recycler.begin()
    assert recycler.idle_bytes == 512  # used in the update before
    recycler.begin()
    assert recycler.idle_bytes == 0


def test_an_update_that_held_many_tensors_once_does_not_keep_their_memory():
    recycler = Recycler()
    held = [recycler.empty((256,), torch.float32, CPU) for _ in range(100)]
    assert recycler.idle_bytes == 0  # they are their holder's
    held.clear()
    for idle in (100, 2, 2):  # one update may hold as many again; then there is what the last one used
        recycler.begin()
        assert recycler.idle_bytes == idle * 1024
        first = recycler.empty((256,), torch.float32, CPU)
        second = recycler.empty((256,), torch.float32, CPU)
        del first, second


def test_tensors_that_outlive_an_update_come_back_to_the_next():
    recycler = Recycler()
    held = recycler.empty((256,), torch.float32, CPU)
    place = address(held)
    for _ in range(3):
        recycler.begin()
    del held
    recycler.begin()
    assert address(recycler.empty((256,), torch.float32, CPU)) == place


def test_no_more_lies_idle_than_the_bound(monkeypatch):
    monkeypatch.setattr(memory, "KEEP_BYTES", 1100)
    recycler = Recycler()
    held = [recycler.empty((128,), torch.float32, CPU) for _ in range(5)]
    places = {address(tensor) for tensor in held[:2]}
    for tensor in held:
        tensor.fill_(1.0)
    del held[0], held[0], tensor
    assert recycler.idle_bytes == 1024
    held.clear()
    assert recycler.idle_bytes == 1024
    again = [recycler.empty((128,), torch.float32, CPU) for _ in range(5)]
    assert {address(tensor) for tensor in again} >= places
    assert len({address(tensor) for tensor in again}) == 5


def test_tensors_outlive_the_recycler():
    tensor = Recycler().empty((1 << 20,), torch.float32, CPU).fill_(7.0)  # with it goes only what lies idle
    assert tensor.data_ptr() % (2 << 20) == 0  # a huge page, where there are any
    assert (tensor == 7.0).all()


def test_memory_is_given_back_by_whichever_thread_drops_the_last_tensor():
    recycler = Recycler()
    made = [[recycler.empty((256,), torch.float32, CPU).fill_(float(n))] for n in range(8)]
    places = {address(held[0]) for held in made}
    threads = [threading.Thread(target=held.clear) for held in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recycler.idle_bytes == 8 * 1024
    assert {address(tensor) for tensor in [recycler.empty((256,), torch.float32, CPU) for _ in range(8)]} == places


def test_memory_that_went_to_another_process_is_not_the_recyclers_any_more():
    recycler = Recycler()
    tensor = recycler.empty((256,), torch.float32, CPU).fill_(5.0)
    tensor.share_memory_()  # moves the values to shared memory: the old place is free
    assert recycler.idle_bytes == 1024
    recycler.empty((256,), torch.float32, CPU).fill_(-1.0)
    assert (tensor == 5.0).all()


@pytest.mark.parametrize("dtype", [*memory._DLPACK_TYPES, torch.float8_e5m2], ids=str)
def test_every_dtype(dtype):
    made = Recycler().empty((3, 5), dtype, CPU)
    assert (made.dtype, tuple(made.shape), made.is_contiguous(), made._version) == (dtype, (3, 5), True, 0)
    assert not made.is_inference()


def test_a_group_is_several_tensors_at_once():
    recycler = Recycler()
    made = recycler.empty_group([(4, 2), (3,)], [torch.float32, torch.int64], CPU)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in made] == [((4, 2), torch.float32), ((3,), torch.int64)]
    places = [address(tensor) for tensor in made]
    del made
    again = recycler.empty_group([(4, 2), (3,)], [torch.float32, torch.int64], CPU)
    assert [address(tensor) for tensor in again] == places


def test_a_gradient_asked_of_one_tensor_does_not_cling_to_the_next():
    recycler = Recycler()
    first = recycler.empty((10,), torch.float32, CPU).fill_(1.0).requires_grad_()
    first.sum().backward()
    place = address(first)
    del first
    again = recycler.empty((10,), torch.float32, CPU)
    assert address(again) == place
    assert not again.requires_grad


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda old: pickle.loads(pickle.dumps(old))], ids=["copy", "pickle"]
)
def test_a_copy_makes_outputs_of_its_own(twin_of):
    recycler = Recycler()
    place = address(recycler.empty((100,), torch.float32, CPU))
    twin = twin_of(recycler)
    assert twin.idle_bytes == 0  # nor is what was kept copied or saved
    ours, theirs = recycler.empty((100,), torch.float32, CPU), twin.empty((100,), torch.float32, CPU)
    assert address(ours) == place
    assert address(theirs) != place


def test_memory_that_cannot_be_is_refused():
    pool = Recycler()._pool
    for shapes, dtypes in [([(2, -1)], [(2, 32)]), ([(2**40, 2**40)], [(2, 32)]), ([(1,)], []), ([], [(2, 32)])]:
        with pytest.raises(ValueError):  # noqa: PT011 (each has words of its own)
            pool.empty(shapes, dtypes)
    with pytest.raises(MemoryError):
        pool.empty([(2**60,)], [(2, 8)])
    assert pool.idle_bytes == 0


# ---------------------------------------------------------------------------------------------------- groups

SHAPES = [
    ((3, 5), torch.float32),
    ((7,), torch.bool),
    ((2, 0), torch.int64),
    ((1 << 16,), torch.float32),  # 256 KiB: memory of its own
    ((), torch.float64),
    ((4, 1, 3), torch.int16),
    ((9,), torch.float64),
]


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[::-1], SHAPES[:1], SHAPES[2:3], SHAPES[3:4]], ids=str)
def test_tensors_of_a_group_are_apart_and_tensors_in_their_own_right(shapes):
    made = Recycler().empty_group(*zip(*shapes, strict=True), CPU)
    for number, ((shape, dtype), tensor) in enumerate(zip(shapes, made, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % 64 == 0
        assert (tensor._base, tensor._version) == (None, 0)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # what a saved tensor holds
        tensor.fill_(number % 2)
    assert [tensor._version for tensor in made] == [1] * len(made)
    for number, tensor in enumerate(made):
        assert (tensor == number % 2).all()


def test_who_keeps_a_tensor_keeps_the_small_ones_of_its_group_and_no_large_one():
    recycler = Recycler()
    small, large, other = recycler.empty_group([(256,), (1 << 16,), (256,)], [torch.float32] * 3, CPU)
    assert other.data_ptr() == small.data_ptr() + 1024
    del large
    assert recycler.idle_bytes == 1 << 18
    del small
    assert recycler.idle_bytes == 1 << 18
    del other
    assert recycler.idle_bytes == (1 << 18) + 2048


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000, 4095, 4096, 4097, 10**6, 2**20 - 1, 2**20, 5 * 10**6])
def test_memory_serves_again_for_sizes_that_differ_a_little_and_wastes_no_more_than_an_eighth(nbytes):
    recycler = Recycler()
    recycler.empty((nbytes,), torch.uint8, CPU)
    assert nbytes <= recycler.idle_bytes <= nbytes * 9 / 8 + 64
    kept = recycler.idle_bytes
    recycler.empty((max(kept, 1),), torch.uint8, CPU)
    assert recycler.idle_bytes == kept
