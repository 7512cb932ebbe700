"""Folders in whose JSON files keywords of constructors were written, or removed; each determined by its number.

A folder is data. Whatever its files say, nothing that only a caller may choose comes from them.
"""

from __future__ import annotations

import inspect
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from folder_mutants import write_json
from saved_folders import Saved

import rlstore

PLACES = ("{witness}/mapped", "{witness}/new", "../witness/mapped", "mapped", "..")
MEMORIES = ("mapped", "shared", "ram")
TYPES = ("float64", "qint32", "torch.qint32", "nn", {"$dtype": "qint32"}, {"$dtype": "complex64"}, {"$dtype": "nn"})
WRONG = (None, True, "x", [], {}, [[1]], 1.5)
SIZES = (0, -1, 2**31, 2**63, 1e300, float("nan"), {"$float": "nan"})
VALUES: tuple[Any, ...] = (*PLACES, *MEMORIES, *TYPES, *WRONG, *SIZES)
FITTING = {"memory": MEMORIES, "path": PLACES, "snapshot_dir": PLACES, "journal": PLACES, "dtype": TYPES}
_ARGUMENTS = ("settings", "options", "schema")  # objects that become arguments

Place = tuple[str, tuple[str | int, ...]]  # a file, and where in it an object is


def keywords_of(kind: type[rlstore.Storage]) -> set[str]:
    """The keywords of the constructor of a class, and of all that makes storages of it."""
    makers = [kind, *(made for name, made in inspect.getmembers(kind, inspect.ismethod) if not name.startswith("_"))]
    parameters = [parameter for made in makers for parameter in inspect.signature(made).parameters.values()]
    return {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


def _public_storages() -> list[type[rlstore.Storage]]:
    public = (getattr(rlstore, name) for name in rlstore.__all__)
    return [kind for kind in public if isinstance(kind, type) and issubclass(kind, rlstore.Storage)]


KEYWORDS = sorted(
    {"subfolder"}  # of a factory
    | {name for kind in _public_storages() for name in keywords_of(kind)}
    | {name for kind in (rlstore.RateLimit, rlstore.Journal) for name in inspect.signature(kind).parameters}
)


class Change(NamedTuple):
    """A keyword that is removed from an object, written into one, or moved into another.

    Attributes:
        place: The object.
        keyword: The keyword.
        value: What is written; ``...`` if it is removed.
        source: Where it is moved from.
    """

    place: Place
    keyword: str
    value: Any = ...
    source: Place | None = None


class Forged:
    """A folder with such changes.

    Attributes:
        how: What was changed.
        saved: What it was made from.
        path: The folder.
        may_differ: True.
    """

    may_differ = True

    def __init__(self, saved: Saved, changes: list[Change], path: Path, witness: Path) -> None:
        self.saved, self.path, self._witness, self.how = saved, path, witness, "; ".join(map(_words, changes))
        shutil.copytree(saved.path, path)
        trees: dict[str, Any] = {}
        for change in changes:
            for place in (change.source, change.place):
                if place is not None and place[0] not in trees:
                    trees[place[0]] = json.loads((path / place[0]).read_text())
            if change.source is not None:
                _at(trees, change.source).pop(change.keyword, None)
            target = _at(trees, change.place)
            if change.value is ...:
                target.pop(change.keyword, None)
            else:
                target[change.keyword] = self._placed(change.value)
        for file, tree in trees.items():
            write_json(path / file, tree)

    def _placed(self, value: Any) -> Any:
        return value.format(witness=self._witness) if isinstance(value, str) else value


def _words(change: Change) -> str:
    where = ".".join(map(str, (change.place[0], *change.place[1])))
    if change.value is ...:
        return f"{change.keyword} removed from {where}"
    moved = "" if change.source is None else f", moved from {change.source[1]}"
    return f"{change.keyword} = {change.value!r} in {where}{moved}"


def _at(trees: dict[str, Any], place: Place) -> Any:
    """The object at a place; an empty one if an earlier change has put something else there."""
    found = trees[place[0]]
    for key in place[1]:
        try:
            found = found[key]
        except (LookupError, TypeError):
            return {}
    return found if isinstance(found, dict) else {}


class KeywordForger:
    """All changes of one keyword, and then as many pairs of changes as are asked for.

    Every keyword is written into every kind of object: of those that differ by a name alone, as the entries of tensors
    do, into one after another. It gets every value where it is known or stands already, else one value after another.

    Args:
        saved: The folders to forge.

    Attributes:
        singles: The changes of one keyword, each with the folder.
    """

    def __init__(self, saved: list[Saved]) -> None:
        self._objects = {one.path: dict(_objects_of(one.path)) for one in saved}
        self._saved, self._turn = saved, 0
        self._seen: set[tuple[Any, ...]] = set()
        self.singles = [(one, change) for one in saved for change in self._singles_of(one)]

    def __call__(self, number: int, scratch: Path, witness: Path) -> Forged:
        """The folder of a number; those after the singles have two changes."""
        if number < len(self.singles):
            saved, change = self.singles[number]
            changes = [change]
        else:
            random_ = random.Random(number)
            saved = random_.choice(self._saved)
            changes = [self._drawn(saved, random_) for _ in range(2)]
        return Forged(saved, changes, scratch / f"forged-{number}", witness)

    def some(self, count: int, random_: random.Random) -> list[int]:
        """The numbers of some singles, half of them of places and types in arguments, and of as many pairs."""
        apt = [
            n for n, (_, change) in enumerate(self.singles) if change.keyword in FITTING and _is_argument(change.place)
        ]
        singles, half = len(self.singles), count // 2
        return [*random_.sample(apt, half), *random_.sample(range(singles), half), *range(singles, singles + count)]

    def _singles_of(self, saved: Saved) -> Iterator[Change]:
        kinds: dict[tuple[Any, ...], list[Place]] = {}
        for place, found in self._objects[saved.path].items():
            kinds.setdefault((place[0], *place[1][:-1], *sorted(found)), []).append(place)
        own = keywords_of(saved.storage)
        for places in kinds.values():
            present = self._objects[saved.path][places[0]]
            for keyword in sorted({*KEYWORDS, *present}):
                place = places[self._turn % len(places)]
                is_argument = keyword in own and _is_argument(place)
                yield from self._changes(saved, place, keyword, keyword in present, is_argument)

    def _changes(
        self, saved: Saved, place: Place, keyword: str, is_present: bool, is_argument: bool
    ) -> Iterator[Change]:
        if is_present:
            yield Change(place, keyword)
        # Of several folders of one class the first gets every value; of objects that no class knows, the first of all.
        where = place[1][-1] if place[1] else ""
        is_of_class = where in (*_ARGUMENTS, "numbers")
        known = (saved.kind, saved.storage, where) if is_of_class else sorted(self._objects[saved.path][place])
        known = (*known, place[0], keyword)
        if (is_present or is_argument) and known not in self._seen:
            self._seen.add(known)
            yield from (Change(place, keyword, value) for value in VALUES)
        else:
            self._turn += 1
            yield Change(place, keyword, VALUES[self._turn % len(VALUES)])

    def _drawn(self, saved: Saved, random_: random.Random) -> Change:
        objects = self._objects[saved.path]
        arguments = [place for place in objects if _is_argument(place)]
        place = random_.choice(arguments if arguments and random_.random() < 0.7 else list(objects))
        way, present = random_.random(), sorted(objects[place])
        if way < 0.15 and present:
            return Change(place, random_.choice(present))
        own = sorted(keywords_of(saved.storage))
        keyword = random_.choice(random_.choice((KEYWORDS, own, present or own, list(FITTING))))
        value = random_.choice(FITTING[keyword] if keyword in FITTING and random_.random() < 0.7 else VALUES)
        sources = [other for other, found in objects.items() if keyword in found and other != place]
        return Change(place, keyword, value, random_.choice(sources) if sources and way < 0.5 else None)


def _is_argument(place: Place) -> bool:
    return bool(place[1]) and place[1][-1] in _ARGUMENTS


def _objects_of(folder: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every object of every JSON file."""

    def walk(file: str, part: Any, where: tuple[str | int, ...]) -> Iterator[tuple[Place, dict[str, Any]]]:
        if isinstance(part, dict):
            yield (file, where), part
        inner: Any = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        for key, value in inner:
            yield from walk(file, value, (*where, key))

    for path in sorted(folder.rglob("*.json")):
        yield from walk(str(path.relative_to(folder)), json.loads(path.read_text()), ())
