"""The replay buffers: how each library's buffer is filled, appended to and sampled, with data as used there.

Libraries are imported when a buffer is created, so that a missing one is reported and the others still run.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import count, cycle, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.harness import Role
from benchmarks.replay_data import GAMMA, Array, Source, Steps

Loop = Callable[[], object]


def one_step_discounts(terminated: Array | torch.Tensor) -> torch.Tensor:
    """Discounts, for buffers that serve termination flags instead."""
    return GAMMA * (1.0 - torch.as_tensor(terminated).float())


class Buffer(ABC):
    """A buffer of one library, for the transitions of a source.

    Attributes:
        sample: draws a batch; called with the arguments from ``arguments``.
    """

    role: Role = "peer"
    sample: Callable[..., Any]

    def __init__(self, source: Source, capacity: int) -> None:
        self.source = source
        self.capacity = capacity

    @abstractmethod
    def fill(self) -> None:
        """Fill it to its capacity."""

    @abstractmethod
    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        """Rename the fields of a drawn batch to the common names."""

    def arguments(self, batch_size: int, calls: int) -> Iterable[tuple[Any, ...]]:
        """The arguments of ``sample`` for each of these calls."""
        return repeat((batch_size,), calls)

    def sampling(self, batch_size: int, calls: int, held: int = 1) -> Loop:
        """A loop that draws batches, each while the ``held`` newest are kept, and returns the last."""
        kept: deque[Any] = deque(maxlen=held)

        def draw() -> object:
            sample, keep = self.sample, kept.append
            for arguments in self.arguments(batch_size, calls):
                keep(sample(*arguments))
            return kept[-1]

        return draw

    def drawn(self, batch_size: int) -> dict[str, torch.Tensor]:
        """One batch with the common names."""
        return self.batch(self.sampling(batch_size, 1)())

    def rest(self) -> None:  # noqa: B027
        """Wait until background work has finished."""

    def close(self) -> None:  # noqa: B027
        """Called once, at the end."""


class AddableBuffer(Buffer):
    """A buffer whose adds are also timed."""

    @abstractmethod
    def adding(self, steps: Steps, calls: int, *, infos: bool = False) -> Loop:
        """A loop of this many calls that appends the steps one by one, repeatedly.

        ``infos`` are given to buffers that take them, and are empty otherwise.
        """

    def adding_at_once(self, steps: Steps) -> Loop | None:
        """A call that appends all steps, where a buffer has one."""
        return None


class SavableBuffer(AddableBuffer):
    """A buffer that is also saved and loaded."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Save it to a folder that does not exist yet."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Become what was saved there by a buffer of the same kind."""


def calling(add: Callable[..., object], arguments: list[tuple[Any, ...]], calls: int) -> Loop:
    """A loop of this many calls with prepared positional arguments, used repeatedly."""
    prepared = list(islice(cycle(arguments), calls))

    def loop() -> None:
        for given in prepared:
            add(*given)

    return loop


class Rlstore(SavableBuffer):
    """One of our storages, given what Gymnasium returns: arrays, rewards in float64, and numbers of one environment.

    With ``tensors`` it is given tensors ``[envs, ...]``.
    """

    role = "ours"

    def __init__(
        self, source: Source, capacity: int, storage: str = "ReplayStorage", *, tensors: bool = False, **options: Any
    ) -> None:
        import rlstore

        super().__init__(source, capacity)
        self._tensors = tensors
        spaces = source.observation_space, source.action_space
        self.storage: Any = getattr(rlstore, storage)(*spaces, "cpu", capacity, source.envs, seed=0, **options)
        self.sample = self.storage.sample

    def fill(self) -> None:
        for steps in self.source.fill(self.capacity):
            self.storage.insert_data_slice({name: torch.from_numpy(values) for name, values in vars(steps).items()})

    def adding(self, steps: Steps, calls: int, *, infos: bool = False) -> Loop:
        given = steps.infos() if infos else [{}] * len(steps.rewards)
        if not self._tensors:
            steps = replace(steps, rewards=steps.rewards.astype(np.float64))
        if infos and self.source.envs > 1:
            steps = steps.after_reset()
        arguments = [self.step_arguments(step, info) for step, info in zip(steps.each(), given, strict=True)]
        return calling(self.storage.add, arguments, calls)

    def adding_at_once(self, steps: Steps) -> Loop:
        data = {name: torch.from_numpy(values) for name, values in vars(steps).items()}
        return partial(self.storage.insert_data_slice, data)

    def step_arguments(self, step: Steps, infos: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of ``add`` for a step."""
        values = (step.observations, step.actions, step.rewards, step.terminated, step.truncated)
        if self._tensors:
            return *map(torch.from_numpy, values), infos, torch.from_numpy(step.next_observations)
        if self.source.envs > 1:
            return *values, infos, step.next_observations
        observation, action, reward, terminated, truncated = (value[0] for value in values)
        # As of MuJoCo, a number of numpy; as of CartPole, which has no infos, one of Python.
        reward = reward if infos else float(reward)
        return observation, action, reward, bool(terminated), bool(truncated), infos, step.next_observations[0]

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        batch = {name: getattr(drawn, name) for name in ("observations", "actions", "next_observations")}
        return batch | {"rewards": drawn.rewards.squeeze(-1), "discounts": drawn.discounts.squeeze(-1)}

    def save(self, path: Path) -> None:
        self.storage.save(path)

    def load(self, path: Path) -> None:
        self.storage = type(self.storage).load(path)
        self.sample = self.storage.sample

    def close(self) -> None:
        self.storage.close()


class Sb3(SavableBuffer):
    """Stable-Baselines3's ReplayBuffer: numpy in, tensors out."""

    def __init__(self, source: Source, capacity: int) -> None:
        from stable_baselines3.common.buffers import ReplayBuffer

        super().__init__(source, capacity)
        self.buffer: Any = ReplayBuffer(
            capacity, source.observation_space, source.action_space, "cpu", n_envs=source.envs
        )
        self.sample = self.buffer.sample

    def fill(self) -> None:
        buffer, at = self.buffer, 0
        for steps in self.source.fill(self.capacity):
            rows = slice(at, at + len(steps.rewards))
            buffer.observations[rows] = steps.observations
            buffer.actions[rows] = steps.actions.reshape(buffer.actions[rows].shape)
            buffer.rewards[rows] = steps.rewards
            buffer.dones[rows] = steps.terminated | steps.truncated
            buffer.timeouts[rows] = steps.truncated
            buffer.next_observations[rows] = steps.next_observations
            at = rows.stop
        buffer.pos, buffer.full = 0, True

    def adding(self, steps: Steps, calls: int, *, infos: bool = False) -> Loop:
        empty = [[{"TimeLimit.truncated": True} if cut else {} for cut in row] for row in steps.truncated]
        arguments = [
            (s.observations, s.next_observations, s.actions, s.rewards, s.terminated | s.truncated, info)
            for s, info in zip(steps.each(), steps.listed_infos() if infos else empty, strict=True)
        ]
        return calling(self.buffer.add, arguments, calls)

    def save(self, path: Path) -> None:
        from stable_baselines3.common.save_util import save_to_pkl

        path.mkdir()
        save_to_pkl(path / "buffer.pkl", self.buffer)

    def load(self, path: Path) -> None:
        from stable_baselines3.common.save_util import load_from_pkl

        self.buffer = load_from_pkl(path / "buffer.pkl")
        self.sample = self.buffer.sample

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        actions = drawn.actions if self.source.action_shape else drawn.actions.squeeze(-1)
        return {
            "observations": drawn.observations,
            "actions": actions,
            "rewards": drawn.rewards.squeeze(-1),
            "discounts": one_step_discounts(drawn.dones.squeeze(-1)),
            "next_observations": drawn.next_observations,
        }


class Cpprb(SavableBuffer):
    """cpprb's ReplayBuffer: numpy in and out.

    ``compress`` stores single frames, for which the stack must be the last axis.
    """

    def __init__(
        self, source: Source, capacity: int, *, kind: str = "ReplayBuffer", compress: bool = False, **options: Any
    ) -> None:
        import cpprb

        super().__init__(source, capacity)
        self._compress = compress
        shape = source.obs_shape
        observations = {"shape": (*shape[1:], shape[0]) if compress else shape, "dtype": source.observation_space.dtype}
        fields: dict[str, dict[str, Any]] = {
            "obs": observations,
            "act": {"shape": source.action_shape or 1, "dtype": source.action_space.dtype},
            "rew": {},
            "done": {"dtype": np.float32 if "Nstep" in options else bool},
        }
        if compress:
            options |= {"next_of": "obs", "stack_compress": "obs"}
        else:
            fields["next_obs"] = observations
        self.buffer: Any = getattr(cpprb, kind)(capacity, fields, **options)
        self.sample = self.buffer.sample

    def _fields(self, steps: Steps) -> dict[str, Array]:
        """The fields of transitions, flattened to one axis."""
        observations, following = steps.observations, steps.next_observations
        if self._compress:
            observations, following = np.moveaxis(observations, 1, -1), np.moveaxis(following, 1, -1)
        return {
            "obs": observations,
            "act": steps.actions,
            "rew": steps.rewards,
            "next_obs": following,
            "done": steps.terminated,
        }

    def fill(self) -> None:
        for steps in self.source.fill(self.capacity):
            self.buffer.add(**self._fields(steps.flat()))
            if (steps.terminated | steps.truncated)[-1].all():
                self.buffer.on_episode_end()

    def adding(self, steps: Steps, calls: int, *, infos: bool = False) -> Loop:
        add = self.buffer.add
        given = list(islice(cycle([self._fields(step) for step in steps.each()]), calls))

        def loop() -> None:
            for fields in given:
                add(**fields)

        return loop

    def adding_at_once(self, steps: Steps) -> Loop:
        return partial(self.buffer.add, **self._fields(steps.flat()))

    def save(self, path: Path) -> None:
        path.mkdir()
        self.buffer.save_transitions(str(path / "buffer.npz"))

    def load(self, path: Path) -> None:
        self.buffer.load_transitions(str(path / "buffer.npz"))

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        values = {name: torch.from_numpy(drawn[name]) for name in ("obs", "act", "rew", "next_obs")}
        if self._compress:
            values |= {name: values[name].movedim(-1, 1) for name in ("obs", "next_obs")}
        return {
            "observations": values["obs"],
            "actions": values["act"] if self.source.action_shape else values["act"].squeeze(-1),
            "rewards": values["rew"].squeeze(-1),
            "discounts": one_step_discounts(drawn["done"].squeeze(-1)),
            "next_observations": values["next_obs"],
        }


class Rlox(AddableBuffer):
    """rlox's ReplayBuffer, for float32 vectors: numpy in and out; every draw takes a seed."""

    def __init__(self, source: Source, capacity: int, kind: str = "ReplayBuffer", *options: Any) -> None:
        import rlox

        super().__init__(source, capacity)
        self.buffer: Any = getattr(rlox, kind)(capacity, *source.obs_shape, *source.action_shape, *options)
        self.seeds = count()
        self.sample = self.buffer.sample

    def arguments(self, batch_size: int, calls: int) -> Iterable[tuple[Any, ...]]:
        return zip(repeat(batch_size, calls), self.seeds, strict=False)

    def fill(self) -> None:
        for steps in self.source.fill(self.capacity):
            self.buffer.push_batch(*self._flat(steps))

    @staticmethod
    def _flat(steps: Steps) -> tuple[Array, ...]:
        flags = steps.terminated.reshape(-1).astype(np.uint8), steps.truncated.reshape(-1).astype(np.uint8)
        values = steps.observations, steps.next_observations, steps.actions, steps.rewards
        return *(value.reshape(-1) for value in values), *flags

    @staticmethod
    def single(step: Steps) -> tuple[Any, ...]:
        """The arguments of ``push`` for a step of one environment."""
        flags = bool(step.terminated[0]), bool(step.truncated[0])
        return step.observations[0], step.actions[0], float(step.rewards[0]), *flags, step.next_observations[0]

    def adding(self, steps: Steps, calls: int, *, infos: bool = False) -> Loop:
        if self.source.envs == 1:
            return calling(self.buffer.push, [self.single(step) for step in steps.each()], calls)
        return calling(self.buffer.push_batch, [self._flat(step) for step in steps.each()], calls)

    def adding_at_once(self, steps: Steps) -> Loop:
        return partial(self.buffer.push_batch, *self._flat(steps))

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        names = {"obs": "observations", "actions": "actions", "rewards": "rewards", "next_obs": "next_observations"}
        values = {ours: torch.from_numpy(drawn[name]) for name, ours in names.items()}
        return values | {"discounts": one_step_discounts(drawn["terminated"])}


class Tianshou(AddableBuffer):
    """tianshou's buffers: numpy in and out, in a Batch. Each environment has its own buffer."""

    def __init__(self, source: Source, capacity: int, kind: str = "ReplayBuffer", **options: Any) -> None:
        import tianshou.data

        super().__init__(source, capacity)
        self._data: Any = tianshou.data
        if source.envs == 1:
            self.buffer: Any = getattr(self._data, kind)(capacity, **options)
        else:
            self.buffer = self._data.VectorReplayBuffer(capacity, source.envs)
        self.sample = self.buffer.sample

    def _batch(self, steps: Steps) -> Any:
        return self._data.Batch(
            obs=steps.observations,
            act=steps.actions,
            rew=steps.rewards,
            terminated=steps.terminated,
            truncated=steps.truncated,
            obs_next=steps.next_observations,
        )

    def _single(self, steps: Steps) -> Any:
        return self._batch(Steps(*(values[0] for values in vars(steps).values())))

    def fill(self) -> None:
        if self.source.envs == 1:
            whole = self._data.Batch.cat([self._batch(steps.flat()) for steps in self.source.fill(self.capacity)])
            whole.done = whole.terminated | whole.truncated
            self.buffer.set_batch(whole)
            # As its own from_data does.
            self.buffer._size = self.capacity
            return
        envs = np.arange(self.source.envs)
        for steps in self.source.fill(self.capacity):
            for step in steps.each():
                self.buffer.add(self._batch(step), envs)

    def adding(self, steps: Steps, calls: int, *, infos: bool = False) -> Loop:
        if self.source.envs == 1:
            return calling(self.buffer.add, [(self._single(step),) for step in steps.each()], calls)
        envs = np.arange(self.source.envs)
        return calling(self.buffer.add, [(self._batch(step), envs) for step in steps.each()], calls)

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        values = drawn[0]
        return {
            "observations": torch.from_numpy(values.obs),
            "actions": torch.from_numpy(values.act),
            "rewards": torch.from_numpy(values.rew).float(),
            "discounts": one_step_discounts(values.terminated),
            "next_observations": torch.from_numpy(values.obs_next),
        }


def require_tree() -> None:
    """Say why there are no priorities of TorchRL's; its own error refers to a warning from when it was imported."""
    try:
        import_module("torchrl._torchrl")
    except ImportError as error:
        raise ImportError("the wheel's extension, which has the tree, was built for another torch") from error


class TorchRl(SavableBuffer):
    """TorchRL's ReplayBuffer: TensorDicts in and out."""

    def __init__(self, source: Source, capacity: int, batch_size: int | None = None, **options: Any) -> None:
        from torchrl.data import LazyTensorStorage, ReplayBuffer

        super().__init__(source, capacity)
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        self.buffer: Any = ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=batch_size, **options)
        self.sample = self.buffer.sample

    @staticmethod
    def data(steps: Steps) -> TensorDict:
        """Transitions flattened to one axis, with the names of TorchRL's environments."""
        tensors = {name: torch.from_numpy(values) for name, values in vars(steps).items()}
        ends = {name: tensors[name].unsqueeze(-1) for name in ("terminated", "truncated")}
        following = {
            "observation": tensors["next_observations"],
            "reward": tensors["rewards"].unsqueeze(-1),
            "done": ends["terminated"] | ends["truncated"],
            **ends,
        }
        fields = {"observation": tensors["observations"], "action": tensors["actions"], "next": following}
        return TensorDict(fields, batch_size=[len(steps.rewards)])

    def fill(self) -> None:
        for steps in self.source.fill(self.capacity):
            self.buffer.extend(self.data(steps.flat()))

    def adding(self, steps: Steps, calls: int, *, infos: bool = False) -> Loop:
        if self.source.envs == 1:
            return calling(self.buffer.add, [(self.data(step)[0],) for step in steps.each()], calls)
        return calling(self.buffer.extend, [(self.data(step),) for step in steps.each()], calls)

    def adding_at_once(self, steps: Steps) -> Loop:
        return partial(self.buffer.extend, self.data(steps.flat()))

    def save(self, path: Path) -> None:
        self.buffer.dumps(path)

    def load(self, path: Path) -> None:
        self.buffer.loads(path)

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        return {
            "observations": drawn["observation"],
            "actions": drawn["action"],
            "rewards": drawn["next", "reward"].squeeze(-1),
            "discounts": one_step_discounts(drawn["next", "terminated"].squeeze(-1)),
            "next_observations": drawn["next", "observation"],
        }
