"""Values whose memory is lent: an exporter may take it back as soon as it is released, and not earlier."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rlstore.kernels import _native as native

LANES, ROWS = 3, 5
GetBuffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
ReleaseBuffer = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_void_p)
fill_info = ctypes.pythonapi.PyBuffer_FillInfo
fill_info.argtypes = [
    ctypes.c_void_p,
    ctypes.py_object,
    ctypes.c_void_p,
    ctypes.c_ssize_t,
    ctypes.c_int,
    ctypes.c_int,
]


class Slot(ctypes.Structure):
    _fields_ = (("slot", ctypes.c_int), ("function", ctypes.c_void_p))


class Spec(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("basicsize", ctypes.c_int),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("slots", ctypes.POINTER(Slot)),
    )


LENT = np.zeros(LANES, np.uint8)
ON_LENDING: list[Callable[[], object]] = []


def lend(owner: object, view: int, flags: int) -> int:
    for call in ON_LENDING:
        call()
    return fill_info(view, owner, LENT.ctypes.data, LANES, 1, flags)


def take_back(owner: object, view: int) -> None:
    LENT[:] = 255


# A type that lends memory, as C extensions define it; in Python itself a class can do so since 3.12 (__buffer__).
FUNCTIONS = (GetBuffer(lend), ReleaseBuffer(take_back))
SLOTS = (Slot * 3)(*((k + 1, ctypes.cast(f, ctypes.c_void_p)) for k, f in enumerate(FUNCTIONS)), (0, None))
SPEC = Spec(b"lending.Lender", object.__basicsize__, 0, 0, SLOTS)
ctypes.pythonapi.PyType_FromSpec.restype = ctypes.py_object
Lender = ctypes.pythonapi.PyType_FromSpec(ctypes.byref(SPEC))


@pytest.fixture
def ring():
    """A ring with an action of uint8, and what it writes actions to."""
    LENT[:], ON_LENDING[:] = [1, 0, 2], []
    counters = [torch.full((LANES,), value) for value in (0, 0, -1, -1, 1)]
    blocks = (torch.zeros(LANES, ROWS, dtype=torch.uint8), torch.zeros(LANES, ROWS, dtype=torch.uint8))
    made = native.EpisodeRing(
        3,
        tuple(counters),
        torch.zeros(LANES, ROWS, dtype=torch.int32),
        ((blocks[0], (), 1, 1),),
        ((blocks[1], ()), (torch.zeros(LANES, ROWS), ())),
        1,
        0,
        0,
    )
    slots = torch.arange(LANES, dtype=torch.int32).view(1, LANES)
    tables = (torch.zeros(LANES, 4, dtype=torch.int64), slots, (torch.zeros(LANES, dtype=torch.uint8),), (None,))
    made.set_tables(*tables)
    made.allow(1 << 62)
    return made, blocks, tables


def step(observation: object, action: object, terminated: object, final: object = None) -> tuple:
    zeros = torch.zeros(LANES, dtype=torch.uint8)
    return (observation, zeros, action, torch.ones(LANES), terminated, zeros, None, final, None)


@pytest.mark.parametrize("place", ["observation", "action", "terminated", "final"])
def test_a_value_is_read_before_its_memory_is_taken_back(ring, place):
    made, (observations, actions), (episodes, _, (finals,), _) = ring
    ended = torch.tensor([True, False, True])
    values = {"observation": torch.zeros(LANES, dtype=torch.uint8), "action": torch.zeros(LANES, dtype=torch.uint8)}
    assert made.write(step(**{**values, "terminated": ended, place: Lender()})) == -1
    found = {"observation": observations[:, 0], "action": actions[:, 0], "terminated": episodes[:, 2], "final": finals}
    assert found[place].tolist() == ([1, 0, 1] if place == "terminated" else [1, 0, 2])
    assert LENT.tolist() == [255] * LANES  # it was taken back


def test_a_step_within_a_step_is_refused(ring):
    made, (_, actions), _ = ring
    zeros, refused = torch.zeros(LANES, dtype=torch.uint8), []

    def write_another() -> None:
        with pytest.raises(RuntimeError, match="while another one is") as error:
            made.write(step(zeros, zeros, zeros))
        refused.append(error)

    ON_LENDING.append(write_another)
    assert made.write(step(zeros, Lender(), zeros)) == -1
    assert len(refused) == 1
    assert actions[:, 0].tolist() == [1, 0, 2]
    assert not actions[:, 1].any()
