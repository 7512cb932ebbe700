"""rsl_rl's algorithms on a :class:`~rlstore.RolloutStorage`: one call swaps the storage of a runner."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from rlstore import RolloutStorage
from rlstore.errors import InvalidInputError

__all__ = ["use_rlstore"]


def use_rlstore(runner_or_algorithm: Any) -> RolloutStorage:
    """Let an algorithm of rsl_rl keep its rollouts in a :class:`~rlstore.RolloutStorage`.

    Call it once, after the runner was made: before it learns, or between two calls of ``learn``; of several processes,
    each calls it. The new storage has the sizes, the observations and the device of the one it replaces. PPO then
    computes returns and advantages with :meth:`RolloutStorage.compute_returns`: the same numbers as before, except for
    rounding. A class that overrides ``compute_returns`` of PPO keeps its own. rsl_rl bootstraps at time limits by
    adding to the rewards, as before.

    Args:
        runner_or_algorithm: An ``OnPolicyRunner`` or ``DistillationRunner``, or its ``alg``.

    Returns:
        The storage.

    Raises:
        InvalidInputError: (a ValueError) if rsl_rl is older than 5.0, it is no algorithm of rsl_rl, its storage is of a
            class of its own or was swapped already, or a rollout has begun. Nothing was changed.
    """
    from rsl_rl.algorithms import PPO
    from rsl_rl.storage import RolloutStorage as Replaced

    if not hasattr(Replaced, "Batch"):
        raise InvalidInputError(
            "use_rlstore() needs rsl-rl-lib 5.0 or later, whose algorithms take batches with names; "
            f"{version('rsl-rl-lib')} is installed. Nothing was changed."
        )
    algorithm = getattr(runner_or_algorithm, "alg", runner_or_algorithm)
    replaced = getattr(algorithm, "storage", None)
    if isinstance(replaced, RolloutStorage):
        raise InvalidInputError(
            "the storage of this algorithm is one of rlstore already; call use_rlstore() once. Nothing was changed."
        )
    if not isinstance(replaced, Replaced):
        raise InvalidInputError(
            f"runner_or_algorithm is a {type(runner_or_algorithm).__name__} with the storage {replaced!r:.80}; give a "
            "runner of rsl_rl, or its alg, with a storage of rsl_rl. Nothing was changed."
        )
    if type(replaced) is not Replaced:
        raise InvalidInputError(
            f"the storage is a {type(replaced).__name__}, which adds to the RolloutStorage of rsl_rl, and that of "
            "rlstore would not have it. Nothing was changed."
        )
    if replaced.step or algorithm.transition.actions is not None:
        raise InvalidInputError(
            f"the storage holds {replaced.step} steps of a rollout, and a step may have begun; call use_rlstore() "
            "before learn(). Nothing was changed."
        )
    storage = RolloutStorage(
        replaced.training_type,
        replaced.num_envs,
        replaced.num_transitions_per_env,
        replaced.observations[0],
        replaced.actions_shape,
        replaced.device,
    )
    algorithm.storage, algorithm.transition = storage, RolloutStorage.Transition()
    if getattr(algorithm.compute_returns, "__func__", None) is PPO.compute_returns:
        algorithm.compute_returns = partial(_compute_returns, algorithm)
    return storage


def _compute_returns(algorithm: Any, obs: Any) -> None:
    """What PPO's method of this name does, with the storage's returns."""
    critic = algorithm.critic
    state = critic.get_hidden_state()
    with torch.no_grad():
        last_values = critic(obs)
    critic.reset(hidden_state=state)  # the next rollout begins with the state before this step
    normalize = not algorithm.normalize_advantage_per_mini_batch
    algorithm.storage.compute_returns(last_values, algorithm.gamma, algorithm.lam, normalize_advantage=normalize)
