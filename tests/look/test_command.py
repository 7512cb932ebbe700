"""`rlstore inspect`: what it shows of every kind of folder, and what it says of others."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from look_storages import filled
from pages import Page

import rlstore
from rlstore.__main__ import main
from rlstore.look.opened import opened
from rlstore.look.page import page
from rlstore.look.summary import summarize

GOLDEN = Path(__file__).parents[1] / "golden"
OLD = sorted(path.parent for path in GOLDEN.rglob("manifest.json"))


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")


def shown(capsys, *arguments):
    """The exit status, what was printed, and what was complained of."""
    try:
        status = main(["inspect", *map(str, arguments)])
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    return status, said.out, said.err


def tree(folder):
    """Everything that a write would change."""
    stats = {path: path.lstat() for path in [folder, *sorted(folder.rglob("*"))]}
    return {p: (s.st_mode, s.st_mtime_ns, s.st_size, p.read_bytes() if p.is_file() else b"") for p, s in stats.items()}


@pytest.mark.parametrize("folder", OLD, ids=lambda folder: str(folder.relative_to(GOLDEN)))
def test_folders_of_every_kind_and_class_are_shown_and_left_as_they_are(folder, capsys, tmp_path):
    before = tree(folder)
    status, out, err = shown(capsys, folder)
    assert (status, err) == (0, "")
    held = re.search(r"transitions +([\d,]+) of", out)
    assert held
    assert "rewards" in out
    status, line, err = shown(capsys, folder, "--html", tmp_path / "page.html")
    assert (status, err) == (0, "")
    assert f"{held[1]} transitions" in line
    page = Page(tmp_path / "page.html")
    assert f"{page.storage['held']:,}" == held[1]
    assert page.episodes == list(range(page.storage["episodes"]["count"]))
    assert tree(folder) == before


def test_what_is_shown_in_the_terminal(capsys, tmp_path):
    storage = filled(rlstore.PrioritizedReplayStorage, alpha=1.0)
    storage.update(storage.held_rows(), [0.0] * 12 + [3.0] * 12)
    storage.save(tmp_path / "saved")
    status, out, _ = shown(capsys, tmp_path / "saved")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 0
    assert lines[0].startswith("saved PrioritizedReplayStorage · snapshot or journal in ")
    assert "transitions 24 of 40 ██████████████░░░░░░░░░░ 60%" in lines
    assert "environments 2 12 steps of each" in lines
    assert "episodes 6 1 going on, 2 terminated, 1 truncated, 1 broken off, 1 both flags" in lines
    assert "lengths 2 to 6, median 4 ▄▄█▄▄" in lines
    assert any(line.startswith("priorities 0 to 3, median 1.5, 12 are 0") for line in lines)
    assert any(line.startswith('observations["</script><b>state"] 3 float32') for line in lines)
    assert any(re.match(r"costs float32 \S.* -111 -55.5 \S+ 0$", line) for line in lines)
    assert "storage_size 40" in " ".join(lines)


def test_in_a_narrow_terminal_names_are_whole(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    filled().save(tmp_path / "saved")
    lines = shown(capsys, tmp_path / "saved")[1].splitlines()
    assert any(re.match(r"rewards +float32 \S.* 0 +0.555 +1.11", line) for line in lines)
    assert max(map(len, lines)) <= 80


def test_nan_and_outliers_are_named(capsys, tmp_path):
    storage = rlstore.ReplayStorage(gym.spaces.Box(-1e9, 1e9, (3,)), gym.spaces.Discrete(2), storage_size=100)
    for i in range(60):
        observation = [i % 7, float("nan") if i == 5 else 0.0, 1e8 if i == 6 else i % 5]
        storage.add(observation, 0, 0.0, True, False, {}, observation)
    storage.save(tmp_path / "saved")
    out = shown(capsys, tmp_path / "saved")[1]
    assert "observations[1] 1 NaN  observations[2] 1 outlier" in out


def test_a_journal_and_a_mapped_folder_in_use_are_shown(capsys, tmp_path):
    mapped = filled(memory="mapped", path=tmp_path / "mapped")
    journal = filled(journal=rlstore.Journal(tmp_path / "journal", 1e6))
    journal.journal.commit()
    for name in ("mapped", "journal"):
        before = tree(tmp_path / name)
        status, out, err = shown(capsys, tmp_path / name)
        assert (status, err) == (0, "")
        assert "24 of 40" in out
        assert tree(tmp_path / name) == before
        with opened(tmp_path / name) as subject:
            assert [bool(note) for note in summarize(subject).notes] == [True] * (name == "mapped")
    mapped.close()
    journal.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12, beside threads of other tests
def test_a_mapped_folder_may_be_looked_at_while_its_storage_writes(tmp_path):
    folder, found = tmp_path / "live", set()
    with another_process_writing(folder) as goes_on:
        while len(found) < 8:
            if (folder / "counters.bin").exists():
                with opened(folder) as subject:
                    seen = summarize(subject)
                    assert seen.episodes.length.sum() == seen.held
                    text = page(seen)  # every episode is read
                    assert "broken off" in text
                found.add((folder / "counters.bin").read_bytes())
            assert goes_on()


@contextlib.contextmanager
def another_process_writing(folder):
    """A process that adds to a mapped storage for ever; yields whether it still does."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            storage = rlstore.ReplayStorage(
                gym.spaces.Box(0, 1e9, (2,)), gym.spaces.Discrete(2), storage_size=2_000, memory="mapped", path=folder
            )
            for step in range(10**9):
                storage.add([step, step], 1, 1.0, step % 50 == 49, False, {}, [step + 1, step + 1])
        os._exit(1)
    try:
        yield lambda: os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_priorities_and_windows_of_mapped_folders(tmp_path):
    more = {"memory": "mapped", "sequence_length": 4, "alpha": 1.0, "path": tmp_path / "windows"}
    windows = filled(rlstore.SequenceReplayStorage, **more)
    starts = summarize_windows(windows)
    windows.update(starts, [float(i) for i in range(1, len(starts) + 1)])
    windows.close()
    with opened(tmp_path / "windows") as subject:
        assert subject.windows is not None
        assert subject.windows.starts.tolist() == starts.tolist()
        seen = summarize(subject).priorities
        assert seen is not None
        assert (seen.what, seen.numbers.least, seen.numbers.most) == ("windows", 1.0, float(len(starts)))


def summarize_windows(storage):
    from rlstore.look.subject import of_storage

    windows = of_storage(storage).windows
    assert windows is not None
    return windows.starts


def test_kept_episodes_are_read_as_they_were_added(tmp_path):
    folder = tmp_path / "kept"
    storage = filled(rlstore.NStepReplayStorage, save_snapshot=True, snapshot_dir=folder, num_workers=0)
    over = storage.episodes()
    over = over[over.is_over]
    storage.close()
    with opened(folder) as subject:
        episodes = subject.episodes
        assert sorted(episodes.returns.tolist()) == pytest.approx(sorted(over.returns.tolist()))
        assert sorted(zip(episodes.envs.tolist(), episodes.lengths.tolist(), strict=True)) == [
            (0, 3),
            (0, 4),
            (0, 5),
            (1, 2),
            (1, 6),
        ]
        for episode in episodes:
            ids = episode.observations["</script><b>state"][:, 0].tolist()
            assert [number % 100 for number in ids] == list(range(int(ids[0] % 100), int(ids[0] % 100) + len(ids)))
            assert episode.final_observations["</script><b>state"][0].item() == ids[-1] + 0.5
            assert episode["costs"].tolist() == [-number for number in ids]
        next(folder.glob("episode-*")).unlink()  # as its storage does when it is full
        assert summarize(subject).episodes.count == 4


# ---------------------------------------------------------------------------------------------------- other folders


def test_a_folder_of_folders_is_listed(capsys, tmp_path):
    for shard in range(2):
        filled().save(tmp_path / "served" / f"shard-{shard}" / "snapshot")
    status, out, _ = shown(capsys, tmp_path / "served")
    assert status == 0
    assert out.splitlines() == [
        f"{tmp_path / 'served'} holds 2 folders. Inspect one of them:",
        f"  {tmp_path / 'served' / 'shard-0' / 'snapshot'}: snapshot or journal",
        f"  {tmp_path / 'served' / 'shard-1' / 'snapshot'}: snapshot or journal",
    ]
    status, _, err = shown(capsys, tmp_path / "served", "--html", tmp_path / "page.html")
    assert (status, "a page is of one of them" in err) == (2, True)


def test_what_is_no_folder_of_rlstore(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    for name, problem in (
        ("empty", "is not a folder that rlstore has written, and has none in it"),
        ("file", "cannot be read: Not a directory. It shows folders; files of experience are read with rlstore.data"),
        ("nowhere", "cannot be read: No such file or directory"),
    ):
        status, out, err = shown(capsys, tmp_path / name)
        assert (status, out, err) == (2, "", f"rlstore: {tmp_path / name} {problem}\n")


def test_damage_is_told_and_where_to_learn_more(capsys, tmp_path):
    filled().save(tmp_path / "saved")
    file = next((tmp_path / "saved").glob("rows-*.bin"))
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    for more in ([], ["--html", tmp_path / "page.html"]):
        status, out, err = shown(capsys, tmp_path / "saved", *more)
        assert (status, out) == (1, "")
        assert f"`rlstore verify {tmp_path / 'saved'}` tells what is damaged" in err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("kind", ["mapped/prioritized", "episodes"])
def test_damaged_manifests_are_told(capsys, tmp_path, kind):
    folder = shutil.copytree(GOLDEN / kind, tmp_path / "damaged")
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(
        re.sub(r',\s*"crc32".*', "\n}", text.replace('"rewards"', '"gains"'), flags=re.S)
    )
    status, _, err = shown(capsys, folder)
    assert (status, "manifest.json is damaged" in err) == (1, True)


def test_a_class_that_is_not_imported_is_named(capsys, tmp_path):
    filled().save(tmp_path / "saved")
    file = tmp_path / "saved" / "manifest.json"
    text = re.sub(r',\s*"crc32": \d+\s*}\s*$', "\n}", file.read_text().replace("rlstore.ReplayStorage", "mine.Storage"))
    file.write_text(text)
    status, _, err = shown(capsys, tmp_path / "saved")
    assert (status, "holds a mine.Storage, and no class of that name is imported" in err) == (2, True)


def test_a_page_that_cannot_be_written(capsys, tmp_path):
    filled().save(tmp_path / "saved")
    (tmp_path / "folder.html").mkdir()
    for target, problem in (
        ("no/page.html", "there is no folder"),
        ("folder.html", f"{tmp_path / 'folder.html'} is a folder"),
    ):
        status, out, err = shown(capsys, tmp_path / "saved", "--html", tmp_path / target)
        assert (status, out) == (2, "")
        assert f"{tmp_path / target} cannot be written: {problem}" in err
    assert sorted(os.listdir(tmp_path)) == ["folder.html", "saved"]


def test_without_rich_the_page_can_still_be_made(capsys, tmp_path, monkeypatch):
    filled().save(tmp_path / "saved")
    monkeypatch.setattr("rlstore.look.command.find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"] + ["rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    status, _, err = shown(capsys, tmp_path / "saved")
    assert (status, err) == (
        2,
        "rlstore: in the terminal it needs rich: pip install 'rlstore[inspect]', or give --html FILE\n",
    )
    assert shown(capsys, tmp_path / "saved", "--html", tmp_path / "page.html")[0] == 0
    assert "nowhere cannot be read: No such file" in shown(capsys, tmp_path / "nowhere")[2]


@pytest.mark.parametrize(
    ("command", "told"), [("inspect", "ReplayStorage · snapshot"), ("verify", "transitions can be")]
)
def test_a_new_process_knows_the_classes_of_snapshots(command, told):
    """Public classes are imported when they are first used, and nothing here has used one."""
    arguments = [sys.executable, "-m", "rlstore", command, str(GOLDEN / "snapshots" / "replay")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert told in done.stdout


@pytest.mark.parametrize("command", [["doctor"], ["demo"], ["verify", OLD[0]], ["inspect", OLD[0]]], ids=lambda c: c[0])
def test_output_that_nobody_reads_is_no_error(command):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as unread:
        done = subprocess.run(
            [sys.executable, "-m", "rlstore", *map(str, command)], stdout=unread, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")
