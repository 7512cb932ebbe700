"""Datasets of Minari, which keeps whole episodes with one observation more than actions.

Extra fields are kept in its ``infos``, an entry for each step.
"""

from __future__ import annotations

import inspect
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from rlstore.data.hdf5 import is_elsewhere
from rlstore.data.source import EpisodeSource, GivenEpisode, nested, plain_file, required
from rlstore.data.written import WrittenEpisode, grouped, spaces_of
from rlstore.engine.calls import did_you_mean
from rlstore.errors import InvalidInputError

_VERSION = re.compile(r"-v\d+$")
_DAMAGED = (OSError, RuntimeError, ValueError, LookupError, AssertionError)


def read_minari(dataset: Any, extra_fields: Sequence[str] = ()) -> EpisodeSource:
    """The episodes of a dataset of Minari, one in memory at a time.

    Args:
        dataset: The id of a dataset on this machine, as ``"mujoco/hopper/medium-v0"``, or a ``minari.MinariDataset``,
            of which Minari has chosen or filtered the episodes.
        extra_fields: The names of those ``infos`` that are fields of the storage. Others are left out.

    Raises:
        InvalidInputError: (a ValueError) if an info is missing, or when the episodes are iterated and one is damaged,
            or has parts of it in other files.
        FileNotFoundError: If there is no dataset of this id; ``minari.download_dataset()`` gets one.
        ImportError: If Minari or h5py is not installed.
    """
    if isinstance(dataset, str):
        minari = required("minari", "read_minari()")
        folder: Path = minari.storage.get_dataset_path(dataset)
        for file in folder.rglob("*"):
            if not file.is_dir():
                plain_file(file)
        try:
            dataset = minari.load_dataset(dataset)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"there is no dataset {dataset!r} in {minari.storage.get_dataset_path()}: "
                "minari.download_dataset() gets one from Minari's server, and MINARI_DATASETS_PATH says where they "
                "are. Nothing was read."
            ) from error
    if not hasattr(dataset, "iterate_episodes"):
        raise InvalidInputError(
            f"read_minari() got a {type(dataset).__name__}; give the id of a dataset or a minari.MinariDataset. "
            "Nothing was read."
        )
    if isinstance(extra_fields, str):
        raise InvalidInputError(f"extra_fields is {extra_fields!r}; give a list of names. Nothing was read.")
    return _MinariSource(dataset, tuple(extra_fields))


class _MinariSource(EpisodeSource):
    def __init__(self, dataset: Any, extra_fields: tuple[str, ...]) -> None:
        self._dataset, self._extra, self._is_own = dataset, extra_fields, False
        self.origin, self.num_steps = f"the dataset {dataset.id}", int(dataset.total_steps)

    @property
    def observation_space(self) -> Any:
        """The space of its observations."""
        return self._dataset.observation_space

    @property
    def action_space(self) -> Any:
        """The space of its actions."""
        return self._dataset.action_space

    @property
    def num_episodes(self) -> int:
        """How many episodes it has."""
        return int(self._dataset.total_episodes)

    def __iter__(self) -> Iterator[GivenEpisode]:
        try:
            if not self._is_own:
                self._check_own()
                self._is_own = True  # it takes a third as long as reading the file
            for episode in self._dataset.iterate_episodes():
                yield {
                    "observations": episode.observations,
                    "actions": episode.actions,
                    "rewards": np.asarray(episode.rewards),
                    "terminated": np.asarray(episode.terminations),
                    "truncated": np.asarray(episode.truncations),
                    **{name: self._info(episode, name) for name in self._extra},
                }
        except _DAMAGED as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"{self.origin} is damaged or not complete: {error}. Download it again") from error

    def _check_own(self) -> None:
        """Refuse a file of HDF5 with links, or with arrays whose numbers are in other files: Minari follows them."""
        file = Path(self._dataset.storage.data_path) / "main_data.hdf5"
        if not file.exists():  # Minari has other formats
            return
        h5py = required("h5py", "read_minari()")

        def check(name: str, item: Any) -> None:
            is_group = isinstance(item, h5py.Group)
            if is_group and any(not isinstance(item.get(part, getlink=True), h5py.HardLink) for part in item):
                raise InvalidInputError(f"{name} of {self.origin} has links to what is elsewhere. Nothing was read.")
            if not is_group and is_elsewhere(item):
                raise InvalidInputError(f"{name} of {self.origin} has its numbers in another file. Nothing was read.")

        with h5py.File(plain_file(file), "r") as opened:
            check("the file", opened)
            opened.visititems(check)

    def _info(self, episode: Any, name: str) -> Any:
        """An extra field ``[T, ...]``; what Gymnasium collected has the info of the reset before it."""
        infos = episode.infos or {}
        if name not in infos:
            raise InvalidInputError(
                f"{self.origin} has no info {name!r} in episode {episode.id}.{did_you_mean(name, infos)} "
                f"It has {list(infos)}"
            )
        return _steps_of(infos[name], len(episode.rewards))


def _steps_of(info: Any, count: int) -> Any:
    if isinstance(info, Mapping):
        parts = {key: _steps_of(part, count) for key, part in info.items()}
        places = [str(place) for place in range(len(parts))]  # of a tuple
        return tuple(parts[place] for place in places) if parts.keys() == set(places) else parts
    return info[1:] if len(info) == count + 1 else info


def write_minari(
    source: Any,
    dataset_id: str,
    *,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    progress: bool = False,
    **metadata: Any,
) -> Any:
    """Write episodes to a new dataset of Minari, in Minari's folder on this machine.

    End flags are written as they are: an episode that goes on, or was broken off, has none in its last step. Images are
    written without loss. A few MiB and one episode are in memory at a time.

    Args:
        source: A storage of replay, some of its episodes, what a reader returned, or episodes as ``add_episodes`` takes
            them.
        dataset_id: The id, with a version: ``"mine/cartpole-v0"``.
        observation_space: The space of the observations; None for that of the source.
        action_space: The space of the actions, likewise.
        progress: Show a progress bar.
        **metadata: More arguments of ``minari.create_dataset_from_buffers``, as ``env="CartPole-v1"``, ``author`` and
            ``description``.

    Returns:
        The ``minari.MinariDataset``.

    Raises:
        InvalidInputError: (a ValueError) if there is a dataset of this id, there is no episode, they differ in form, or
            one has no final observation. Nothing was written.
        ImportError: If Minari or h5py is not installed.
    """
    minari = required("minari", "write_minari()")
    required("h5py", "write_minari()")
    known = spaces_of(source)
    chosen = {
        "observation_space": _space("observation_space", known[0] if observation_space is None else observation_space),
        "action_space": _space("action_space", known[1] if action_space is None else action_space),
    }
    folder = _new_folder(dataset_id)
    try:
        dataset = None
        for group in grouped(source, "write_minari()", progress=progress):
            buffers = [_buffer(minari, episode) for episode in group]
            if dataset is None:
                options = {**chosen, **_without_loss(minari, group[0]), **metadata}
                dataset = _create(minari, dataset_id, buffers, options)
            else:
                dataset.update_dataset_from_buffer(buffers)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return dataset


def _new_folder(dataset_id: object) -> Path:
    """Where Minari keeps a dataset of this id, which is not there yet."""
    if not isinstance(dataset_id, str) or not _VERSION.search(dataset_id):
        raise InvalidInputError(
            f"dataset_id is {dataset_id!r}; Minari needs a name with a version, as 'cartpole/random-v0'. "
            "Nothing was written."
        )
    folder: Path = required("minari.storage", "write_minari()").get_dataset_path(dataset_id)
    if folder.exists():
        raise InvalidInputError(
            f"there is a dataset {dataset_id!r}, and Minari replaces none: give another version, or call "
            f"minari.delete_dataset({dataset_id!r}) before. Nothing was written."
        )
    return folder


def _space(name: str, space: Any) -> spaces.Space[Any]:
    if not isinstance(space, spaces.Space):
        raise InvalidInputError(
            f"{name} is {space!r}; Minari needs a Gymnasium space: write_minari(..., {name}=...). Nothing was written."
        )
    return space


def _create(minari: Any, dataset_id: str, buffers: list[Any], options: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".* set to None|env_spec is None", UserWarning)
        try:
            return minari.create_dataset_from_buffers(dataset_id, buffers, **options)
        except (ValueError, AssertionError) as error:
            raise InvalidInputError(f"Minari refuses to write {dataset_id!r}: {error} Nothing was written.") from error


def _without_loss(minari: Any, episode: WrittenEpisode) -> dict[str, bool]:
    """What makes Minari keep images as they are."""
    if "jpeg_encoding" in inspect.signature(minari.create_dataset_from_buffers).parameters:
        return {"jpeg_encoding": False}
    for path, array in episode.steps.items():
        if array.dtype == np.uint8 and array.ndim > 1:
            raise InvalidInputError(
                f"{'/'.join(map(str, path))} is uint8 {array.shape[1:]}, which Minari {minari.__version__} keeps as "
                "JPEG: that changes it. Minari 0.5.4, for Python 3.11 and later, does not; or write npz or Parquet. "
                "Nothing was written."
            )
    return {}


def _buffer(minari: Any, episode: WrittenEpisode) -> Any:
    """An episode as Minari takes it."""
    steps, infos = episode.steps, {}
    if not episode.final:
        raise InvalidInputError(
            "an episode has no final observation, and Minari keeps one more observation than actions; write npz or "
            "Parquet. Nothing was written."
        )
    observations = {
        path[1:]: np.concatenate([leaf, episode.final[path[1:]][None]])
        for path, leaf in steps.items()
        if path[0] == "observations"
    }
    infos = {path: array for path, array in steps.items() if path[0] not in _FIELDS}
    return minari.data_collector.EpisodeBuffer(
        observations=nested(observations),
        actions=nested({path[1:]: array for path, array in steps.items() if path[0] == "actions"}),
        rewards=steps[("rewards",)],
        terminations=steps[("terminated",)],
        truncations=steps[("truncated",)],
        infos=nested({tuple(map(str, path)): array for path, array in infos.items()}) if infos else None,
    )


_FIELDS = ("observations", "actions", "rewards", "terminated", "truncated")
