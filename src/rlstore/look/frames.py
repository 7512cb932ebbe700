"""Observations that are images: which are, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlstore.engine.rows.layout import Leaf
from rlstore.look.numbers import Array, Numbers

LEAST_SIDE = 8  # what is smaller is a table of numbers
MOST_SIDE = 128  # what is larger is reduced
_MOST_CHANNELS = 64
# For channels that say what is where, as in MinAtar.
_PALETTE = np.array(
    [
        (76, 201, 240),
        (247, 127, 0),
        (128, 237, 153),
        (239, 71, 111),
        (255, 209, 102),
        (177, 133, 219),
        (0, 150, 136),
        (255, 255, 255),
        (144, 164, 174),
        (161, 136, 127),
    ],
    np.uint8,
)


def is_image(shape: Sequence[int], leaf: Leaf | None = None) -> bool:
    """Whether an observation of this shape is an image: ``[H, W]``, ``[C, H, W]`` or ``[H, W, C]``.

    Args:
        shape: The shape.
        leaf: Where frames are stacked, how.
    """
    if leaf is not None:
        shape = leaf.frame_shape
    if len(shape) == 3:
        axis = _channel_axis(shape)
        sides = [size for at, size in enumerate(shape) if at != axis]
        return min(sides) >= LEAST_SIDE and shape[axis] <= _MOST_CHANNELS
    return len(shape) == 2 and min(shape) >= LEAST_SIDE


def _channel_axis(shape: Sequence[int]) -> int:
    return 2 if shape[2] <= shape[0] else 0


def frames_of(values: Array, leaf: Leaf | None, numbers: Numbers) -> tuple[Array, str]:
    """Images as bytes ``[n, H, W, 1 or 3]``, and what is to be said of how they are shown.

    Args:
        values: Observations ``[n, *shape]``.
        leaf: Where frames are stacked, how. The newest is shown.
        numbers: What is known of such values, by which they are scaled.
    """
    about = []
    if leaf is not None:
        size = leaf.frame_shape[leaf.axis]
        values = np.take(values, range(values.shape[leaf.axis + 1] - size, values.shape[leaf.axis + 1]), leaf.axis + 1)
        about.append(f"the newest of {leaf.stack} frames")
    if values.ndim == 3:
        values = values[..., np.newaxis]
    elif _channel_axis(values.shape[1:]) == 0:
        values = np.moveaxis(values, 1, 3)
    values, how = _with_colors(values)
    pixels, scaled = _as_bytes(values, numbers)
    small = _reduced(pixels)
    about += [text for text in (how, scaled) if text]
    if small.shape != pixels.shape:
        about.append(f"reduced from {pixels.shape[2]} x {pixels.shape[1]}")
    return small, ", ".join(about)


def _with_colors(values: Array) -> tuple[Array, str]:
    """Images ``[n, H, W, C]`` with one or three channels."""
    channels = values.shape[3]
    if values.dtype == np.bool_ and channels > 1:
        return _painted(values), f"{channels} channels, each in a color"
    if channels in (1, 3):
        return values, ""
    if channels % 3 == 0 and channels > 6:
        return values[..., -3:], f"the last three of {channels} channels"
    return values[..., -1:], f"the last of {channels} channels"


def _painted(values: Array) -> Array:
    """Each channel in a color, the last ones above the others."""
    pictures = np.full((*values.shape[:3], 3), 24, np.uint8)
    for channel in range(values.shape[3]):
        pictures[values[..., channel]] = _PALETTE[channel % len(_PALETTE)]
    return pictures


def _as_bytes(values: Array, numbers: Numbers) -> tuple[Array, str]:
    """Values from 0 to 255: of other ranges than usual ones, from the least to the most."""
    if values.dtype == np.uint8:
        return values, ""
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255, ""
    least, most = numbers.least or 0.0, numbers.most or 0.0
    usual = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))
    # An image that would be all but black or gray is not of such a range.
    low, high = next(
        ((a, b) for a, b in usual if a <= least and most <= b and 3 * (most - least) > b - a), (least, most)
    )
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are almost infinite
        scaled = (values.astype(np.float32) - low) * (255 / (high - low or 1))
    return np.nan_to_num(scaled).clip(0, 255).astype(np.uint8), f"{low:g} is black and {high:g} is white"


def _reduced(pixels: Array) -> Array:
    """Images of at most 128 pixels a side: the means of squares of them."""
    count, height, width, channels = pixels.shape
    by = -(-max(height, width) // MOST_SIDE)
    if by == 1:
        return pixels
    cut = pixels[:, : height // by * by, : width // by * by]
    squares = cut.reshape(count, height // by, by, width // by, by, channels)
    means: Array = squares.mean((2, 4), dtype=np.float32)
    return means.astype(np.uint8)
