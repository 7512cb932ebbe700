"""Uniform replay of vectors, as for SAC: 1M transitions of 17 and 6 numbers, batches of 256."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.harness import Phase, Target, Workload
from benchmarks.replay_buffers import AddableBuffer, Cpprb, Loop, Rlox, Rlstore, Sb3, Tianshou, TorchRl
from benchmarks.replay_contenders import Copies, Sampling
from benchmarks.replay_data import Source, VectorSource, check_batches

CAPACITY = 1_000_000
BATCH = 256
OBS, ACTIONS = 17, 6
ENVS = 16
EPISODE = 200
ADDS, SAMPLES = 400, 100
# Two episodes of as many steps are added repeatedly; two of twice as many with 16 environments: half a megabyte.
LOOP = 50
SLICE, SLICES = 1000, 4
OFFLINE = 50 * ADDS
# Bytes of a transition as it is appended, with two flags, and as it is served, with a discount.
GIVEN = 4 * (2 * OBS + ACTIONS + 1) + 2
SERVED = 4 * (2 * OBS + ACTIONS + 2)


def source(envs: int = 1) -> VectorSource:
    return VectorSource(envs, OBS, ACTIONS, EPISODE)


BUFFERS: dict[str, Callable[[Source, int], AddableBuffer]] = {
    "rlstore": Rlstore,
    "rlstore, from tensors": partial(Rlstore, tensors=True),
    "rlox": Rlox,
    "SB3": Sb3,
    "cpprb": Cpprb,
    "tianshou": Tianshou,
    "TorchRL": TorchRl,
}
# What a lap does: a name, what it is called, calls, and the bytes of each.
PHASES = (
    ("add infos", "add 1, infos of MuJoCo", ADDS, GIVEN),
    ("add 16 infos", "add 16, infos of MuJoCo", ADDS, ENVS * GIVEN),
    ("add broken", "add 1, observations that do not follow on", ADDS, GIVEN),
    ("add", "add 1, empty infos", ADDS, GIVEN),
    ("add 16", "add 16, empty infos", ADDS, ENVS * GIVEN),
    ("slice", "a row of 1000 added in one call", SLICE * SLICES, GIVEN),
    ("sample", "sample 256 of one environment", SAMPLES, BATCH * SERVED),
    ("sample 16", "sample 256 of 16 environments", SAMPLES, BATCH * SERVED),
)


def repeated(call: Loop, times: int) -> None:
    for _ in range(times):
        call()


class Uniform(Sampling):
    """Three buffers of a library: full ones of one environment and of 16, and a small one of shuffled steps."""

    def __init__(self, name: str, make: Callable[[Source, int], AddableBuffer]) -> None:
        single, self._shared = make(source(), CAPACITY), make(source(ENVS), CAPACITY)
        self._offline = make(source(), OFFLINE)
        super().__init__(name, lambda: single, {"sample": (BATCH, SAMPLES)})
        self._shared.fill()
        steps, shared_steps = source().loop(LOOP), source(ENVS).loop(2 * LOOP)
        at_once = single.adding_at_once(next(source().fill(SLICE)))
        self._loops = {
            "add infos": single.adding(steps, ADDS, infos=True),
            "add 16 infos": self._shared.adding(shared_steps, ADDS, infos=True),
            "add broken": self._offline.adding(steps.shuffled(), ADDS),
            "add": single.adding(steps, ADDS),
            "add 16": self._shared.adding(shared_steps, ADDS),
            **({"slice": partial(repeated, at_once, SLICES)} if at_once else {}),
            **self._loops,
            "sample 16": self._shared.sampling(BATCH, SAMPLES),
        }
        for _ in range(OFFLINE // ADDS):
            self._loops["add broken"]()

    def evidence(self) -> Mapping[str, torch.Tensor]:
        drawn = self._shared.drawn(BATCH)
        check_batches(source(ENVS), (BATCH,), 1, {self.name: drawn})
        return super().evidence()

    def close(self) -> None:
        super().close()
        self._shared.close()
        self._offline.close()


def workload() -> Workload:
    warnings.filterwarnings("ignore", "the observations of an environment are not")
    floor = Copies({name: (size, calls) for name, _, calls, size in PHASES})
    ours = ("rlstore",)
    return Workload(
        name="replay_vector",
        title="Replay of 1M transitions, observations 17, actions 6",
        phases=tuple(Phase(name, label, calls) for name, label, calls, _ in PHASES),
        contenders={name: partial(Uniform, name, make) for name, make in BUFFERS.items()} | {"memcpy": lambda: floor},
        check=partial(check_batches, source(), (BATCH,), 1),
        rounds=10,
        targets=(
            Target("add infos", ("SB3",), 0.35, ours, "replay add 1, infos of MuJoCo"),
            Target("add 16 infos", ("SB3",), 0.45, ours, "replay add 16, infos of MuJoCo"),
            Target("add broken", ("SB3",), 0.5, ours, "replay add 1, observations that do not follow on"),
            Target("add", ("rlox",), 2.0, ours, "replay add 1, empty infos"),
            Target("add 16", ("rlox",), 1.5, ours, "replay add 16, empty infos"),
            Target("sample", ("rlox",), 0.35, ours, "sample 256 of 1M, 1 environment"),
            Target("sample 16", ("rlox",), 0.45, ours, "sample 256 of 1M, 16 environments"),
            Target("slice", ours=ours, row="insert_data_slice, a row of 1000", microseconds=0.3),
        ),
    )
