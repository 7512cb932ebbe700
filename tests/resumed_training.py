"""Small trainings in turns, for every class, and all ways in which one is stopped and taken up again.

A turn adds, learns and draws; what it returns tells every bit that was served. Whoever stops a training between two
turns and takes it up from what was saved must be served the same as one who never stopped.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import rlstore
from rlstore import Journal, RateLimit, Storage

sys.path.insert(0, str(Path(__file__).parent / "golden"))

from programs import (
    ARGUMENTS,
    BOX,
    DISCRETE,
    ENVS,
    FRAMES,
    GOALS,
    STEPS,
    add_rollout_step,
    decoupled,
    distillation,
    distributed,
    distributed_step,
    ends,
    frames,
    goal,
    ids,
    rollout,
    same_goal,
    step_of,
)

TURNS = 7
ADDS = 6  # steps of a turn; the ring of a replay storage has wrapped after the fourth
RESET_AT = 5  # the turn that begins with reset()


def digest(*parts: Any) -> str:
    """Tells every bit, shape and dtype in nests of tensors and plain values."""
    found = hashlib.sha1()
    for leaf in _leaves(parts):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode() + leaf.detach().contiguous().numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (Mapping, TensorDict)):
        for key in sorted(value.keys(), key=str):
            yield key
            yield from _leaves(value[key])
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, rlstore.RolloutStorage.Batch):
        yield from _leaves(vars(value))
    else:
        yield value


# ---------------------------------------------------------------------------------------------------- replay


def _add(storage: Any, writer: Any, step: int) -> None:
    """One step; now and then an environment sits it out, so that what follows breaks its episode."""
    named: dict[str, Any] = {}
    if step % 4 == 3:
        named["mask"] = torch.tensor([True, step % 8 == 3, step % 3 != 0])
    if "costs" in {one.name for one in storage._fields.extra}:
        named["costs"] = ids(step)[:, 0] / 3
    if getattr(storage, "hidden_shape", None):
        state = ids(step, 2).unsqueeze(0).contiguous()
        named["hidden_states"] = (state, -state)
    if storage.observation_space == FRAMES:
        terminated, truncated = ends(step)
        writer.add(
            frames(step), torch.arange(ENVS) % 2, ids(step)[:, 0], terminated, truncated, {}, frames(step + 1), **named
        )
    else:
        observe = goal if isinstance(storage, rlstore.HindsightReplayStorage) else ids
        writer.add(*step_of(step, observe), **named)


def replay_turn(storage: Any, turn: int) -> list[str]:
    """Add, draw, set priorities by what was drawn, draw again."""
    if isinstance(storage, rlstore.HindsightReplayStorage):
        storage.compute_reward = same_goal  # a function is not saved
    if turn == RESET_AT:
        storage.reset()
    by_writer = storage._options.memory == "shared"
    writer = storage.writer() if by_writer and turn % 2 else storage
    for step in range(ADDS * turn, ADDS * (turn + 1)):
        _add(storage, writer, step)
    if writer is not storage:
        writer.close()
    served = [storage.sample() for _ in range(3)]
    if getattr(storage, "alpha", 0) > 0:
        rows = served[-1].rows
        storage.update(rows, 0.25 + torch.arange(len(rows)) / 4 * (turn % 3))
        served.append(storage.sample(5))
        told = storage.stale_updates, storage.draw_total, storage.current_beta
    else:
        told = (storage.draw_total,)
    served.extend(storage.generate_batches(1, 3))
    limit = None if storage._sharing is None else storage._sharing.limit_state()
    return [digest(batch) for batch in served] + [digest(storage.get_all_buffer_data(), len(storage), told, limit)]


# ---------------------------------------------------------------------------------------------------- rollouts


def rollout_turn(storage: Any, turn: int) -> list[str]:
    """Half a rollout, or the other half and the update; one is given up halfway."""
    if turn == RESET_AT:
        storage.clear()
    halfway, is_first = STEPS // 2, (turn + (turn >= RESET_AT)) % 2 == 0
    for step in range(halfway) if is_first else range(halfway, STEPS):
        add_rollout_step(storage, 10 * turn + step)
    served: list[Any] = []
    if not is_first:
        storage.compute_returns(torch.arange(float(ENVS)), 0.9, 0.8)
        served.extend(digest(batch) for batch in storage.mini_batch_generator(2, 2))
        served.extend(digest(batch) for batch in storage.mini_batch_generator(4, 2, reshuffle=True))
        served.extend(digest(batch) for batch in storage.recurrent_mini_batch_generator(2, 1))
        served.extend(digest(batch) for batch in storage.generate_batches(2, 5, 2))
    served.append(digest(storage.get_all_buffer_data(), len(storage)))
    if not is_first:
        storage.clear()
    return served


def distillation_turn(storage: Any, turn: int) -> list[str]:
    """Half a rollout, or the other half, and the steps in order."""
    halfway = STEPS // 2
    for step in range(halfway) if turn % 2 == 0 else range(halfway, STEPS):
        transition = storage.Transition()
        transition.observations = TensorDict({"policy": ids(10 * turn + step)}, batch_size=[ENVS])
        transition.actions, transition.rewards = ids(step), ids(step)[:, 0]
        transition.privileged_actions, transition.dones = -ids(step), ends(step)[0]
        storage.add_transition(transition)
    served = [digest(storage.get_all_buffer_data(), len(storage))]
    if turn % 2:
        served.extend(digest(batch) for batch in [*storage.generator(), *storage.generate_batches(3)])
        storage.clear()
    return served


def decoupled_turn(storage: Any, turn: int) -> list[str]:
    """Five steps of rollouts of seven; one is given up."""
    if turn == RESET_AT:
        storage.reset()
    begun, served = (turn - RESET_AT if turn >= RESET_AT else turn) * 5, []
    for step in range(begun, begun + 5):
        terminated, truncated = ends(step + turn)
        scalar, obs = ids(step)[:, 0] / 100, ids(step)
        storage.add(
            obs, torch.arange(ENVS) % 2, scalar, terminated, truncated, ids(step + 1), -scalar, scalar / 2, scalar / 3
        )
        if step % STEPS == STEPS - 1:
            storage.compute_returns_and_advantages(torch.arange(float(ENVS)))
            served.extend(digest(batch) for batch in [*storage.sample(2), *storage.generate_batches(3, 4)])
            storage.update()
    return [*served, digest(storage.get_all_buffer_data(), len(storage))]


def distributed_turn(storage: Any, turn: int) -> list[str]:
    """Three steps of rollouts of two; in the second of two turns those that are complete are learnt from."""
    if turn == RESET_AT:
        storage.reset()
    for step in range(3 * turn, 3 * turn + 3):
        storage.insert_transition(distributed_step(step))
    served = [digest(batch) for batch in storage.generate_batches(1, None, 2)]
    served.append(digest(storage.get_all_buffer_data(), len(storage), storage.report().committed))
    if turn % 2:
        storage.after_gradients(None, None, {})
    return served


def handles_turn(storage: Any, turn: int) -> list[str]:
    """Two rollouts by an actor's handle; in every other turn a learner's handle takes two, and two stay."""
    with storage.actor() as actor:
        for number in (2 * turn, 2 * turn + 1):
            with actor.rollout(version=number) as written:
                for row in range(3):
                    written["obs"][row], written["reward"][row] = 10 * number + row, number
    served = []
    if turn % 2:
        with storage.learner(prefetch=0) as learner:
            served.append(digest(next(learner)))
            served.append(digest(next(learner)))
    report = storage.report()
    return [*served, digest(storage.get_all_buffer_data(), report.committed, report.served, report.full)]


# ---------------------------------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Training:
    """One class in one form: how it is made, and its turns."""

    make: Callable[..., Any]
    turn: Callable[[Any, int], list[str]]
    is_mapped: bool = False

    def start(self, folder: Path, **more: Any) -> Any:
        """A new storage; ``folder`` is for its mapped files."""
        mapped = {"memory": "mapped", "path": folder} if self.is_mapped else {}
        return self.make(**mapped, **more)

    def load(self, saved: Path, folder: Path, **more: Any) -> Any:
        """The storage that was saved; ``folder`` is for its mapped files."""
        return Storage.load(saved, folders={"path": folder} if self.is_mapped else None, **more)


def _replay(kind: type[Any], space: Any = BOX, *, is_mapped: bool = False, **options: Any) -> Training:
    # Without infos the episodes of some go on where they ended.
    given = {**ARGUMENTS, "autoreset": "Disabled", **options}
    return Training(lambda **more: kind(space, DISCRETE, **given, **more), replay_turn, is_mapped)


def _of_program(make: Callable[..., Any], turn: Callable[[Any, int], list[str]]) -> Training:
    return Training(lambda **more: make("cpu", **more), turn)


COSTS = {"extra_fields": {"costs": ((), torch.float32)}}
LSTM = {"hidden_shape": ((1, 2), (1, 2)), "sequence_length": 3}
TRAININGS = {
    "replay": _replay(rlstore.ReplayStorage, n_step=2, **COSTS),
    "replay, shared": _replay(rlstore.ReplayStorage, memory="shared"),
    "replay, mapped": _replay(rlstore.ReplayStorage, is_mapped=True, **COSTS),
    "replay, limited": _replay(rlstore.ReplayStorage, rate_limit=RateLimit(2.0, 6, 400.0)),
    "n-step, ahead": _replay(rlstore.NStepReplayStorage, num_workers=2, fetch_every=3),
    "prioritized": _replay(rlstore.PrioritizedReplayStorage, n_step=2, beta_steps=20, **COSTS),
    "prioritized, ahead": _replay(rlstore.PrioritizedReplayStorage, num_workers=2, beta_steps=20),
    "prioritized, shared": _replay(rlstore.PrioritizedReplayStorage, memory="shared", beta_steps=20),
    "prioritized, mapped": _replay(rlstore.PrioritizedReplayStorage, is_mapped=True, beta_steps=20),
    "sequences": _replay(rlstore.SequenceReplayStorage, sequence_length=4, burn_in=1, overlap=1),
    "sequences, by priority": _replay(rlstore.SequenceReplayStorage, sequence_length=3, alpha=0.6, beta_steps=20),
    "sequences, shared": _replay(rlstore.SequenceReplayStorage, memory="shared", sequence_length=3, alpha=0.6),
    "sequences, across": _replay(rlstore.SequenceReplayStorage, sequence_length=4, across_episodes=True, **COSTS),
    "sequences, LSTM": _replay(rlstore.SequenceReplayStorage, **LSTM),
    "hindsight": _replay(rlstore.HindsightReplayStorage, GOALS, compute_reward=same_goal),
    "frames": _replay(rlstore.ReplayStorage, FRAMES, frame_stack=4, n_step=2),
    "frames, mapped": _replay(rlstore.ReplayStorage, FRAMES, is_mapped=True, frame_stack=4),
    "rollout": _of_program(rollout, rollout_turn),
    "distillation": _of_program(distillation, distillation_turn),
    "decoupled": _of_program(decoupled, decoupled_turn),
    "distributed": _of_program(distributed, distributed_turn),
    "distributed, handles": _of_program(distributed, handles_turn),
}


# ---------------------------------------------------------------------------------------------------- how it is kept


def saved_elsewhere(storage: Any, folder: Path, turn: int) -> Callable[[], Path]:
    """A folder of its own for each turn."""
    storage.save(folder / str(turn))
    return lambda: folder / str(turn)


def saved_again(storage: Any, folder: Path, turn: int) -> Callable[[], Path]:
    """The same folder each time, mostly in the background: what was saved before need not be written again."""
    save = storage.save(folder, background=turn % 3 != 0)

    def saved() -> Path:
        if save is not None:
            save.wait()
        return folder

    return saved


def journaled(storage: Any, folder: Path, turn: int) -> Callable[[], Path]:
    """What a commit leaves in the folder of the journal, as it is before the next one."""
    storage.journal.commit()
    copied = shutil.copytree(storage.journal.path, folder / str(turn))
    return lambda: copied


WAYS = {
    "saved elsewhere": saved_elsewhere,
    "saved again": saved_again,
    "journaled": journaled,
}


def play(training: Training, folder: Path) -> list[list[str]]:
    """What is served in each turn when nobody stops."""
    storage = training.start(folder / "mapped")
    try:
        return [training.turn(storage, turn) for turn in range(TURNS)]
    finally:
        _close(storage)


def play_stopped(training: Training, keep: Callable[..., Callable[[], Path]], folder: Path) -> list[list[str]]:
    """What is served in each turn when it is kept before each.

    The turn is played by the storage that was kept and by the one that is taken up; they must be served the same. By
    turns either of them goes on, so that what was kept is added to both by the storage that wrote it and by one that
    was loaded from it.
    """
    served, is_journaled = [], keep is journaled
    storage = training.start(folder / "mapped 0", **({"journal": _journal(folder / "journal")} if is_journaled else {}))
    for turn in range(TURNS):
        kept = keep(storage, folder / "kept", turn)
        served.append(training.turn(storage, turn))
        copied = shutil.copytree(kept(), folder / f"copied {turn}") if turn % 2 else kept()
        goes_on = {"journal": _journal(copied)} if is_journaled else {}  # in the same folder
        loaded = training.load(copied, folder / f"mapped {turn + 1}", **goes_on)
        again = training.turn(loaded, turn)
        assert again == served[-1], f"turn {turn}: what was served differs at {_difference(again, served[-1])}"
        if turn % 2 == 0:
            storage, loaded = loaded, storage
        _close(loaded)
    _close(storage)
    return served


def _journal(folder: Path) -> Journal:
    return Journal(folder, interval=3600.0)  # it commits when it is told to


def _difference(one: list[str], other: list[str]) -> list[int]:
    return [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def _close(storage: Any) -> None:
    close = getattr(storage, "close", None)
    if close is not None:
        close()
