"""The memory that rows take: pages counted one by one, and how many steps fit into what is free."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstore import DoesNotFitError
from rlstore.engine.memory import capacity, growth
from rlstore.engine.memory.growth import ENDLESS, Growth, RowBlock


def pages_of(block: RowBlock, since: list[int], count: list[int]) -> int:
    """The bytes of the pages of all bytes of these rows, looked at one by one."""
    pages = set()
    for lane, (first, rows) in enumerate(zip(since, count, strict=True)):
        for row in range(min(rows, block.rows)):
            begin = block.address + (lane * block.rows + (first + row) % block.rows) * block.row_bytes
            pages |= {byte // block.page for byte in range(begin, begin + block.row_bytes)}
    return len(pages) * block.page


@given(st.data())
def test_each_page_counts_once(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    lanes = draw(1, 4)
    block = RowBlock(draw(0, 40), lanes, draw(1, 9), draw(0, 12), draw(1, 30))
    since, count = ([draw(0, most) for _ in range(lanes)] for most in (20, 11))
    assert block.taken(np.array(since), np.array(count)) == pages_of(block, since, count)


@pytest.fixture
def machine(monkeypatch):
    """A function that sets the bytes that are free; 100 are taken at a time, and 30 are left to everything else."""
    monkeypatch.setattr(growth, "STEP", 100)
    monkeypatch.setattr(growth, "RESERVE", 30)
    monkeypatch.setattr(capacity, "MUCH", 1)

    def has(free: int | None) -> None:
        monkeypatch.setattr(capacity, "free_ram", lambda: None if free is None else (free, "a limit"))

    return has


def grown(count: list[int], rows: int = 50, page: int = 10, row_bytes: int = 7, tables: tuple[RowBlock, ...] = ()):
    block = RowBlock(0, len(count), rows, row_bytes, page)
    return Growth([block], tables, np.zeros(len(count), np.int64), np.array(count), rows)


def test_steps_that_fit(machine):
    machine(10**6)
    # One row of 7 bytes is there, in a page of 10. With 14 more there are 105 bytes in 11 pages, with 15 more 112.
    assert grown([1]).room(1.0, "S", "") == 14
    assert grown([1]).more(14) == 100
    assert grown([1]).more(15) == 110
    assert grown([1]).room(0.2, "S", "") == 3  # a fifth of 100: 4 rows in 3 pages
    assert grown([36]).room(1.0, "S", "") == ENDLESS  # 252 bytes in 26 pages, of 35 at most
    assert grown([35]).room(1.0, "S", "") == ENDLESS  # 245 in 25: all of the rest are 100 bytes
    assert 1 <= grown([34]).room(1.0, "S", "") < 16  # 238 in 24
    assert grown([50]).room(1.0, "S", "") == ENDLESS
    machine(30 + 40)
    assert grown([1]).room(1.0, "S", "") == 6  # 7 rows in 5 pages, where 8 would be in 6
    machine(None)
    assert grown([1]).room(1.0, "S", "") == ENDLESS


def test_a_step_of_many_lanes_may_be_more_than_is_taken_at_a_time(machine):
    lanes = [0] * 20  # 50 rows of 7 bytes are 35 pages of 10, so a row of each lane is a page of each
    machine(10**6)
    assert grown(lanes).more(1) == 200
    assert grown(lanes).room(1.0, "S", "") == 1
    machine(200 + 30)
    assert grown(lanes).room(1.0, "S", "") == 1
    machine(200 + 29)
    with pytest.raises(DoesNotFitError):
        grown(lanes).room(1.0, "S", "")


def test_each_row_may_be_an_episode(machine):
    machine(10**6)
    table = RowBlock(0, 1, 51, 13, 1)
    one = grown([1], page=1, tables=(table,))
    assert one.more(5) == 5 * (7 + 13)
    assert one.room(1.0, "S", "") == 5
    assert one.taken == 7  # nothing says that there was an episode


def test_the_refusal_has_the_numbers(machine):
    machine(30 + 9)
    with pytest.raises(MemoryError) as refused:
        grown([10]).room(1.0, "S", "4 of 5 transitions")
    message = str(refused.value)
    for words in (
        "S holds 4 of 5 transitions in 0.00 GB (70 bytes); the next step needs 0.00 GB (10 bytes)",
        "(39 bytes) are free in RAM (a limit), of which 0.00 GB (30 bytes) are kept free",
        "Nothing was written. Everything that is held can still be sampled and saved.",
        "storage_size",
        "frame_stack",
        'memory="mapped"',
    ):
        assert words in message
