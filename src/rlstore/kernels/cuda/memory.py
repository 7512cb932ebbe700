"""How the kernels of replay see the memory of a ring: tensors that begin where the memory does, and offsets.

A field of a record begins in the middle of it, at no multiple of 16 bytes; the memory that it is a view of does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlstore.kernels.cuda.launch import next_power_of_2
from rlstore.kernels.ring_memory import Block

_WIDEST_TILE = 1024  # elements of a frame that a program takes at once


class Place(NamedTuple):
    """Where ``tensor[i, j, ...]`` is: ``memory[offset + i * strides[0] + j * strides[1] + ...]``."""

    memory: Tensor
    offset: int
    strides: tuple[int, ...]


def place_of(tensor: Tensor) -> Place:
    """A tensor as the memory that it is a view of."""
    items = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return Place(tensor.as_strided((items,), (1,), 0), int(tensor.storage_offset()), tensor.stride())


def plain(tensor: Tensor) -> Tensor:
    """A tensor that kernels can take: flags of one byte as whole numbers."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def tile_of(elements: int) -> int:
    """Elements of a frame in one tile."""
    return min(next_power_of_2(elements), _WIDEST_TILE)


class Layout(NamedTuple):
    """Several fields, as constants of a kernel."""

    sizes: tuple[int, ...]
    stacks: tuple[int, ...]
    inners: tuple[int, ...]
    lane_strides: tuple[int, ...]
    row_strides: tuple[int, ...]
    offsets: tuple[int, ...]
    tiles: tuple[int, ...]


def layout_of(blocks: list[Block]) -> tuple[tuple[Tensor, ...], Layout]:
    """The memory of fields' rows as raw numbers, and where they are in it."""
    places = [place_of(block.rows) for block in blocks]
    layout = Layout(
        tuple(block.size for block in blocks),
        tuple(block.stack for block in blocks),
        tuple(block.size // block.outer for block in blocks),
        tuple(place.strides[0] for place in places),
        tuple(place.strides[1] for place in places),
        tuple(place.offset for place in places),
        tuple(tile_of(block.size) for block in blocks),
    )
    return tuple(place.memory for place in places), layout
