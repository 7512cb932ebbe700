"""Folders of somebody else: whatever they say, they are refused or loaded; each test is named for what one once did."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from judged_folders import judged
from tensordict import TensorDict

from rlstore import (
    DecoupledRolloutStorage,
    DistributedStorage,
    ReplayStorage,
    RolloutStorage,
    Storage,
    UnsupportedSpaceError,
)

sys.path.insert(0, str(Path(__file__).parent / "golden"))

from programs import PROGRAMS

# Newer Pythons warn of forks beside threads, which other tests may have started.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

BOX, MOVES = spaces.Box(-1e9, 1e9, (3,)), spaces.Discrete(2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A snapshot of each class, by the name of its program."""
    root = tmp_path_factory.mktemp("saved")
    names = ("replay", "n-step", "prioritized", "sequences", "hindsight, future", "rollout", "decoupled", "distributed")
    for name in names:
        make, run = PROGRAMS[name]
        storage = make("cpu")
        for _ in run(storage):
            pass
        storage.save(root / name)
    of_spaces = RolloutStorage.from_spaces(BOX, MOVES, 2, 3, autoreset="SameStep")
    of_spaces.save(root / "rollout of spaces")
    return {path.name: path for path in root.iterdir()}


def forged(folder, source, change):
    """A copy of a folder whose manifest, without its checksum, was changed."""
    shutil.copytree(source, folder)
    path = folder / "manifest.json"
    told = json.loads(path.read_text())
    told.pop("crc32", None)
    change(told)
    path.write_text(json.dumps(told))
    return folder


def play(storage, first, last):
    for step in range(first, last):
        storage.add(np.full((1, 3), step), [0], [step], [False], [False], {}, np.full((1, 3), step + 1))


# ---------------------------------------------------------------------------------------------------- places


def subclasses(kind):
    for found in kind.__subclasses__():
        yield found
        yield from subclasses(found)


def arguments_of(kind):
    """The parameters of the constructor and, where there is one, of ``from_spaces``."""
    makers = [kind, *([kind.from_spaces] if hasattr(kind, "from_spaces") else [])]
    return {name: p for make in makers for name, p in inspect.signature(make).parameters.items()}


def is_no_value(parameter):
    """Whether a parameter is a place, or something that runs."""
    kinds = ("PathLike", "Journal", "Callable", "ComputeReward", "FinalCritic")
    return any(kind in str(parameter.annotation) for kind in kinds)


def class_of(source):
    """The class of a snapshot, and its settings."""
    told = json.loads((source / "manifest.json").read_text())
    (kind,) = (kind for kind in set(subclasses(Storage)) if told["class"] == f"rlstore.{kind.__name__}")
    return kind, told["settings"]


def setting(place, name, value):
    """Sets one of the settings of a manifest, or one of the options in them."""

    def change(manifest):
        settings = manifest["settings"]
        (settings if place == "settings" else settings[place])[name] = value

    return change


def test_no_argument_that_is_a_place_or_runs_comes_from_a_file(saved, tmp_path):
    """Of every class, among settings and options; `journal` once made folders anywhere."""
    tried, elsewhere = 0, str(tmp_path / "elsewhere")
    for name, source in saved.items():
        kind, settings = class_of(source)
        names = [name for name, parameter in arguments_of(kind).items() if is_no_value(parameter)]
        assert "journal" in names
        for place in ("settings", *(["options"] if "options" in settings else [])):
            there = settings if place == "settings" else settings[place]
            for argument in (*names, "device", "seed", "nonsense"):
                verdicts = judged(forged(tmp_path / f"{tried}", source, setting(place, argument, elsewhere)))
                # The folders that were used are mentioned, for who loads it; they are not opened.
                assert verdicts.are_refusals or argument in there, (name, place, argument, vars(verdicts))
                tried += 1
    assert not (tmp_path / "elsewhere").exists()
    assert tried > 60


def test_every_class_is_among_those_that_are_tried(saved):
    own = {kind for kind in subclasses(Storage) if kind.__module__.startswith("rlstore.")}
    assert {class_of(source)[0] for source in saved.values()} == {k for k in own if not k.__name__.endswith("Core")}


@pytest.mark.parametrize("memory", ["ram", None])
def test_a_snapshot_emptied_and_filled_a_mapped_storage_of_somebody_else(memory, tmp_path):
    """Its settings name a place, beside options that do not tell of one."""
    victim = ReplayStorage(BOX, MOVES, storage_size=10, memory="mapped", path=tmp_path / "victim")
    play(victim, 0, 4)
    victim.close()
    storage = ReplayStorage(BOX, MOVES, storage_size=10)
    play(storage, 100, 102)
    storage.save(tmp_path / "honest")

    def change(manifest):
        settings = manifest["settings"]
        settings["options"].pop("memory")
        if memory is not None:
            settings["options"]["memory"] = memory
        settings.update(memory="mapped", path=str(tmp_path / "victim"))

    assert judged(forged(tmp_path / "snapshot", tmp_path / "honest", change)).are_refusals
    again = ReplayStorage(BOX, MOVES, storage_size=10, memory="mapped", path=tmp_path / "victim")
    assert again[again.held_rows()]["observations"][:, 0].tolist() == [0, 1, 2, 3]
    again.close()


def test_values_of_another_kind_are_refused(saved, tmp_path):
    values, tried = {"bool": "x", "int": 2.5, "float": "1", "str": 3}, 0
    for name, source in saved.items():
        kind, settings = class_of(source)
        kinds = {argument: str(p.annotation).removesuffix(" | None") for argument, p in arguments_of(kind).items()}
        for place, there in (("settings", settings), ("options", settings.get("options", {}))):
            for argument in [argument for argument in there if kinds.get(argument) in values]:
                folder = tmp_path / f"{tried}"
                verdicts = judged(forged(folder, source, setting(place, argument, values[kinds[argument]])))
                assert verdicts.are_refusals, (name, argument, vars(verdicts))
                tried += 1
    assert tried > 60


# ---------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", ["torch.qint32", "torch.quint4x2", "torch.complex32", "torch.nothing", "float32.x"])
def test_the_dtype_of_a_mapped_folder_ended_the_process(dtype, tmp_path):
    fields = {"observations": [[3], dtype, 1, 0], "rewards": [[], "torch.float32", 1, 0]}
    schema = {"steps": 4, "lanes": 1, "fields": fields}
    (tmp_path / "mapped").mkdir()
    text = json.dumps({"format": "rlstore mapped storage", "version": 1, "schema": schema})
    (tmp_path / "mapped" / "manifest.json").write_text(text)
    assert judged(tmp_path / "mapped").are_refusals


def renamed(value, dtype):
    """A form in which all dtypes are another one."""
    if isinstance(value, dict):
        return {k: dtype if k in ("dtype", "$dtype") else renamed(v, dtype) for k, v in value.items()}
    return [renamed(part, dtype) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("dtype", ["qint32", "quint2x4", "bits16"])
def test_the_dtypes_of_a_snapshot_ended_the_process(dtype, saved, tmp_path):
    for name, source in saved.items():
        told = json.loads((source / "manifest.json").read_text())
        for part in ("settings", "tensors"):
            other = renamed(told[part], dtype)
            if other != told[part]:
                verdicts = judged(
                    forged(tmp_path / f"{name} {part}", source, lambda m, p=part, o=other: m.update({p: o}))
                )
                assert verdicts.are_refusals, (name, part, vars(verdicts))
    mapping = {"shape": [1 << 18], "dtype": dtype}  # of 1 MiB, which is mapped
    change = setting("settings", "observation_space", mapping)
    assert judged(forged(tmp_path / "mapping", saved["replay"], change)).are_refusals


@pytest.mark.parametrize("dtype", ["qint32", "torch.quint8", torch.qint8, torch.complex32, torch.quint4x2])
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: ReplayStorage({"shape": [400], "dtype": dtype}, MOVES),
        lambda dtype: ReplayStorage(BOX, {"shape": [400], "dtype": dtype, "type": "Box"}),
        lambda dtype: ReplayStorage(BOX, MOVES, extra_fields={"more": ((400,), dtype)}),
        lambda dtype: DistributedStorage({"shape": [400], "dtype": dtype}, MOVES),
        lambda dtype: DecoupledRolloutStorage({"shape": [400], "dtype": dtype}, MOVES),
        lambda dtype: RolloutStorage.from_spaces({"shape": [400], "dtype": dtype}, MOVES, 2, 2, autoreset="SameStep"),
    ],
)
def test_a_dtype_without_bytes_of_its_own_in_a_space_ended_the_process(make, dtype):
    with pytest.raises(UnsupportedSpaceError, match=str(dtype).removeprefix("torch.")):
        make(dtype)


def test_an_example_of_a_dtype_that_cannot_be_saved_is_refused():
    example = torch.zeros(2, 3, dtype=torch.float8_e4m3fnuz)
    with pytest.raises(UnsupportedSpaceError, match="float8_e4m3fnuz"):
        RolloutStorage("rl", 2, 3, TensorDict({"policy": example}, [2]), (1,))
