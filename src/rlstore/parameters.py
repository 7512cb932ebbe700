"""What can be changed of a storage once it is made: its parameters, by name or as attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

from rlstore.engine.calls import did_you_mean
from rlstore.engine.checks import check_fraction, check_positive, check_seconds
from rlstore.errors import NotReadyError, UnknownParameterError

_Class = TypeVar("_Class", bound=type)
_Value = TypeVar("_Value")

# The check of a parameter, of the storage's class name, the parameter's name and its new value; returns it made plain.
Check = Callable[[str, str, Any], Any]


def whole_number(owner: str, name: str, value: Any) -> int:
    """A whole number above 0."""
    check_positive(owner, **{name: value})
    return int(value)


def whole_number_or_none(owner: str, name: str, value: Any) -> int | None:
    """A whole number above 0, or None."""
    return None if value is None else whole_number(owner, name, value)


def fraction(owner: str, name: str, value: Any) -> float:
    """A number from 0 to 1."""
    check_fraction(owner, **{name: value})
    return float(value)


def seconds(owner: str, name: str, value: Any) -> float:
    """A time to wait."""
    check_seconds(owner, **{name: value})
    return float(value)


class Argument(property):
    """An argument of a storage's class as an attribute: assigning it changes the parameter, or is refused."""


def argument(name: str, read: Callable[[Any], Any] | None = None, doc: str | None = None) -> Any:
    """An attribute that is an :class:`Argument`.

    The storage itself keeps the value under ``_name``, and reads it there. In a class that does not call ``__init__``
    of this library, the attribute is as any other.

    Args:
        name: The name of the attribute.
        read: Returns the value, if it is kept elsewhere.
        doc: What it is.
    """
    place = f"_{name}"

    def assign(storage: Any, value: Any) -> None:
        if getattr(storage, "_guard", None) is None:
            setattr(storage, place, value)
        else:
            storage._assign(name, value)

    return Argument(read or attrgetter(place), assign, doc=doc)


class Yielding(cached_property[_Value]):
    """A property that gives way to an attribute of the same name: subclasses may use the name for their own.

    ``help()`` shows it as the property that it is like; nothing is cached.
    """

    def __get__(self, storage: Any, owner: type | None = None) -> Any:
        return self if storage is None else self.func(storage)


def with_arguments(*names: str) -> Callable[[_Class], _Class]:
    """A decorator of a class of storages: these attributes are :class:`Argument`, and its properties do not give way.

    Args:
        names: The attributes.
    """

    def decorated(cls: _Class) -> _Class:
        for name in names:
            setattr(cls, name, argument(name))
        for base in cls.__mro__:
            for name, found in vars(base).items():
                if isinstance(found, Yielding) and isinstance(inspect.getattr_static(cls, name), Yielding):
                    setattr(cls, name, argument(name, found.func, found.__doc__))
        return cls

    return decorated


def no_parameter(storage: object, name: str, checks: Mapping[str, Check], algorithm: object = None) -> Exception:
    """The error for a name that is not the one of a parameter.

    Args:
        storage: The storage.
        name: What was to be changed.
        checks: The parameters that there are.
        algorithm: The algorithm, whose attributes might have been meant; None if there is none.
    """
    owner = type(storage).__name__
    if isinstance(inspect.getattr_static(type(storage), name, None), Argument):
        return UnknownParameterError(
            f"{name!r} of a {owner} is fixed when the storage is made: make another one. What can be changed is "
            f"{list(checks)}. Nothing was changed."
        )
    told, known = "", list(checks)
    if algorithm is not None:
        own = [key for key, value in getattr(algorithm, "__dict__", {}).items() if key[:1] != "_"]
        told, known = f", and the algorithm (a {type(algorithm).__name__}) {own}", [*known, *own]
    meant = did_you_mean(name, known)
    return UnknownParameterError(
        f"{owner} has no parameter {name!r}; it has {list(checks)}{told}.{meant} Nothing was changed."
    )


def require_empty(held: int, name: str) -> None:
    """Refuse to change a parameter that needs new memory while ``held`` transitions are stored."""
    if held:
        raise NotReadyError(
            f"{name} can change only while the storage is empty; it holds {held} transitions. Call reset() first. "
            "Nothing was changed."
        )
