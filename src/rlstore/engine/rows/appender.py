"""Steps as callers give them, appended to a ring: the one path of every add."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.calls import warn_caller
from rlstore.engine.guard import uninterrupted
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.finals import ORDER, final_of_next_step, find_final, fit_final
from rlstore.engine.rows.schema import Field, as_tensor
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError, StorageClosedError
from rlstore.kernels import Guard, protocol
from rlstore.kernels.protocol import BUSY, DONE, NEEDS_EPISODES, NEEDS_ROOM, WRITTEN, WRITTEN_WITH_REPEAT
from rlstore.kernels.protocol import WRITTEN_WITH_BREAK as WRITTEN_WITH_BREAK

Kernels = tuple[protocol.WindowIndex | None, protocol.Priorities | None]
Fit = Callable[[], tuple[Tensor | None, ...]]
Write = Callable[[tuple[Any, ...]], int]


class Follower(Protocol):
    """What has to know of every row."""

    @property
    def kernels(self) -> Kernels:
        """The kernels that do all of :meth:`follow`."""
        ...

    def follow(self) -> None:
        """Take in the rows that were written since."""
        ...

    def begin(self, priorities: Any, mask: Any, lanes: range) -> Callable[[], None]:
        """Check the first priorities of the next rows of some lanes; returns what sets them once they are written."""
        ...


class Appender:
    """Appends steps to a ring, one step of all its lanes at a time.

    Several threads may append: a step and what follows from it is one call of a kernel, which nothing can interrupt, or
    (where that call cannot do it) several calls with the guard.

    Args:
        ring: The ring, or a part of it.
        fields: What a step consists of.
        guard: That of the storage.
        sampler: What draws from the ring; None for a part of it.
        whole: What draws from the ring of which this is a part, if that is done with the same guard.

    Attributes:
        warned: True once it has warned of observations that do not continue their episode.
        warned_of_repeat: True once it has warned of a step that repeats the final observation before it.
        settle: Called before rows change while batches are gathered; None if there is nothing to wait for.
        keep: Called after rows were written; None if they are kept nowhere else.
        permit: Called before a step that had to wait for the guard, during which another thread may have handed the
            lanes to a writer; it may raise. None while there can be no writers.
    """

    def __init__(
        self,
        ring: EpisodeRing,
        fields: StepFields,
        guard: Guard,
        sampler: Follower | None = None,
        whole: Follower | None = None,
    ) -> None:
        self._steps = array("q", [0])  # the kernel that appends alone counts here
        self.warned = self.warned_of_repeat = False
        self._odd_reward: Tensor | None = None  # of the last step that repeated a final observation
        self.ring, self.fields = ring, fields
        self.settle: Callable[[], None] | None = None
        self.keep: Callable[[], None] | None = None
        self.permit: Callable[[], None] | None = None
        self._guard, self._sampler, self._whole = guard, sampler, whole or sampler
        self._kernel: protocol.EpisodeRing | None = None
        self._direct: protocol.EpisodeRing | None = None  # the same, once it may append alone
        self._followers: Kernels = (None, None)  # what the kernel refers to that does all that follows from a step
        self._followed: protocol.EpisodeRing | None = None  # that kernel
        self._is_part, self._closed = ring.is_part, False
        self._watches = ring.is_shared
        self._is_plain = fields.structure.is_leaf and not fields.named  # one tensor each, and nothing by name
        self._no_final = (None,) * (len(fields.observations) + 1)
        self._columns_end = 2 * len(fields.observations) + len(fields.columns)
        self._places: list[Field] | None = None

    @property
    def added(self) -> int:
        """Steps that were appended."""
        return self._steps[0]

    @added.setter
    def added(self, count: int) -> None:
        self._steps[0] = count

    def append(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
        mask: Any,
        named: Mapping[str, Any],
        priorities: Any = None,
    ) -> None:
        """Append one step; everything is checked before anything is written.

        Args:
            observations: Before the step, ``[lanes, ...]``.
            actions: ``[lanes, ...]``.
            rewards: ``[lanes]``.
            terminateds: ``[lanes]``.
            truncateds: ``[lanes]``.
            infos: May hold final observations.
            next_observations: After the step.
            mask: False for lanes that take no part, or None.
            named: Recurrent states and extra fields by name.
            priorities: The first priorities of the rows, ``[lanes]``; None for the largest.
        """
        if self._is_plain and not named:
            values = (observations, next_observations, actions, rewards, terminateds, truncateds, mask, None, None)
        else:
            fields = self.fields
            columns = fields.named_columns(named, self.ring.lanes)
            leaves = (*fields.structure.leaves(observations), *fields.next_structure.leaves(next_observations))
            values = (*leaves, actions, rewards, *columns, terminateds, truncateds, mask, *self._no_final)
        # Looked at for nothing but the KEYS of final observations.
        if type(infos) is not dict or (infos and ("final_obs" in infos or "final_observation" in infos)):
            values = self._with_final(values, infos)
        kernel = self._direct if priorities is None else None
        outcome = BUSY if kernel is None else kernel.append(values)
        if outcome == WRITTEN:
            return
        if outcome not in DONE:
            with self._guard:
                if self.permit is not None:
                    self.permit()
                if outcome == BUSY and not self._is_part:
                    self._find_direct()
                if priorities is None:
                    outcome = self.write(values, outcome, infos)
                else:
                    begin = self.begin(priorities, mask)
                    with uninterrupted():
                        outcome = self.write(values, outcome, infos)
                        begin()
        self._warn_of(outcome)

    def begin(self, priorities: Any, mask: Any) -> Callable[[], None]:
        """Check the first priorities of the next step; returns what sets them once it is written."""
        if self._whole is None:
            raise InvalidInputError(
                'priorities were given to a writer of memory="shared", whose storage keeps them in its own process. '
                "New rows get the largest priority; change it with storage.update(). Nothing was written."
            )
        return self._whole.begin(priorities, mask, range(self.ring.first, self.ring.first + self.ring.lanes))

    def append_steps(
        self, values: tuple[Any, ...] | None, steps: int, fit: Fit, priorities: Any = None, mask: Any = None
    ) -> None:
        """Append several steps: see :meth:`write_steps`; or a single one with first priorities and their mask."""
        with self._guard:
            self.ring.require_room(steps)
            begin = None if priorities is None else self.begin(priorities, mask)
            with uninterrupted():
                outcome = self.write_steps(values, steps, fit, resumed=False)
                if begin is not None:
                    begin()
        self._warn_of(outcome)

    def _warn_of(self, outcome: int) -> None:
        """Say what is odd about a step that was written, once."""
        if outcome == WRITTEN_WITH_BREAK and not self.warned:
            self.warned = True
            warn_caller(_BROKEN, UserWarning)
        elif outcome == WRITTEN_WITH_REPEAT and not self.warned_of_repeat:
            lane, rewards = self.ring.repeated()
            if self.ring.autoreset is not None or self._are_of_resets(rewards):
                self.warned_of_repeat = True
                given = "" if rewards is None else f", with a reward of {rewards[1].numpy()!s}"
                remedy = _DETECTED if self.ring.autoreset is None else _SAME_STEP
                warn_caller(f"{_REPEATED.format(lane=lane, given=given)} {remedy}", UserWarning)

    def _are_of_resets(self, rewards: Tensor | None) -> bool:
        """Whether a step that repeats a final observation has the reward of a reset step that was changed.

        That of every reset step is the same. A task that goes on after a truncation repeats them, too, with rewards as
        those before.
        """
        if rewards is None:
            return False
        before, reward = rewards
        known, self._odd_reward = self._odd_reward, reward
        return known is not None and bool((reward == known).all() and (reward != before).any())

    def _find_direct(self) -> None:
        """Let the kernel append the next steps alone, if there is nothing to do that it does not do."""
        if self._sampler is None or self.keep is not None:
            return
        kernel = self._bind()
        if self._followed is kernel:
            self._direct = kernel

    def _with_final(self, values: tuple[Any, ...], infos: Any) -> tuple[Any, ...]:
        """The values of a step with the final observations that its infos hold; a kernel may read a single leaf."""
        found = find_final(infos)
        if found is None:
            return values
        if self.ring.autoreset == "NextStep":
            raise final_of_next_step(f"infos holds {found[0]!r}")
        if self.fields.structure.is_leaf:
            return (*values[:-2], found[1], None)
        return self._with_fitted_final(values, found)

    def _with_fitted_final(self, values: tuple[Any, ...], found: tuple[str, Any]) -> tuple[Any, ...]:
        key, final = found
        fields = self.fields
        fitted = fit_final(f"infos[{key!r}]", final, fields.structure, fields.observations, self.ring.lanes)
        return (*values[: -len(fitted)], *fitted)

    def cut_off(self) -> None:
        """End the open episodes without a flag: the next step of each lane begins another one, whatever it observes."""
        with self._guard:
            self.require_open()
            if self.permit is not None:
                self.permit()
            if self.settle is not None:
                self.settle()
            with uninterrupted():
                self.ring.cut_off()
                self._follow(0)

    def write(self, values: tuple[Any, ...], outcome: int = BUSY, infos: Any = None) -> int:
        """Write one step of all lanes, for a caller that has the guard; every value fits, or nothing is written.

        Args:
            values: The observation leaves, those of the next observations, the columns; whether the episode terminated
                and whether it was truncated ``[lanes]``; which lanes take part (None: all); the leaves of final
                observations, each None if there are none, and which lanes have one (None: all that end).
            outcome: Why the kernel did not write them, if it was asked already.
            infos: Where a single leaf of final observations is from that was not looked at yet.

        Returns:
            ``WRITTEN``; ``WRITTEN_WITH_BREAK`` if an episode was broken off: its observations did not continue, and no
            end was flagged; or ``WRITTEN_WITH_REPEAT`` if a step that is no reset step looks nearly like one.

        Raises:
            InvalidInputError: If a value does not fit.
        """
        kernel = self._kernel or self._bind()
        if self.settle is not None:
            self.settle()
        if self._followed is kernel:
            write: Write = kernel.write_held
        else:
            write = partial(self._write_apart, kernel)
        if outcome == BUSY:
            outcome = write(values)
        if outcome not in DONE:
            outcome = self._complete(write, values, outcome, infos)
        if self.keep is not None:
            self.keep()
        return outcome

    def _write_apart(self, kernel: protocol.EpisodeRing, values: tuple[Any, ...]) -> int:
        """Write one step, and then do what follows from it."""
        with uninterrupted():
            outcome = kernel.write(values)
            if outcome in DONE:
                self._follow(1)
        return outcome

    def write_steps(self, values: tuple[Any, ...] | None, steps: int, fit: Fit, *, resumed: bool) -> int:
        """Write several steps, for a caller that has the guard; all values fit, or nothing is written.

        Args:
            values: Those of :meth:`write`, ``[steps, lanes, ...]``; None to let them be fitted.
            steps: The number of steps.
            fit: Checks all values, and returns them as the ring takes them, if a kernel cannot read them.
            resumed: None of them is a reset step, and the first need not continue what is held.

        Returns:
            What :meth:`write` does: of a break in any step, else of a repeat in any.
        """
        done, result, checked = 0, WRITTEN, values is None
        values = fit() if values is None or steps == 0 else values
        while done < steps:
            if self.settle is not None:
                self.settle()
            # What is kept elsewhere is kept step by step, before anything of it can be overwritten.
            end = steps if self.keep is None else done + 1
            before, kernel = done, self._kernel or self._bind()
            with uninterrupted():
                done, outcome = kernel.write_steps(values, steps, done, end, resumed, checked)
                if done > before:
                    self._follow(done - before)
            if self.keep is not None and done > before:
                self.keep()
            if outcome in DONE:
                if outcome != WRITTEN and result != WRITTEN_WITH_BREAK:
                    result = outcome
            elif outcome >= 0:
                if checked:
                    raise RuntimeError(f"{self._place(outcome).name} was checked and does not fit its block")
                values, checked = fit(), True
            else:
                self._make_room(outcome)
            if done < steps and not checked:
                values, checked = fit(), True  # so that no other call converts all of them again
        return result

    def _follow(self, steps: int) -> None:
        """So many steps were written."""
        self._steps[0] += steps
        if self._watches:
            self.ring.catch_up()
        if self._sampler is not None:
            self._sampler.follow()

    def _bind(self) -> protocol.EpisodeRing:
        """The kernel that writes; it is bound once, unless others write too and may make tables grow."""
        self.require_open()
        kernel = self.ring.writing_kernel()
        self._kernel, self._watches = None if self.ring.is_part else kernel, self.ring.is_shared
        if self._sampler is not None and self._followed is not kernel:
            self._followers, whole = self._sampler.kernels, self.ring.kernel if self._watches else None
            steps = torch.frombuffer(self._steps, dtype=torch.int64)
            self._followed = kernel if kernel.guard_with(self._guard, steps, whole, *self._followers) else None
        return kernel

    def require_open(self) -> None:
        """Refuse to append after :meth:`close`."""
        if self._closed:
            raise StorageClosedError("this storage is closed. Nothing was written.")

    def close(self) -> None:
        """Append nothing any more."""
        self._closed, self._kernel, self._direct, self._followed = True, None, None, None

    def _complete(self, write: Write, values: tuple[Any, ...], outcome: int, infos: Any) -> int:
        """Bring a write to its end that has written nothing yet: convert values, and make room."""
        given, fitted = values, -1
        while outcome not in DONE:
            if outcome >= 0:
                # The kernel cannot read it: convert it if possible, else refuse it.
                is_final = outcome == self._columns_end + 3 and self.fields.structure.is_leaf  # nests are fitted
                found = find_final(infos) if is_final else None
                if found is not None:
                    values, infos, fitted = self._with_fitted_final(values, found), None, -1
                    outcome = write(values)
                    continue
                if outcome == fitted:
                    self._fit(outcome, given, check_rule=True)  # the kernel has found that it breaks the rule
                    raise RuntimeError(f"{self._place(outcome).name} was checked and still does not fit its block")
                fitting = self._fit(outcome, values)
                values, fitted = (*values[:outcome], fitting, *values[outcome + 1 :]), outcome
            else:
                self._make_room(outcome)
            outcome = write(values)
        return outcome

    def _make_room(self, outcome: int) -> None:
        """Do what has to be done before a kernel can write."""
        if outcome == NEEDS_ROOM:
            self.ring.make_room()
        else:
            self.ring.extend(episodes=outcome == NEEDS_EPISODES)

    def _place(self, index: int) -> Field:
        if self._places is None:
            self._places = self.fields.places(self.ring.lanes)
        return self._places[index]

    def _fit(self, index: int, values: tuple[Any, ...], *, check_rule: bool = False) -> Tensor:
        """The value at a place as the ring takes it, on its device."""
        field, value, ring, mask = self._place(index), values[index], self.ring, self._columns_end + 2
        if ring.lanes == 1 and value is not None:
            value = value if isinstance(value, (np.ndarray, Tensor)) else as_tensor(value, field.name)
            if tuple(value.shape) == field.shape or (len(value.shape) == 0 and field.shape == (1,)):
                value = value.reshape(1, *field.shape)
        if (field.is_flag or field.rule is not None) and index != mask and values[mask] is not None:
            value = field.without(value, self._fit(mask, values))
        try:
            fitted = field.fit(value, ring.lanes, ring.device, check_rule=check_rule)
        except InvalidInputError as error:
            self._refuse_others(field, value)
            has_shape = field.name == "actions" and self._is_plain and not getattr(value, "is_nested", False)
            if has_shape and tuple(getattr(value, "shape", ())) == (ring.lanes, *self._place(0).shape):
                raise InvalidInputError(f"{error} They have the shape of observations: {ORDER}") from error
            raise
        if type(fitted) is not Tensor:  # whose methods are the caller's: the kernel would ask them again
            with torch._C.DisableTorchFunctionSubclass():
                fitted = fitted.as_subclass(Tensor)
        # A single element counts as contiguous whatever its strides; the kernel needs plain ones.
        return fitted.clone(memory_format=torch.contiguous_format) if fitted.numel() == 1 else fitted

    def _refuse_others(self, field: Field, value: Any) -> None:
        """Refuse a step of other environments than those of this part."""
        ring = self.ring
        shape = tuple(as_tensor(value, field.name).shape) if ring.lanes < ring.whole.lanes else ()
        if shape and shape[0] != ring.lanes and shape[1:] == field.shape:
            last = ring.first + ring.lanes - 1
            own = f"environment {last}" if ring.lanes == 1 else f"environments {ring.first} to {last}"
            raise InvalidInputError(
                f"{field.name} has {shape[0]} rows; this writer has {own} only, of {ring.whole.lanes}. Nothing was "
                f"written. Give it the steps of its own, or make a writer of more: storage.writer({shape[0]})."
            )

    def __getstate__(self) -> dict[str, Any]:
        unbound = {"_kernel": None, "_direct": None, "_followed": None, "_followers": (None, None)}
        own = {**unbound, "keep": None, "permit": None}
        return {**self.__dict__, **own}


_BROKEN = (
    "the observations of an environment are not the next_observations given for it before, and no end was "
    "flagged there. "
    "The episode was taken to be cut off at that point: the step before keeps its own next observation, and n-step "
    "targets and sequences stop there. If you normalize or augment observations, add them as the environment "
    "gave them. (This warning is shown once.)"
)
_REPEATED = (
    "a step of environment {lane} begins with the observation in which its episode had ended{given}; it was stored as "
    "the first step of the next episode."
)
_DETECTED = (
    "That was so before, with the same reward. If the environments reset themselves in the step after an end, as "
    "Gymnasium's do by default, these steps are no experience, and are only recognized by a reward of 0: make the "
    'storage with autoreset=envs.metadata["autoreset_mode"]. If that is "SameStep", give add() the infos of every '
    'step, which hold final_obs. If you reset the environments yourself, use autoreset="Disabled". (This warning is '
    "shown once.)"
)
_SAME_STEP = (
    'With autoreset="SameStep" that is not the final observation, but the first of the next episode: give add() the '
    "infos of every step, which hold final_obs. If the environments reset themselves in the step after an end, as "
    'Gymnasium\'s do by default, make the storage with autoreset="NextStep". If an episode may end in the observation '
    'with which the next one begins, use autoreset="Disabled". (This warning is shown once.)'
)
