"""The ten methods on replay: a trainer that knows nothing of it can drive it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlstore.engine.batches.staging import moved
from rlstore.engine.batches.transitions import Part, Request, TransitionGather
from rlstore.engine.checks import check_fraction, check_positive
from rlstore.engine.rows.finals import fit_final
from rlstore.engine.rows.schema import Field, as_tensor
from rlstore.engine.rows.spaces import SpaceLike
from rlstore.errors import InvalidInputError, NotReadyError, UnknownParameterError
from rlstore.replay.saved import SavedReplay
from rlstore.storage import BatchDict, Sample

# What one step of get_all_buffer_data and insert_data_slice holds, and which of it a sample may lack.
_STEP = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations")
_OPTIONAL = ("final_observations", "masks")


class OffPolicyStorage(SavedReplay):
    """Replay, and the ten methods on it."""

    # What update_storage_parameter may change, besides the size.
    _sizes: ClassVar[tuple[str, ...]] = ("batch_size",)
    _fractions: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def _as_dict(self, batch: Any) -> BatchDict:
        """A batch in the words of the vocabulary."""

    @classmethod
    def create_factory(  # type: ignore[override]
        cls,
        size: int,
        observation_space: SpaceLike | None = None,
        action_space: SpaceLike | None = None,
        num_envs: int | None = None,
        **arguments: Any,
    ) -> Callable[..., Any]:
        """A function ``f(device, actor, algorithm)`` that makes storages of ``size`` transitions.

        Without spaces they learn the number of environments and all shapes from their first sample. Other arguments are
        those of the class, by keyword.
        """

        def create(device: str | torch.device = "cpu", actor: Any = None, algorithm: Any = None) -> Any:
            given: dict[str, Any] = {"device": device, "storage_size": size, "num_envs": num_envs, **arguments}
            storage = cls(observation_space, action_space, **given)
            storage._give(actor, algorithm)
            return storage

        return create

    # ---------------------------------------------------------------------------------------------- writing

    @property
    def _sample_names(self) -> tuple[str, ...]:
        return (*_STEP, *_OPTIONAL, *(("hidden_states",) if self._fields.hidden_shapes else ()))

    def init_tensors(self, sample: Sample) -> None:
        """Allocate the blocks for samples like this one. If they are there already, the sample must fit them."""
        self._check_names(sample, _STEP)
        blank = dict(self.__dict__)
        try:
            if self._replay is not None:
                self._fit_steps(sample, (), self._replay.lanes)
                return
            num_envs = self._fields.read_sample(sample)
            if self.num_envs not in (None, num_envs):
                raise InvalidInputError(
                    f"the first sample has {num_envs} environments, and num_envs is {self.num_envs}"
                )
            self._fit_steps(sample, (), num_envs)  # before anything is allocated for it
            self._allocate(num_envs)
        except Exception:
            self.__dict__ = blank  # a sample that is refused leaves no shapes behind
            raise

    def insert_transition(self, sample: Sample) -> None:
        """Store one step of all environments, in the words of the vocabulary (see :mod:`rlstore.storage`).

        It takes ``observations``, ``actions``, ``rewards``, ``terminated``, ``truncated``, ``next_observations``; and
        may hold ``final_observations``, read where an episode ended, and ``masks``, False for environments that sat
        out.
        """
        if self._replay is None:
            self.init_tensors(sample)
        self._check_names(sample, _STEP)
        final, infos = sample.get("final_observations"), {}
        if final is not None:
            infos = {"final_obs": final}
        self._write(
            sample["observations"],
            sample["actions"],
            sample["rewards"],
            self._hidden_of(sample.get("hidden_states")),
            sample["terminated"],
            sample["truncated"],
            infos,
            sample["next_observations"],
            sample.get("masks"),
        )

    def _hidden_of(self, hidden_states: Any) -> tuple[Any, ...]:
        """Recurrent states, ``[layers, envs, hidden]`` each, as a row holds them."""
        shapes = self._fields.hidden_shapes
        states = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        if hidden_states is None and not shapes:
            states = ()
        if len(states) != len(shapes):
            raise InvalidInputError(
                f"hidden_states holds {len(states)} states; this storage holds {len(shapes)}, fixed by its "
                f"hidden_shape. "
                "Nothing was written."
            )
        fitted = []
        for index, (state, shape) in enumerate(zip(states, shapes, strict=True)):
            given, lanes = as_tensor(state, f"hidden_states[{index}]"), self._ring_of().lanes
            if tuple(given.shape) != (shape[0], lanes, shape[1]):
                raise InvalidInputError(
                    f"hidden_states[{index}] is {tuple(given.shape)}; this storage holds [layers, envs, hidden] = "
                    f"{(shape[0], lanes, shape[1])}, fixed by its hidden_shape. Nothing was written."
                )
            fitted.append(given.transpose(0, 1))
        return tuple(fitted)

    def _check_names(self, sample: Sample, needed: tuple[str, ...]) -> None:
        owner = type(self).__name__
        if not isinstance(sample, Mapping):
            raise InvalidInputError(f"a sample is a {type(sample).__name__}; give a dict. Nothing was written.")
        unknown = [name for name in sample if name not in self._sample_names]
        missing = [name for name in needed if sample.get(name) is None]
        if unknown or missing:
            problem = f"cannot hold {unknown}" if unknown else f"needs {missing}"
            raise InvalidInputError(
                f"a sample for {owner} {problem}; it takes {list(self._sample_names)}. Nothing was written."
            )

    # ---------------------------------------------------------------------------------------------- learning

    def before_gradients(self, actor: Any = None, algo: Any = None) -> None:
        """Nothing is to be prepared: targets are made when a batch is read."""

    def after_gradients(
        self, actor: Any = None, algo: Any = None, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Take what was learnt. It may also be called as ``after_gradients(batch, info)``.

        Returns:
            ``info`` with ``storage_size``, the transitions held.
        """
        if info is None:
            info = algo if isinstance(algo, dict) else {}
        self._learn(actor if isinstance(actor, Mapping) else {}, info)
        info["storage_size"] = len(self)
        return info

    def _learn(self, batch: Mapping[str, Any], info: dict[str, Any]) -> None:
        """Take what the learner tells of a batch."""

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1
    ) -> Iterator[BatchDict]:
        """``num_mini_batch * num_epochs`` batches drawn at random, in the words of the vocabulary.

        Args:
            num_mini_batch: Batches in each epoch.
            mini_batch_size: Rows (or sequences) in each; None takes the storage's ``batch_size``.
            num_epochs: Epochs; there is nothing that sets one apart from the next.
        """
        check_positive("generate_batches()", num_mini_batch=num_mini_batch, num_epochs=num_epochs)
        if mini_batch_size is not None:
            check_positive("generate_batches()", mini_batch_size=mini_batch_size)
        size = self.batch_size if mini_batch_size is None else int(mini_batch_size)
        for _ in range(num_mini_batch * num_epochs):
            drawn, tensors = self._take(size)
            batch = self._as_dict(self._batch(drawn, tensors))
            if "rows" not in batch:
                batch["rows"] = moved(drawn.rows, self._torch_device)
            yield batch

    # ---------------------------------------------------------------------------------------------- the whole

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> BatchDict:
        """Copies of everything held, ``[steps, envs, ...]`` by the names of the vocabulary, the oldest step first.

        An environment that holds fewer steps than another is filled up with zeros, as ``masks`` tells.
        """
        with self._paused():
            return self._whole_data(data_to_cpu) if len(self) else {}

    def _whole_data(self, data_to_cpu: bool) -> BatchDict:
        ring, fields = self._ring_of(), self._fields
        held = ring.held()
        steps, place = int(held.max()), "cpu" if data_to_cpu else self._torch_device
        step, lane = torch.arange(steps, device=ring.device).unsqueeze(1), torch.arange(ring.lanes, device=ring.device)
        rows = torch.where(step < held, (ring.written - held + step) * ring.lanes + lane, -1)
        requests = self._whole_requests()
        tensors = [
            tensor.to(place).unflatten(0, (steps, ring.lanes))
            for tensor in TransitionGather(ring, requests, 1, 1.0)(rows.flatten().contiguous())
        ]
        count = len(fields.observations)
        shape = (steps, ring.lanes)
        data = {
            "observations": fields.structure.build(tensors[:count], shape),
            "next_observations": fields.structure.build(tensors[count : 2 * count], shape),
            **dict(zip(("actions", "rewards", "terminated", "truncated"), tensors[2 * count :], strict=False)),
            "masks": (rows >= 0).to(place),
        }
        hidden = tensors[2 * count + 4 :]
        if hidden:
            states = tuple(state.transpose(1, 2) for state in hidden)  # [steps, layers, envs, hidden]
            data["hidden_states"] = states if len(states) > 1 else states[0]
        return data

    def _whole_requests(self) -> list[Request]:
        fields = self._fields
        kinds = (Part.OBSERVATION, Part.NEXT_OBSERVATION)
        leaves = [Request(kind, i, f.shape, f.dtype) for kind in kinds for i, f in enumerate(fields.observations)]
        columns = [Request(Part.COLUMN, i, c.shape or (1,) * (i == 1), c.dtype) for i, c in enumerate(fields.columns)]
        flags = [Request(part, 0, (1,), torch.bool) for part in (Part.TERMINATED, Part.TRUNCATED)]
        return [*leaves, *columns[:2], *flags, *columns[2:]]

    def insert_data_slice(self, new_data: Sample) -> None:
        """Append data of the form that ``get_all_buffer_data`` gives, ``[steps, envs, ...]``, the oldest step first."""
        if not isinstance(new_data, Mapping):
            raise InvalidInputError(f"new_data is a {type(new_data).__name__}; give a dict. Nothing was changed.")
        if not new_data:
            return
        self._check_names(new_data, _STEP)
        if "final_observations" in new_data:
            raise InvalidInputError(
                "new_data needs no final_observations: its next_observations are. Nothing was changed."
            )
        first = as_tensor(new_data["rewards"], "rewards")
        if first.dim() < 2:
            raise InvalidInputError(f"rewards is {tuple(first.shape)}; give [steps, envs, ...]. Nothing was changed.")
        if self._replay is None:
            self.init_tensors({name: _at(value, 0) for name, value in new_data.items()})
        self._require_no_writers()
        ring, count = self._ring_of(), len(self._fields.observations)
        values = self._fit_steps(new_data, (first.shape[0],), ring.lanes)
        before = int(ring.written.sum())
        if self._ahead is not None:
            self._ahead.settle()
        for step in range(first.shape[0]):
            row = tuple(None if value is None else value[step] for value in values)
            # None of these is a reset step.
            ring.after_end[... if row[-1] is None else row[-1].to(ring.device) != 0] = -1
            ring.write((*row, *row[count : 2 * count], None))
            self._added += 1
            self._follow()
        self._count_slice(int(ring.written.sum()) - before)

    def _fit_steps(self, data: Sample, lead: tuple[int, ...], lanes: int) -> tuple[Tensor | None, ...]:
        """The values of steps ``[*lead, envs, ...]`` as a ring takes them, or an error; nothing is written."""
        fields = self._fields
        place = torch.device("cpu") if self._replay is None else self._replay.device

        def fit(field: Field, value: Any) -> Tensor:
            given = as_tensor(value, field.name)
            if given.shape[: len(lead)] != lead:
                raise InvalidInputError(
                    f"{field.name} is {tuple(given.shape)}; it has to begin with {(*lead, lanes)}, as rewards do. "
                    "Nothing was changed."
                )
            flat = given.flatten(0, len(lead)) if lead and given.dim() > 1 else given
            count = lanes * (lead[0] if lead else 1)
            fitted: Tensor = field.fit(flat, count, place).unflatten(0, (*lead, lanes))
            return fitted

        def flag(name: str) -> Field:
            return Field(name, (), torch.uint8, f"num_envs={lanes}", is_flag=True)

        leaves = [
            fit(field, leaf)
            for name, structure in (("observations", fields.structure), ("next_observations", fields.next_structure))
            for field, leaf in zip(fields.observations, structure.leaves(data[name]), strict=True)
        ]
        columns = [
            fit(column, data[name]) for column, name in zip(fields.columns, ("actions", "rewards"), strict=False)
        ]
        states = data.get("hidden_states")
        states = states if isinstance(states, tuple) or states is None else (states,)
        if fields.hidden_shapes and (states is None or len(states) != len(fields.hidden_shapes)):
            raise InvalidInputError(
                f"hidden_states has to hold {len(fields.hidden_shapes)} states. Nothing was changed."
            )
        columns += [
            fit(column, as_tensor(state, column.name).transpose(len(lead), len(lead) + 1))
            for column, state in zip(fields.columns[2:], states or (), strict=True)
        ]
        flags = [fit(flag(name), data[name]) for name in ("terminated", "truncated")]
        masks = None if data.get("masks") is None else fit(flag("masks"), data["masks"])
        if not lead and data.get("final_observations") is not None:
            fit_final("final_observations", data["final_observations"], fields.structure, fields.observations, lanes)
        return (*leaves, *columns, *flags, masks)

    # ---------------------------------------------------------------------------------------------- parameters

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Change a parameter; ``storage_size`` only while the storage is empty."""
        owner = type(self).__name__
        if parameter_name in self._sizes:
            check_positive(owner, **{parameter_name: new_parameter_value})
            self._change(parameter_name, int(new_parameter_value))
        elif parameter_name in self._fractions:
            check_fraction(owner, **{parameter_name: new_parameter_value})
            self._change(parameter_name, float(new_parameter_value))
        elif parameter_name == "rate_limit":
            self.set_rate_limit(new_parameter_value)
        elif parameter_name == "storage_size":
            check_positive(owner, storage_size=new_parameter_value)
            if len(self):
                raise NotReadyError(
                    f"storage_size can change only while the storage is empty; it holds {len(self)} transitions. "
                    "Call reset() first. Nothing was changed."
                )
            if self._memory == "mapped":
                raise InvalidInputError(
                    "the size of a mapped storage is fixed by its folder; make another one. Nothing was changed."
                )
            self._change(parameter_name, int(new_parameter_value))
        else:
            known = [*self._sizes, *self._fractions, "rate_limit", "storage_size"]
            raise UnknownParameterError(
                f"{owner} has no parameter {parameter_name!r}; it has {known}. Nothing was changed."
            )

    def _change(self, name: str, value: Any) -> None:
        blank = dict(self.__dict__)
        try:
            setattr(self, name, value)
            if self._replay is None:
                return
            if name == "storage_size":
                self.max_size = value
                self._allocate(self._replay.lanes)
            else:
                self._check_longest(self._replay.steps, self._replay.lanes)
                self._bind()
        except Exception:
            self.__dict__ = blank
            raise


def _at(value: Any, index: int) -> Any:
    """Entry ``index`` of each tensor in a nest."""
    if isinstance(value, tuple):
        return tuple(_at(part, index) for part in value)
    if isinstance(value, dict):
        return {key: _at(part, index) for key, part in value.items()}
    return value[index]
