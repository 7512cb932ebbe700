"""rlstore stores the experience of reinforcement-learning agents and serves it to learners."""

from rlstore.decoupled import DecoupledRolloutStorage
from rlstore.distributed import DistributedStorage, HandoffReport
from rlstore.distributed_actor import ActorHandle, Rollout
from rlstore.distributed_learner import Learner
from rlstore.engine.limiter import RateLimit
from rlstore.engine.slots import SlotQueue
from rlstore.errors import (
    DiskFullError,
    DoesNotFitError,
    InvalidInputError,
    NotReadyError,
    PeerLostError,
    RolloutFullError,
    SnapshotError,
    StorageClosedError,
    StorageError,
    UnknownParameterError,
    UnsupportedSpaceError,
    WaitTimeoutError,
)
from rlstore.hindsight import HindsightReplayStorage
from rlstore.nstep import NStepReplayStorage
from rlstore.prioritized import PrioritizedBatch, PrioritizedReplayStorage
from rlstore.replay import ReplayStorage
from rlstore.replay_writer import ReplayWriter
from rlstore.rollout import RolloutStorage
from rlstore.rollout_batch import RolloutBatch
from rlstore.sequence import SequenceBatch, SequenceReplayStorage
from rlstore.storage import Critic, Storage
from rlstore.transition_batch import ReplayBatch

__version__ = "0.1.0"

__all__ = [
    "ActorHandle",
    "Critic",
    "DecoupledRolloutStorage",
    "DiskFullError",
    "DistributedStorage",
    "DoesNotFitError",
    "HandoffReport",
    "HindsightReplayStorage",
    "InvalidInputError",
    "Learner",
    "NStepReplayStorage",
    "NotReadyError",
    "PeerLostError",
    "PrioritizedBatch",
    "PrioritizedReplayStorage",
    "RateLimit",
    "ReplayBatch",
    "ReplayStorage",
    "ReplayWriter",
    "Rollout",
    "RolloutBatch",
    "RolloutFullError",
    "RolloutStorage",
    "SequenceBatch",
    "SequenceReplayStorage",
    "SlotQueue",
    "SnapshotError",
    "Storage",
    "StorageClosedError",
    "StorageError",
    "UnknownParameterError",
    "UnsupportedSpaceError",
    "WaitTimeoutError",
]
