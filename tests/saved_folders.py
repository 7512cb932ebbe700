"""Folders of every kind that rlstore writes, and how each is loaded, used and told from another."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from resumed_training import digest

import rlstore

sys.path.insert(0, str(Path(__file__).parent / "golden"))

from programs import (
    ARGUMENTS,
    BOX,
    DISCRETE,
    ENVS,
    FRAMES,
    PROGRAMS,
    ends,
    fill,
    fill_rollout,
    frames,
    goal,
    ids,
    same_goal,
    step_of,
)

SNAPSHOTS = (
    "replay",
    "replay, shared",
    "n-step",
    "n-step, ahead",
    "prioritized",
    "sequences",
    "sequences, by priority",
    "sequences, LSTM",
    "hindsight, future",
    "frames",
    "rollout",
    "distillation",
    "decoupled",
    "distributed",
)
SAVED_OFTEN = ("prioritized", "sequences")  # to the same folder: what was added since is appended
MAPPED: dict[str, tuple[type[Any], Any, dict[str, Any]]] = {
    "replay": (rlstore.ReplayStorage, BOX, {}),
    "prioritized": (rlstore.PrioritizedReplayStorage, BOX, {}),
    "sequences": (rlstore.SequenceReplayStorage, BOX, {"sequence_length": 3, "alpha": 0.6}),
    "frames": (rlstore.ReplayStorage, FRAMES, {"frame_stack": 4}),
}
STATES = ("closed", "left open", "without a seal")  # of a mapped folder


class Saved:
    """One folder that was saved, and what was in it.

    Attributes:
        kind: "snapshot", "mapped" or "episodes".
        name: Of the storage that saved it.
        state: Of a mapped folder.
        path: The folder.
        content: A digest of what a storage serves that is loaded from it.
    """

    def __init__(self, kind: str, name: str, path: Path, state: str = "") -> None:
        self.kind, self.name, self.path, self.state = kind, name, path, state
        self.content = ""

    def load(self, path: Path) -> Any:
        """A storage from a folder that was made of this one."""
        if self.kind == "snapshot":
            storage = rlstore.Storage.load(path)
            if isinstance(storage, rlstore.HindsightReplayStorage):
                storage.compute_reward = same_goal
            return storage
        if self.kind == "mapped":
            kind, space, more = MAPPED[self.name]
            return kind(space, DISCRETE, **ARGUMENTS, **more, memory="mapped", path=path)
        return kept_episodes(path)

    def use(self, storage: Any) -> None:
        """What a program does with it: every row is read, and one more step is added."""
        advance(self.name, storage)
        list(storage.generate_batches(2))
        if self.kind != "snapshot" or hasattr(storage, "storage_size"):
            storage.sample(64)
        storage.get_all_buffer_data()


def content_of(storage: Any) -> str:
    """A digest of what it serves: how much there is, two batches, and everything."""
    return digest(len(storage), *storage.generate_batches(2), storage.get_all_buffer_data())


def advance(name: str, storage: Any) -> None:
    """Add a step, as the program of this name does."""
    none = torch.zeros(ENVS, dtype=torch.bool)
    if name in ("rollout", "distillation"):
        storage.clear()
        if name == "rollout":
            fill_rollout(storage, 50)
    elif name == "decoupled":
        scalar = ids(50)[:, 0]
        storage.add(ids(50), torch.arange(ENVS) % 2, scalar, none, none, ids(51), scalar, scalar, scalar)
    elif name == "distributed":
        terminated, truncated = ends(50)
        step = {"observations": ids(50), "actions": torch.arange(ENVS) % 2, "rewards": ids(50)[:, 0]}
        ended = {"terminated": terminated, "truncated": truncated, "next_observations": ids(51)}
        storage.insert_transition({**step, **ended, "hidden_states": (ids(50, 2).unsqueeze(0),)})
    elif name == "frames":
        storage.add(frames(50), torch.arange(ENVS) % 2, ids(50)[:, 0], none, none, {}, frames(51))
    elif name == "sequences, LSTM":
        state = ids(50, 2).unsqueeze(0).contiguous()
        storage.add(*step_of(50), hidden_states=(state, -state))
    else:
        fill(storage, 50, 52, goal if name.startswith("hindsight") else ids)


def kept_episodes(path: Path) -> Any:
    """A storage that keeps its episodes in a folder."""
    arguments = {**ARGUMENTS, "save_snapshot": True, "snapshot_dir": path, "num_workers": 0}
    return rlstore.NStepReplayStorage(BOX, DISCRETE, **arguments)


def _fill_mapped(name: str, storage: Any) -> None:
    if name != "frames":
        fill(storage, 0, 30)
        return
    for step in range(30):
        terminated, truncated = ends(step)
        actions, infos = torch.arange(ENVS) % 2, {"final_obs": frames(step + 1)}
        storage.add(frames(step), actions, ids(step)[:, 0], terminated, truncated, infos, frames(step + 1))


def saved_folders(root: Path) -> list[Saved]:
    """One folder of each kind."""
    saved = []
    for name in SNAPSHOTS:
        make, run = PROGRAMS[name]
        storage = make("cpu")
        for _ in run(storage):
            if name in SAVED_OFTEN:
                storage.save(root / "snapshot" / name)
        storage.save(root / "snapshot" / name)
        saved.append(Saved("snapshot", name, root / "snapshot" / name))
    for name, (kind, space, more) in MAPPED.items():
        for state in STATES:
            folder = root / "mapped" / f"{name}, {state}"
            live = folder if state == "closed" else root / "live" / folder.name
            storage = kind(space, DISCRETE, **ARGUMENTS, **more, memory="mapped", path=live)
            _fill_mapped(name, storage)
            if state == "left open":  # closed once, and then in use
                storage.close()
                storage = kind(space, DISCRETE, **ARGUMENTS, **more, memory="mapped", path=live)
                advance(name, storage)
            if live != folder:
                shutil.copytree(live, folder)
            storage.close()
            saved.append(Saved("mapped", name, folder, state))
    storage = kept_episodes(root / "episodes")
    fill(storage, 0, 30)
    storage.close()
    saved.append(Saved("episodes", "n-step", root / "episodes"))
    for one in saved:
        copy = shutil.copytree(one.path, root / "read")
        storage = one.load(copy)
        one.content = content_of(storage)
        _close(storage)
        shutil.rmtree(copy)
    return saved


def _close(storage: Any) -> None:
    close: Callable[[], None] | None = getattr(storage, "close", None)
    if close is not None:
        close()
