"""A served storage whose actors are plain objects of this process: writer, shards, ledger and learner without Ray."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import ray

from rlstore.ray import ServedStorage, learner, ledger, serving, shard, writer
from rlstore.ray.calls import Connection
from rlstore.ray.saves import Saving


class LocalActor:
    """Stands for the handle of an actor: a call is executed at once, and its reference is the result.

    Coroutines of an actor run one at a time, as in its loop.
    """

    def __init__(self, target: Any) -> None:
        self._target, self._loop = target, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def remote(*args: Any) -> Any:
            result = method(*args)
            if not asyncio.iscoroutine(result):
                return result
            with self._loop:
                return asyncio.run(result)

        return SimpleNamespace(remote=remote)


class LocalConnection(Connection):
    def ask_ledger(self, method: str, *args: Any, wanted: Any = None) -> Any:
        return getattr(self.ledger, method).remote(*args)


def serve_locally(monkeypatch: Any, factory: Any, shards: int, **saved: Any) -> ServedStorage:
    """A served storage, ``saved`` as the attributes of Saving say."""
    saving = Saving(shards, **saved)
    actors: dict[str, LocalActor] = {}

    def get_actor(name: str, namespace: str) -> LocalActor:
        if name not in actors:
            raise ValueError(name)
        return actors[name]

    monkeypatch.setattr(ray, "get_actor", get_actor)
    for module in (ledger, shard):
        monkeypatch.setattr(module, "was_restarted", lambda: False)
    monkeypatch.setattr(shard, "this_node", lambda: "here")
    monkeypatch.setattr(shard, "ask", lambda call, who, seconds: call())
    for module in (writer, learner, serving):
        monkeypatch.setattr(module, "answer", lambda ref, who, seconds: ref)
    for module in (writer, learner):
        monkeypatch.setattr(module, "is_done", lambda ref: True)
    for module in (learner, serving):
        monkeypatch.setattr(module, "answers", lambda refs, names, seconds: refs)
    keeper = actors[ledger.ledger_name("local")] = LocalActor(ledger.Ledger("local", None, saving, 60.0))
    packed = shard.packed_factory(factory)
    for index in range(shards):
        made = shard.Shard(index, packed, "local", 0, saving)
        made.ready()
        actors[ledger.shard_name("local", index)] = LocalActor(made)
    handles = tuple(actors[ledger.shard_name("local", index)] for index in range(shards))
    return ServedStorage(LocalConnection("local", keeper, handles, ("here",) * shards, 5.0))
