"""One thread at a time uses a storage: the guard that each of them has, and the methods that take it.

Whoever closes an object closes its guard last. Every method that takes the guard then raises StorageClosedError.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # in C: what signal makes of it is slow, and may be interrupted
import concurrent.futures.thread  # noqa: F401  (before register_at_fork below)
import copyreg
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from rlstore.errors import StorageClosedError
from rlstore.kernels import Block, GuardBlock
from rlstore.kernels import Guard as Guard

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Guarded(Protocol):
    """What has a guard."""

    @property
    def _guard(self) -> Guard: ...


_Owner = TypeVar("_Owner", bound=Guarded)


def new_guard() -> Guard:
    """A guard that no other thread holds in a process that is forked: the fork waits for what is being done."""
    guard = Guard()
    _GUARDS.add(guard)
    return guard


copyreg.pickle(Guard, lambda guard: (new_guard, ()))  # a copy of a storage has a guard of its own


def guarded(method: Callable[Concatenate[_Owner, _P], _R]) -> Callable[Concatenate[_Owner, _P], _R]:
    """A method that runs with the guard of its object."""

    @wraps(method)
    def with_guard(self: _Owner, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._guard:
            return method(self, *args, **kwargs)

    return with_guard


def guarded_steps(
    method: Callable[Concatenate[_Owner, _P], Iterator[_R]],
) -> Callable[Concatenate[_Owner, _P], Iterator[_R]]:
    """A generator that runs with the guard of its object, except while its consumer has an item."""

    @wraps(method)
    def with_guard(self: _Owner, /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_R]:
        guard, items = self._guard, cast("Generator[_R, None, None]", method(self, *args, **kwargs))
        try:
            while True:
                with guard:
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item
        finally:
            with taken(guard):  # what a generator that is not exhausted has to give back
                items.close()

    return with_guard


def close_guard(guard: Guard, what: str) -> None:
    """Let whoever uses ``what`` from now on raise StorageClosedError; see the module."""
    guard.close(StorageClosedError, f"this {what} is closed. Nothing was changed.")


def taken(guard: Guard) -> AbstractContextManager[None]:
    """Holds a guard that may be closed: for what a closed object still has to release, or a save to write.

    What interrupts the wait for it, as Ctrl-C does, is raised at the end of the block.
    """
    return GuardBlock(guard, False)


def released(guard: Guard) -> AbstractContextManager[None]:
    """Releases a guard that this thread holds, while it waits for what others do."""
    return GuardBlock(guard, True)


def as_block(steps: Callable[_P, Iterator[_R]]) -> Callable[_P, AbstractContextManager[_R]]:
    """``contextlib.contextmanager`` for what holds something.

    An interruption, as by Ctrl-C, comes either before the block or in it: there is none between what the generator has
    taken and the block, in which nobody would give it back, as there is in the Python of contextlib.
    """

    @wraps(steps)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[_R]:
        return Block(steps(*args, **kwargs))

    return make


class uninterrupted:  # noqa: N801 - used like a function
    """Defers Ctrl-C to the end of the block: for calls that are to be made together, away from hot paths.

    Python handles signals in the main thread alone, so it does nothing in others. A wait in the block asks
    :func:`raise_interruption` now and then.
    """

    current: uninterrupted | None = None

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._frame: FrameType | None = None
        self._outer: uninterrupted | None = None
        self.is_due = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        before = _signal.getsignal(signal.SIGINT)
        if callable(before):
            self._before, self._outer = before, uninterrupted.current
            try:
                _signal.signal(signal.SIGINT, self._note)  # before it, an interruption is raised; after it, noted
            except BaseException:
                _signal.signal(signal.SIGINT, before)
                raise
            uninterrupted.current = self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            uninterrupted.current = self._outer
            _signal.signal(signal.SIGINT, self._before)
            self._raise()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_due, self._frame = True, frame

    def _raise(self) -> None:
        if self.is_due and self._before is not None:
            self.is_due, frame, self._frame = False, self._frame, None
            self._before(signal.SIGINT, frame)


def raise_interruption() -> None:
    """Raise what a block of :class:`uninterrupted` in this thread has deferred, if anything."""
    deferring = uninterrupted.current
    while deferring is not None and threading.get_ident() == threading.main_thread().ident:
        deferring._raise()
        deferring = deferring._outer


# ---------------------------------------------------------------------------------------------------- forks


def _take(guard: Guard) -> None:
    """Take a guard whatever interrupts the wait, as Ctrl-C does; the interruption is raised when it is taken."""
    interruption: BaseException | None = None
    while True:
        try:
            guard.enter(1)
            break
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption


_GUARDS: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[Guard] = []  # by the thread that is forking: all of them


def _before_fork() -> None:
    interruption: BaseException | None = None
    for guard in (_FORKING, *_GUARDS):  # first that: two threads that fork would wait for each other
        try:
            _take(guard)
        except BaseException as error:  # Python would fork nevertheless
            interruption = error
        _held.append(guard)
    if interruption is not None:
        raise interruption


def _after_fork() -> None:
    while _held:
        _held.pop().__exit__(None, None, None)


def _after_fork_in_child() -> None:
    for guard in _held:
        guard.forget_waiting()
    _after_fork()


# Before a fork, what was registered last comes first. concurrent.futures takes the lock of all thread pools there, and
# so does a thread that holds a guard and submits work: were it registered later, they would wait for each other.
_FORKING = Guard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
