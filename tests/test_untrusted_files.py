"""Folders of somebody else: whatever they say, they are refused or loaded; each test is named for what one once did."""

from __future__ import annotations

import inspect
import json
import math
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from judged_folders import judged
from saved_folders import saved_folders
from tensordict import TensorDict

from rlstore import (
    DecoupledRolloutStorage,
    DistributedStorage,
    PrioritizedReplayStorage,
    RateLimit,
    ReplayStorage,
    RolloutStorage,
    SequenceReplayStorage,
    Storage,
    UnsupportedSpaceError,
)
from rlstore.engine.disk.snapshot import SnapshotWriter

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


# ---------------------------------------------------------------------------------------------------- tensors


def saved_as(folder, storage, change):
    """Save a storage whose numbers and tensors were changed before; every checksum is right."""
    with SnapshotWriter("save()", folder) as writer:
        content = storage._content(copy=True)
        content.rows = storage._rows_for(writer)
        content.tensors = dict(content.tensors)
        change(content)
        writer.write(content)
    return folder


def some(name):
    """A storage that has run its program."""
    make, run = PROGRAMS[name]
    storage = make("cpu")
    for _ in run(storage):
        pass
    return storage


@pytest.mark.parametrize(
    ("left", "following"), [(624, 624), (2, 624), (1, 1), (0, 625), (-1, 626), (1, 2**63), (600, 0)]
)
@pytest.mark.parametrize("name", ["rollout", "distributed"])
def test_the_state_of_a_generator_made_torch_read_behind_it(name, left, following, tmp_path):
    def change(content):
        state = content.tensors["generator[cpu]"].numpy()
        struct.pack_into("=i", state, 8, left)
        struct.pack_into("=Q", state, 16, following)

    verdicts = judged(saved_as(tmp_path / "snapshot", some(name), change))
    assert verdicts.load.startswith("SnapshotError")
    assert "generator[cpu]" in verdicts.load


def test_every_state_that_a_generator_has_can_be_loaded(tmp_path):
    storage = some("rollout")
    for draws in (0, 1, 1, 100, 520, 1, 1, 1, 624, 700):  # the state is used up after 624 numbers
        torch.randint(2**31, (draws,), generator=storage._generator)
        storage.save(tmp_path / "snapshot")
        loaded = Storage.load(tmp_path / "snapshot")
        drawn = [torch.randint(2**31, (3,), generator=one._generator).tolist() for one in (storage, loaded)]
        assert drawn[0] == drawn[1]


@pytest.mark.parametrize("state", [[-1, -1], [2**63 - 1, 2**63 - 1], [-(2**63), -(2**63)], [0, 2**62]])
def test_every_state_of_the_generator_of_replay_draws_rows_that_are_held(state, tmp_path):
    def change(content):
        content.tensors["random"] = torch.tensor(state)

    loaded = Storage.load(saved_as(tmp_path / "snapshot", some("prioritized"), change))
    held = set(loaded.held_rows().tolist())
    for _ in range(5):
        assert held.issuperset(loaded.sample().rows.tolist())


@pytest.mark.parametrize("shape", [(0, 30_000_000), (0, 10**10), (4, 3, 30_000_000, 0), (3, 3), ()])
@pytest.mark.parametrize("name", ["saved_hidden_state_a[0]", "final_values", "distribution_params[0]"])
def test_a_column_without_steps_took_memory_for_its_environments(name, shape, tmp_path):
    def change(content):
        content.tensors[name] = torch.empty(shape)
        column = name.partition("[")[0]
        content.numbers = {**content.numbers, "groups": {**content.numbers["groups"], column: 1}}

    assert judged(saved_as(tmp_path / "snapshot", some("rollout"), change)).are_refusals


@pytest.mark.parametrize("count", [40_000, 200_000])
def test_to_load_many_slots_took_their_number_squared(count, tmp_path):
    storage = DistributedStorage(spaces.Box(-1, 1, (1,)), MOVES, num_steps=1, num_storages=count)
    storage.save(tmp_path / "snapshot")
    assert judged(tmp_path / "snapshot").load == "loaded"


def test_slots_are_served_and_filled_in_the_same_order_after_a_load(tmp_path):
    """Eight rollouts, of which two are held by a learner; the rest of them wait; one is being written."""
    storage = DistributedStorage(BOX, MOVES, num_steps=1, num_storages=8, batch_size=2)

    def insert(storage, number):
        storage.insert_transition(
            {
                **{name: torch.full((1, 3), float(number)) for name in ("observations", "next_observations")},
                "actions": torch.tensor([0]),
                "rewards": torch.tensor([float(number)]),
                "terminated": torch.tensor([False]),
                "truncated": torch.tensor([False]),
            }
        )

    def served(storage):
        return [batch["rewards"].flatten().tolist() for batch in storage.generate_batches(1, 2, shuffle=False)]

    for number in range(6):
        insert(storage, number)
    assert served(storage) == [[0.0, 1.0]]
    storage.save(tmp_path / "snapshot")
    loaded = Storage.load(tmp_path / "snapshot")
    for one in (storage, loaded):
        one.after_gradients(None, None, {})
        insert(one, 6)
        insert(one, 7)
        told = []
        for _ in range(3):
            told += served(one)
            one.after_gradients(None, None, {})
        assert told == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


@pytest.mark.parametrize("part", ["rows", "weights", "probabilities", "counts", "others"])
@pytest.mark.parametrize("change", ["another dtype", "an axis more", "an entry less"])
def test_a_prepared_batch_of_another_form_was_served(part, change, tmp_path):
    name = "sequences" if part == "others" else "prioritized"
    kind = {"sequences": SequenceReplayStorage, "prioritized": PrioritizedReplayStorage}[name]
    more = {"sequence_length": 2, "alpha": 0.5} if part == "others" else {"sample_info": True}
    storage = kind(BOX, MOVES, storage_size=20, num_envs=1, batch_size=4, num_workers=1, seed=0, **more)
    play(storage, 0, 12)
    storage.sample()
    storage._pipeline.prefetch.settle()

    def forge(content):
        tensor = content.tensors[f"prepared 0 {part}"]
        forms = {"another dtype": tensor.double(), "an axis more": tensor.unsqueeze(0), "an entry less": tensor[:-1]}
        content.tensors[f"prepared 0 {part}"] = forms[change].clone()

    loaded = Storage.load(saved_as(tmp_path / "honest", storage, lambda content: None))
    assert torch.equal(loaded.sample().rows, storage.sample().rows)
    verdicts = judged(saved_as(tmp_path / "forged", storage, forge))
    assert verdicts.are_refusals
    assert f"prepared 0 {part}" in verdicts.load


# ---------------------------------------------------------------------------------------------------- memory


MANY = 30_000_000
FIELDS = {"observations": [[3], "torch.float32", 1, 0], "rewards": [[], "torch.float32", 1, 0]}


def folder_of(path, **content):
    """A folder with a manifest alone."""
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"version": 1, **content}))
    return path


@pytest.mark.parametrize("sizes", [(MANY, 1), (1, MANY), (5000, 5000), (2**40, 1), (1, 2**40), (2**47, 2**47)])
@pytest.mark.parametrize("priorities", [None, "rows", ["windows", 1, 1, False]])
@pytest.mark.parametrize("counters", [False, True])
def test_a_mapped_folder_without_rows_took_memory_for_all_that_it_said(sizes, priorities, counters, tmp_path):
    schema = {"steps": sizes[0], "lanes": sizes[1], "fields": FIELDS, "priorities": priorities}
    folder = folder_of(tmp_path / "mapped", format="rlstore mapped storage", schema=schema)
    if counters and sizes[1] < 10_000:
        (folder / "counters.bin").write_bytes(bytes(5 * 8 * sizes[1]))
    verdicts = judged(folder)
    assert verdicts.load.startswith("SnapshotError")  # it is no snapshot
    assert verdicts.verify.startswith("damaged") or ": 0 transitions" in verdicts.verify


def test_the_steps_of_an_episode_without_bytes_took_memory(tmp_path):
    """They were believed where no tensor had any."""
    schema = {"rewards": [[0], "torch.float32"], "observations": [[0], "torch.float32"]}
    folder = folder_of(tmp_path / "episodes", format="rlstore episodes", schema=schema)

    def write(steps, lane, flags):
        header = {
            "__metadata__": {"steps": str(steps), "lane": str(lane)},
            "observations": {"dtype": "F32", "shape": [steps + 1, 0], "data_offsets": [0, 0]},
            "rewards": {"dtype": "F32", "shape": [steps, 0], "data_offsets": [0, 0]},
        }
        end = 0
        for name in ("terminated", "truncated") if flags else ():
            header[name] = {"dtype": "BOOL", "shape": [steps], "data_offsets": [end, end + steps]}
            end += steps
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(end)
        (folder / "episode-000000000001.safetensors").write_bytes(content)
        return judged(folder)

    for steps in (MANY // 2, 2**62):
        verdicts = write(steps, 0, False)
        assert verdicts.verify.startswith("damaged")
        assert verdicts.inspect.startswith("SnapshotError")
    assert write(3, 2**70, True).inspect.startswith("SnapshotError")
    assert write(3, 1, True).verify.startswith("whole")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("replay", {"num_envs": MANY, "storage_size": MANY}),
        ("replay", {"num_envs": MANY, "storage_size": 2**40}),
        ("prioritized", {"storage_size": 2**31}),
        ("sequences", {"storage_size": 2**31, "num_envs": 2**20}),
        ("rollout", {"num_envs": MANY}),
        ("rollout", {"num_transitions_per_env": MANY}),
        ("rollout of spaces", {"num_envs": MANY}),
        ("decoupled", {"num_envs": MANY}),
        ("decoupled", {"num_steps": 2**40}),
        ("distributed", {"num_storages": MANY}),
    ],
)
def test_sizes_that_no_byte_stands_behind_took_memory(name, changes, saved, tmp_path):
    verdicts = judged(forged(tmp_path / "forged", saved[name], lambda told: told["settings"].update(changes)))
    assert not verdicts.load.startswith("loaded")


@pytest.mark.parametrize("size", [2**24, 2**31])
def test_a_shared_storage_of_a_size_that_was_made_up_is_not_allocated(size, saved, tmp_path):
    def change(told):
        told["settings"]["options"]["memory"] = "shared"
        told["settings"]["storage_size"] = size

    assert judged(forged(tmp_path / "forged", saved["replay"], change)).are_refusals


def test_a_shared_storage_of_ten_million_that_holds_little_is_loaded(tmp_path):
    storage = ReplayStorage(BOX, MOVES, storage_size=10_000_000, num_envs=2, memory="shared")
    storage.save(tmp_path / "saved")
    assert Storage.load(tmp_path / "saved").storage_size == 10_000_000


def test_the_bounds_of_a_space_took_gigabytes(saved, tmp_path):
    box = {"$space": "Box", "shape": [MANY], "dtype": "float64", "low": 0, "high": 1}
    for name in ("replay", "decoupled", "distributed", "rollout of spaces"):
        change = setting("settings", "observation_space", box)
        assert judged(forged(tmp_path / name, saved[name], change)).are_refusals


def test_honest_storages_that_are_much_larger_than_what_they_hold_are_loaded(tmp_path):
    storages = [
        ReplayStorage(BOX, MOVES, storage_size=10_000_000),
        ReplayStorage(BOX, MOVES, storage_size=1_000_000, num_envs=256, memory="shared"),
        PrioritizedReplayStorage(BOX, MOVES, storage_size=1_000_000, num_envs=4),
        SequenceReplayStorage(BOX, MOVES, storage_size=1_000_000, num_envs=64, sequence_length=4, alpha=0.5),
        RolloutStorage.from_spaces(BOX, MOVES, 4096, 24, autoreset="SameStep"),
        DistributedStorage(BOX, MOVES, num_storages=10_000),
    ]
    for number, storage in enumerate(storages):
        storage.save(tmp_path / f"{number}")
        verdicts = judged(tmp_path / f"{number}")
        assert (verdicts.load, verdicts.inspect) == ("loaded", "shown")


# ---------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("depth", [150, 1000, 500_000])
@pytest.mark.parametrize("pair", ["[]", '{"a":}'])
def test_json_that_is_nested_deeply_is_refused(depth, pair, saved, tmp_path):
    opening, closing = pair[:-1], pair[-1]
    nest = opening * depth + "1" + closing * depth
    for field in ("settings", "numbers", "note"):
        shutil.copytree(saved["replay"], tmp_path / field)
        path = tmp_path / field / "manifest.json"
        told = json.loads(path.read_text())
        told.pop("crc32")
        told[field] = {"nest": "HERE"}
        path.write_text(json.dumps(told).replace('"HERE"', nest))
        verdicts = judged(tmp_path / field)
        assert verdicts.are_refusals or (field == "note" and depth == 150)


@pytest.mark.parametrize("piece", ["[],", "{},", '"ab",', "0.5,"])
def test_json_that_takes_far_more_memory_than_its_bytes_is_refused(piece, saved, tmp_path):
    shutil.copytree(saved["replay"], tmp_path / "forged")
    path = tmp_path / "forged" / "manifest.json"
    told = json.loads(path.read_text())
    told.pop("crc32")
    told["note"] = {"list": ["HERE"]}
    path.write_text(json.dumps(told).replace('"HERE"', piece * (6_000_000 // len(piece)) + "1"))
    judged(tmp_path / "forged")


def test_brackets_in_names_are_no_nesting(tmp_path):
    name = "[" * 500 + '\\"{'
    space = spaces.Dict({name: BOX, "plain": BOX})
    storage = RolloutStorage.from_spaces(space, MOVES, 1, 2, autoreset="SameStep")
    storage.save(tmp_path / "snapshot")
    assert judged(tmp_path / "snapshot").load == "loaded"


# ---------------------------------------------------------------------------------------------------- waits


def test_a_file_cannot_make_a_call_wait_without_an_end_or_prefetch_without_one(tmp_path):
    replay = ReplayStorage(BOX, MOVES, storage_size=10, timeout=math.inf, num_workers=2, rate_limit=RateLimit(1e-9, 2))
    replay.save(tmp_path / "replay")
    distributed = DistributedStorage(BOX, MOVES, num_storages=2, timeout=math.inf)
    distributed.save(tmp_path / "distributed")
    assert Storage.load(tmp_path / "distributed").timeout == 3600
    loaded = Storage.load(tmp_path / "replay")
    assert (loaded.timeout, loaded.num_workers) == (3600, 2)
    many = setting("options", "num_workers", 10**9)
    loaded = Storage.load(forged(tmp_path / "many", tmp_path / "replay", many))
    assert loaded.num_workers == 1024


# ---------------------------------------------------------------------------------------------------- writing


def test_verify_and_inspect_open_nothing_for_writing(tmp_path):
    """Of every kind of folder, whole; `judged` asserts that nothing was opened, made, renamed or removed."""
    for one in saved_folders(tmp_path / "saved"):
        verdicts = judged(one.path, load=lambda path: True)
        assert verdicts.verify.startswith("whole"), one.name
        assert verdicts.inspect == "shown", one.name
    storage = ReplayStorage(BOX, MOVES, journal=tmp_path / "journal")
    play(storage, 0, 4)
    storage.close()
    assert judged(tmp_path / "journal").verify.startswith("whole")
