"""A replay storage made from arrays that are in memory, beside a copy of their bytes.

1M transitions of 17 and 6 numbers with and without next observations, and 20,000 single images of 84 x 84, in episodes
of 500 steps, every second one terminated. Everything that ``from_arrays`` does is timed: the check of all values, new
memory for the storage, and its rows. The copies are made array by array, into memory that is new each time, as that of
a storage is, or was written before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.harness import Contender, Phase, Role, Target, Workload
from rlstore import ReplayStorage

STEPS, OBS, ACTIONS = 1_000_000, 17, 6
IMAGES, SIDE = 20_000, 84
EPISODE = 500
PHASES = {
    "vectors": "1M transitions without next observations, 98 MB",
    "vectors next": "1M transitions with next observations, 166 MB",
    "images": "20,000 images, 141 MB",
    "images next": "20,000 images with next observations, 282 MB",
}
MOST = 3.0  # times a copy into new memory

Arrays = Mapping[str, np.ndarray[Any, Any]]


def vectors() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    observations = random.standard_normal((STEPS, OBS), np.float32)
    return {
        "observations": observations,
        "actions": random.standard_normal((STEPS, ACTIONS), np.float32),
        "rewards": random.standard_normal(STEPS, np.float32),
        **_ends(STEPS),
    }


def images() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return {
        "observations": random.integers(0, 255, (IMAGES, SIDE, SIDE), np.uint8),
        "actions": random.integers(0, 6, IMAGES),
        "rewards": random.standard_normal(IMAGES, np.float32),
        **_ends(IMAGES),
    }


def _ends(steps: int) -> dict[str, np.ndarray[Any, Any]]:
    step = np.arange(steps)
    return {"terminals": step % (2 * EPISODE) == EPISODE - 1, "timeouts": step % (2 * EPISODE) == 2 * EPISODE - 1}


def with_next(arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """The same with next observations: those of the next step, and where an episode ended another one."""
    observations = arrays["observations"]
    following = np.roll(observations, -1, axis=0)
    ended = arrays["terminals"] | arrays["timeouts"]
    following[ended] = observations[ended]
    return {**arrays, "next_observations": following}


class Loader(Contender):
    """Does something with each of the data in turn; what came of it is kept until the next time.

    Args:
        name: Its name.
        role: Ours, or a floor.
        data: The arrays by the name of the phase.
        make: What is done with them; it is given what came of it the last time.
    """

    def __init__(self, name: str, role: Role, data: Mapping[str, Arrays], make: Callable[[Arrays, Any], Any]) -> None:
        super().__init__(name)
        self.role = role
        self._data, self._make = data, make
        self._made: dict[str, Any] = dict.fromkeys(data)

    def phases(self) -> Mapping[str, Callable[[], object]]:
        return {phase: partial(self._run, phase) for phase in self._data}

    def _run(self, phase: str) -> None:
        self._made[phase] = self._make(self._data[phase], self._made[phase])

    def rest(self) -> None:
        """Let others have the memory of a storage, of which there are four."""
        self._made = {phase: made if isinstance(made, dict) else None for phase, made in self._made.items()}

    def evidence(self) -> Mapping[str, torch.Tensor]:
        """What a storage holds of the first data; copies are taken to be right."""
        self._run("vectors next")
        made = self._made["vectors next"]
        if isinstance(made, dict):
            return {name: torch.as_tensor(made[name]) for name in ("observations", "actions")}
        data = made.get_all_buffer_data()
        return {name: data[name].squeeze(1) for name in ("observations", "actions")}


def _store(arrays: Arrays, before: Any) -> ReplayStorage:
    del before
    actions = arrays["actions"]
    space = spaces.Discrete(6) if actions.ndim == 1 else {"shape": actions.shape[1:], "type": "Box"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the truncated steps that are left out without next observations
        return ReplayStorage.from_arrays(dict(arrays), action_space=space)


def _copy_anew(arrays: Arrays, before: Any) -> dict[str, np.ndarray[Any, Any]]:
    del before
    return {name: array.copy() for name, array in arrays.items()}


def _copy_over(arrays: Arrays, before: Any) -> dict[str, np.ndarray[Any, Any]]:
    made: dict[str, np.ndarray[Any, Any]] = before or _copy_anew(arrays, None)
    for name, array in arrays.items():
        np.copyto(made[name], array)
    return made


def _check(evidence: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for name, held in evidence.items():
        for field, expected in evidence["memcpy"].items():
            if not torch.equal(held[field], expected):
                raise RuntimeError(f"{name} holds other {field}")


def workload() -> Workload:
    data: dict[str, Arrays] = {"vectors": vectors(), "images": images()}
    data.update({f"{name} next": with_next(arrays) for name, arrays in list(data.items())})
    contenders = {
        "rlstore": partial(Loader, "rlstore", "ours", data, _store),
        "memcpy, new memory": partial(Loader, "memcpy, new memory", "floor", data, _copy_anew),
        "memcpy": partial(Loader, "memcpy", "floor", data, _copy_over),
    }
    targets = [Target(phase, ("memcpy, new memory",), MOST, row=f"from_arrays, {PHASES[phase]}") for phase in PHASES]
    return Workload(
        "loading",
        "from_arrays",
        tuple(Phase(name, label) for name, label in PHASES.items()),
        contenders,
        _check,
        rounds=12,
        targets=tuple(targets),
    )
