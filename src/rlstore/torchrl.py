"""A replay buffer for TorchRL's TensorDicts: ``extend``, ``sample``, ``update_tensordict_priority``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from rlstore import PrioritizedReplayStorage, ReplayStorage
from rlstore.engine.batches.pipeline import Part, Request
from rlstore.engine.calls import explained
from rlstore.engine.checks import check_path, check_positive
from rlstore.engine.disk.journal import Journal, as_journal
from rlstore.engine.disk.snapshot import SnapshotReader, snapshot_files, write_snapshot_files
from rlstore.engine.rows.schema import as_tensor
from rlstore.errors import InvalidInputError, NotReadyError, SnapshotError
from rlstore.replay.tensordicts import Key, entry, insert_steps, sample_windows

__all__ = ["ReplayBuffer"]

_FLAGS = ("done", "terminated", "truncated")
_STEPS = "steps_to_next_obs"
# The first extra field: the flags as they were given. A storage itself knows an end where any of them is set.
_ENDS = "next_flags"
_ENDS_FORM = {"shape": [len(_FLAGS)], "dtype": torch.bool}
_ENDS_ASKED = (Request(Part.COLUMN, 2, (len(_FLAGS),), torch.bool),)  # behind actions and rewards
# Entries that are no observations and no extra fields: what is stored otherwise, and what a sample holds of its own.
_OTHERS = frozenset(
    [("action",), ("next", "reward"), ("index",), ("_weight",), ("priority_weight",)]
    + [place for name in _FLAGS for place in ((name,), ("next", name))]
)
_SETTINGS = {"size": "storage_size", "num_envs": "num_envs", "n_step": "n_step", "gamma": "discount", "alpha": "alpha"}
_Storage = ReplayStorage | PrioritizedReplayStorage


class ReplayBuffer:
    """Transitions as TorchRL's collectors return them, in place of its ``TensorDictReplayBuffer``.

    Entries that are both at the root and under "next" (``observation`` and the like) are observations, of which each is
    stored once. ``action``, ``("next", "reward")`` and the flags ``("next", "done")``, ``("next", "terminated")`` and
    ``("next", "truncated")`` are known. Not stored are flags at the root, and ``index``, ``priority_weight`` and
    ``_weight``, which a sample has of its own; with ``alpha``, ``priority_key`` becomes priorities. All other entries
    are stored as they are; in an n-step transition they are those of the first step. Which entries there are, and their
    shapes and dtypes, is taken from the first data, and later data have to have the same. Rewards are float32.

    Args:
        size: The number of transitions held, over all environments; then the oldest are overwritten.
        num_envs: The number of environments that the data are from.
        batch_size: Transitions in a sample, where ``sample`` is given no number.
        n_step: Steps over which rewards are summed before the bootstrap.
        gamma: The discount factor of that sum.
        alpha: The exponent of the priorities; None draws uniformly.
        beta: The exponent of the importance weights: 1 corrects the bias completely.
        eps: Added to every priority, so that none is 0.
        priority_key: The entry that holds priorities.
        device: The device of the data and of the samples.
        seed: The seed of the random generator; None draws one from torch's default generator.
        journal: A folder, new or empty, to which a thread commits the data every two seconds, or a
            :class:`~rlstore.Journal` with other options; :meth:`loads` goes on with it. None for no journal.
    """

    @explained
    def __init__(
        self,
        size: int,
        *,
        num_envs: int = 1,
        batch_size: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        alpha: float | None = None,
        beta: float = 0.4,
        eps: float = 1e-8,
        priority_key: Key = "td_error",
        device: str | torch.device = "cpu",
        seed: int | None = None,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> None:
        check_positive("ReplayBuffer", size=size, num_envs=num_envs)
        if batch_size is not None:
            check_positive("ReplayBuffer", batch_size=batch_size)
        if not eps >= 0:
            raise InvalidInputError(f"eps is {eps!r}; ReplayBuffer needs a number that is not negative")
        self.num_envs, self.batch_size, self.eps, self.priority_key = num_envs, batch_size, eps, priority_key
        self._options: dict[str, Any] = {"n_step": n_step, "discount": gamma, "device": device, "seed": seed}
        self._options.update(storage_size=size, num_envs=num_envs, autoreset="Disabled")
        self._is_prioritized = alpha is not None
        if self._is_prioritized:
            self._options.update(alpha=alpha, beta=beta)
        self._journal = as_journal("ReplayBuffer", journal)
        self._kind: Any = PrioritizedReplayStorage if self._is_prioritized else ReplayStorage
        self._kind(None, None, **self._options)  # which checks them: the storage is made for the first data
        self._storage: _Storage | None = None
        self._layout: _Layout | None = None  # there are both or neither

    @property
    def storage(self) -> _Storage:
        """The storage that holds the data, which is made with the first of them.

        Entries that are no observations are its extra fields: ``td_cost`` holds ``cost``, and ``td_nextQ_cost``
        ``("next", "cost")``. ``next_flags`` holds the flags under "next" as they were given.
        """
        if self._storage is None:
            raise NotReadyError(
                "this ReplayBuffer is empty, and its storage is made with the first data: call extend() or add(), or "
                "loads() what was saved. Nothing was changed."
            )
        return self._storage

    def __len__(self) -> int:
        """Transitions held now."""
        return 0 if self._storage is None else len(self._storage)

    # ---------------------------------------------------------------------------------------------- writing

    def extend(self, data: TensorDictBase) -> Tensor:
        """Append steps of all environments; everything is checked before anything is written.

        A step that does not begin with the observation in which the one before it ended, or after an end, begins a new
        episode.

        Args:
            data: TensorDict ``[num_envs, steps]``, or flattened to ``[num_envs * steps]``; of one environment
                ``[steps]``. Steps are in the order of time. With ``alpha``, an entry ``priority_key`` is their first
                priorities; without it they get the largest so far.

        Returns:
            The row of each, as ``index`` of a sample has it, int64 of the shape of ``data``.

        Raises:
            InvalidInputError: (a ValueError) if an entry is missing, of another shape, or was not in the first data.
        """
        for key in ("action", ("next", "reward")):
            entry(data, key, "data")
        shape = self._shape(data)
        layout = self._layout_of(data)
        priorities = self._first_priorities(data)
        steps = _by_time(data, shape)
        sample = _sample(steps, layout)
        storage = self._new_storage(layout, steps) if self._storage is None else self._storage
        rows = insert_steps(storage, sample).transpose(0, 1)
        if priorities is not None:
            storage.update(rows.flatten(), priorities)
        if self._storage is None:
            self._begin_journal(storage)
            self._storage, self._layout = storage, layout
        return rows.reshape(data.shape)

    def _layout_of(self, data: TensorDictBase) -> _Layout:
        """Which entries of the data are what: those of the first data, and no others."""
        keys = _stored_keys(data, self.priority_key if self._is_prioritized else None)
        if _STEPS in keys and self._options["n_step"] > 1:
            raise InvalidInputError(
                f"data has {_STEPS!r}: its rewards are sums over steps already, and this ReplayBuffer would sum them "
                f"over n_step={self._options['n_step']} again. Leave MultiStep out, or give n_step=1. "
                "Nothing was written."
            )
        if self._layout is None:
            return _first_layout(data, keys)
        unknown = [key for key in keys if key not in self._layout.keys]
        if unknown:
            raise InvalidInputError(
                f"data has {unknown}, which the first data did not have, and there is no place for it. Leave it out "
                "with data.exclude(), or make another ReplayBuffer. Nothing was written."
            )
        return self._layout

    def _new_storage(self, layout: _Layout, steps: TensorDictBase) -> _Storage:
        """An empty storage for data like these."""
        forms: dict[str, Any] = {_ENDS: _ENDS_FORM}
        forms.update((name, (layout.extra_shapes[name], steps.get(key).dtype)) for name, key in layout.extra.items())
        reward_shape = tuple(steps.get(("next", "reward")).shape[2:])
        reward_shape = () if reward_shape == (1,) else reward_shape
        storage: _Storage = self._kind(None, None, **self._options, extra_fields=forms, reward_shape=reward_shape)
        return storage

    def _begin_journal(self, storage: _Storage) -> None:
        """The first data are in the storage: what is refused before leaves nothing in the folder of the journal."""
        try:
            storage._begin_journal(self._journal)
        except InvalidInputError as error:
            raise InvalidInputError(f"{error} To go on with it here, call loads() of its folder first.") from error

    def add(self, data: TensorDictBase) -> Tensor:
        """Append one step.

        Args:
            data: A TensorDict ``[]``, or of several environments ``[num_envs]``.

        Returns:
            Its row or rows.
        """
        entry(data, "action", "data")
        expected = (self.num_envs,) if data.ndim else ()
        if tuple(data.shape) != expected or (self.num_envs > 1 and not data.ndim):
            raise InvalidInputError(
                f"data is {tuple(data.shape)}; add() takes one step of {self.num_envs} environments, and extend() "
                "several. Nothing was written."
            )
        return self.extend(data.reshape(-1)).reshape(data.shape)

    def _shape(self, data: TensorDictBase) -> tuple[int, int]:
        """The number of environments and of steps."""
        given, envs = tuple(data.shape), self.num_envs
        count = math.prod(given)  # numel() of an empty TensorDict is 1
        if not 1 <= len(given) <= 2 or count == 0 or count % envs or (len(given) == 2 and given[0] != envs):
            raise InvalidInputError(
                f"data is {given}; give [num_envs, steps], num_envs={envs}, or flattened to [num_envs * steps]. "
                "Nothing was written."
            )
        return envs, count // envs

    # ---------------------------------------------------------------------------------------------- reading

    @torch.inference_mode(False)  # a batch is trained on
    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Draw transitions: a TensorDict ``[batch]`` with the entries of the data, and some more.

        For a window of k steps, ``("next", "reward")`` is ``sum_{i<k} gamma^i r_i``, and the other entries under "next"
        are those after its last step; flags and rewards are ``[batch, 1]``. Besides there are

        - ``index`` int64 ``[batch]``: the row, for ``update_priority``;
        - with priorities ``priority_weight`` and ``_weight``, the same tensor, ``[batch]``: importance weights divided
          by the largest of the batch;
        - with ``n_step`` above 1 ``steps_to_next_obs`` int64 ``[batch, 1]``: k, which TorchRL's losses read.

        Args:
            batch_size: The number of transitions; None for that given to the buffer.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise InvalidInputError("batch_size is None; give it to sample() or to ReplayBuffer()")
        if batch_size is not None:
            check_positive("sample()", batch_size=batch_size)
        storage = self.storage
        # Flags are those of the last step of a window, and so in the batch where that is the only one.
        batch, steps, ends = sample_windows(storage, size, () if storage.n_step == 1 else _ENDS_ASKED)
        assert self._layout is not None  # there is a storage
        served = batch["observations"].set("action", batch["actions"])
        following = batch["next_observations"].set("reward", batch["rewards"])
        for name, flag in zip(_FLAGS, (ends[0] if ends else batch[_ENDS]).split(1, dim=1), strict=True):
            following.set(name, flag)
        served.set("next", following).set("index", batch["rows"])
        for name, key in self._layout.extra.items():
            served.set(key, batch[name].reshape(size, *self._layout.extra_shapes[name]))
        if self._is_prioritized:
            weights = batch["weights"].squeeze(1)
            served.set("priority_weight", weights).set("_weight", weights)  # its name before TorchRL 0.9
        if storage.n_step > 1:
            served.set(_STEPS, steps.unsqueeze(1))
        return served

    # ---------------------------------------------------------------------------------------------- priorities

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set priorities of rows; those overwritten since are dropped. Does nothing without ``alpha``.

        Args:
            index: ``index`` of a sample, ``[n]``, or what ``extend`` returned.
            priority: A number, or one for each row; finite and not negative.
        """
        if not self._is_prioritized:
            return
        rows, values = as_tensor(index, "index").reshape(-1), as_tensor(priority, "priority").reshape(-1) + self.eps
        self.storage.update(rows, values.expand(len(rows)) if values.numel() == 1 else values)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample to its entry ``priority_key``, of several numbers a row to their largest.

        Args:
            data: The sample, with that entry and ``index``.
        """
        if self._is_prioritized:
            rows = entry(data, "index", "data").reshape(-1)
            self.storage.update(rows, self._priorities(data))

    def _priorities(self, data: TensorDictBase) -> Tensor:
        """One priority for each row of the data, ``[rows]``."""
        given = entry(data, self.priority_key, "data").detach()
        rows, numbers = math.prod(data.shape), math.prod(given.shape[data.ndim :])
        if given.dtype.is_complex or not numbers:
            raise InvalidInputError(
                f"{self.priority_key!r} is {tuple(given.shape)} {given.dtype}; give at least one real number for each "
                f"of {rows} rows. Nothing was written."
            )
        return given.reshape(rows, numbers).amax(1) + self.eps

    def _first_priorities(self, data: TensorDictBase) -> Tensor | None:
        """Those that data come with, checked before the data are written; None for the largest so far."""
        if not self._is_prioritized or data.get(self.priority_key, None) is None:
            return None
        priorities = self._priorities(data)
        if priorities.is_cuda:
            return priorities  # to look at them is to wait; the storage leaves out those that are not valid
        wrong = ~((priorities >= 0) & (priorities.float() < torch.inf))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise InvalidInputError(
                f"{self.priority_key!r} is {(priorities[row] - self.eps).item()} in row {row} of {len(priorities)}; "
                "priorities have to be finite (as float32) and not negative. Nothing was written."
            )
        return priorities

    # ---------------------------------------------------------------------------------------------- saving

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save everything to a folder: data, priorities, counters and the random generator.

        It is ``storage.save(path)``, which may also be called, for example with ``background=True``.

        Args:
            path: The folder: new, empty, or with what was saved before, which is replaced.
        """
        self.storage.save(path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Go on with what :meth:`dumps` or a journal has saved; what this buffer holds is dropped.

        Make the buffer with the arguments of the one that was saved, on any ``device``. ``beta`` and the random
        generator are those that were saved. With ``journal``, commits go on in the same folder, or begin in an empty
        one.

        Args:
            path: The folder.

        Raises:
            SnapshotError: (a RuntimeError) if there is none that a ReplayBuffer has saved, or it is damaged.
            InvalidInputError: (a ValueError) if the arguments differ. Nothing was changed.
        """
        check_path("loads()", "path", path)
        with SnapshotReader(path) as reader:
            self._require_alike(reader)
        storage = self._kind.load(path, self._options["device"], journal=self._journal)
        self._storage, self._layout = storage, _layout_of_storage(storage)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that :meth:`dumps` saves, in memory: a copy, which ``torch.load(weights_only=True)`` reads.

        It is made in a temporary folder, which for a moment needs as much disk as the data; :meth:`dumps` and a journal
        need no copy in memory.

        Returns:
            The files of :meth:`dumps` by name, as tensors of bytes; none for a buffer that is empty.
        """
        if self._storage is None:
            return {}
        with TemporaryDirectory(prefix="rlstore-") as folder:
            self._storage.save(folder)
            self._storage._ring_of().saved.pop(Path(folder), None)  # there is no later save to the same folder
            return snapshot_files(folder)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned, as :meth:`loads` does; what this buffer holds is dropped.

        Args:
            state_dict: What it returned; of an empty buffer it makes this one empty.

        Raises:
            SnapshotError: (a RuntimeError) if no ReplayBuffer has made it, or it is damaged.
            InvalidInputError: (a ValueError) if it is something else, or the arguments differ. Nothing was changed.
        """
        if not isinstance(state_dict, Mapping):
            raise InvalidInputError(
                f"state_dict is a {type(state_dict).__name__}; give what state_dict() of a ReplayBuffer of rlstore "
                "returned. Nothing was changed."
            )
        if not state_dict:
            self._storage = self._layout = None
            return
        with TemporaryDirectory(prefix="rlstore-") as folder:
            try:
                write_snapshot_files(state_dict, folder)
            except InvalidInputError as error:
                raise InvalidInputError(
                    f"state_dict is none that a ReplayBuffer of rlstore has returned: {error}"
                ) from error
            self.loads(folder)

    def _require_alike(self, reader: SnapshotReader) -> None:
        """Refuse what a buffer with other arguments has saved, and what no buffer has."""
        saved = reader.settings
        learnt: Any = saved.get("learnt")
        extra: Any = saved.get("extra_fields")
        is_known = reader.class_name in ("rlstore.ReplayStorage", "rlstore.PrioritizedReplayStorage")
        has_keys = isinstance(learnt, dict) and [] not in learnt.get("paths", [[]]) and isinstance(extra, dict)
        names = list(extra) if has_keys else []
        has_fields = names[:1] == [_ENDS] and extra[_ENDS] == _ENDS_FORM
        if not is_known or not has_fields or not all(name.startswith(_PREFIX) for name in names[1:]):
            raise SnapshotError(
                f"{reader.folder} holds a {reader.class_name} that no ReplayBuffer of this version has saved. "
                "Nothing was changed."
            )
        for name, setting in _SETTINGS.items():
            own, other = self._options.get(setting), saved.get(setting)
            if own != other:
                raise InvalidInputError(
                    f"{name} is {own}, and {other} in what was saved in {reader.folder}; make the ReplayBuffer with "
                    f"{name}={other}. Nothing was changed."
                )


class _Layout(NamedTuple):
    """Which entries of a TensorDict are what.

    Attributes:
        observations: Keys that are before a step and, under "next", after it.
        extra: The key of each other entry, by the name of the extra field that holds it.
        extra_shapes: The shape of one row of it.
        keys: The keys of all of them.
    """

    observations: list[Key]
    extra: dict[str, Key]
    extra_shapes: dict[str, tuple[int, ...]]
    keys: frozenset[Key]


def _after(observations: list[Key]) -> list[Key]:
    """The keys of observations after a step."""
    return [("next", *_parts(key)) for key in observations]


def _layout(observations: list[Key], extra: dict[str, tuple[Key, tuple[int, ...]]]) -> _Layout:
    keys = {name: key for name, (key, _) in extra.items()}
    shapes = {name: shape for name, (_, shape) in extra.items()}
    return _Layout(observations, keys, shapes, frozenset([*observations, *_after(observations), *keys.values()]))


def _first_layout(data: TensorDictBase, keys: list[Key]) -> _Layout:
    """Which of these entries of the first data are what."""
    observations = [key for key in keys if ("next", *_parts(key)) in keys]
    if not observations:
        raise InvalidInputError(
            f"data has no entry that is before and, under 'next', after the step: {keys}. Nothing was written."
        )
    extra = [key for key in keys if key not in observations and key not in _after(observations)]
    return _layout(observations, {_name(key): (key, tuple(data.get(key).shape[data.ndim :])) for key in extra})


def _layout_of_storage(storage: _Storage) -> _Layout:
    """That of the data that a storage holds."""
    fields = storage._fields
    observations = [_short(tuple(map(str, path))) for path in fields.structure.paths]
    extra = [field for field in fields.extra if field.name != _ENDS]
    return _layout(observations, {field.name: (_key(field.name), field.shape) for field in extra})


def _stored_keys(data: TensorDictBase, priority_key: Key | None) -> list[Key]:
    """The keys of all entries that are observations or extra fields, sorted."""
    others = _OTHERS if priority_key is None else _OTHERS | {_parts(priority_key)}
    found = []
    for key, value in data.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor):
        if _parts(key) in others:
            continue
        if not isinstance(value, Tensor):
            raise InvalidInputError(
                f"data has {key!r}, a {type(value).__name__}; only tensors can be stored. Leave it out with "
                "data.exclude(). Nothing was written."
            )
        found.append(key)
    return sorted(found, key=_parts)


def _parts(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _short(parts: tuple[str, ...]) -> Key:
    return parts[0] if len(parts) == 1 else parts


# Keys as names of extra fields, which are identifiers: so a storage knows the keys of what it holds, also on disk.
_PREFIX = "td_"


def _name(key: Key) -> str:
    """The name of a key: Q_ is between its parts, and Q2d_ stands for the character 2d."""
    return _PREFIX + "Q_".join(re.sub("[^0-9A-PR-Za-z_]", lambda c: f"Q{ord(c[0]):x}_", part) for part in _parts(key))


def _key(name: str) -> Key:
    """The key of a name."""
    parts = name.removeprefix(_PREFIX).split("Q_")
    return _short(tuple(re.sub("Q([0-9a-f]+)_", lambda c: chr(int(c[1], 16)), part) for part in parts))


def _by_time(data: TensorDictBase, shape: tuple[int, int]) -> TensorDictBase:
    """The data as ``[steps, num_envs]``."""
    return data.detach().reshape(shape).transpose(0, 1)


def _sample(steps: TensorDictBase, layout: _Layout) -> dict[str, Any]:
    """Steps in the words of the vocabulary."""
    ends = _ends(steps)
    before = {name: entry(steps, key, "data") for name, key in layout.extra.items()}
    for place, inner in (("data", steps), ("data['next']", steps.get("next"))):
        for key in layout.observations:
            entry(inner, key, place)
    return {
        "observations": steps.select(*layout.observations),
        "next_observations": steps.get("next").select(*layout.observations),
        "actions": entry(steps, "action", "data"),
        "rewards": entry(steps, ("next", "reward"), "data"),
        **ends,
        **before,
    }


def _ends(steps: TensorDictBase) -> dict[str, Tensor]:
    """Which steps terminated their episode, which were the last before a truncation, and the flags to be served.

    Flags that are missing follow from the others. Those that are there are served as they are: TorchRL's trainer marks
    the last step of each batch as truncated, and not as done.
    """
    given, following = {}, steps.get("next")
    for name in _FLAGS:
        flag = following.get(name, None)
        if flag is not None:
            if not isinstance(flag, Tensor):
                flag = entry(steps, ("next", name), "data")  # which refuses it
            if flag.shape[2:] not in ((), (1,)):
                raise InvalidInputError(
                    f"data has {('next', name)!r} of {tuple(flag.shape[2:])} for each step; give one flag, () or (1,). "
                    "Nothing was written."
                )
            given[name] = (flag != 0).reshape(steps.shape)
    if not given:
        entry(steps, ("next", "done"), "data")
    ended = torch.stack(list(given.values())).any(0)
    terminated = given.get("terminated", ended & ~given["truncated"] if "truncated" in given else ended)
    truncated = given.get("truncated", ended & ~terminated)
    served = torch.stack([given.get("done", ended), terminated, truncated], dim=-1)
    return {"terminated": terminated, "truncated": truncated | (ended & ~terminated), _ENDS: served}
