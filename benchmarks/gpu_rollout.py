"""Rollouts on a GPU: rsl_rl's storage and ours, recurrent and not; pixels; and an update's work as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict
from torch import Tensor

from benchmarks.contenders import drain, rsl_rl_storage
from benchmarks.gpu_measure import Group, Work, Works

GAMMA, LAMBDA = 0.99, 0.95
EPOCHS, MINI_BATCHES = 5, 4
ADD, RETURNS = "add_transition", "returns, normalized"
SHUFFLED, RESHUFFLED = "5 x 4 batches, one shuffle", "5 x 4 batches, reshuffled"
RECURRENT = "recurrent 5 x 4 batches"
FLOAT, FLAG = 4, 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of a rollout; ``hidden`` is the size of two GRUs, 0 for none."""

    envs: int
    steps: int = 24
    policy: int = 48
    critic: int = 235
    actions: int = 12
    hidden: int = 0

    @property
    def rows(self) -> int:
        """Transitions."""
        return self.steps * self.envs

    @property
    def observed(self) -> int:
        """Bytes of the observations of a transition."""
        return FLOAT * (self.policy + self.critic)

    @property
    def others(self) -> int:
        """Bytes of the other fields of a batch: actions, two distribution parameters, and four numbers."""
        return FLOAT * (3 * self.actions + 4)


class RolloutData:
    """The same random steps for all contenders, as separate tensors, as a simulator returns them."""

    def __init__(self, sizes: Sizes, device: torch.device, episode_length: float = 100.0) -> None:
        self.sizes, self.device = sizes, device
        random = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device)

        def step() -> dict[str, Any]:
            n, actions = sizes.envs, sizes.actions
            ends = torch.rand(n, generator=random, device=device) < 1 / episode_length
            memory = tuple(normal(1, n, sizes.hidden) for _ in range(2)) if sizes.hidden else (None, None)
            observed = {"policy": normal(n, sizes.policy), "critic": normal(n, sizes.critic)}
            return {
                "observations": TensorDict(observed, batch_size=[n], device=device),
                "actions": normal(n, actions),
                "rewards": normal(n),
                "dones": ends.long(),  # simulators return integers
                "values": normal(n, 1),
                "actions_log_prob": normal(n),
                # A state-independent standard deviation is an expanded view.
                "distribution_params": (normal(n, actions), normal(actions).exp().expand(n, actions)),
                "hidden_states": memory,
            }

        self.steps = [step() for _ in range(sizes.steps)]
        self.last_values = normal(sizes.envs, 1)

    def trajectories(self) -> int:
        """The number of trajectories in the rollout."""
        return sum(self.trajectories_of_batches())

    def trajectories_of_batches(self) -> list[int]:
        """The number of trajectories in each recurrent mini-batch."""
        ends = torch.stack([step["dones"] for step in self.steps[:-1]]).sum(0)
        return [int((own + 1).sum()) for own in ends.chunk(MINI_BATCHES)]


class RolloutCalls:
    """Two storages of one class, driven as rsl_rl drives it: one that is being filled, and one that is full."""

    def __init__(self, storage_class: Any, data: RolloutData) -> None:
        self.data = data
        self.adding, self.full = (self._make(storage_class) for _ in range(2))
        self._transitions = [self._transition(storage_class.Transition(), step) for step in data.steps]
        self._next = 0
        with torch.inference_mode():
            for transition in self._transitions:
                self.full.add_transition(transition)
            self.compute_returns()

    def _make(self, storage_class: Any) -> Any:
        sizes, device = self.data.sizes, str(self.data.device)
        observations = self.data.steps[0]["observations"]
        return storage_class("rl", sizes.envs, sizes.steps, observations, [sizes.actions], device)

    @staticmethod
    def _transition(transition: Any, step: dict[str, Any]) -> Any:
        for name, value in step.items():
            setattr(transition, name, value)
        return transition

    def make_room(self) -> None:
        """Called before an add: begin a new rollout if this one is full."""
        self._next %= len(self._transitions)
        if self._next == 0:
            self.adding.clear()

    def add(self) -> None:
        """Add one step."""
        self.adding.add_transition(self._transitions[self._next])
        self._next += 1

    def compute_returns(self) -> None:
        """Compute returns and normalized advantages of the full rollout."""
        raise NotImplementedError

    def shuffled(self) -> int:
        """All batches, with one permutation for all epochs."""
        return drain(self.full.mini_batch_generator(MINI_BATCHES, EPOCHS))

    def recurrent(self) -> int:
        """All padded batches."""
        return drain(self.full.recurrent_mini_batch_generator(MINI_BATCHES, EPOCHS))

    def works(self) -> dict[str, Work]:
        """What is measured."""
        found = {
            ADD: Work(self.add, self.make_room, torch.inference_mode),
            RETURNS: Work(self.compute_returns, context=torch.inference_mode),
        }
        return found | (
            {RECURRENT: Work(self.recurrent)} if self.data.sizes.hidden else {SHUFFLED: Work(self.shuffled)}
        )


class Ours(RolloutCalls):
    """rlstore's RolloutStorage."""

    def __init__(self, data: RolloutData) -> None:
        from rlstore import RolloutStorage

        super().__init__(RolloutStorage, data)

    def compute_returns(self) -> None:
        self.full.compute_returns(self.data.last_values, GAMMA, LAMBDA)

    def reshuffled(self) -> int:
        """All batches, with a new permutation for each epoch."""
        return drain(self.full.mini_batch_generator(MINI_BATCHES, EPOCHS, reshuffle=True))

    def works(self) -> dict[str, Work]:
        found = super().works()
        return found if self.data.sizes.hidden else {**found, RESHUFFLED: Work(self.reshuffled)}


class OursReusing(Ours):
    """The same with ``reuse=True``: the batches are gathered once and yielded in every epoch."""

    def shuffled(self) -> int:
        return drain(self.full.mini_batch_generator(MINI_BATCHES, EPOCHS, reuse=True))

    def recurrent(self) -> int:
        return drain(self.full.recurrent_mini_batch_generator(MINI_BATCHES, EPOCHS, reuse=True))

    def works(self) -> dict[str, Work]:
        return {RECURRENT: Work(self.recurrent)} if self.data.sizes.hidden else {SHUFFLED: Work(self.shuffled)}


class OursBounded(Ours):
    """The same with ``max_trajectories``: the number of trajectories is bounded, so the host does not synchronize."""

    def __init__(self, data: RolloutData) -> None:
        super().__init__(data)
        self._bound = max(data.trajectories_of_batches())

    def recurrent(self) -> int:
        return drain(self.full.recurrent_mini_batch_generator(MINI_BATCHES, EPOCHS, max_trajectories=self._bound))

    def works(self) -> dict[str, Work]:
        return {RECURRENT: Work(self.recurrent)}


class RslRl(RolloutCalls):
    """rsl_rl's RolloutStorage. Its PPO computes the returns, in a loop over the storage's tensors."""

    def __init__(self, data: RolloutData) -> None:
        super().__init__(rsl_rl_storage(), data)

    def compute_returns(self) -> None:
        st = self.full
        advantage: Any = 0
        for step in reversed(range(st.num_transitions_per_env)):
            last = step == st.num_transitions_per_env - 1
            next_values = self.data.last_values if last else st.values[step + 1]
            alive = 1.0 - st.dones[step].float()
            delta = st.rewards[step] + alive * GAMMA * next_values - st.values[step]
            advantage = delta + alive * GAMMA * LAMBDA * advantage
            st.returns[step] = advantage + st.values[step]
        st.advantages = st.returns - st.values
        st.advantages = (st.advantages - st.advantages.mean()) / (st.advantages.std() + 1e-8)

    def works(self) -> dict[str, Work]:
        found = super().works()
        # It cannot reshuffle; its only mode is shown instead.
        return found if self.data.sizes.hidden else {**found, RESHUFFLED: found[SHUFFLED]}


class ByHand:
    """What a program writes that needs no library: a tensor for each field, a loop of copies, ``index_select``."""

    def __init__(self, data: RolloutData) -> None:
        steps = [self._fields(step) for step in data.steps]
        self._steps, self._next = steps, 0
        self._blocks = [torch.zeros((len(steps), *value.shape), device=data.device) for value in steps[0]]
        served = [block.flatten(0, 1) for number, block in enumerate(self._blocks) if number not in (3, 4)]
        self._served = [*served, *(torch.zeros(data.sizes.rows, 1, device=data.device) for _ in range(2))]
        self._rows, self._device = data.sizes.rows, data.device

    @staticmethod
    def _fields(step: dict[str, Any]) -> list[Tensor]:
        """The tensors of a step; rewards and dones, which no batch has, are the fourth and the fifth."""
        observed = step["observations"]
        names = ("actions", "rewards", "dones", "values", "actions_log_prob")
        return [observed["policy"], observed["critic"], *(step[name] for name in names), *step["distribution_params"]]

    def add(self) -> None:
        """Add one step."""
        for block, value in zip(self._blocks, self._steps[self._next], strict=True):
            block[self._next].copy_(value)
        self._next = (self._next + 1) % len(self._steps)

    def reshuffled(self) -> int:
        """All batches, with a new permutation for each epoch."""
        count = 0
        for _ in range(EPOCHS):
            for picked in torch.randperm(self._rows, device=self._device).chunk(MINI_BATCHES):
                count += len([block.index_select(0, picked) for block in self._served])
        return count

    def works(self) -> dict[str, Work]:
        """What is measured."""
        return {ADD: Work(self.add, context=torch.inference_mode), RESHUFFLED: Work(self.reshuffled)}


def _floors(data: RolloutData) -> dict[str, int]:
    """The bytes that each work must read and write."""
    sizes = data.sizes
    given = sizes.observed + FLOAT * (2 * sizes.actions + 3 + 2 * sizes.hidden) + 8  # the deviation is one row for all
    kept = sizes.observed + FLOAT * (3 * sizes.actions + 3 + 2 * sizes.hidden) + FLAG
    folded = FLOAT * 4 + FLAG  # rewards, values and dones in, returns and advantages out
    floors = {ADD: sizes.envs * (given + kept), RETURNS: sizes.rows * folded}
    row = 2 * (sizes.observed + sizes.others)
    if not sizes.hidden:
        return floors | {SHUFFLED: sizes.rows * row, RESHUFFLED: EPOCHS * sizes.rows * row}
    # Once for all epochs: the bytes read, and the bytes written, observations and masks with their padding.
    pieces = data.trajectories()
    read = sizes.rows * (sizes.observed + sizes.others + FLAG)
    written = sizes.rows * sizes.others + pieces * sizes.steps * (sizes.observed + FLAG)
    return floors | {RECURRENT: read + written + 2 * pieces * FLOAT * 2 * sizes.hidden}


def rollouts(sizes: Sizes, device: torch.device) -> Group:
    """A rollout in our storage and in rsl_rl's."""
    data = RolloutData(sizes, device)

    def works_of(contender: Callable[[RolloutData], RolloutCalls]) -> Works:
        return contender(data).works()

    memory = f", GRU {sizes.hidden} for actor and critic" if sizes.hidden else ""
    bounded = {"rlstore, bounded": partial(works_of, OursBounded)} if sizes.hidden else {}
    by_hand = {} if sizes.hidden else {"torch, by hand": lambda: ByHand(data).works()}
    return Group(
        name=f"{'recurrent' if sizes.hidden else 'rollout'}_{sizes.envs}",
        title=f"{sizes.steps} x {sizes.envs}, observations {sizes.policy} and {sizes.critic}, actions {sizes.actions}"
        + memory,
        floors=_floors(data),
        contenders={
            "rlstore": partial(works_of, Ours),
            **bounded,
            "rlstore, reuse": partial(works_of, OursReusing),
            "rsl_rl": partial(works_of, RslRl),
            **by_hand,
        },
    )


# ---------------------------------------------------------------------------------------------------------- one graph

UPDATE = "returns, normalized, shuffled, an epoch of 4 batches"


def _eager_update(data: RolloutData) -> tuple[Ours, Callable[[], list[Any]]]:
    ours = Ours(data)

    def update() -> list[Any]:
        with torch.inference_mode():
            ours.compute_returns()
        return list(ours.full.mini_batch_generator(MINI_BATCHES, 1))

    return ours, update


def _captured_update(data: RolloutData) -> Works:
    """The update as a graph. Its batches are in the graph's memory, and each replay overwrites them."""
    if data.device.type != "cuda":
        raise RuntimeError("CUDA graphs need CUDA")
    ours, update = _eager_update(data)
    for _ in range(3):  # compiles all kernels
        update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    ours.full.register_graph(graph)
    with torch.cuda.graph(graph):
        batches = update()
    expected = ours.full.returns.clone()
    ours.full.returns.zero_()
    graph.replay()
    torch.testing.assert_close(ours.full.returns, expected)
    held = (ours, batches)  # the graph writes into both

    def replay() -> object:
        graph.replay()
        return held

    return {UPDATE: Work(replay)}


def captured(sizes: Sizes, device: torch.device) -> Group:
    """The storage's part of an update, call by call and as one graph."""
    data = RolloutData(sizes, device)
    row = 2 * (sizes.observed + sizes.others)
    return Group(
        name="graph",
        title=f"The storage's part of an update, {sizes.steps} x {sizes.envs}",
        floors={UPDATE: _floors(data)[RETURNS] + sizes.rows * row},
        contenders={
            "one graph": partial(_captured_update, data),
            "call by call": lambda: {UPDATE: Work(_eager_update(data)[1])},
        },
    )


# ------------------------------------------------------------------------------------------------------------- pixels

PIXELS = "an epoch of batches of 256, as float32"


@dataclass(frozen=True)
class PixelSizes:
    """Sizes of a rollout of images, and the number of its batches."""

    steps: int = 128
    envs: int = 64
    image: tuple[int, ...] = (4, 84, 84)
    batches: int = 32


def _pixel_storage(sizes: PixelSizes, device: torch.device) -> Any:
    import numpy as np

    from rlstore import DecoupledRolloutStorage

    n, random = sizes.envs, torch.Generator(device).manual_seed(0)
    space = Box(0, 255, sizes.image, np.uint8)
    storage = DecoupledRolloutStorage(space, Discrete(15), device, sizes.steps, n)
    images = torch.randint(256, (2, n, *sizes.image), generator=random, device=device, dtype=torch.uint8)
    numbers = torch.randn(4, n, generator=random, device=device)
    actions = torch.randint(15, (n,), generator=random, device=device)
    never = torch.zeros(n, dtype=torch.bool, device=device)
    for _ in range(sizes.steps):
        storage.add(images[0], actions, numbers[0], never, never, images[1], *numbers[1:])
    storage.compute_returns_and_advantages(torch.zeros(n, device=device))
    return storage


def _our_pixels(sizes: PixelSizes, device: torch.device) -> Works:
    storage = _pixel_storage(sizes, device)
    return {PIXELS: Work(lambda: drain(storage.sample(sizes.batches)))}


def _plain_pixels(sizes: PixelSizes, device: torch.device) -> Works:
    """Rows indexed and converted field by field, as rollout buffers do."""
    rows = sizes.steps * sizes.envs
    observations = torch.randint(256, (rows, *sizes.image), device=device, dtype=torch.uint8)
    fields = [torch.randn(rows, 1, device=device) for _ in range(8)]

    def batches() -> Iterable[tuple[Tensor, ...]]:
        for picked in torch.randperm(rows, device=device).chunk(sizes.batches):
            yield observations[picked].float(), *(block[picked] for block in fields)

    return {PIXELS: Work(lambda: drain(batches()))}


def pixels(sizes: PixelSizes, device: torch.device) -> Group:
    """Batches of images."""
    image = torch.Size(sizes.image).numel()
    row = image * (1 + FLOAT) + 2 * 8 * FLOAT
    shape = "x".join(map(str, sizes.image))
    return Group(
        name="pixels",
        title=f"{sizes.steps} x {sizes.envs} of {shape} uint8, {sizes.batches} batches",
        floors={PIXELS: sizes.steps * sizes.envs * row},
        contenders={
            "rlstore": partial(_our_pixels, sizes, device),
            "torch, indexed": partial(_plain_pixels, sizes, device),
        },
    )
