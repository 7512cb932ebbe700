"""What the state machines of all replay storages share: any interleaving of calls, beside the plain Python model."""

from __future__ import annotations

import copy
import math
import os
import pickle
import tempfile
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from replay_envs import MOVES, STARTS, Envs, Place
from replay_model import ReplayModel, Step, Transition
from replay_world import ACTIONS, FINAL_FORMS, PLAIN_KINDS, STACK_KINDS, Given, Vector

from rlstore import NotReadyError

ENVS = 3
LIMITS = settings(
    max_examples=int(os.environ.get("RLSTORE_EXAMPLES", "40")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
WAYS_TO_COPY = ["copy", "pickle", "save"]
EVERY_MOVE = st.tuples(*[st.sampled_from(MOVES)] * ENVS)
EVERY_FLAG = st.tuples(*[st.booleans()] * ENVS)


@dataclass(frozen=True)
class Config:
    """How a storage is made; ``options`` are the arguments of its class alone."""

    kind: Vector = PLAIN_KINDS[0]
    action: Any = ACTIONS[0]
    num_envs: int = 1
    capacity: int = 4
    spare: int = 0
    n_step: int = 1
    discount: float = 0.5
    autoreset: Any = None
    reward_size: int = 0
    batch_size: int = 3
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The arguments of every replay storage."""
        return {
            "observation_space": self.kind.space,
            "action_space": self.action.space,
            "storage_size": self.capacity * self.num_envs + self.spare % self.num_envs,
            "num_envs": self.num_envs,
            "batch_size": self.batch_size,
            "autoreset": self.autoreset,
            "seed": self.seed,
            **({"reward_shape": (self.reward_size,)} if self.reward_size else {}),
            **self.kind.options,
            **self.options,
        }


@st.composite
def configs(draw, kinds=None, largest=12, **options):
    """Any small storage; ``options`` are strategies."""
    kinds = st.one_of(st.sampled_from(PLAIN_KINDS), st.sampled_from(STACK_KINDS)) if kinds is None else kinds
    capacity = draw(st.integers(1, largest))
    return Config(
        kind=draw(kinds),
        action=draw(st.sampled_from(ACTIONS)),
        num_envs=draw(st.integers(1, ENVS)),
        capacity=capacity,
        spare=draw(st.integers(0, 2)),
        n_step=min(draw(st.integers(1, 4)), capacity),
        discount=draw(st.sampled_from([0.5, 0.9, 1.0, 0.0])),
        autoreset=draw(st.sampled_from([None, None, "NextStep", "SameStep", "Disabled"])),
        reward_size=draw(st.sampled_from([0, 0, 0, 1, 2])),
        batch_size=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 99)),
        options={name: draw(strategy) for name, strategy in options.items()},
    )


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5)


def read_batch(config: Config, batch: Any, size: int) -> list[Transition]:
    """What was served, as transitions; the rows are -1 where the batch does not name them."""
    get = batch.get if isinstance(batch, dict) else lambda name: getattr(batch, name, None)
    rewards, discounts = get("rewards"), get("discounts")
    assert tuple(rewards.shape) == (size, config.reward_size or 1)
    assert tuple(discounts.shape) == (size, 1)
    rows = [-1] * size if get("rows") is None else get("rows").tolist()
    columns = (
        rows,
        config.kind.read(get("observations")),
        config.action.read(get("actions")),
        [tuple(reward) for reward in rewards.tolist()],
        discounts.flatten().tolist(),
        config.kind.read(get("next_observations")),
    )
    assert all(len(column) == size for column in columns)
    return [Transition(*served) for served in zip(*columns, strict=True)]


def match(served: list[Transition], expected: list[Transition]) -> set[int]:
    """Every transition served is one of those expected; returns the places of those that were served.

    Steps that were put in twice, by a slice, may be alike: one that is served stands for all that are.
    """
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, wanted in enumerate(expected):
        places.setdefault((wanted.observation, wanted.action, wanted.following), []).append(place)
    seen: set[int] = set()
    for one in served:
        key = (one.observation, one.action, one.following)
        assert key in places, f"{one} is none of {expected}"
        fits = [
            place
            for place in places[key]
            if one.row in (-1, expected[place].row)
            and close(one.discount, expected[place].discount)
            and all(map(close, one.reward, expected[place].reward))
        ]
        assert fits, f"{one} is not as in {[expected[place] for place in places[key]]}"
        seen.update(fits)
    return seen


class ReplayMachine(RuleBasedStateMachine):
    """Drives a storage and its model through the same calls.

    A subclass has a rule that calls ``begin`` with a config, and says what ``sample`` must serve.
    """

    storage_class: Any = None
    goes_on_with_copies = True

    def begin(self, config: Config) -> None:
        self.config = config
        self.storage = self.new_storage()
        self.model = self.new_model()
        self.envs = Envs(config.kind, config.action, config.num_envs, config.autoreset, config.reward_size)
        self.has_warned: bool | None = False

    def new_storage(self) -> Any:
        targets = {"n_step": self.config.n_step, "discount": self.config.discount}
        return self.storage_class(**self.config.arguments(), **targets)

    def new_model(self) -> ReplayModel:
        config = self.config
        return ReplayModel(config.num_envs, config.capacity, config.n_step, config.discount, config.autoreset)

    def teardown(self) -> None:
        if hasattr(self, "storage"):
            self.storage.close()

    # ---------------------------------------------------------------------------------------------- writing

    @rule(
        moves=EVERY_MOVE,
        start=st.sampled_from(STARTS),
        give_final=EVERY_FLAG,
        padding=st.sampled_from(["any", "repeat", "zeros"]),
        form=st.sampled_from(["tensors", "arrays", "lists", "strided", "bare"]),
        final_form=st.sampled_from(FINAL_FORMS),
        key=st.sampled_from(["final_obs", "final_observation"]),
    )
    def add(self, moves, start, give_final, padding, form, final_form, key):
        form = "tensors" if form == "bare" and self.config.num_envs > 1 else form
        step = self.envs.step(moves, start, give_final, padding)
        self.give(step, *self.envs.arguments(step, form, final_form, key))

    @rule(ends=st.lists(st.tuples(EVERY_MOVE, st.booleans()), min_size=2, max_size=14), start=st.sampled_from(STARTS))
    def add_many(self, ends, start):
        for moves, give_final in ends:
            step = self.envs.step(moves, start, (give_final,) * ENVS)
            self.give(step, *self.envs.arguments(step))

    def give(self, step: list[Given | None], arguments: list[Any], mask: torch.Tensor | None) -> None:
        """Add to storage and model, and see that an episode that was broken off is warned of once."""
        options = {} if mask is None else {"mask": mask}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = self.storage.add(*arguments, **options, **self.add_options(step))
        assert result is None
        rows, broken = self.model.add(step)
        self.expect_warning(caught, broken)
        self.stored(rows)

    def add_options(self, step: list[Given | None]) -> dict[str, Any]:
        return {}

    def stored(self, rows: list[int], in_slice: bool = False) -> None:
        """Called with the rows that were added, and when rows went."""

    def expect_warning(self, caught: list[Any], broken: bool) -> None:
        assert all(issubclass(one.category, UserWarning) for one in caught), [str(one.message) for one in caught]
        assert len(caught) <= 1
        if self.has_warned is not None and not self.envs.warning_is_open:
            assert len(caught) == (broken and not self.has_warned), [str(one.message) for one in caught]
        if caught or broken:
            self.has_warned = True

    @rule(what=st.integers(0, 7))
    def add_something_bad(self, what):
        places = copy.deepcopy(self.envs.places)
        step = self.envs.step(("go",) * ENVS, "fresh")
        self.envs.places = places
        arguments, mask = self.envs.arguments(step)
        count = self.config.num_envs + 1
        if what < 5:
            arguments[what] = torch.full((count, 7), float("nan"))
        elif what == 5:
            arguments[5] = {"final_obs": torch.zeros(count, 7)}
            arguments[3] = torch.ones(self.config.num_envs, dtype=torch.bool)
        elif what == 6:
            arguments[6] = torch.zeros(count, 7)
        else:
            mask = torch.ones(count, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"Nothing was"):
            self.storage.add(*arguments, mask=mask, **self.add_options(step))

    # ---------------------------------------------------------------------------------------------- learning

    def can_sample(self) -> bool:
        return bool(self.model.held())

    def serve(self, size: int | None = None) -> Any:
        """A batch, or None if there is nothing yet and the storage says so."""
        if not self.can_sample():
            with pytest.raises(NotReadyError):
                self.storage.sample() if size is None else self.storage.sample(size)
            return None
        return self.storage.sample() if size is None else self.storage.sample(size)

    def check(self, batch: Any, size: int) -> set[int]:
        """A batch is as the model has it; returns the places among the transitions that were served."""
        return match(read_batch(self.config, batch, size), self.model.transitions())

    @rule(size=st.one_of(st.none(), st.integers(1, 40)))
    def sample(self, size):
        batch = self.serve(size)
        if batch is not None:
            self.check(batch, self.config.batch_size if size is None else size)

    @rule()
    def sample_until_all_are_seen(self):
        self.see_all()

    def see_all(self) -> None:
        """With 30 draws a row, one that can be drawn is missed once in 10 ** 13 times."""
        expected = self.model.transitions()
        size = int((30 + math.log(len(expected) + 1)) * len(expected))
        batch = self.serve(max(1, size))
        if batch is not None:
            assert self.check(batch, size) == set(range(len(expected)))

    @rule(count=st.integers(1, 3), size=st.one_of(st.none(), st.integers(1, 9)), epochs=st.integers(1, 2))
    def generate_batches(self, count, size, epochs):
        if not self.can_sample():
            with pytest.raises(NotReadyError):
                next(iter(self.storage.generate_batches(count, size, epochs)))
            return
        served = 0
        for batch in self.storage.generate_batches(count, size, epochs):
            assert batch["rows"].dtype is torch.int64
            self.check(batch, self.config.batch_size if size is None else size)
            served += 1
        assert served == count * epochs

    @rule(size=st.integers(1, 6))
    def change_the_batch_size(self, size):
        self.storage.update_storage_parameter("batch_size", size)
        self.config = replace(self.config, batch_size=size)
        assert self.storage.batch_size == size

    # ---------------------------------------------------------------------------------------------- the whole

    @rule()
    def reset(self):
        self.storage.reset()
        self.model.reset()
        if any(place.is_after_end for place in self.envs.places):
            self.envs.forget()
        self.stored([])

    @rule(way=st.sampled_from(WAYS_TO_COPY), go_on=st.booleans())
    def go_on_with_a_copy(self, way, go_on):
        twin = {"copy": copy.deepcopy, "pickle": lambda s: pickle.loads(pickle.dumps(s)), "save": self.reload}[way](
            self.storage
        )
        assert type(twin) is type(self.storage)
        self.same_draws(twin)
        if go_on and self.goes_on_with_copies:
            self.storage, twin, self.has_warned = twin, self.storage, None
        twin.close()

    def reload(self, storage: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            storage.save(Path(folder) / "saved")
            return self.storage_class.load(Path(folder) / "saved")

    def same_draws(self, twin: Any) -> None:
        """A copy holds the same and draws the same."""
        self.check_data(twin.get_all_buffer_data())
        if self.can_sample():
            batches = [one.sample(5) for one in (self.storage, twin)]
            assert type(batches[0]) is type(batches[1])
            for one, other in zip(*batches, strict=True):
                assert same_nest(one, other)

    @rule(into=st.sampled_from(["itself", "another", "itself, emptied"]))
    def put_in_what_came_out(self, into):
        data, steps = self.storage.get_all_buffer_data(), self.model.by_lane()
        if into == "another":
            self.storage.close()
            self.storage, self.model, self.has_warned = self.new_storage(), self.new_model(), False
            self.adapt_new_storage()
        elif into == "itself, emptied":
            self.storage.reset()
            self.model.reset()
        if into != "itself":
            self.stored([])
            self.envs.forget()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whether to warn of data that do not fit together is left open
            self.storage.insert_data_slice(data)
        self.has_warned = None
        self.stored(self.model.append(steps), in_slice=True)
        for env, given in enumerate(steps):
            if given:
                self.envs.places[env] = self.place_after(given[-1])

    def adapt_new_storage(self) -> None:
        """Called when a new storage takes the place of one whose parameters were changed."""
        self.storage.update_storage_parameter("batch_size", self.config.batch_size)

    def place_after(self, step: Step) -> Place:
        return Place() if step.terminated or step.truncated else Place(step.following)

    # ---------------------------------------------------------------------------------------------- at all times

    @invariant()
    def everything_is_as_in_the_model(self):
        if not hasattr(self, "model"):
            return
        assert len(self.storage) == len(self.model.held())
        assert self.storage.full == self.model.is_full()
        self.check_data(self.storage.get_all_buffer_data())

    def check_data(self, data: dict[str, Any]) -> None:
        """All the data that a storage gives out are the model's, and there are no others."""
        lanes = self.model.by_lane()
        if not any(lanes):
            assert data == {}
            return
        steps, envs = max(map(len, lanes)), self.config.num_envs
        shape = (steps, envs)
        assert tuple(data["masks"].shape) == shape
        assert data["masks"].tolist() == [[time < len(lane) for lane in lanes] for time in range(steps)]
        reward_shape = (self.config.reward_size or 1,)
        assert tuple(data["rewards"].shape) == (*shape, *reward_shape)
        rewards = data["rewards"].tolist()
        flags = [data[name].reshape(shape).tolist() for name in ("terminated", "truncated")]
        seen, following = (
            self.config.kind.read(flattened(data[name], self.config.kind.space))
            for name in ("observations", "next_observations")
        )
        actions = self.config.action.read(data["actions"].flatten(0, 1))
        for env, lane in enumerate(lanes):
            for time, step in enumerate(lane):
                place = time * envs + env
                assert seen[place] == step.observation
                assert following[place] == step.following
                assert actions[place] == step.action
                assert tuple(rewards[time][env]) == step.reward
                assert (flags[0][time][env], flags[1][time][env]) == (step.terminated, step.truncated)


class TargetsMachine(ReplayMachine):
    """Adds what can be done where targets are folded over n steps."""

    @precondition(lambda self: hasattr(self, "model"))
    @rule(n_step=st.integers(1, 4), discount=st.sampled_from([0.25, 0.9, 1.0]))
    def change_the_targets(self, n_step, discount):
        n_step = min(n_step, self.config.capacity)
        self.storage.update_storage_parameter("n_step", n_step)
        self.storage.update_storage_parameter("discount", discount)
        self.config = replace(self.config, n_step=n_step, discount=discount)
        self.model.n_step, self.model.discount = n_step, discount
        self.targets_changed()

    def targets_changed(self) -> None:
        """Called when the same rows have other targets."""


def flattened(nest: Any, space: Any) -> Any:
    """The first two axes of every leaf made one."""
    if hasattr(space, "spaces"):
        if isinstance(space.spaces, dict):
            return {key: flattened(nest[key], part) for key, part in space.spaces.items()}
        return tuple(flattened(part, sub) for part, sub in zip(nest, space.spaces, strict=True))
    return nest.flatten(0, 1)


def same_nest(one: Any, other: Any) -> bool:
    """Two nests of tensors are equal to the bit, dtypes included."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_nest, one, other))
    if one is None:
        return other is None
    return set(one.keys()) == set(other.keys()) and all(same_nest(part, other[key]) for key, part in one.items())
