"""Folders of every kind that rlstore writes, and how each is loaded, used and told from another."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from resumed_training import digest

import rlstore

sys.path.insert(0, str(Path(__file__).parent / "golden"))

from programs import (
    ARGUMENTS,
    BOX,
    DISCRETE,
    ENVS,
    FRAMES,
    GOALS,
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


def _add_stacks(storage: Any, first: int, last: int) -> None:
    """Frame stacks of which the older frames of each first one are others; episodes of four steps."""
    for step in range(first, last):
        stack = torch.stack([ids(step + back) % 251 for back in (-2, -1, 0)], 1)
        if step % 4 == 0:
            stack[:, :2] = 252
        if step % 4 == 1:
            stack[:, 0] = 252
        follows = torch.cat([stack[:, 1:], ids(step + 1).unsqueeze(1) % 251], 1)
        ended = torch.full((3,), step % 4 == 3)
        stacks = stack.to(torch.uint8), follows.to(torch.uint8)
        storage.add(stacks[0], torch.arange(3) % 2, ids(step)[:, 0], ended, ~ended & ended, {}, stacks[1])


def _starts_program(storage: Any) -> Iterator[Any]:
    """Such frame stacks, the last episode of which has only begun."""
    _add_stacks(storage, 0, 29)
    yield storage.sample()


def _make_starts(device: str) -> Any:
    space = spaces.Box(0, 255, (3, 1), "uint8")
    return rlstore.ReplayStorage(space, spaces.Discrete(2), device, storage_size=60, num_envs=3, frame_stack=3, seed=7)


MADE = {**PROGRAMS, "frames, starts": (_make_starts, _starts_program)}
SNAPSHOTS = (
    "replay",
    "replay, shared",
    "n-step",
    "n-step, ahead",
    "prioritized",
    "prioritized, ahead",
    "sequences",
    "sequences, by priority",
    "sequences, LSTM",
    "hindsight, future",
    "frames",
    "frames, starts",
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
    "sequences, across": (
        rlstore.SequenceReplayStorage,
        BOX,
        {"sequence_length": 4, "overlap": 1, "across_episodes": True, "alpha": 0.6},
    ),
    "hindsight": (rlstore.HindsightReplayStorage, GOALS, {"compute_reward": same_goal, "autoreset": "Disabled"}),
    "frames": (rlstore.ReplayStorage, FRAMES, {"frame_stack": 4}),
}
WRITTEN_OVER = 21  # steps after which nothing is held that was there
STATES = ("closed", "left open", "without a seal")  # of a mapped folder


class Saved:
    """One folder that was saved, and what was in it.

    Attributes:
        kind: "snapshot", "mapped" or "episodes".
        name: Of the storage that saved it.
        state: Of a mapped folder; "journal" of a snapshot that a journal has written.
        path: The folder.
        storage: The class.
        content: A digest of what a storage serves that is loaded from it.
    """

    def __init__(self, kind: str, name: str, path: Path, state: str = "") -> None:
        self.kind, self.name, self.path, self.state = kind, name, path, state
        self.content = ""
        self.storage: type[rlstore.Storage] = rlstore.Storage

    @property
    def writes(self) -> bool:
        """Whether a storage that is loaded from it writes to it."""
        return self.kind != "snapshot" or self.state == "journal"

    def load(self, path: Path) -> Any:
        """A storage from a folder that was made of this one."""
        if self.kind == "snapshot":
            storage = rlstore.Storage.load(path, journal=path if self.state == "journal" else None)
            if isinstance(storage, rlstore.HindsightReplayStorage):
                storage.compute_reward = same_goal
            return storage
        if self.kind == "mapped":
            kind, space, more = MAPPED[self.name]
            return kind(space, DISCRETE, **{**ARGUMENTS, **more}, memory="mapped", path=path)
        return kept_episodes(path)

    def use(self, storage: Any) -> None:
        """What a program does with it: it draws, reads every row, and adds steps until all that was there is gone."""
        replay = hasattr(storage, "storage_size")
        for number in range(WRITTEN_OVER if replay else 1):
            advance(self.name, storage, number)
            if number % (WRITTEN_OVER - 1):
                continue
            list(storage.generate_batches(2))
            if replay:
                storage.sample(64)
            if getattr(storage, "alpha", 0):
                rows = storage.sample().rows
                storage.update(rows, torch.ones(len(rows)))
            storage.get_all_buffer_data()


def content_of(storage: Any) -> str:
    """A digest of what it serves: how much there is, two batches, and everything."""
    return digest(len(storage), *storage.generate_batches(2), storage.get_all_buffer_data())


def advance(name: str, storage: Any, number: int = 0) -> None:
    """Add a step, as the program of this name does after 30 of them."""
    step = 50 + number
    none = torch.zeros(ENVS, dtype=torch.bool)
    if name in ("rollout", "distillation"):
        storage.clear()
        if name == "rollout":
            fill_rollout(storage, step)
    elif name == "decoupled":
        scalar = ids(step)[:, 0]
        storage.add(ids(step), torch.arange(ENVS) % 2, scalar, none, none, ids(step + 1), scalar, scalar, scalar)
    elif name == "distributed":
        terminated, truncated = ends(step)
        taken = {"observations": ids(step), "actions": torch.arange(ENVS) % 2, "rewards": ids(step)[:, 0]}
        ended = {"terminated": terminated, "truncated": truncated, "next_observations": ids(step + 1)}
        storage.insert_transition({**taken, **ended, "hidden_states": (ids(step, 2).unsqueeze(0),)})
    elif name == "frames":
        storage.add(frames(step), torch.arange(ENVS) % 2, ids(step)[:, 0], none, none, {}, frames(step + 1))
    elif name == "frames, starts":
        _add_stacks(storage, 29 + number, 30 + number)
    elif name == "sequences, LSTM":
        state = ids(step, 2).unsqueeze(0).contiguous()
        storage.add(*step_of(step), hidden_states=(state, -state))
    else:
        fill(storage, step, step + 1, goal if name.startswith("hindsight") else ids)


def kept_episodes(path: Path) -> Any:
    """A storage that keeps its episodes in a folder."""
    arguments = {**ARGUMENTS, "save_snapshot": True, "snapshot_dir": path, "num_workers": 0}
    return rlstore.NStepReplayStorage(BOX, DISCRETE, **arguments)


def _fill_mapped(name: str, storage: Any) -> None:
    if name != "frames":
        fill(storage, 0, 30, goal if name == "hindsight" else ids)
        return
    for step in range(30):
        terminated, truncated = ends(step)
        actions, infos = torch.arange(ENVS) % 2, {"final_obs": frames(step + 1)}
        storage.add(frames(step), actions, ids(step)[:, 0], terminated, truncated, infos, frames(step + 1))


def saved_folders(root: Path) -> list[Saved]:
    """One folder of each kind."""
    saved = []
    for name in SNAPSHOTS:
        make, run = MADE[name]
        storage = make("cpu")
        for _ in run(storage):
            if name in SAVED_OFTEN:
                storage.save(root / "snapshot" / name)
        storage.save(root / "snapshot" / name)
        saved.append(Saved("snapshot", name, root / "snapshot" / name))
    journaled = rlstore.Storage.load(root / "snapshot" / "prioritized", journal=root / "snapshot" / "journal")
    fill(journaled, 40, 45)
    _close(journaled)
    saved.append(Saved("snapshot", "prioritized", root / "snapshot" / "journal", "journal"))
    for name, (kind, space, more) in MAPPED.items():
        for state in STATES:
            folder = root / "mapped" / f"{name}, {state}"
            live = folder if state == "closed" else root / "live" / folder.name
            storage = kind(space, DISCRETE, **{**ARGUMENTS, **more}, memory="mapped", path=live)
            _fill_mapped(name, storage)
            if state == "left open":  # closed once, and then in use
                storage.close()
                storage = kind(space, DISCRETE, **{**ARGUMENTS, **more}, memory="mapped", path=live)
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
        one.content, one.storage = content_of(storage), type(storage)
        _close(storage)
        shutil.rmtree(copy)
    return saved


def _close(storage: Any) -> None:
    close: Callable[[], None] | None = getattr(storage, "close", None)
    if close is not None:
        close()
