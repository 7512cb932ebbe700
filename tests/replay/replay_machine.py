"""What the state machines of all replay storages share: any interleaving of calls, beside the plain Python model."""

from __future__ import annotations

import copy
import math
import pickle
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from replay_batches import ENVS, Config, each_leaf, flattened, match, read_batch, same_nest
from replay_envs import MOVES, STARTS, Envs, Place
from replay_model import ReplayModel, Step
from replay_world import FINAL_FORMS, Given

from rlstore import NotReadyError, RowNotHeldError

EXAMPLES = pytest.mark.parametrize(
    "examples", [25, pytest.param(1000, marks=[pytest.mark.torture, pytest.mark.timeout(3600)])]
)
EVERY_MOVE = st.tuples(*[st.sampled_from(MOVES)] * ENVS)
EVERY_FLAG = st.tuples(*[st.booleans()] * ENVS)
EVERY_START = st.sampled_from(STARTS)
SOME_ENVS = st.one_of(st.none(), st.none(), st.frozensets(st.integers(0, ENVS - 1), min_size=1))
# At which step of many something happens, to which environment, and what.
EVENTS = st.dictionaries(
    st.tuples(st.integers(0, 15), st.integers(0, ENVS - 1)), st.sampled_from(sorted(set(MOVES) - {"go"})), max_size=6
)
WHOLE = ["reset", "copy", "pickle", "save", "put into itself", "put into another", "put into itself, emptied"]


class ReplayMachine(RuleBasedStateMachine):
    """Drives a storage and its model through the same calls.

    A subclass has a rule that calls ``begin`` with a config, and says what ``sample`` must serve.
    """

    storage_class: Any = None
    goes_on_with_copies = True
    parameters: tuple[str, ...] = ("batch_size",)

    def begin(self, config: Config) -> None:
        self.config = config
        self.storage = self.new_storage()
        self.model = self.new_model()
        self.envs = Envs(config.kind, config.action, config.num_envs, config.autoreset, config.reward_size)
        self.has_warned = False
        self.looks = 0

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
        start=EVERY_START,
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

    @rule(count=st.integers(2, 16), events=EVENTS, only=SOME_ENVS, give_final=EVERY_FLAG, start=EVERY_START)
    def add_many(self, count, events, only, give_final, start):
        """Long episodes, in which little happens."""
        for number in range(count):
            moves = [events.get((number, env), "go") if only is None or env in only else "sit" for env in range(ENVS)]
            step = self.envs.step(moves, start, give_final)
            self.give(step, *self.envs.arguments(step))

    @rule(steps=st.lists(st.tuples(EVERY_MOVE, EVERY_START, st.booleans()), min_size=2, max_size=10))
    def add_many_kinds(self, steps):
        """Short episodes, in which much happens."""
        for moves, start, give_final in steps:
            step = self.envs.step(moves, start, (give_final,) * ENVS, "repeat")
            self.give(step, *self.envs.arguments(step, "arrays", "list"))

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
        """Called with the rows that were added, if any."""

    def emptied(self) -> None:
        """Called when the storage was reset, or a new one took its place."""

    def expect_warning(self, caught: list[Any], broken: bool) -> None:
        # Those of steps that repeat a final observation are looked at in test_autoreset_mistakes.py.
        caught = [one for one in caught if "in which its episode had ended" not in str(one.message)]
        assert all(issubclass(one.category, UserWarning) for one in caught), [str(one.message) for one in caught]
        assert len(caught) <= 1
        if not self.envs.warning_is_open:
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

    @rule(size=st.one_of(st.none(), st.integers(1, 40)), count=st.integers(0, 3), epochs=st.integers(1, 2))
    def sample(self, size, count, epochs):
        asked = self.config.batch_size if size is None else size
        if count == 0:
            batch = self.serve(size)
            if batch is not None:
                self.check(batch, asked)
            return
        batches = self.storage.generate_batches(count, size, epochs)
        if not self.can_sample():
            with pytest.raises(NotReadyError):
                next(iter(batches))
            return
        served = 0
        for batch in batches:
            assert batch["rows"].dtype is torch.int64
            self.check(batch, asked)
            served += 1
        assert served == count * epochs

    def see_all(self) -> None:
        """With 30 draws a row, one that can be drawn is missed once in 10 ** 13 times."""
        expected = self.model.transitions()
        size = int((30 + math.log(len(expected) + 1)) * len(expected))
        batch = self.serve(max(1, size))
        if batch is not None:
            assert self.check(batch, size) == set(range(len(expected)))

    @rule(
        batch_size=st.integers(1, 6),
        n_step=st.integers(1, 4),
        discount=st.sampled_from([0.25, 0.9, 1.0]),
        beta=st.sampled_from([0.0, 0.4, 1.0]),
    )
    def change_parameters(self, **values):
        values["n_step"] = min(values["n_step"], self.config.capacity)
        chosen = {name: values[name] for name in self.parameters}
        for name, value in chosen.items():
            self.storage.update_storage_parameter(name, value)
            assert getattr(self.storage, name) == value
        self.parameters_changed(**chosen)

    def parameters_changed(self, **values: Any) -> None:
        self.config = replace(self.config, **values)
        self.model.n_step, self.model.discount = self.config.n_step, self.config.discount

    # ---------------------------------------------------------------------------------------------- the whole

    @rule(what=st.sampled_from(WHOLE), go_on=st.booleans())
    def treat_as_a_whole(self, what, go_on):
        if what == "reset":
            self.reset()
        elif what.startswith("put into "):
            self.put_in_what_came_out(what.removeprefix("put into "))
        else:
            self.make_a_copy(what, go_on)

    def reset(self) -> None:
        self.storage.reset()
        self.model.reset()
        if any(place.is_after_end for place in self.envs.places):
            self.envs.forget()
        self.emptied()

    def make_a_copy(self, way: str, go_on: bool) -> None:
        if way == "copy":
            twin = copy.deepcopy(self.storage)
        else:
            twin = pickle.loads(pickle.dumps(self.storage)) if way == "pickle" else self.reload(self.storage)
        assert type(twin) is type(self.storage)
        self.same_draws(twin)
        if go_on and self.goes_on_with_copies:
            self.storage, twin = twin, self.storage
            if way == "save":
                self.model.resume()
                self.has_warned = False
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

    def put_in_what_came_out(self, into: str) -> None:
        data, steps = self.storage.get_all_buffer_data(), self.model.by_lane()
        if into == "another":
            self.storage.close()
            self.storage, self.model, self.has_warned = self.new_storage(), self.new_model(), False
            self.storage_replaced()
        elif into == "itself, emptied":
            self.storage.reset()
            self.model.reset()
        if into != "itself":
            self.emptied()
            self.envs.forget()
        self.storage.insert_data_slice(data)  # data that do not fit together are not warned of
        self.stored(self.model.append(steps), in_slice=True)
        for env, given in enumerate(steps):
            if given:
                self.envs.places[env] = self.place_after(given[-1])

    def storage_replaced(self) -> None:
        """Called when a new storage has taken the place of another."""

    def place_after(self, step: Step) -> Place:
        if not (step.terminated or step.truncated):
            return Place(step.following)
        return Place(None, step.following) if self.config.autoreset == "NextStep" else Place()

    # ---------------------------------------------------------------------------------------------- at all times

    @invariant()
    def everything_is_as_in_the_model(self):
        if not hasattr(self, "model"):
            return
        assert len(self.storage) == len(self.model.held())
        assert self.storage.full == self.model.is_full()
        self.check_data(self.storage.get_all_buffer_data())
        for size in (None, 16):
            batch = self.serve(size)
            if batch is not None:
                self.check(batch, size or self.config.batch_size)
        self.looks += 1
        if self.looks % 4 == 0:
            self.see_all()
        self.check_episodes()
        if self.looks % 3 == 0:
            self.check_rows()

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

    # ---------------------------------------------------------------------------------------------- a look inside

    def check_episodes(self) -> None:
        """The listing is the model's; and so are the fields of one of the episodes, another one each time."""
        listed, found = self.storage.episodes(), []
        totals = [total if self.config.reward_size else [total] for total in listed.returns.tolist()]
        columns = (listed.envs, listed.lengths, listed.terminated, listed.truncated, listed.is_over, listed.is_whole)
        for total, *rest in zip(totals, *(column.tolist() for column in columns), strict=True):
            found.append((tuple(total), *rest))
        expected, steps_of = [], []
        for held, episode in self.model.held_episodes():
            last, rewards = held[-1], [step.reward for step in held]
            ends = (last.terminated, last.truncated) if episode.over else (False, False)
            is_whole = len(held) == len(episode.steps)
            total = tuple(map(sum, zip(*rewards, strict=True)))
            expected.append((total, last.env, len(held), *ends, episode.over, is_whole))
            steps_of.append(held)
        assert found == expected
        if not found:
            return
        place = self.looks % len(listed)
        episode, held = listed[place], steps_of[place]
        assert episode.rows.tolist() == [self.model.row_of(step) for step in held]
        assert episode.length == len(episode) == len(held)
        assert tuple(episode.rewards.shape) == (len(held), *[self.config.reward_size] * bool(self.config.reward_size))
        self.check_steps({name: episode[name] for name in episode.names}, held)
        kind = self.config.kind
        final = each_leaf(episode.final_observations, kind.space, lambda leaf: leaf.unsqueeze(0))
        assert kind.read(final) == [held[-1].following]

    def check_rows(self) -> None:
        """What can be read by row ids is what the model holds; and others are refused."""
        rows = self.storage.held_rows().tolist()
        held = sorted(self.model.held(), key=self.model.row_of)
        assert rows == [self.model.row_of(step) for step in held]
        steps = self.storage[rows]
        assert not rows or tuple(steps["rewards"].shape[1:]) == (self.config.reward_size or 1,)
        if rows:
            self.check_steps(steps, held)
        beside = {rows[0] - self.config.num_envs, rows[-1] + self.config.num_envs} if rows else {0}
        for row in beside - set(rows):
            with pytest.raises(RowNotHeldError, match=f"row {row} "):
                self.storage[[*rows, row]]

    def check_steps(self, found: dict[str, Any], steps: list[Step]) -> None:
        """Fields that were read, ``[steps, ...]``, are those of these steps."""
        kind = self.config.kind
        assert kind.read(found["observations"]) == [step.observation for step in steps]
        assert kind.read(found["next_observations"]) == [step.following for step in steps]
        assert self.config.action.read(found["actions"]) == [step.action for step in steps]
        rewards = found["rewards"].reshape(len(steps), -1)
        assert [tuple(reward) for reward in rewards.tolist()] == [step.reward for step in steps]
        for name in ("terminated", "truncated"):
            assert found[name].flatten().tolist() == [getattr(step, name) for step in steps]


def explore(machine: type[ReplayMachine], examples: int) -> None:
    """Try so many interleavings of calls."""
    limits = settings(
        max_examples=examples, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=limits)
