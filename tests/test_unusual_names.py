"""Paths that are not UTF-8, as long as they may be, or hold control characters: wherever a path is taken."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from contextlib import suppress

import pytest
from gymnasium import spaces

from rlstore import InvalidInputError, Journal, NStepReplayStorage, ReplayStorage, Storage
from rlstore.__main__ import main

NAMES = {"not UTF-8": os.fsdecode(b"x\xff\xfe"), "255 bytes": "n" * 255, "control characters": "a\x1b[31m\r\n\x9b0m"}


def make(kind=ReplayStorage, **more):
    return kind(spaces.Box(-9, 9, (2,)), spaces.Discrete(3), storage_size=20, num_envs=1, batch_size=2, **more)


def filled(kind=ReplayStorage, **more):
    """Ten steps, of which the reward is the number."""
    storage = make(kind, **more)
    for step in range(10):
        now = [step / 2, 0.0]
        storage.add(now, step % 3, float(step), step % 5 == 4, False, {}, [step / 2 + 0.5, 0.0])
    return storage


def rewards(storage):
    return storage[storage.held_rows()]["rewards"].flatten().tolist()


@pytest.fixture(params=NAMES)
def path(request, tmp_path):
    """A path in a folder with such a name, and with such a name itself."""
    (tmp_path / NAMES[request.param]).mkdir()
    return tmp_path / NAMES[request.param] / NAMES[request.param]


WAYS = {
    "save": lambda path: filled().save(path),
    "save in the background": lambda path: filled().save(path, background=True).wait(),
    "journal": lambda path: filled(journal=Journal(path, interval=3600.0)).close(),
    "mapped": lambda path: filled(memory="mapped", path=path).close(),
    "kept episodes": lambda path: filled(NStepReplayStorage, save_snapshot=True, snapshot_dir=path, n_step=1).close(),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_is_there_again_and_can_be_looked_at(way, path, capsys):
    WAYS[way](path)
    if way == "mapped":
        again: Storage = make(memory="mapped", path=path)
    elif way == "kept episodes":
        again = make(NStepReplayStorage, save_snapshot=True, snapshot_dir=path, n_step=1)
    else:
        again = ReplayStorage.load(path)
    assert rewards(again) == [float(step) for step in range(10)]
    again.close()
    page = path.parent / "page.html"
    for command in (["verify", path], ["inspect", path], ["inspect", path, "--html", page]):
        assert main(list(map(str, command))) == 0, command
        said = capsys.readouterr()
        assert not said.err
        assert all(character.isprintable() or character == "\n" for character in said.out), command
        said.out.encode()
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")


def test_a_page_may_have_any_name(path):
    storage = filled()
    for _ in range(2):
        storage.to_html(path)
    assert "</html>" in path.read_text()
    assert os.listdir(path.parent) == [path.name]


def test_errors_of_the_command_line_are_text(path, capsys):
    """Also what the file of a stranger says of itself."""
    for command in (["verify", path], ["inspect", path], ["inspect", path.parent, "--html", path / "no"]):
        with pytest.raises(SystemExit) as left:
            main(list(map(str, command)))
        assert left.value.code == 2
        err = capsys.readouterr().err
        err.encode()
        assert "Traceback" not in err
        assert all(character.isprintable() or character == "\n" for character in err), command


def test_what_a_folder_says_of_itself_is_written_out(tmp_path, capsys):
    filled().save(tmp_path / "saved")
    manifest = tmp_path / "saved" / "manifest.json"
    text = manifest.read_text().replace('"rlstore.ReplayStorage"', '"a\\u001b[2J\\u009b31m.B\\ud800"')
    manifest.write_text(text[: text.rindex(',\n "crc32"')] + "\n}")
    for command in ("verify", "inspect"):
        with suppress(SystemExit):
            main([command, str(tmp_path / "saved")])
        said = capsys.readouterr()
        both = said.out + said.err
        assert "x1b[2J" in both
        assert all(character.isprintable() or character == "\n" for character in both)


def test_a_failure_of_the_command_line_itself_is_text(tmp_path, capsys, monkeypatch):
    def fail(path):
        raise RuntimeError(f"of {path}\x1b[31m")

    filled().save(tmp_path / "saved")
    monkeypatch.setattr("rlstore.verify.verify", fail)
    assert main(["verify", str(tmp_path / "saved")]) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert r"\x1b[31m" in err
    assert "\x1b" not in err


def test_a_terminal_gets_no_control_character_from_a_new_process(tmp_path):
    folder = os.fsencode(tmp_path) + b"/a\x1b[31m\xff"
    os.mkdir(folder)
    for command in (b"verify", b"inspect"):
        done = subprocess.run([sys.executable, "-m", "rlstore", command, folder], capture_output=True, check=False)
        assert done.returncode == 2
        assert b"\x1b" not in done.stderr
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "call",
    [
        lambda path: filled().save(path),
        ReplayStorage.load,
        lambda path: filled().to_html(path),
        Journal,
        lambda path: make(memory="mapped", path=path),
        lambda path: make(NStepReplayStorage, save_snapshot=True, snapshot_dir=path),
    ],
)
def test_a_path_with_a_zero_byte_is_refused(call):
    with pytest.raises(InvalidInputError, match="zero byte"):
        call("a\0b")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_waits_for_a_fifo(way, tmp_path, capsys):
    """In the place of the folder, and of each file in it."""
    WAYS[way](tmp_path / "whole")
    names = ["", *sorted(os.listdir(tmp_path / "whole"))]
    for place, name in enumerate(names):
        folder = tmp_path / str(place)
        if name:
            shutil.copytree(tmp_path / "whole", folder)
            (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises((RuntimeError, ValueError)) if name != "lock" else suppress(Exception):
            Storage.load(folder)
        for command in (["verify", folder], ["inspect", folder]):
            with suppress(SystemExit):
                main(list(map(str, command)))
            assert "Traceback" not in capsys.readouterr().err, (name, command)
        assert stat.S_ISFIFO((folder / name).lstat().st_mode), name
