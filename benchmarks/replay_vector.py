"""Uniform replay of vectors, as for SAC: 1M transitions of 17 and 6 numbers, batches of 256."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

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
# Bytes of a transition as it is appended, with two flags, and as it is served, with a discount.
GIVEN = 4 * (2 * OBS + ACTIONS + 1) + 2
SERVED = 4 * (2 * OBS + ACTIONS + 2)


def source(envs: int = 1) -> VectorSource:
    return VectorSource(envs, OBS, ACTIONS, EPISODE)


BUFFERS: dict[str, Callable[[Source, int], AddableBuffer]] = {
    "rlstore": Rlstore,
    "rlstore, from gymnasium": partial(Rlstore, from_gymnasium=True),
    "rlox": Rlox,
    "SB3": Sb3,
    "cpprb": Cpprb,
    "tianshou": Tianshou,
    "TorchRL": TorchRl,
}


class Uniform(Sampling):
    """Two full buffers of a library: one environment appends to the first, which is sampled, and 16 to the second."""

    def __init__(self, name: str, make: Callable[[Source, int], AddableBuffer]) -> None:
        single, self._shared = make(source(), CAPACITY), make(source(ENVS), CAPACITY)
        super().__init__(name, lambda: single, {"sample": (BATCH, SAMPLES)})
        self._shared.fill()
        self._adding = {
            "add": single.adding(source().loop(), ADDS),
            "add uncached": single.adding(source().loop(EPISODE), ADDS),
            "add 16": self._shared.adding(source(ENVS).loop(), ADDS),
            "add 16 uncached": self._shared.adding(source(ENVS).loop(EPISODE), ADDS),
        }

    def phases(self) -> Mapping[str, Loop]:
        return {**self._adding, **super().phases()}

    def close(self) -> None:
        super().close()
        self._shared.close()


def workload() -> Workload:
    added = {"add": GIVEN, "add uncached": GIVEN, "add 16": ENVS * GIVEN, "add 16 uncached": ENVS * GIVEN}
    floor = Copies({phase: (size, ADDS) for phase, size in added.items()} | {"sample": (BATCH * SERVED, SAMPLES)})
    return Workload(
        name="replay_vector",
        title="Replay of 1M transitions, observations 17, actions 6",
        phases=(
            Phase("add", "add of one environment", ADDS),
            Phase("add uncached", "the same, values out of the cache", ADDS),
            Phase("add 16", "add of 16 environments", ADDS),
            Phase("add 16 uncached", "the same, values out of the cache", ADDS),
            Phase("sample", "sample 256", SAMPLES),
        ),
        contenders={name: partial(Uniform, name, make) for name, make in BUFFERS.items()} | {"memcpy": lambda: floor},
        check=partial(check_batches, source(), (BATCH,), 1),
        rounds=25,
        targets=(
            *(Target(phase, ("SB3",), 0.6) for phase in ("add", "add uncached")),
            *(Target(phase, ("rlox",), 3.0) for phase in ("add", "add uncached")),
            *(Target(phase, ("SB3",), 0.4) for phase in ("add 16", "add 16 uncached")),
            Target("sample", ("cpprb",), 0.35),
            Target("sample", ("rlox",), 0.75),
        ),
    )
