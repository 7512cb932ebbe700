"""The two end flags of a step: every form in which they may be given, against the flags as they are meant."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from rlstore import InvalidInputError
from rlstore.engine.rows.ends import JoinedFlags, on_one_device, read_flags
from rlstore.kernels import join_flags

TERMINATED, TRUNCATED = [0, 1, 0, 1, 0], [0, 0, 1, 1, 0]
ENDED, CUT_OFF = [0, 1, 1, 1, 0], [0, 0, 1, 0, 0]
FORMS = {
    "bool array": lambda flags: np.array(flags, bool),
    "bool tensor": lambda flags: torch.tensor(flags, dtype=torch.bool),
    "bytes": lambda flags: np.array(flags, np.uint8),
    "other bytes": lambda flags: torch.tensor(flags, dtype=torch.int8) * -3,
    "column": lambda flags: torch.tensor(flags, dtype=torch.bool).unsqueeze(1),
    "floats": lambda flags: torch.tensor(flags, dtype=torch.float32),
    "numbers": lambda flags: np.array(flags),
    "list": lambda flags: flags,
    "bools": lambda flags: [bool(flag) for flag in flags],
    "every other": lambda flags: np.repeat(np.array(flags, bool), 2)[::2],
    "every third": lambda flags: torch.tensor(flags, dtype=torch.bool).repeat_interleave(3)[::3],
}


@pytest.mark.parametrize(("first", "second"), list(product(FORMS, FORMS)))
def test_flags_are_joined_in_whatever_form_they_come(first, second):
    ended, cut_off, count = JoinedFlags(5).join(FORMS[first](TERMINATED), FORMS[second](TRUNCATED))
    assert (ended.tolist(), cut_off.tolist(), count) == (ENDED, CUT_OFF, 3)


def test_the_next_step_writes_over_them():
    flags = JoinedFlags(2)
    kept, _, count = flags.join([True, False], [False, False])
    assert (kept.tolist(), count) == ([1, 0], 1)
    again, cut_off, count = flags.join([False, False], [False, False])
    assert again is kept
    assert (kept.tolist(), cut_off.tolist(), count) == ([0, 0], [0, 0], 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "is missing"),
        (np.zeros(4, bool), r"is \(4,\) bool"),
        (np.zeros((5, 2), bool), r"is \(5, 2\) bool"),
        (torch.tensor(True), r"is \(\) bool"),
        (torch.full((5,), torch.nan), "is nan at 5 of 5 entries"),
        ("no flags", "cannot be converted"),
    ],
)
def test_what_is_no_flag_for_each_environment_is_refused_by_name(wrong, message):
    flags = JoinedFlags(5)
    with pytest.raises(InvalidInputError, match=f"terminated {message}"):
        flags.join(wrong, np.zeros(5, bool))
    with pytest.raises(InvalidInputError, match=f"truncated {message}"):
        flags.join(np.zeros(5, bool), wrong)


def test_the_native_function_writes_nothing_that_it_cannot_read():
    ended, cut_off = torch.full((2,), 7, dtype=torch.uint8), torch.full((2,), 7, dtype=torch.uint8)
    good, freed = np.ones(2, bool), torch.ones(2, dtype=torch.bool)
    freed.untyped_storage().resize_(0)
    for wrong in (np.ones(3, bool), np.ones((2, 2), bool), np.ones(2), torch.ones(2), [True, True], None, freed):
        assert join_flags(wrong, good, ended, cut_off) == -1
        assert join_flags(good, wrong, ended, cut_off) == -1
    for out in (torch.zeros(3, dtype=torch.uint8), torch.zeros(2), freed, None):
        with pytest.raises((ValueError, TypeError)):
            join_flags(good, good, ended, out)
    assert ended.tolist() == cut_off.tolist() == [7, 7]


def test_flags_stay_on_the_device_that_they_are_on():
    flags = read_flags("dones", [True, False], 2)
    assert (flags.dtype, flags.device.type, flags.tolist()) == (torch.uint8, "cpu", [1, 0])
    assert all(one is other for one, other in zip(on_one_device(flags, flags), (flags, flags), strict=True))
