"""Calls to Ray actors: every wait has a deadline, and errors name the actor that was waited for."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

# What Ray raises when a process or a node is dead, temporarily or permanently, or an object was lost with it.
_LOST = (
    exceptions.RayActorError,
    exceptions.ObjectLostError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
)

# How often a waiting thread checks whether it should stop.
_SLICE_SECONDS = 0.5

# Between two calls to an actor that is being restarted: Ray does not notify when it is back.
_PAUSE_SECONDS = 0.2


class GoneForGoodError(PeerLostError):
    """An actor that Ray does not restart: it was shut down."""


class Deadline:
    """A point in time at which a wait ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds; 0 after the deadline."""
        return max(self._end - time.monotonic(), 0.0)

    def pause(self) -> None:
        """Sleep before a dead actor is called again."""
        time.sleep(min(_PAUSE_SECONDS, self.left))


class Changed:
    """Wakes the waiting coroutines of an asyncio actor."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everybody who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, deadline: Deadline) -> bool:
        """Wait for the next notification; False after the deadline."""
        try:
            await asyncio.wait_for(self._event.wait(), deadline.left)
        except asyncio.TimeoutError:
            return False
        return True


def check_seconds(owner: str, **seconds: object) -> None:
    """Refuse times that are not finite numbers above 0, by name."""
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise InvalidInputError(f"{name} is {value!r}; {owner} needs seconds, above 0")


def check_connected() -> None:
    """Refuse to go on without a Ray cluster."""
    if not ray.is_initialized():
        raise NotReadyError("this process is not connected to a Ray cluster; call ray.init() first")


def answer(ref: Any, who: str, seconds: float, wanted: Callable[[], bool] | None = None) -> Any:
    """The result of a call.

    Args:
        ref: The call.
        who: The actor that was called, for errors.
        seconds: How long to wait.
        wanted: Asked regularly; the wait ends when it returns False.

    Raises:
        PeerLostError: (a ConnectionError) if the actor is dead.
        WaitTimeoutError: (a TimeoutError) if it did not answer in time.
        StorageClosedError: If the result is not wanted any more.
        StorageError: What the call itself raised.
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
        raise GoneForGoodError(f"{who} is gone for good: {_first_line(error)}") from error
    except _LOST as error:
        raise PeerLostError(f"{who} is gone: {_first_line(error)}") from error
    except exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, StorageError):
            raise cause from error
        raise


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def answers(refs: Sequence[Any], names: Sequence[str], seconds: float) -> list[Any]:
    """The results of several calls, waited for together; an exception for each that failed or is not ready."""
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


def ask(call: Callable[[], Any], who: str, seconds: float, wanted: Callable[[], bool] | None = None) -> Any:
    """The result of a call, which is repeated until the deadline while its actor is being restarted."""
    deadline = Deadline(seconds)
    while True:
        try:
            return answer(call(), who, deadline.left, wanted)
        except PeerLostError as error:
            if not deadline.left or isinstance(error, GoneForGoodError):
                raise
            deadline.pause()


def is_done(ref: Any) -> bool:
    """True if a call has returned or failed."""
    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])


def is_running() -> bool:
    """False when the interpreter shuts down: it waits for threads that call this."""
    return threading.main_thread().is_alive()


def was_restarted() -> bool:
    """True in an actor that Ray has restarted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray deprecates what it calls itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def this_node() -> str:
    """The address and the id of the node of this process."""
    context = ray.get_runtime_context()
    address: Any = ray.util.get_node_ip_address  # without annotations in Ray
    return f"{address()} {context.get_node_id()[:8]}"


def start_on_this_node(kind: type[Any], *args: Any, **options: Any) -> Any:
    """Start a small asyncio actor on this node, whose loss would end everything anyway; returns its handle.

    Ray restarts it, and never repeats a call.
    """
    # Not a soft affinity: with that Ray may choose another node whenever this one is busy.
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(kind)
    return actor_class.options(
        num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=10_000, scheduling_strategy=node, **options
    ).remote(*args)


@dataclass(frozen=True)
class Connection:
    """The actors of a served storage; every handle of it has one.

    Attributes:
        name: The name of the served storage, in errors and in the cluster.
        ledger: The actor of the ledger.
        shards: The actors of the shards.
        nodes: The node and process in which each shard was started.
        deadline: Seconds after which a wait ends with an error.
    """

    name: str
    ledger: Any
    shards: tuple[Any, ...]
    nodes: tuple[str, ...]
    deadline: float

    def who(self, shard: int) -> str:
        """The name of a shard in errors."""
        return f"shard {shard} of {self.name} (served at first from {self.nodes[shard]})"

    @property
    def patience(self) -> float:
        """Seconds after which a learner continues without a shard that does not answer."""
        return max(self.deadline / 6, 0.5)

    def ask_ledger(self, method: str, *args: Any, wanted: Callable[[], bool] | None = None) -> Any:
        """Call a method of the ledger, again while the ledger is being restarted.

        The ledger has the same deadline for permits and explains in its error why there was none; so it gets a second
        more.
        """

        def call() -> Any:
            return getattr(self.ledger, method).remote(*args)

        return ask(call, f"the ledger of {self.name}", self.deadline + 1, wanted)
