"""What was closed does nothing any more: each method raises StorageClosedError, or is documented to be harmless.

The methods are found by reflection, so a new one takes part by itself: it fails here until ``ARGUMENTS`` knows what it
needs.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import rlstore
from rlstore import (
    DistributedStorage,
    HindsightReplayStorage,
    MixedReplay,
    NotReadyError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
    StorageClosedError,
)

BOX, GOALS = spaces.Box(-1e9, 1e9, (2,)), ("observation", "achieved_goal", "desired_goal")
ENVS, STEPS = 2, 5


def observe(step: int, nest: bool) -> Any:
    value = np.full((ENVS, 2), step, np.float32)
    return dict.fromkeys(GOALS, value) if nest else value


def step_of(storage: Any, step: int) -> dict[str, Any]:
    nest = isinstance(storage, HindsightReplayStorage)
    flags = {"terminateds": np.zeros(ENVS), "truncateds": np.zeros(ENVS)}
    seen = {"observations": observe(step, nest), "next_observations": observe(step + 1, nest)}
    return {**seen, "actions": np.zeros((ENVS, 2)), "rewards": np.ones(ENVS), "infos": {}, **flags}


def sample_of(storage: Any, step: int = 0) -> dict[str, Any]:
    given = {name: value for name, value in step_of(storage, step).items() if name != "infos"}
    given["terminated"], given["truncated"] = given.pop("terminateds"), given.pop("truncateds")
    return given


def no_reward(achieved: Any, desired: Any, info: Any) -> Any:
    return -achieved[:, 0]


REPLAY: dict[str, tuple[type, dict[str, Any]]] = {
    "replay": (ReplayStorage, {}),
    "nstep": (NStepReplayStorage, {"n_step": 2, "num_workers": 2}),
    "prioritized": (PrioritizedReplayStorage, {}),
    "sequence": (SequenceReplayStorage, {"sequence_length": 2}),
    "hindsight": (HindsightReplayStorage, {"compute_reward": no_reward}),
}


def make_replay(name: str, **options: Any) -> Any:
    kind, own = REPLAY[name]
    space = spaces.Dict(dict.fromkeys(GOALS, BOX)) if kind is HindsightReplayStorage else BOX
    storage = kind(space, BOX, storage_size=20 * ENVS, num_envs=ENVS, batch_size=2, **own, **options)
    for step in range(STEPS):
        storage.add(**step_of(storage, step))
    return storage


def make_slots(**options: Any) -> DistributedStorage:
    storage = DistributedStorage(BOX, BOX, num_steps=2, num_storages=8, batch_size=1, **options)
    for step in range(4):
        storage.insert_transition(sample_of(storage, step))
    return storage


# The arguments of methods that need some, by their name; each is called with the object that was closed.
ARGUMENTS: dict[str, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "actor": lambda it: (("a",), {}),
    "add": lambda it: (
        ((0, 0, None, {"reward": 1.0}), {}) if isinstance(it, DistributedStorage) else ((), step_of(it, STEPS))
    ),
    "add_episodes": lambda it: (([],), {}),
    "generate_batches": lambda it: ((1, 1), {}),
    "init_tensors": lambda it: ((sample_of(it),), {}),
    "insert_data_slice": lambda it: (({},), {}),
    "insert_transition": lambda it: ((sample_of(it, STEPS),), {}),
    "priorities": lambda it: (([0],), {}),
    "publish": lambda it: ((3,), {}),
    "register_graph": lambda it: ((None,), {}),
    "save": lambda it: ((f"/proc/no such folder/{id(it)}",), {}),
    "seed": lambda it: ((1,), {}),
    "set_rate_limit": lambda it: ((None,), {}),
    "to_html": lambda it: ((f"/proc/no such folder/{id(it)}",), {}),
    "update": lambda it: (([0], [1.0]), {}),
    "update_storage_parameter": lambda it: (("batch_size", 2), {}),
    "__getitem__": lambda it: ((0,), {}),
    "__getitems__": lambda it: (([0],), {}),
    "__deepcopy__": lambda it: (({},), {}),
}
DUNDERS = ("__getitem__", "__getitems__", "__next__", "__deepcopy__")
# Harmless by their documentation: what they do is nothing, or needs nothing that was released.
HARMLESS = {"close", "before_gradients", "report"}


def methods(it: Any) -> Iterator[str]:
    """The public methods of an object, without those that belong to its class."""
    for name in dir(type(it)):
        found = inspect.getattr_static(type(it), name)
        if isinstance(found, (classmethod, staticmethod, property)) or not callable(found) or isinstance(found, type):
            continue
        if name in DUNDERS or not name.startswith("_"):
            yield name


def call(it: Any, name: str) -> Any:
    args, kwargs = ARGUMENTS[name](it) if name in ARGUMENTS else ((), {})
    result = getattr(it, name)(*args, **kwargs)
    if hasattr(result, "__enter__") and not isinstance(result, type(it)):
        with result:
            return None
    return list(result) if isinstance(result, Iterator) else result


def outcome(it: Any, name: str) -> Any:
    """The class of the error that a method raises, or what it returns."""
    try:
        return call(it, name)
    except Exception as error:
        return type(error)


def closed_storage(name: str, tmp_path: Any) -> Any:
    memory = {"memory": "mapped", "path": tmp_path / "rows"} if name == "prioritized" else {}
    storage = make_replay(name, journal=tmp_path / "journal", **memory)
    storage.close()
    return storage


def closed_shared(tmp_path: Any) -> Any:
    storage = make_replay("replay", memory="shared")
    storage.writer().close()
    storage.close()
    return storage


def closed_writer(tmp_path: Any, **options: Any) -> Any:
    storage = make_replay("replay", **options)
    writer = storage.writer()
    writer.close()
    return writer


def orphaned_writer(tmp_path: Any) -> Any:
    storage = make_replay("replay")
    writer = storage.writer()
    storage.close()
    return writer


def closed_slots(tmp_path: Any) -> Any:
    storage = make_slots(journal=tmp_path / "journal")
    storage.close()
    return storage


def closed_handle(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make_closed(tmp_path: Any) -> Any:
        handle = make(make_slots())
        handle.close()
        return handle

    return make_closed


def orphaned(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make_orphan(tmp_path: Any) -> Any:
        storage = make_slots()
        handle = make(storage)
        storage.close()
        return handle

    return make_orphan


def of_closed(look: Callable[[Any], Any], name: str = "nstep") -> Callable[[Any], Any]:
    def make(tmp_path: Any) -> Any:
        storage = make_replay(name)
        seen = look(storage)
        storage.close()
        return seen

    return make


def begun(storage: Any) -> Any:
    batches = storage.generate_batches(4, 1)
    next(batches)
    return batches


def closed_journal(tmp_path: Any) -> Any:
    storage = make_replay("replay", journal=tmp_path / "journal")
    storage.close()
    return storage.journal


def closed_mixture(tmp_path: Any) -> MixedReplay[Any]:
    mixed = MixedReplay(make_replay("prioritized"), make_replay("prioritized"), batch_size=2)
    mixed.online.close()
    mixed.offline.close()
    return mixed


CLOSED: dict[str, Callable[[Any], Any]] = {
    **{name: lambda tmp_path, name=name: closed_storage(name, tmp_path) for name in REPLAY},
    "shared": closed_shared,
    "slots": closed_slots,
    "writer": closed_writer,
    "writer of shared memory": lambda tmp_path: closed_writer(tmp_path, memory="shared"),
    "writer of a closed storage": orphaned_writer,
    "actor": closed_handle(lambda storage: storage.actor()),
    "actor that has reserved": closed_handle(lambda storage: storage.actor().__enter__()),
    "actor of a closed storage": orphaned(lambda storage: storage.actor()),
    "learner": closed_handle(lambda storage: storage.learner()),
    "mixture": closed_mixture,
    "dataset": of_closed(lambda storage: storage.as_dataset()),
    "replay_iter": of_closed(lambda storage: storage.replay_iter),
    "batches": of_closed(begun),
    "journal": closed_journal,
}
# (what, method): what its documentation says that it does.
EXCEPTIONS = {
    ("learner", "__next__"),  # StopIteration
    ("slots", "update"),  # "Does nothing"
    ("journal", "leave"), ("journal", "measure"),  # of the storage, not of users
    ("batches", "send"), ("batches", "throw"),  # of Python
    ("replay_iter", "__getitem__"),  # an iterable dataset of torch has none
}  # fmt: skip


@pytest.mark.parametrize("what", CLOSED)
def test_every_method_of_what_was_closed_says_so(what, tmp_path):
    it = CLOSED[what](tmp_path)
    refused = {name for name in methods(it) if name not in HARMLESS and (what, name) not in EXCEPTIONS}
    assert refused
    assert {name: outcome(it, name) for name in refused} == dict.fromkeys(refused, StorageClosedError)
    for name in sorted(HARMLESS.intersection(methods(it))):
        call(it, name)
    repr(it)
    if hasattr(it, "__len__"):
        len(it)


@pytest.mark.parametrize("what", ["prioritized", "slots"])
def test_what_was_closed_cannot_be_copied(what, tmp_path):
    storage = CLOSED[what](tmp_path)
    for make_copy in (copy.copy, pickle.dumps):
        with pytest.raises(StorageClosedError):
            make_copy(storage)


def test_the_error_is_caught_by_what_caught_it_before():
    assert issubclass(StorageClosedError, (NotReadyError, RuntimeError, ValueError, rlstore.StorageError))


def test_an_episode_of_a_closed_storage_cannot_be_read():
    storage = make_replay("replay")
    episodes = storage.episodes()
    storage.close()
    assert episodes.lengths.tolist() == [STEPS] * ENVS  # a listing does not change when the storage does
    with pytest.raises(StorageClosedError):
        episodes[0].observations  # noqa: B018


def test_a_save_of_what_was_closed_does_not_mix_it_with_what_another_storage_wrote_since(tmp_path):
    """It had the counters of the one and the rows of the other, with checksums that were right."""
    first = make_replay("replay", memory="mapped", path=tmp_path / "rows")
    first.close()
    second = ReplayStorage(
        BOX, BOX, storage_size=20 * ENVS, num_envs=ENVS, batch_size=2, memory="mapped", path=tmp_path / "rows"
    )
    for step in range(STEPS, 25):
        second.add(**step_of(second, step))
    with pytest.raises(StorageClosedError):
        first.save(tmp_path / "mixture")
    with pytest.raises(StorageClosedError):
        first.save(tmp_path / "mixture", background=True)
    assert not (tmp_path / "mixture").exists()
    second.close()


def test_whoever_waits_for_the_guard_while_it_is_closed_is_refused_too(tmp_path):
    storage = make_replay("replay", memory="mapped", path=tmp_path / "rows")
    errors: list[BaseException] = []

    def save() -> None:
        try:
            storage.save(tmp_path / "saved")
        except BaseException as error:
            errors.append(error)

    with storage._guard:
        thread = threading.Thread(target=save, daemon=True)
        thread.start()
        thread.join(0.2)  # time to reach the guard; without it the test passes, too
        storage.close()
    thread.join(10)
    assert [type(error) for error in errors] == [StorageClosedError]
