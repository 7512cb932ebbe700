"""Storages of every kind, what is done to them, call by call, as a seed decides, and a model of what they hold."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from killed_storages import ADD, KINDS, LANES, MASKED, RESET, SAMPLE, STEPS, UPDATE, Kind, judge_held
from resumed_training import digest

from rlstore import NStepReplayStorage, PrioritizedReplayStorage

sys.path.insert(0, str(Path(__file__).parent / "golden"))

import programs


class World:
    """A storage, and what was done to it.

    Attributes:
        storage: The storage.
    """

    storage: Any

    def make(self, **more: Any) -> Any:
        """A new storage."""
        raise NotImplementedError

    def call(self, random_: random.Random) -> None:
        """One call of the storage, which the generator and all calls before decide."""
        raise NotImplementedError

    def reset(self) -> None:
        """Empty the storage."""
        raise NotImplementedError

    def state(self, storage: Any) -> str:
        """Tells any two states of storages apart between which there is a call; reading it changes nothing."""
        raise NotImplementedError

    def judge(self, storage: Any) -> None:
        """What a storage holds is what these calls leave, as a plain model has it."""
        raise NotImplementedError

    def twin(self) -> World:
        """The same once more, with a storage of its own."""
        return copy.deepcopy(self)


class ReplayWorld(World):
    """Replay of a :class:`Kind`; ``written`` and ``since`` are as in ``killed_storages.Progress``."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.written, self.since = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
        self._rows: Any = None

    def make(self, **more: Any) -> Any:
        return self.kind.make(**more)

    def call(self, random_: random.Random) -> None:
        self._complete(self.storage)
        (call,) = random_.choices((ADD, MASKED, SAMPLE, UPDATE, RESET), (60, 10, 8, 12, 0.3))
        mask = [call == ADD or random_.random() < 0.5 for _ in range(LANES)]
        if call in (ADD, MASKED):
            step = self.kind.step(self.written.tolist(), self.since.tolist())
            self.storage.add(*step, mask=None if all(mask) else np.array(mask))
            self.written += np.array(mask)
        elif call == RESET:
            self.reset()
        elif call == UPDATE and self.kind.by_priority and self._rows is not None:
            self.storage.update(self._rows, 0.5 + self._rows % 7)
        elif len(self.storage) >= STEPS // 2:
            self._rows = getattr(self.storage.sample(), "rows", None)

    def _complete(self, storage: Any) -> None:
        if "compute_reward" in self.kind.options:  # a function is not saved
            storage.compute_reward = self.kind.options["compute_reward"]

    def reset(self) -> None:
        self.storage.reset()
        self.since[:] = self.written

    def state(self, storage: Any) -> str:
        ring, told = storage._ring_of(), [storage.draw_total, storage._added]
        if self.kind.by_priority:
            told += [storage.stale_updates, storage.current_beta, storage._sampler.tree.leaves]
        return digest(ring.written, ring.begun, storage._random, told)

    def judge(self, storage: Any) -> None:
        self._complete(storage)
        ring = storage._ring_of()
        assert ring.written.tolist() == self.written.tolist()
        assert ring.held().tolist() == np.minimum(self.written - self.since, STEPS).tolist()
        judge_held(self.kind, storage, self)  # type: ignore[arg-type] # it has the counts of a progress


class RolloutWorld(World):
    """Rollouts: step after step, returns, batches, and the next one; now and then one is given up."""

    def __init__(self) -> None:
        self.steps, self.held, self.phase = 0, 0, ""

    def make(self, **more: Any) -> Any:
        return programs.rollout("cpu", **more)

    def call(self, random_: random.Random) -> None:
        storage = self.storage
        if self.phase == "computed":
            for _ in storage.recurrent_mini_batch_generator(2, 1) if random_.random() < 0.5 else ():
                pass
            for _ in storage.mini_batch_generator(2, 2):
                pass
            self.phase = "learnt"
        elif self.phase == "learnt" or random_.random() < 0.02:
            self.reset()
        elif self.held < programs.STEPS:
            programs.add_rollout_step(storage, self.steps)
            self.steps, self.held = self.steps + 1, self.held + 1
        else:
            storage.compute_returns(torch.arange(float(programs.ENVS)), 0.9, 0.8)
            self.phase = "computed"

    def reset(self) -> None:
        self.storage.clear()
        self.held, self.phase = 0, ""

    def state(self, storage: Any) -> str:
        return digest(storage.get_all_buffer_data(), len(storage), storage._generator.get_state())

    def judge(self, storage: Any) -> None:
        data = storage.get_all_buffer_data()
        assert len(storage) == self.held * programs.ENVS
        for place, step in enumerate(range(self.steps - self.held, self.steps)):
            ids = programs.ids(step)
            assert torch.equal(data["observations"]["policy"][place], ids)
            assert torch.equal(data["actions"][place], ids)
            assert torch.equal(data["rewards"][place], ids / 100)
            assert torch.equal(data["values"][place], ids / 200)
            flags = [data[name][place].flatten().tolist() for name in ("terminated", "truncated")]
            assert flags == [flag.tolist() for flag in programs.ends(step)]


class DistributedWorld(World):
    """Rollouts that are inserted step by step, and others that an actor hands over; batches of them."""

    def __init__(self) -> None:
        self.steps, self.handed, self.served = 0, 0, False
        self.complete: list[list[float]] = []  # the rewards of the complete rollouts, oldest first
        self.begun: list[list[float]] = []

    def make(self, **more: Any) -> Any:
        return programs.distributed("cpu", **more)

    def call(self, random_: random.Random) -> None:
        storage = self.storage
        if self.served:
            storage.after_gradients(None, None, {})
            self.served, self.complete = False, []
        elif len(self.complete) > 4 or (self.complete and random_.random() < 0.02):
            for _ in storage.generate_batches(1):
                pass
            self.served = True
        elif random_.random() < 0.2:
            self.handed += 1
            with storage.actor() as actor, actor.rollout(version=self.handed) as rollout:
                for name in storage.storages:
                    rollout[name].zero_()
                rollout.set_states((torch.full((1, 1, 2), float(self.handed)),))
                rollout["reward"][:] = torch.tensor([0.0, -self.handed, -self.handed - 0.5])
            self.complete.append([-float(self.handed), -self.handed - 0.5])
        else:
            storage.insert_transition(programs.distributed_step(self.steps))
            rewards = programs.ids(self.steps)[:, 0].tolist()
            self.begun = [
                [*row, reward] for row, reward in zip(self.begun or [[]] * len(rewards), rewards, strict=True)
            ]
            self.steps += 1
            if len(self.begun[0]) == 2:
                self.complete, self.begun = self.complete + self.begun, []

    def reset(self) -> None:
        self.storage.reset()
        self.served, self.complete, self.begun = False, [], []

    def state(self, storage: Any) -> str:
        report = storage.report()
        told = report.committed, report.served, report.full, len(storage)
        return digest(storage.get_all_buffer_data(), told, storage._generator.get_state())

    def judge(self, storage: Any) -> None:
        data = storage.get_all_buffer_data()
        assert len(storage) == 2 * len(self.complete) + sum(map(len, self.begun))
        rewards = data["rewards"].squeeze(-1).T.tolist() if data else []
        assert rewards == self.complete


AHEAD = Kind("n-step ahead", NStepReplayStorage, {"n_step": 3, "num_workers": 2, "fetch_every": 5})
SHARED = Kind("shared", PrioritizedReplayStorage, {"memory": "shared", "beta_steps": 500})
WORLDS: dict[str, Callable[[], World]] = {
    "uniform": lambda: ReplayWorld(KINDS["replay"]),
    "prioritized": lambda: ReplayWorld(KINDS["prioritized"]),
    "sequence": lambda: ReplayWorld(KINDS["sequences by priority"]),
    "n-step": lambda: ReplayWorld(KINDS["n-step"]),
    "rollout": RolloutWorld,
    "distributed": DistributedWorld,
    "n-step ahead": lambda: ReplayWorld(AHEAD),
    "shared": lambda: ReplayWorld(SHARED),
    "frames": lambda: ReplayWorld(KINDS["frames"]),
    "sequence across": lambda: ReplayWorld(KINDS["sequences across"]),
    "hindsight": lambda: ReplayWorld(KINDS["hindsight"]),
}
