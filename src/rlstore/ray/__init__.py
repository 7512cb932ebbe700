"""Storages served from a Ray cluster, and a queue of rollouts across machines: ``pip install rlstore[ray]``.

::

    served = serve(PrioritizedReplayStorage.create_factory(125_000, space, actions, num_envs=8), shards=4)
    with served.writer(num_envs=8) as writer:      # in any task or actor: the handle is picklable
        writer.add(sample)
    with served.learner(batch_size=256) as learner:
        for batch in learner:
            learner.update(batch["rows"], priorities)
"""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:  # pragma: no cover - run by a test in a process of its own
    raise ImportError("rlstore.ray needs Ray, which is not installed: pip install rlstore[ray]") from error

from rlstore.ray.learner import ServedLearner
from rlstore.ray.rollout_queue import QueueLearner, QueueReport, RolloutQueue, rollout_queue
from rlstore.ray.serving import ServedReport, ServedStorage, ShardReport, serve
from rlstore.ray.writer import ServedWriter

__all__ = [
    "QueueLearner",
    "QueueReport",
    "RolloutQueue",
    "ServedLearner",
    "ServedReport",
    "ServedStorage",
    "ServedWriter",
    "ShardReport",
    "rollout_queue",
    "serve",
]
