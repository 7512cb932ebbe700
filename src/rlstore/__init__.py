"""rlstore stores the experience of reinforcement-learning agents and serves it to learners."""

from rlstore.decoupled import DecoupledRolloutStorage
from rlstore.errors import (
    DiskFullError,
    DoesNotFitError,
    InvalidInputError,
    NotReadyError,
    RolloutFullError,
    StorageError,
    UnknownParameterError,
    UnsupportedSpaceError,
)
from rlstore.rollout import RolloutStorage
from rlstore.storage import Critic, Storage

__version__ = "0.1.0"

__all__ = [
    "Critic",
    "DecoupledRolloutStorage",
    "DiskFullError",
    "DoesNotFitError",
    "InvalidInputError",
    "NotReadyError",
    "RolloutFullError",
    "RolloutStorage",
    "Storage",
    "StorageError",
    "UnknownParameterError",
    "UnsupportedSpaceError",
]
