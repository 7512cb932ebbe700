"""Three-step replay of pixels, as for DrQ-v2: three stacked RGB frames of 84 x 84, batches of 256, served in uint8.

Some contenders use their own processes or threads, so the wall clock is used, and batches are drawn back to back,
without a learner in between: throughput is measured.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.episode_loader import EpisodeWindows, save_episode
from benchmarks.harness import Phase, Target, Workload
from benchmarks.replay_buffers import Buffer, Cpprb, Loop, Rlstore, TorchRl
from benchmarks.replay_contenders import Copies, Sampling, keep_freed_memory
from benchmarks.replay_data import GAMMA, PixelSource, check_batches

EPISODE = 250
CAPACITY = 24 * EPISODE
BATCH = 256
STEPS = 3
STACK, CHANNELS, ACTIONS = 3, 3, 6
WORKERS = 4
SAMPLES, HELD_SAMPLES = 10, 4
# Bytes of a transition as it is served: two stacks, an action, a reward and a discount.
PIXELS = 2 * STACK * CHANNELS * PixelSource.SIDE**2
SERVED, SERVED_FLOAT = (PIXELS * size + 4 * ACTIONS + 4 + 4 for size in (1, 4))
# Longer than it takes to fill the queues of prefetched batches.
REST = 0.5


def source() -> PixelSource:
    return PixelSource(STACK, CHANNELS, ACTIONS, EPISODE)


def inside(observations: torch.Tensor) -> torch.Tensor:
    """Which windows end before their episode does."""
    return torch.from_numpy(source().steps_left(source().ids(observations)) > STEPS)


class RlstoreNStep(Rlstore):
    """Our NStepReplayStorage."""

    def __init__(self, capacity: int, workers: int = 0, dtype: torch.dtype | None = None) -> None:
        options: dict[str, Any] = {
            "n_step": STEPS,
            "dtype": dtype,
            "num_workers": workers,
            "pin_memory": False,
            "frame_stack": STACK,
        }
        super().__init__(source(), capacity, "NStepReplayStorage", batch_size=BATCH, **options)

    def arguments(self, batch_size: int, calls: int) -> Iterable[tuple[Any, ...]]:
        return repeat((), calls)

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        batch = super().batch(drawn)
        return batch | {name: batch[name].to(torch.uint8) for name in ("observations", "next_observations")}

    def rest(self) -> None:
        if self.storage.num_workers:
            time.sleep(REST)


class CpprbNStep(Cpprb):
    """cpprb folding when it is added to.

    It keeps both stacks whole: together with folding its compression serves no next observations, or wrong ones. It
    serves no discounts, and it does not answer for windows that reach the end of their episode: the first of them is
    not marked as terminated, and the next observations of the others are arbitrary.
    """

    def __init__(self, capacity: int) -> None:
        folding = {"size": STEPS, "gamma": GAMMA, "rew": "rew", "next": "next_obs"}
        super().__init__(source(), capacity, Nstep=folding)

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        batch = super().batch(drawn)
        batch["discounts"] *= GAMMA ** (STEPS - 1)
        return batch | {"compared": inside(batch["observations"])}


class TorchRlNStep(TorchRl):
    """TorchRL folding, with its MultiStep, before it is added to.

    It too leaves windows that reach a termination unmarked, but for the last.
    """

    def __init__(self, capacity: int) -> None:
        from torchrl.data.postprocs import MultiStep

        super().__init__(source(), capacity)
        self._fold: Any = MultiStep(GAMMA, STEPS)

    def fill(self) -> None:
        for episode in self.source.fill(self.capacity):
            data = self.data(episode.flat())
            self.buffer.extend(self._fold(data.unsqueeze(0)).squeeze(0))

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        batch = super().batch(drawn)
        batch["discounts"] = drawn["gamma"] * batch["discounts"] / GAMMA
        return batch | {"compared": inside(batch["observations"])}


class Loader(Buffer):
    """The pattern of DrQ-v2: episodes in files, and a DataLoader with four worker processes."""

    def __init__(self) -> None:
        super().__init__(source(), CAPACITY)
        self._folder = Path(tempfile.mkdtemp())
        dataset = EpisodeWindows(self._folder, CAPACITY // WORKERS, STEPS, GAMMA)
        self._loader: DataLoader[Any] = DataLoader(dataset, BATCH, num_workers=WORKERS)

    def fill(self) -> None:
        for number, episode in enumerate(self.source.fill(self.capacity)):
            save_episode(self._folder, number, episode)
        self._batches = iter(self._loader)
        self.sample = self._batches.__next__

    def arguments(self, batch_size: int, calls: int) -> Iterable[tuple[Any, ...]]:
        return repeat((), calls)

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        observations, actions, rewards, discounts, following = drawn
        return {
            "observations": observations,
            "actions": actions,
            "rewards": rewards.squeeze(-1),
            "discounts": discounts.squeeze(-1),
            "next_observations": following,
        }

    def rest(self) -> None:
        time.sleep(REST)

    def close(self) -> None:
        shutil.rmtree(self._folder)


# The buffers that hold their data in this process.
BUFFERS: dict[str, Callable[[int], Buffer]] = {
    "rlstore": RlstoreNStep,
    "cpprb": CpprbNStep,
    "TorchRL": TorchRlNStep,
}


class Float32(Sampling):
    """Our storage serving float32; the four newest batches are held, as a learner that is behind holds them."""

    def __init__(self, name: str) -> None:
        buffer = RlstoreNStep(CAPACITY, dtype=torch.float32)
        super().__init__(name, lambda: buffer, {"sample": (BATCH, SAMPLES)})
        self._held = buffer.sampling(BATCH, HELD_SAMPLES, held=4)

    def phases(self) -> Mapping[str, Loop]:
        return {"held": self._held}


def workload() -> Workload:
    keep_freed_memory()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    makers: dict[str, Callable[[], Buffer]] = {
        "drqv2's loader": Loader,
        **{name: partial(make, CAPACITY) for name, make in BUFFERS.items()},
        "rlstore, 4 ahead": partial(RlstoreNStep, CAPACITY, WORKERS),
    }
    draws = {"sample": (BATCH, SAMPLES)}
    floor = Copies({"sample": (BATCH * SERVED, SAMPLES), "held": (BATCH * SERVED_FLOAT, HELD_SAMPLES)})
    return Workload(
        name="replay_nstep_pixels",
        title="Three-step replay of 6,000 transitions, observations 9 x 84 x 84 in uint8",
        phases=(
            Phase("sample", "sample 256", SAMPLES),
            Phase("held", "sample 256 in float32, four batches held", HELD_SAMPLES),
        ),
        contenders={name: partial(Sampling, name, make, draws) for name, make in makers.items()}
        | {"rlstore, float32": partial(Float32, "rlstore, float32"), "memcpy": lambda: floor},
        check=partial(check_batches, source(), (BATCH,), STEPS),
        rounds=5,
        targets=(
            Target("held", ("memcpy",), 1.3, ("rlstore, float32",), "3-step pixels 256 in float32, four batches held"),
        ),
        clock="wall",
    )
