"""What the examples share: environments, actor processes, episode statistics, the progress line and the report."""

from __future__ import annotations

import argparse
import atexit
import json
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import nn

# The networks here are tiny: a second thread costs more in synchronization than it saves in arithmetic.
torch.set_num_threads(1)

Array = NDArray[Any]
WINDOW = 100  # episodes in the mean return


class HideVelocities(gym.ObservationWrapper[Array, Any, Array]):
    """CartPole without velocities: only the position of the cart and the angle of the pole are observed."""

    VISIBLE = (0, 2)

    def __init__(self, env: gym.Env[Array, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        visible = list(self.VISIBLE)
        self.observation_space = gym.spaces.Box(space.low[visible], space.high[visible], dtype=np.float32)

    def observation(self, observation: Array) -> Array:
        """The cart's position and the pole's angle."""
        return observation[list(self.VISIBLE)]


def make_envs(
    num_envs: int,
    env: str | Callable[[], gym.Env[Any, Any]] = "CartPole-v1",
    wrapper: Callable[[Any], Any] | None = None,
) -> gym.vector.SyncVectorEnv:
    """Vectorized environments with same-step autoreset, so that every step is a transition.

    ``env`` is the name of a registered environment or a function that creates one.
    """

    def make() -> gym.Env[Any, Any]:
        made = gym.make(env) if isinstance(env, str) else env()
        return wrapper(made) if wrapper else made

    return gym.vector.SyncVectorEnv([make] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def true_successors(next_obs: Array, infos: dict[str, Any]) -> torch.Tensor:
    """The observations that followed the actions, before any reset.

    Where an episode ended, ``next_obs`` is already the first observation of the next one; the final observation is in
    ``infos["final_obs"]``. A truncated episode must bootstrap from the value of its final observation.
    """
    successors = next_obs.copy()
    if "final_obs" in infos:
        ended = infos["_final_obs"]
        successors[ended] = np.stack(infos["final_obs"][ended])
    return torch.from_numpy(successors)


@contextmanager
def actors(act: Callable[..., None], arguments: Sequence[tuple[Any, ...]], close: Callable[[], None]) -> Iterator[None]:
    """Run ``act`` in one process for each tuple of arguments, until the end of the block.

    ``close`` must make ``act`` return; a process that does not end is terminated. A warning names each process that
    failed.
    """
    spawn = torch.multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=act, args=given, name=f"actor {i}") for i, given in enumerate(arguments)]
    try:
        # Ctrl-C is handled by the learner, which then ends the actors; they inherit that the signal is ignored.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for process in processes:
                process.start()
        finally:
            signal.signal(signal.SIGINT, previous)
        yield
    finally:
        try:
            close()
        finally:
            for process in processes:
                if process.pid is not None:
                    process.join(timeout=30)
                    process.terminate()
                    process.join()
        for process in processes:
            if process.exitcode:
                warnings.warn(f"{process.name} ended with exit code {process.exitcode}", RuntimeWarning, stacklevel=3)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, rate: float) -> None:
    """Move the parameters of ``target`` by the fraction ``rate`` of the way to those of ``source``."""
    for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
        slow.lerp_(fast, rate)


class Stopwatch:
    """Measures the total time spent inside ``with`` blocks, or waiting for the items of an iterable."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._started

    def around(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the same items, measuring the time until each one is returned.

        They are Any because the fields of a batch depend on the mode of the storage, not on its type.
        """
        iterator = iter(items)
        while True:
            with self:
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


@dataclass
class Result:
    """The result of a training run."""

    name: str
    mean_return: float
    episodes: int
    env_steps: int
    seconds: float
    storage_seconds: float
    losses: list[float] = field(repr=False)
    curve: list[tuple[int, float]] = field(repr=False)
    """Environment steps (or what else is counted) and return at the end of every episode."""
    extra: dict[str, float] = field(default_factory=dict)
    unit: str = "environment steps"
    """What is counted."""


class Run:
    """Episode statistics, stopping condition and progress line of one training run, which counts steps of ``unit``."""

    def __init__(
        self,
        name: str,
        num_envs: int,
        max_steps: int,
        threshold: float | None = None,
        unit: str = "environment steps",
    ) -> None:
        self.name, self.unit = name, unit
        self.max_steps = max_steps
        self.threshold = threshold
        self.env_steps = 0
        self.losses: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self.storage_watch = Stopwatch()
        self._open_returns = np.zeros(num_envs)
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._started = time.perf_counter()
        self._printed = self._started
        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=8) if self._console.is_terminal else None
        if self._live:
            self._live.start()
            atexit.register(self._live.stop)  # restores the terminal after Ctrl-C

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 episodes (NaN before the first)."""
        return float(np.mean(self._recent)) if self._recent else float("nan")

    @property
    def active(self) -> bool:
        """Whether there are steps left and the threshold has not been reached."""
        reached = self.threshold is not None and len(self._recent) == WINDOW and self.mean_return >= self.threshold
        return self.env_steps < self.max_steps and not reached

    def count(self, rewards: Array, ended: Array) -> None:
        """Count one step of every environment."""
        self._open_returns += rewards
        self.note(len(rewards), self._open_returns[ended])
        self._open_returns[ended] = 0.0

    def note(self, steps: int, returns: Iterable[float]) -> None:
        """Count steps, and record the returns of the episodes that ended in them."""
        self.env_steps += steps
        for episode_return in returns:
            self._recent.append(float(episode_return))
            self.curve.append((self.env_steps, float(episode_return)))

    def show(self, loss: float) -> None:
        """Record the loss of an update and refresh the progress line; without a terminal, print it every 5 seconds."""
        self.losses.append(loss)
        if self._live:
            self._live.update(self._line())
        elif time.perf_counter() - self._printed >= 5.0:
            self._printed = time.perf_counter()
            self._console.print(self._line(), soft_wrap=True)

    def finish(self, **extra: float) -> Result:
        """Close the progress line and return the result."""
        if self._live:
            self._live.update(self._line())
            self._live.stop()
        return Result(
            name=self.name,
            mean_return=self.mean_return,
            episodes=len(self.curve),
            env_steps=self.env_steps,
            seconds=time.perf_counter() - self._started,
            storage_seconds=self.storage_watch.seconds,
            losses=self.losses,
            curve=self.curve,
            extra=extra,
            unit=self.unit,
        )

    def _line(self) -> str:
        seconds = time.perf_counter() - self._started
        return (
            f"{self.name}: {self.env_steps:,}/{self.max_steps:,} {self.unit.split()[-1]}, "
            f"{len(self.curve):,} episodes, mean return [bold]{self.mean_return:.4g}[/bold], "
            f"{self.env_steps / seconds:,.0f} {self.unit.split()[-1]}/s"
        )


def arguments(description: str | None, steps: int, threshold: float | None = None) -> argparse.ArgumentParser:
    """The command-line arguments of every example; examples that stop early pass their threshold."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="environment steps at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for the learning curve (PNG) and the result (JSON)")
    if threshold is not None:
        text = "stop once the mean return of the last 100 episodes reaches this (default: %(default)s)"
        parser.add_argument("--threshold", type=float, default=threshold, help=text)
    return parser


def report(result: Result, out: Path | None) -> None:
    """Print the result as a table and, if ``out`` is given, write the learning curve and the result there."""
    table = Table(title=result.name, show_header=False)
    table.add_row(f"mean return, last {WINDOW} training episodes", f"{result.mean_return:.4g}")
    for name, value in result.extra.items():
        table.add_row(name.replace("_", " "), f"{value:,.1f}")
    table.add_row("episodes", f"{result.episodes:,}")
    table.add_row(result.unit, f"{result.env_steps:,}")
    table.add_row(f"{result.unit.split()[-1]} per second", f"{result.env_steps / result.seconds:,.0f}")
    table.add_row("wall time", f"{result.seconds:.1f} s")
    table.add_row("share of it in storage calls", f"{result.storage_seconds / result.seconds:.1%}")
    console = Console()
    console.print(table)
    if out is not None:
        save(result, out)
        console.print(f"Learning curve: {out / result.name}.png")


def save(result: Result, out: Path) -> None:
    """Write the learning curve (PNG) and the result (JSON) into the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{result.name}.json").write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
    plot_curve(result, out / f"{result.name}.png")


def plot_curve(result: Result, path: Path) -> None:
    """Plot the return of every episode and the running mean."""
    from matplotlib.figure import Figure  # imported here because actor processes import this file and do not plot

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if result.curve:
        steps, returns = np.array(result.curve).T
        window = min(WINDOW, len(returns))
        sums = np.cumsum(np.concatenate([[0.0], returns]))
        ends = np.arange(1, len(returns) + 1)
        starts = np.maximum(ends - window, 0)
        axes.scatter(steps, returns, s=8, alpha=0.4, linewidths=0, label="one episode")
        axes.plot(steps, (sums[ends] - sums[starts]) / (ends - starts), color="C1", label=f"mean of the last {WINDOW}")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.set(title=result.name, xlabel=result.unit, ylabel="return")
    if all(episode_return >= 0 for _, episode_return in result.curve):
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
