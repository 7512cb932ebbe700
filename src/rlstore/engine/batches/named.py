"""Batches that are named tuples, with a user's extra fields appended."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

_Batch = TypeVar("_Batch", bound=tuple[Any, ...])


def extended(base: type[_Batch], names: Iterable[str]) -> type[_Batch]:
    """A named tuple class with the fields of ``base``, followed by ``names``.

    Its instances are instances of ``base`` too; they can be pickled and copied. The same names give the same class.

    Args:
        base: A named tuple class.
        names: Names of the fields to append; without any the result is ``base`` itself.
    """
    added = tuple(names)
    return _extended(base, added) if added else base


@cache
def _extended(base: type[_Batch], names: tuple[str, ...]) -> type[_Batch]:
    fields: tuple[str, ...] = base._fields  # type: ignore[attr-defined]
    with_names: Any = namedtuple(base.__name__, (*fields, *names))  # type: ignore[misc]

    class Extended(with_names, base):  # type: ignore[misc,valid-type]
        __slots__ = ()

        def __reduce__(self) -> tuple[Any, ...]:
            return _rebuilt, (base, names, tuple(self))

    Extended.__name__, Extended.__qualname__, Extended.__module__ = base.__name__, base.__qualname__, base.__module__
    Extended.__doc__ = f"{base.__doc__ or ''}\n\nExtra fields: {', '.join(names)}."
    made: Any = Extended
    return made  # type: ignore[no-any-return]


def _rebuilt(base: type[_Batch], names: tuple[str, ...], values: tuple[Any, ...]) -> _Batch:
    made: _Batch = extended(base, names)(*values)
    return made
