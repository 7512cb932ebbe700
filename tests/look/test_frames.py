"""Which observations are images, and how they are shown."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlstore.engine.rows.layout import Leaf
from rlstore.engine.rows.schema import Field
from rlstore.look.frames import frames_of, is_image
from rlstore.look.numbers import numbers_of


def leaf_of(shape, stack, axis):
    return Leaf(Field("observations", shape, torch.uint8, ""), stack, axis)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((84, 84), True),
        ((3, 64, 48), True),
        ((64, 48, 3), True),
        ((10, 10, 10), True),
        ((17,), False),
        ((), False),
        ((4, 7), False),
        ((3, 4, 4), False),
        ((200, 200, 200), False),
        ((2, 3, 16, 16), False),
    ],
)
def test_images_are_told_by_their_shape(shape, expected):
    assert is_image(shape) == expected


def test_of_stacked_frames_the_newest_is_shown():
    values = np.arange(12, dtype=np.uint8).reshape(1, 12, 1, 1) * np.ones((1, 1, 9, 10), np.uint8)
    gray, about = frames_of(values, leaf_of((12, 9, 10), 12, 0), numbers_of(values))
    assert (gray.shape, gray.max(), gray.min(), about) == ((1, 9, 10, 1), 11, 11, "the newest of 12 frames")
    colored, about = frames_of(values, leaf_of((12, 9, 10), 4, 0), numbers_of(values))
    assert (colored[0, 0, 0].tolist(), about) == ([9, 10, 11], "the newest of 4 frames")
    last = np.moveaxis(values, 1, 3)
    assert (frames_of(last, leaf_of((9, 10, 12), 4, 2), numbers_of(last))[0] == colored).all()
    flat = values[:, :2, 0]  # [1, 2, 10]: two frames of one row each are no image
    assert not is_image(flat.shape[1:], leaf_of((2, 10), 2, 0))


def test_unknown_stacks_show_what_comes_last():
    values = np.arange(4, dtype=np.uint8).reshape(1, 4, 1, 1) * np.ones((1, 1, 9, 10), np.uint8)
    shown, about = frames_of(values, None, numbers_of(values))
    assert (shown.shape, int(shown.max()), about) == ((1, 9, 10, 1), 3, "the last of 4 channels")


def test_floats_are_scaled_from_their_range():
    values = np.linspace(0, 1, 100, dtype=np.float32).reshape(1, 10, 10)
    assert frames_of(values, None, numbers_of(values))[0].reshape(-1)[[0, 50, 99]].tolist() == [0, 128, 255]
    signed, about = frames_of(values * 2 - 1, None, numbers_of(values * 2 - 1))
    assert (signed.reshape(-1)[[0, 99]].tolist(), about) == ([0, 255], "-1 is black and 1 is white")
    odd = values * 6 + 4
    odd[0, 0, 1] = np.nan
    wide, about = frames_of(odd, None, numbers_of(odd))
    assert (wide.reshape(-1)[[0, 1, 99]].tolist(), about) == ([0, 0, 255], "4 is black and 10 is white")


def test_flags_in_channels_have_a_color_each():
    values = np.zeros((1, 10, 10, 4), bool)
    values[0, 2, 3, 0] = values[0, 5, 6, 3] = True
    shown, about = frames_of(values, None, numbers_of(values))
    colors = {tuple(color) for color in shown.reshape(-1, 3).tolist()}
    assert (shown.shape, len(colors), about) == ((1, 10, 10, 3), 3, "4 channels, each in a color")


def test_large_images_are_reduced_to_means_of_squares():
    values = np.zeros((1, 300, 200), np.uint8)
    values[0, 0, 0] = 90  # one of the nine of a square
    shown, about = frames_of(values, None, numbers_of(values))
    assert (shown.shape, shown[0, 0, 0, 0], about) == ((1, 100, 66, 1), 10, "reduced from 200 x 300")
