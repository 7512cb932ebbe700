"""Storages that several threads use at once, and whether a row is wrong: every value follows from (lane, time)."""

from __future__ import annotations

import copy
import random
import threading
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces

import rlstore
from rlstore import NotReadyError, RolloutFullError

LANES, STEPS, WIDTH, LENGTH, N_STEP = 4, 200, 300, 7, 3  # episodes of LENGTH steps
FIRST = 1 << 21  # the ids of a lane are from lane * FIRST on: as float32 they are exact
BATCH = 256  # observations of a batch take 300 KB, and are gathered without the GIL


def split(ids):
    """The lane and the time of ids."""
    ids = ids.long()
    return ids // FIRST, ids % FIRST


def reward(ids):
    return (ids % 1024 + 1).float()  # never 0: a step like the one before it with no reward would be a reset step


class ReplayWorld:
    """A replay storage. Each lane is added by one thread, which says so by a mask: lanes go on independently."""

    def __init__(self, kind, folder, **options):
        self.kind, self.folder = kind, folder
        box = spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)
        given = {"storage_size": LANES * STEPS, "num_envs": LANES, "batch_size": BATCH, "seed": 0, "dtype": None}
        given.update(autoreset="Disabled", **options)  # episodes go on where they ended
        space = spaces.Dict(observation=box, achieved_goal=box, desired_goal=box) if kind == "hindsight" else box
        own = {
            "replay": (rlstore.ReplayStorage, {"n_step": N_STEP, "discount": 1.0}),
            "n-step": (rlstore.NStepReplayStorage, {"n_step": N_STEP, "discount": 1.0, "num_workers": 0}),
            "prioritized": (rlstore.PrioritizedReplayStorage, {"n_step": N_STEP, "discount": 1.0, "alpha": 0.6}),
            "sequence": (rlstore.SequenceReplayStorage, {"sequence_length": 4, "burn_in": 1, "alpha": 0.6}),
            "uniform sequence": (rlstore.SequenceReplayStorage, {"sequence_length": 5, "overlap": 2}),
            "hindsight": (rlstore.HindsightReplayStorage, {"compute_reward": _no_reward, "relabel_fraction": 0.0}),
        }
        make, more = own[kind]
        if given["memory"] == "mapped":
            given["path"] = folder / "mapped"
        self.storage = make(space, spaces.Discrete(LANES * FIRST), **{**more, **given})
        self.times = [0] * LANES  # that each lane has reached
        self.saved = 0  # snapshots that are complete

    # ---------------------------------------------------------------------------------------------- what threads do

    def _step(self, lanes):
        """The next step of some lanes."""
        ids = torch.tensor([lane * FIRST + self.times[lane] for lane in lanes])
        ends = ids % FIRST % LENGTH == LENGTH - 1
        flags = ends, torch.zeros(len(lanes), dtype=torch.bool)
        return self._observation(ids), ids, reward(ids), *flags, {}, self._observation(ids + 1)

    def _observation(self, ids):
        vector = ids.float().unsqueeze(1).expand(len(ids), WIDTH).contiguous()
        return dict.fromkeys(self.storage.observation_space, vector) if self.kind == "hindsight" else vector

    def adding(self, lane):
        """Adds the next step of one lane, and of every lane that no thread adds: a function to call again and again."""
        mask = torch.arange(LANES) == lane

        def add():
            self.storage.add(*self._step(range(LANES)), mask=mask)
            self.times[lane] += 1

        return add

    def writing(self, lane):
        writer = self.storage.writer(range(lane, lane + 1), f"thread {lane}")

        def write():
            writer.add(*self._step([lane]))
            self.times[lane] += 1

        return write

    def sample(self):
        try:
            batch = self.storage.sample()
        except NotReadyError:
            return
        self._check_sequences(batch) if "sequence" in self.kind else self._check(batch)

    def update(self):
        try:
            batch = self.storage.sample(64)
        except NotReadyError:
            return
        if self.kind in ("prioritized", "sequence"):
            self.storage.update(batch.rows, torch.rand(len(batch.rows)) + 0.01)  # those overwritten since are dropped

    def reset(self):
        self.storage.reset()

    def save(self):
        self.storage.save(self.folder / "snapshot")
        self.saved += 1

    def load(self):
        if not self.saved:
            return
        mapped = self.storage._options.memory == "mapped"
        folders = {"path": self.folder / f"loaded {random.random()}"} if mapped else {}
        loaded = type(self.storage).load(self.folder / "snapshot", folders=folders)
        if self.kind == "hindsight":
            loaded.compute_reward = _no_reward
        self._check_data(loaded.get_all_buffer_data())
        loaded.close()

    def read(self):
        self._check_data(self.storage.get_all_buffer_data())
        assert 0 <= len(self.storage) <= LANES * STEPS
        assert self.storage.draw_total >= 0
        assert repr(self.storage)

    def generate(self):
        try:
            for batch in self.storage.generate_batches(2, 32):
                if "sequence" not in self.kind:
                    self._check_ids(batch["observations"], batch["actions"])
        except NotReadyError:
            return

    def tune(self):
        self.storage.update_storage_parameter("batch_size", random.choice([BATCH, BATCH - 1]))
        self.storage.seed(random.randrange(1000))

    def copy(self):
        twin = copy.deepcopy(self.storage)
        self._check_data(twin.get_all_buffer_data())
        twin.add(*self._step(range(LANES)), mask=torch.zeros(LANES, dtype=torch.bool))
        twin.close()

    # ---------------------------------------------------------------------------------------------- the checks

    def _check_ids(self, observations, actions):
        """The ids of rows ``[n]`` or ``[n, length]`` whose values agree."""
        parts = observations.values() if self.kind == "hindsight" else [observations]
        ids = actions.long().reshape(actions.shape[: 2 if "sequence" in self.kind else 1])
        for part in parts:
            assert bool((part == ids.unsqueeze(-1)).all()), "an observation is not that of its action"
        return ids

    def _check(self, batch):
        ids = self._check_ids(batch.observations, batch.actions)
        nexts = batch.next_observations["observation"] if self.kind == "hindsight" else batch.next_observations
        assert bool((nexts == nexts[:, :1]).all()), "a next observation is of two rows"
        k = nexts[:, 0].long() - ids
        to_end = LENGTH - split(ids)[1] % LENGTH
        assert bool(((k >= 1) & (k <= to_end.clamp(max=N_STEP))).all()), "a next observation is not that of its row"
        if self.kind != "hindsight":
            sums = sum(torch.where(k > i, reward(ids + i), 0.0) for i in range(N_STEP))
            assert bool((batch.rewards[:, 0] == sums).all()), "a reward is not the sum of its steps"
            assert bool(((batch.discounts[:, 0] == 0) == (k == to_end)).all()), "a discount is not that of its step"
        if hasattr(batch, "rows"):
            lane, time = split(ids)
            assert bool((batch.rows == time * LANES + lane).all()), "a row id is not that of its row"

    def _check_sequences(self, batch):
        lane, first = batch.rows % LANES, batch.rows // LANES
        expected = (lane * FIRST + first).unsqueeze(1) + torch.arange(5)
        held = batch.observations[..., 0] == expected
        held &= batch.is_first | (torch.arange(5) == 0) | (expected % FIRST % LENGTH > 0)
        assert bool(held[:, 0].all()), "a sequence does not begin with its row"
        assert bool((batch.masks <= held).all()), "a step to learn from is not the next one of its sequence"
        same = (batch.observations == batch.observations[..., :1]).all(-1) & (
            batch.actions.reshape(held.shape) == expected
        )
        assert bool((same | ~held).all()), "an observation is not that of its action"
        assert bool(((batch.rewards[..., 0] == reward(expected)) | ~held).all())

    def _check_data(self, data):
        if not data:
            return
        actions, masks = data["actions"], data["masks"].reshape(data["actions"].shape[:2])
        lane, time = split(actions.reshape(masks.shape))
        assert bool((lane == torch.arange(LANES).expand_as(lane))[masks].all()), "a row is not in its lane"
        values = data["observations"]["observation"] if self.kind == "hindsight" else data["observations"]
        assert bool((values == actions.reshape(*masks.shape, 1))[masks].all()), "a row has values of another"
        follows = (time[1:] == time[:-1] + 1) | ~(masks[1:] & masks[:-1])
        assert bool(follows.all()), "a row is missing"


def _no_reward(achieved, desired, info):
    return torch.zeros(len(achieved))


class RolloutWorld:
    """A rollout. Each step has a number, whoever adds it, and all its values follow from that and the lane."""

    def __init__(self, kind, folder, **options):
        self.kind, self.folder, self.saved, self.count = kind, folder, 0, 0
        self._numbers = threading.Lock()
        if kind == "rollout":
            obs = torch.zeros(LANES, WIDTH)
            self.storage = rlstore.RolloutStorage("rl", LANES, 24, {"policy": obs}, (1,), seed=0)
        else:
            box = spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)
            self.storage = rlstore.DecoupledRolloutStorage(box, spaces.Box(-1e9, 1e9, (1,)), "cpu", 24, LANES, seed=0)

    def adding(self, lane):
        return self._add

    writing = adding

    def _add(self):
        with self._numbers:
            self.count += 1
            number = self.count
        ids = (torch.arange(LANES) * FIRST + number).float()
        column, vector = ids.unsqueeze(1), ids.unsqueeze(1).expand(LANES, WIDTH).contiguous()
        dones = torch.full((LANES,), number % LENGTH == 0)
        if self.kind != "rollout":
            self.storage.add(vector, column, ids, dones, torch.zeros_like(dones), vector, ids, ids, ids)
            return
        step = self.storage.Transition()
        step.observations, step.actions, step.rewards, step.values = {"policy": vector}, column, ids, column
        step.actions_log_prob, step.dones, step.distribution_params = ids, dones, (column, column)
        step.hidden_states = (column.unsqueeze(0), None)
        try:
            self.storage.add_transition(step)
        except RolloutFullError:
            self.storage.clear()

    def sample(self):
        self._serve(
            lambda: self.storage.mini_batch_generator(3, 2) if self.kind == "rollout" else self.storage.sample(4)
        )

    def generate(self):
        self.update()  # without returns it refuses
        self._serve(lambda: self.storage.generate_batches(2, None, 1))

    def tune(self):
        """Recurrent batches, whose padded rows are zero."""
        if self.kind == "rollout":
            self._serve(lambda: self.storage.recurrent_mini_batch_generator(2, 1))

    def _serve(self, batches):
        try:
            for batch in batches():
                self._check(batch)
        except NotReadyError:  # empty, not complete, or begun anew meanwhile
            return

    def _check(self, batch):
        get = batch.get if isinstance(batch, dict) else lambda name: getattr(batch, name, None)
        obs = get("obs") if get("observations") is None else get("observations")
        obs = obs["policy"] if self.kind == "rollout" else obs
        if getattr(batch, "masks", None) is not None:  # padded trajectories, apart from the other fields
            assert bool((obs == obs[..., :1]).all()), "an observation is of two rows"
            return
        ids = obs.reshape(-1, WIDTH)[:, :1]
        assert bool((obs.reshape(-1, WIDTH) == ids).all()), "an observation is of two rows"
        for name in ("actions", "rewards", "values"):
            value = get(name)
            if value is not None:
                assert bool((value.reshape(ids.shape) == ids).all()), f"{name} are not those of the observations"

    def update(self):
        try:
            if self.kind == "rollout":
                self.storage.compute_returns(torch.zeros(LANES, 1), 0.0, 0.0, False)
            else:
                self.storage.compute_returns_and_advantages(torch.zeros(LANES))
        except NotReadyError:
            return

    def reset(self):
        self.storage.reset()

    def save(self):
        self.storage.save(self.folder / "snapshot")
        self.saved += 1

    def load(self):
        if self.saved:
            self._check_data(type(self.storage).load(self.folder / "snapshot").get_all_buffer_data())

    def read(self):
        self._check_data(self.storage.get_all_buffer_data())
        assert 0 <= len(self.storage) <= 24 * LANES
        assert repr(self.storage)

    def copy(self):
        self._check_data(copy.deepcopy(self.storage).get_all_buffer_data())

    def _check_data(self, data):
        if data:
            self._check({name: value for name, value in data.items() if name in ("observations", "actions", "rewards")})


REPLAY_KINDS = ["replay", "n-step", "prioritized", "sequence", "uniform sequence", "hindsight"]
KINDS = [*REPLAY_KINDS, "rollout", "decoupled"]
# What the threads of each scenario do. "add" and "write" stand for one lane each.
SCENARIOS = {
    "add and sample": ["add", "sample"],
    "add twice": ["add", "add", "read"],
    "sample twice": ["add", "sample", "sample"],
    "add twice and sample": ["add", "add", "sample"],
    "add and sample three times": ["add", "sample", "sample", "sample"],
    "add, sample, update": ["add", "sample", "update"],
    "sample and update": ["sample", "update", "update"],
    "add and reset": ["add", "add", "reset"],
    "add, sample, reset": ["add", "sample", "reset"],
    "add and save": ["add", "save"],
    "add, sample, save": ["add", "sample", "save"],
    "save and load": ["add", "save", "load"],
    "write and sample": ["write", "write", "sample"],
    "write, save, read": ["write", "write", "save", "read"],
    "prefetch: add and sample": ["add", "sample", "sample"],
    "prefetch: add, sample, reset": ["add", "sample", "reset"],
    "add, read, update": ["add", "read", "update"],
    "add, generate, tune": ["add", "generate", "tune"],
    "add, sample, copy": ["add", "sample", "copy"],
}


def run(kind, scenario, folder, turns, memory="ram"):
    """Run a scenario until each thread has taken so many turns. The first exception of a thread is raised."""
    make = ReplayWorld if kind in REPLAY_KINDS else RolloutWorld
    workers = {"num_workers": 2} if scenario.startswith("prefetch") else {}
    world = make(kind, Path(folder), memory=memory, **workers)
    lanes, actions = iter(range(LANES)), []
    for name in SCENARIOS[scenario]:
        made = {"add": world.adding, "write": world.writing}.get(name)
        actions.append(made(next(lanes)) if made else getattr(world, name))
    if "write" not in SCENARIOS[scenario]:
        for lane in range(LANES):  # so that there is something to sample from the beginning
            for _ in range(30):
                world.adding(lane)()
    errors, taken = [], [0] * len(actions)

    def work(place, action):
        try:
            while not errors and min(taken) < turns:  # who is done goes on beside the others
                action()
                taken[place] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if hasattr(world.storage, "close"):
        world.storage.close()
    if errors:
        raise errors[0]
