"""The public names, which ``rlstore`` imports when one of them is first used."""

from rlstore.distributed.actor import ActorHandle, Rollout
from rlstore.distributed.batch import RolloutBatch
from rlstore.distributed.learner import Learner
from rlstore.distributed.storage import DistributedStorage, HandoffReport
from rlstore.engine.disk.background import BackgroundSave
from rlstore.engine.disk.journal import Journal
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.processes.slots import SlotQueue
from rlstore.episodes import Episode, Episodes
from rlstore.errors import (
    DiskFullError,
    DoesNotFitError,
    InvalidInputError,
    NotReadyError,
    PeerLostError,
    RolloutFullError,
    RowNotHeldError,
    SnapshotError,
    StorageClosedError,
    StorageError,
    UnknownParameterError,
    UnsupportedSpaceError,
    WaitTimeoutError,
)
from rlstore.replay.hindsight import HindsightReplayStorage
from rlstore.replay.mixed import MixedReplay
from rlstore.replay.nstep import NStepReplayStorage
from rlstore.replay.prioritized import PrioritizedReplayStorage
from rlstore.replay.sequence import SequenceReplayStorage
from rlstore.replay.storage import ReplayStorage
from rlstore.replay.views import PrioritizedBatch, ReplayBatch, SequenceBatch
from rlstore.replay.writer import ReplayWriter
from rlstore.rollout.decoupled import DecoupledBatch, DecoupledRolloutStorage
from rlstore.rollout.storage import RolloutStorage
from rlstore.storage import Critic, Storage

__all__ = [
    "ActorHandle",
    "BackgroundSave",
    "Critic",
    "DecoupledBatch",
    "DecoupledRolloutStorage",
    "DiskFullError",
    "DistributedStorage",
    "DoesNotFitError",
    "Episode",
    "Episodes",
    "HandoffReport",
    "HindsightReplayStorage",
    "InvalidInputError",
    "Journal",
    "Learner",
    "MixedReplay",
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
    "RowNotHeldError",
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
