"""Waiting for Ray: every wait has a deadline, and an error says who was waited for."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlstore.errors import (
    InvalidInputError,
    NotReadyError,
    PeerLostError,
    StorageClosedError,
    StorageError,
    WaitTimeoutError,
)

# What Ray raises when a process, a machine, or what lay on it is gone, for now or for ever.
LOST = (
    exceptions.RayActorError,
    exceptions.ObjectLostError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
)


class GoneForGoodError(PeerLostError):
    """An actor that Ray will not start again: it was shut down."""


# A thread that waits looks this often whether it is still wanted.
_SLICE_SECONDS = 0.5


class Deadline:
    """A point in time by which something must have come."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, 0 if it is over."""
        return max(self._end - time.monotonic(), 0.0)


def check_seconds(owner: str, **seconds: object) -> None:
    """Refuse times that are not above 0, by name."""
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise InvalidInputError(f"{name} is {value!r}; {owner} needs seconds, above 0")


def answer(ref: Any, who: str, seconds: float, wanted: Callable[[], bool] | None = None) -> Any:
    """What a call gives.

    Args:
        ref: The call.
        who: Who was called, for errors.
        seconds: How long to wait.
        wanted: Asked now and then by a thread that may be told to stop.

    Raises:
        PeerLostError: (a ConnectionError) if whoever was called is gone.
        WaitTimeoutError: (a TimeoutError) if it did not answer in time.
        StorageError: What it raised itself.
    """
    deadline = Deadline(seconds)
    if wanted is not None:
        while not ray.wait([ref], timeout=min(_SLICE_SECONDS, deadline.left))[0]:
            if not wanted():
                raise StorageClosedError("this was closed while it waited")
            if not deadline.left:
                break
    try:
        return ray.get(ref, timeout=deadline.left)
    except exceptions.GetTimeoutError as error:
        raise WaitTimeoutError(f"{who} did not answer within {seconds:g} s") from error
    except exceptions.ActorDiedError as error:
        raise GoneForGoodError(f"{who} is gone for good: {first_line(error)}") from error
    except LOST as error:
        raise PeerLostError(f"{who} is gone: {first_line(error)}") from error
    except exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, StorageError):
            raise cause from error
        raise


def answers(refs: Sequence[Any], names: Sequence[str], seconds: float) -> list[Any]:
    """What each of several calls gives when all are there or the time is over; or that nothing came, as an error."""
    deadline = Deadline(seconds)
    if refs:
        ray.wait(list(refs), num_returns=len(refs), timeout=seconds)
    given: list[Any] = []
    for ref, name in zip(refs, names, strict=True):
        try:
            given.append(answer(ref, name, max(deadline.left, 0.001)))
        except (PeerLostError, WaitTimeoutError, NotReadyError) as error:
            given.append(error)
    return given


def is_done(ref: Any) -> bool:
    """True if a call has ended, well or not."""
    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def program_goes_on() -> bool:
    """False once the interpreter has begun to end: its threads are waited for."""
    return threading.main_thread().is_alive()


def was_restarted() -> bool:
    """True in an actor that Ray has started again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns of what it calls itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def this_node() -> str:
    """The address and the id of the node that this process is on."""
    context = ray.get_runtime_context()
    address: Any = ray.util.get_node_ip_address  # without annotations in Ray
    return f"{address()} {context.get_node_id()[:8]}"


def on_this_node() -> Any:
    """A place for a small actor: this node, with which all would end anyway.

    Not a soft choice: with that Ray may put it on another node at once, because this one is busy for the moment.
    """
    node = ray.get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node, soft=False)
