"""Mapped folders whose tables were forged, and whose seal is gone: refused by rlstore, or of use; never a crash."""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import warnings

import pytest
import torch
from killed_storages import ADD, KINDS, UPDATE, Progress, contents, forked, operate

from rlstore.errors import StorageError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

WORDS = [struct.pack("q", value) for value in (-1, -2, 0, 1, 2**31 - 1, 2**40, 2**48, 2**62, 2**63 - 1, -(2**63))]
HALVES = [struct.pack("i", value) for value in (-1, 0, 1, 2**31 - 1, -(2**31))]
REALS = [struct.pack("f", value) for value in (-1.0, float("nan"), float("inf"), 3e38)]


def forgeries(files, random_):
    """One entry of one file at a time, as it cannot be; or the whole file."""
    for name, content in sorted(files.items()):
        for value in (*WORDS, *HALVES, *REALS):
            if name.endswith(".bin") and len(content) >= len(value):
                size = len(value)
                place = random_.randrange(len(content) // size) * size
                yield name, content[:place] + value + content[place + size :]
                yield name, value * (len(content) // size)


def use(kind, path):
    """Open the folder, draw, set priorities, and write until every row is overwritten."""
    try:
        storage = kind.open(path)
        len(storage), storage.get_all_buffer_data()
        progress = Progress()
        written = storage._ring_of().written.tolist()
        progress.written[:], progress.since[:] = torch.tensor(written), torch.tensor(written)
        for _ in range(30):
            operate(kind, storage, ADD, progress, random.Random(0), path / "none")
            operate(kind, storage, UPDATE, progress, random.Random(0), path / "none")
        storage.reset()
        storage.close()
    except StorageError:
        return "refused"
    except BaseException as error:
        return repr(error)
    return "used"


def judge(kind, tmp_path, count):
    """How many forgeries of the folder of a storage are refused, and how many are used."""

    def fill():
        storage, random_, progress = kind.open(tmp_path / "mapped"), random.Random(0), Progress()
        for operation in [ADD] * 40 + [UPDATE]:
            operate(kind, storage, operation, progress, random_, tmp_path / "saved")
        storage.close()

    assert os.waitpid(forked(fill), 0)[1] == 0
    files = contents(tmp_path / "mapped")
    files.pop("seal.json", None)
    cases = list(forgeries(files, random.Random(0)))
    cases = cases if count is None else random.Random(0).sample(cases, count)

    def try_all():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")
        for index, (name, content) in enumerate(cases):
            signal.alarm(30)
            folder = tmp_path / f"forged {index}"
            folder.mkdir()
            for other, whole in {**files, name: content}.items():
                (folder / other).write_bytes(whole)
            os.write(writing, f"{use(kind, folder)}\n".encode())

    reading, writing = os.pipe()
    child = forked(try_all)
    os.close(writing)
    with os.fdopen(reading) as told:
        lines = told.read().splitlines()
    wrong = {(cases[i][0], line) for i, line in enumerate(lines) if line not in ("refused", "used")}
    assert not wrong
    assert os.waitpid(child, 0)[1] == 0, f"{cases[len(lines)][0]} ended it"
    return {word: lines.count(word) for word in ("refused", "used")}


@pytest.mark.parametrize("name", ["frames", "sequences by priority"])
def test_a_forged_folder_is_refused_or_of_use(name, tmp_path):
    assert sum(judge(KINDS[name], tmp_path, 12).values()) == 12


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", KINDS)
def test_every_forged_folder_is_refused_or_of_use(name, tmp_path):
    counts = judge(KINDS[name], tmp_path, None)
    print(name, counts)
    assert counts["refused"] > 20
