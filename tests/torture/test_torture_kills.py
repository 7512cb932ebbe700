"""Mapped storages, killed 300 times at random and at 400 instants and more of each operation."""

from __future__ import annotations

import random

import pytest
from killed_storages import (
    ADD,
    KINDS,
    MASKED,
    RESET,
    SAVE,
    UPDATE,
    Progress,
    images,
    judge,
    judge_image,
    judge_saved,
    kill_at_random,
)

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),
]
KILLS, INSTANTS = 300, 400


@pytest.mark.parametrize("name", KINDS)
def test_killed_at_random(name, tmp_path):
    kind, progress, random_ = KINDS[name], Progress(), random.Random(name)
    for _ in range(KILLS):
        kill_at_random(kind, tmp_path, progress, random_)
        judge(kind, tmp_path / "mapped", progress)
        judge_saved(tmp_path / "saved")
        progress.end()
    print(f"{name}: {KILLS} kills, {progress.written.tolist()} rows")


# What goes before, and what is looked at: the first rows, rows that overwrite others, tables that grow, and so on.
PLANS = [
    ([ADD] * 2, [ADD] * 8),
    ([ADD] * 30, [ADD] * 6),
    ([ADD] * 54, [ADD] * 6),
    ([ADD] * 30, [UPDATE, ADD, UPDATE]),
    ([ADD] * 30, [MASKED] * 4),
    ([ADD] * 30, [RESET, ADD, ADD]),
    ([ADD] * 20, [SAVE, ADD, SAVE]),
]


@pytest.mark.parametrize("name", KINDS)
def test_killed_at_every_instant(name, tmp_path):
    kind, judged, turn = KINDS[name], 0, 0
    while judged < INSTANTS or turn < len(PLANS):
        before, watched = PLANS[turn % len(PLANS)]
        folder = tmp_path / str(turn)
        folder.mkdir()
        for image in images(kind, folder, before + [ADD] * (turn // len(PLANS)), watched, turn):
            judge_image(kind, image, folder / "image")
            judged += 1
        judge_saved(folder / "saved")
        turn += 1
    print(f"{name}: {judged} instants of {turn} runs")
