"""What writers write: the episodes of a storage, of a file or of a caller, as arrays of one form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rlstore.data.source import Array, Form
from rlstore.engine.rows.schema import Path, walk
from rlstore.episodes import Episode, read_together
from rlstore.errors import InvalidInputError
from rlstore.replay.loading.names import by_name, told_of
from rlstore.replay.loading.progress import Bar

# Episodes of so many bytes, and the one that passes them, are written at once.
_GROUP_BYTES = 4 << 20


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
        """The form of a step of each field."""
        return {path: (array.shape[1:], array.dtype) for path, array in self.steps.items()}


def written_episodes(source: Any, owner: str, *, progress: bool) -> Iterator[WrittenEpisode]:
    """The episodes of a storage, or of anything that can be iterated, a few MiB and one episode in memory at a time.

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
    count = len(episodes) if isinstance(episodes, Sized) else getattr(episodes, "num_episodes", 0)
    first: dict[Path, Form] = {}
    for number, episode in enumerate(_all(Bar(shown=progress).over(episodes, "Writing", count))):
        forms = episode.forms
        first = first or forms
        _require_equal(forms, first, f"in episode {number}", f"in those before it; {owner} writes episodes of one form")
        observed = {path[1:]: form for path, form in forms.items() if path[0] == "observations"}
        finals = {leaf: (value.shape, value.dtype) for leaf, value in episode.final.items()}
        if finals:
            _require_equal(finals, observed, f"in final_observations of episode {number}", "in its observations")
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


def _require_equal(forms: Mapping[Path, Form], expected: Mapping[Path, Form], where: str, there: str) -> None:
    if forms == expected:
        return
    for path in {**expected, **forms}:
        told = [f"{kind[path][1]} {kind[path][0]}" if path in kind else "missing" for kind in (forms, expected)]
        found, wanted = told
        if found != wanted:
            name = "/".join(map(str, path)) or "it"
            raise InvalidInputError(f"{name} is {found} {where}, and {wanted} {there}. Nothing was written.")


def _all(episodes: Iterable[Any]) -> Iterator[WrittenEpisode]:
    """Episodes of callers one by one, those of storages as many at a time as have 4 MiB."""
    waiting: list[Episode] = []
    most, left = 1, 1  # steps; the first episode tells how large they are
    for number, given in enumerate(episodes):
        if isinstance(given, Episode):
            waiting.append(given)
            left -= len(given)
            if left > 0:
                continue
        for episode in _of_storages(waiting):
            most = max(1, _GROUP_BYTES // max(1, sum(array.nbytes for array in episode.steps.values()) // len(episode)))
            yield episode
        waiting, left = [], most
        if not isinstance(given, Episode):
            with told_of(f"episode {number}"):
                episode = _of_caller(by_name(given, None))
            yield episode
    yield from _of_storages(waiting)


def _of_storages(episodes: list[Episode]) -> Iterator[WrittenEpisode]:
    for group, fields in read_together(episodes):
        finals = _arrays((), fields.pop("final_observations", ()))
        steps = {path: array for name, value in fields.items() for path, array in _arrays((name,), value).items()}
        begin = 0
        for place, episode in enumerate(group):
            own = {path: array[begin : begin + len(episode)] for path, array in steps.items()}
            begin += len(episode)
            for name, is_set in (("terminated", episode.terminated), ("truncated", episode.truncated)):
                own[(name,)] = _only_last(is_set, len(episode))
            final = {leaf: array[place, ...] for leaf, array in finals.items()}
            yield WrittenEpisode(own, final or _arrays((), episode.final_observations))


def _of_caller(given: dict[str, Any]) -> WrittenEpisode:
    """An episode as ``add_episodes`` takes it, by the names of the vocabulary."""
    final, following = (given.pop(name, None) for name in ("final_observations", "next_observations"))
    flags = {name: _array(name, given.pop(name, False)) != 0 for name in ("terminated", "truncated")}
    steps = {path: array for name, value in given.items() for path, array in _arrays((name,), value).items()}
    count = len(steps[("actions",)]) if steps[("actions",)].ndim else 0
    for name, flag in flags.items():
        steps[(name,)] = flag.reshape(-1) if flag.ndim else _only_last(bool(flag), count)
    finals = _arrays((), final) or {path: leaf[-1, ...] for path, leaf in _arrays((), following).items()}
    for path in [path for path, leaf in steps.items() if path[0] == "observations" and len(leaf) == count + 1]:
        finals.setdefault(path[1:], steps[path][-1, ...])
        steps[path] = steps[path][:-1]
    wrong = next((path for path, array in steps.items() if array.ndim == 0 or len(array) != count), None)
    if wrong or not count:
        raise InvalidInputError(
            f"{'/'.join(map(str, wrong or ('actions',)))} is not [{count or 1}, ...], a value for each action. "
            "Nothing was written."
        )
    if (steps[("terminated",)] | steps[("truncated",)])[:-1].any():
        raise InvalidInputError("it ends before its last step; give episodes one by one. Nothing was written.")
    return WrittenEpisode(steps, finals)


def _only_last(is_set: bool, count: int) -> Array:
    flags = np.zeros(count, np.bool_)
    flags[-1:] = is_set
    return flags


def _arrays(lead: Path, value: Any) -> dict[Path, Array]:
    """The leaves of a nest as arrays, by their paths behind ``lead``; none of None."""
    name = "/".join(map(str, lead or ("final_observations",)))
    return {} if value is None else {(*lead, *path): _array(name, leaf) for path, leaf in walk(value)}


def _array(name: str, value: Any) -> Array:
    if isinstance(value, Tensor):
        try:
            return np.asarray(value.detach().cpu().numpy())
        except TypeError as error:
            told = f"{name} is {value.dtype}, which files cannot hold. Nothing was written."
            raise InvalidInputError(told) from error
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise InvalidInputError(f"{name} is {array.dtype}; files hold numbers. Nothing was written.")
    return array
