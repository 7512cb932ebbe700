"""The ten methods on DistributedStorage: a trainer that knows nothing of it can drive it from one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rlstore.distributed.base import DistributedBase
from rlstore.distributed.fields import RolloutFields
from rlstore.distributed.rows import Steps, batch_of, check_slice_names, rows_of, slice_of
from rlstore.engine.batches.select import epoch_rows
from rlstore.engine.checks import check_positive, check_seconds
from rlstore.engine.processes.slots import State
from rlstore.errors import InvalidInputError, NotReadyError, UnknownParameterError
from rlstore.storage import BatchDict, Sample


class DistributedTrainer(DistributedBase):
    """Slots in shared memory, and the ten methods on them."""

    # ---------------------------------------------------------------------------------------------- writing

    def init_tensors(self, sample: Sample) -> None:
        """Allocate the slots for samples like this one. If they are there already, the sample must fit them."""
        if self._memory is not None:
            Steps.of_sample(self._memory.fields, sample)
            return
        Steps.check_names(sample)
        fields = RolloutFields.of_sample(sample, self.state_shapes)
        Steps.of_sample(fields, sample)  # before anything is allocated for it
        self._allocate(fields)

    def insert_transition(self, sample: Sample) -> None:
        """Store one step of N environments, in the words of the vocabulary (see :mod:`rlstore.storage`).

        It takes ``observations``, ``actions``, ``rewards``, ``terminated``, ``truncated``, ``next_observations``; and
        may hold ``values``, ``distribution_params`` (which together are ``policy_outputs``) and, with
        ``state_shapes``, must hold ``hidden_states``: a tuple of ``[layers, N, hidden]``.

        Each environment has a slot of its own. Transition t goes to row t (the observation, and what the actor made of
        it) and to row t + 1 (the rest). After ``num_steps`` of them the rollouts are complete, and learners can have
        them. What the actor will make of the last row's observation is not known then: ``action``,
        ``policy_outputs`` and ``baseline`` are zero there.

        Raises:
            RolloutFullError: (an OverflowError) if there are not N free slots, and no learner to wait for. Nothing was
                written.
        """
        if self._memory is None:
            self.init_tensors(sample)
        memory = self._open_memory()
        steps = Steps.of_sample(memory.fields, sample)
        if self._spent:
            self._release()
        if not self._lanes:
            self._reserve_lanes(steps.lanes)
        elif steps.lanes != len(self._lanes):
            raise InvalidInputError(
                f"the sample has {steps.lanes} environments, and this rollout was begun with {len(self._lanes)}. "
                "Nothing was written."
            )
        with torch.inference_mode(False):
            self._carried = steps.write(memory, torch.tensor(self._lanes), self._step, self._carried)
        self._step += 1
        if self._step == self.max_size:
            for slot in self._lanes:
                memory.versions[slot] = memory.handoff.published
                self._inserter.commit(slot)
            self._lanes, self._step = [], 0

    # ---------------------------------------------------------------------------------------------- learning

    def before_gradients(self, actor: Any = None, algo: Any = None) -> None:
        """Nothing is to be prepared: the targets of rollouts that another policy made depend on the learner's own."""

    def after_gradients(
        self, actor: Any = None, algo: Any = None, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The rollouts that were served are learnt from: their slots are free, once their generator is done.

        It may also be called as ``after_gradients(batch, info)``.

        Returns:
            ``info`` with ``storage_size``, the transitions held.
        """
        if info is None:
            info = algo if isinstance(algo, dict) else {}
        self._spent = True
        if not self._serving:
            self._release()
        info["storage_size"] = len(self)
        return info

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1, shuffle: bool = True
    ) -> Iterator[BatchDict]:
        """Batches of whole rollouts, in the words of the vocabulary: tensors ``[num_steps, mini_batch_size, ...]``.

        The rollouts are those that were complete first, and stay the same until ``after_gradients``. If there are too
        few it waits for the actors that take part, if there are any.

        Args:
            num_mini_batch: Batches in each epoch.
            mini_batch_size: Rollouts in each; None shares out all there are. None comes twice in an epoch.
            num_epochs: Epochs, each with an order of its own.
            shuffle: False serves them in the order in which they were completed.

        Yields:
            Dicts; ``rows`` are ``t * num_storages + slot``, int64 ``[num_steps, mini_batch_size]``.
        """
        check_positive("generate_batches()", num_mini_batch=num_mini_batch, num_epochs=num_epochs)
        if mini_batch_size is not None:
            check_positive("generate_batches()", mini_batch_size=mini_batch_size)
        memory = self._open_memory()
        if self._spent and not self._serving:
            self._release()
        size = self._hold(num_mini_batch, mini_batch_size)
        held, self._serving = self._held, self._serving + 1
        try:
            for _ in range(num_epochs):
                order = epoch_rows(len(held), num_mini_batch * size, self._generator, shuffle=shuffle).tolist()
                for first in range(0, len(order), size):
                    if self._held[: len(held)] != held:
                        raise NotReadyError("the rollouts were given up while a generator was still serving them")
                    slots = [held[place] for place in order[first : first + size]]
                    with torch.inference_mode(False):
                        batch = batch_of(memory, self._gather(slots), slots, self._torch_device)
                    yield batch
        finally:
            self._serving -= 1
            if self._spent and not self._serving:
                self._release()

    # ---------------------------------------------------------------------------------------------- the whole

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> BatchDict:
        """Copies of all complete rollouts, ``[num_steps, rollouts, ...]``, by the names of the vocabulary.

        ``last_observations`` follow the last step. What the vocabulary has no word for comes beside it:
        ``last_actions``, ``episode_returns`` and ``episode_steps`` of each step, ``versions`` ``[rollouts]``,
        ``first_rows`` (what row 0 holds besides the observation) and ``last_rows`` (what the actor made of the last
        observation).
        """
        if self._memory is None:
            return {}
        self._open_memory()
        with self._all_slots() as slots, torch.inference_mode(False):
            if not slots:
                return {}
            return slice_of(
                self._memory, self._gather(slots), torch.device("cpu") if data_to_cpu else self._torch_device
            )

    def insert_data_slice(self, new_data: Sample) -> None:
        """Replace everything held with ``new_data``, of the form that ``get_all_buffer_data`` gives.

        It needs ``observations``, ``actions``, ``rewards``, ``terminated``, ``truncated``, and ``last_observations`` or
        ``next_observations``; the rest may be left out.
        """
        if not isinstance(new_data, Mapping):
            raise InvalidInputError(f"new_data is a {type(new_data).__name__}; give a dict. Nothing was changed.")
        if self._memory is None and new_data:
            check_slice_names(new_data)
            fields = RolloutFields.of_sample(new_data, self.state_shapes, 2)
            rows_of(fields, self.max_size, new_data)  # before anything is allocated for it
            self._allocate(fields)
        if self._memory is None:
            return
        memory = self._open_memory()
        rows = rows_of(memory.fields, self.max_size, new_data)
        counts, held = memory.handoff.slots.counts(), len(self._held) + len(self._lanes)
        room = counts[State.FREE] + counts[State.FULL] + held
        if rows.count > room:
            raise InvalidInputError(
                f"new_data holds {rows.count} rollouts; there is room for {room}. Nothing was changed."
            )
        self._empty()
        for index in range(rows.count):
            slot = self._inserter.reserve()
            rows.write(memory, slot, index)
            self._inserter.commit(slot)

    def reset(self) -> None:
        """Make the storage empty and its counts zero. What actors are writing is theirs, and comes when it is done."""
        if self._memory is not None:
            self._empty()
            self._memory.handoff.set_counts(0, 0, 0)

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Change ``batch_size`` or ``timeout``; or ``num_steps`` or ``num_storages``, which need new memory.

        Those can change only while the storage is empty and nobody else takes part.
        """
        owner = type(self).__name__
        if parameter_name == "timeout":
            check_seconds(owner, timeout=new_parameter_value)
            self.timeout = float(new_parameter_value)
            return
        if parameter_name not in ("batch_size", "num_steps", "num_storages"):
            raise UnknownParameterError(
                f"{owner} has no parameter {parameter_name!r}; it has ['batch_size', 'timeout', 'num_steps', "
                "'num_storages']. Nothing was changed."
            )
        check_positive(owner, **{parameter_name: new_parameter_value})
        if parameter_name == "batch_size":
            self.batch_size = int(new_parameter_value)
            return
        self._check_alone(parameter_name)
        old, before = self._memory, (self.max_size, self.num_storages)
        setattr(self, "max_size" if parameter_name == "num_steps" else parameter_name, int(new_parameter_value))
        try:
            if old is not None:
                self._allocate(old.fields)
                old.handoff.close()  # whoever still has a handle of it is told
        except Exception:
            self.max_size, self.num_storages = before
            raise
        self._carried = {}

    def _check_alone(self, name: str) -> None:
        if len(self):
            raise NotReadyError(
                f"{name} can change only while the storage is empty; it holds {len(self)} transitions. Call reset() "
                "first. Nothing was changed."
            )
        if self._memory is None:
            return
        peers = self._open_memory().handoff.peers
        others = [peers.describe(peer) for role in ("actor", "learner") for peer in peers.here(role)]
        if others:
            raise NotReadyError(
                f"{name} can change only while nobody else takes part: here are {', '.join(others)}. Nothing was "
                "changed."
            )
