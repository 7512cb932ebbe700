"""What writers write: the episodes of a storage, of a file or of a caller, as arrays of one form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rlstore.data.source import Array, Form
from rlstore.engine.rows.schema import Path, walk
from rlstore.errors import InvalidInputError
from rlstore.replay.loading.names import TERMINATED, TRUNCATED
from rlstore.replay.loading.progress import Bar

# Episodes of so many bytes, and the one that passes them, are written at once.
_GROUP_BYTES = 4 << 20
_SAME = {**dict.fromkeys(TERMINATED, "terminated"), **dict.fromkeys(TRUNCATED, "truncated")}


@dataclass(frozen=True)
class WrittenEpisode:
    """The arrays of an episode of ``T`` steps, by their paths: ``("actions",)``, ``("observations", "camera")``.

    Attributes:
        steps: Every field, ``[T, ...]``; the flags are bool.
        final: The leaves of the observation after the last step, by their paths in it; empty if it is not known.
    """

    steps: dict[Path, Array]
    final: dict[Path, Array]

    def __len__(self) -> int:
        return len(self.steps[("actions",)])

    @property
    def forms(self) -> dict[Path, Form]:
        """The form of a step of each field, and of the final observation."""
        forms = {path: (array.shape[1:], array.dtype) for path, array in self.steps.items()}
        return forms | {("final_observations", *path): (leaf.shape, leaf.dtype) for path, leaf in self.final.items()}


def written_episodes(source: Any, owner: str, *, progress: bool) -> Iterator[WrittenEpisode]:
    """The episodes of a storage, or of anything that can be iterated, one in memory at a time.

    Args:
        source: The storage, or the episodes.
        owner: Who writes them, for errors.
        progress: Show a progress bar.

    Raises:
        InvalidInputError: If one of them lacks something, or has another form than those before it.
    """
    episodes = source.episodes() if hasattr(source, "episodes") else source
    if isinstance(episodes, (Mapping, str)) or not isinstance(episodes, Iterable):
        raise InvalidInputError(
            f"{owner} got a {type(source).__name__}; give a storage, its episodes(), or a list of episodes"
        )
    first: dict[Path, Form] = {}
    count = len(episodes) if isinstance(episodes, Sized) else getattr(episodes, "num_episodes", 0)
    for number, given in enumerate(Bar(shown=progress).over(episodes, "Writing", count)):
        episode = _from_mapping(given, number) if isinstance(given, Mapping) else _from_storage(given)
        forms = episode.forms
        first = first or forms
        for path in {**first, **forms}:
            if forms.get(path) != first.get(path):
                raise InvalidInputError(
                    f"{'/'.join(map(str, path))} is {_told(forms.get(path))} in episode {number}, and "
                    f"{_told(first.get(path))} in those before it; {owner} writes episodes of one form. "
                    "Nothing was written."
                )
        yield episode
    if not first:
        raise InvalidInputError(f"{owner} got no episode to write. Nothing was written.")


def grouped(source: Any, owner: str, *, progress: bool) -> Iterator[list[WrittenEpisode]]:
    """:func:`written_episodes`, as many at a time as have 4 MiB, and at least one."""
    group: list[WrittenEpisode] = []
    nbytes = 0
    for episode in written_episodes(source, owner, progress=progress):
        group.append(episode)
        nbytes += sum(array.nbytes for array in episode.steps.values())
        if nbytes >= _GROUP_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def spaces_of(source: Any) -> tuple[Any, Any]:
    """The spaces of observations and actions, as far as a storage or a reader knows them."""
    return getattr(source, "observation_space", None), getattr(source, "action_space", None)


def _told(form: Form | None) -> str:
    return f"{form[1]} {form[0]}" if form else "missing"


def _from_storage(episode: Any) -> WrittenEpisode:
    """An episode of a storage, each field read once."""
    steps = {}
    for name in episode.names:
        if name not in ("next_observations", "terminated", "truncated"):
            steps.update(_arrays(name, episode[name]))
    for name, is_set in (("terminated", episode.terminated), ("truncated", episode.truncated)):
        steps[(name,)] = np.zeros(len(episode), np.bool_)
        steps[(name,)][-1] = is_set
    return WrittenEpisode(steps, _leaves(episode.final_observations))


def _from_mapping(given: Mapping[str, Any], number: int) -> WrittenEpisode:
    """An episode as ``add_episodes`` takes it."""
    known = {_SAME.get(name, name): value for name, value in given.items()}
    missing = [name for name in ("observations", "actions", "rewards") if known.get(name) is None]
    if missing:
        raise InvalidInputError(f"episode {number} has no {missing[0]}; it has {list(given)}. Nothing was written.")
    final, following = (known.pop(name, None) for name in ("final_observations", "next_observations"))
    flags = {name: _array(name, known.pop(name, False)) != 0 for name in ("terminated", "truncated")}
    steps = {path: array for name, value in known.items() for path, array in _arrays(name, value).items()}
    count = len(steps[("actions",)])
    for name, flag in flags.items():
        steps[(name,)] = np.zeros(count, np.bool_)
        steps[(name,)][slice(None) if flag.ndim else -1] = flag.reshape(-1) if flag.ndim else flag
    finals = _leaves(final) or {path: leaf[-1] for path, leaf in _leaves(following).items()}
    for path in [path for path, leaf in steps.items() if path[0] == "observations" and len(leaf) == count + 1]:
        finals.setdefault(path[1:], steps[path][-1])
        steps[path] = steps[path][:-1]
    wrong = next((path for path, array in steps.items() if array.ndim == 0 or len(array) != count), None)
    if wrong or not count:
        raise InvalidInputError(
            f"{'/'.join(map(str, wrong or ('actions',)))} of episode {number} is not [{count or 1}, ...], a value for "
            "each action. Nothing was written."
        )
    return WrittenEpisode(steps, finals)


def _arrays(name: str, value: Any) -> dict[Path, Array]:
    return {(name, *path): _array(name, leaf) for path, leaf in walk(value)}


def _leaves(observations: Any) -> dict[Path, Array]:
    return {} if observations is None else {path: _array("observations", leaf) for path, leaf in walk(observations)}


def _array(name: str, value: Any) -> Array:
    if isinstance(value, Tensor):
        try:
            return np.asarray(value.detach().cpu().numpy())
        except TypeError as error:
            raise InvalidInputError(
                f"{name} is {value.dtype}, which files cannot hold. Nothing was written."
            ) from error
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise InvalidInputError(f"{name} is {array.dtype}; files hold numbers. Nothing was written.")
    return array
