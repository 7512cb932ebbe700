"""The replay buffer of FastTD3 and FastSAC: ``SimpleReplayBuffer``, with each observation stored once."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlstore import ReplayStorage
from rlstore.engine.batches.pipeline import Part, Request
from rlstore.engine.calls import explained
from rlstore.engine.checks import check_positive
from rlstore.errors import InvalidInputError
from rlstore.replay.tensordicts import entry, sample_windows

__all__ = ["SimpleReplayBuffer"]

_OWNER = "SimpleReplayBuffer"
_SETTINGS = ("storage_size", "num_envs", "observation_space", "action_space", "n_step", "discount")
_ENDS = tuple(Request(part, 0, (), torch.bool) for part in (Part.TERMINATED, Part.TRUNCATED))


class SimpleReplayBuffer:
    """A drop-in replacement for the class of the same name in FastTD3 and FastSAC, on a :class:`ReplayStorage`.

    Differences: next observations are not stored a second time, so it takes about half the memory. Every transition can
    be drawn, and rows are drawn uniformly over all environments, not the same number from each. An n-step window ends
    with its episode, whether that terminated or was truncated, and at the newest step.

    Args:
        n_env: The number of environments that are stepped together.
        buffer_size: Steps held of each environment; then the oldest are overwritten.
        n_obs: The length of one observation.
        n_act: The length of one action.
        n_critic_obs: The length of one observation of the critic.
        asymmetric_obs: Whether the critic has observations of its own.
        playground_mode: With ``asymmetric_obs``: the critic's observation begins with the actor's, which is not stored
            a second time.
        n_steps: Steps over which rewards are summed before the bootstrap.
        gamma: The discount factor.
        device: The device of the data and of the batches; None for torch's default device.
    """

    @explained
    def __init__(
        self,
        n_env: int,
        buffer_size: int,
        n_obs: int,
        n_act: int,
        n_critic_obs: int,
        asymmetric_obs: bool = False,
        playground_mode: bool = False,
        n_steps: int = 1,
        gamma: float = 0.99,
        device: str | torch.device | None = None,
    ) -> None:
        check_positive(_OWNER, n_env=n_env, buffer_size=buffer_size, n_obs=n_obs, n_act=n_act)
        self.n_env, self.buffer_size, self.n_obs, self.n_act = n_env, buffer_size, n_obs, n_act
        self.n_critic_obs, self.asymmetric_obs = n_critic_obs, asymmetric_obs
        self.playground_mode = playground_mode and asymmetric_obs
        self.n_steps, self.gamma, self.device = n_steps, gamma, device
        observations: spaces.Box | spaces.Dict = _numbers(n_obs)
        if asymmetric_obs:
            check_positive(_OWNER, n_critic_obs=n_critic_obs)
            own = n_critic_obs - n_obs if self.playground_mode else n_critic_obs
            if own < 1:
                raise InvalidInputError(
                    f"n_critic_obs is {n_critic_obs}; with playground_mode it has to be larger than n_obs, {n_obs}"
                )
            observations = spaces.Dict({"observations": observations, "critic_observations": _numbers(own)})
        self._storage = ReplayStorage(
            observations,
            _numbers(n_act),
            torch.get_default_device() if device is None else device,
            n_env * buffer_size,
            n_env,
            n_step=n_steps,
            discount=gamma,
            autoreset="Disabled",  # what follows a step is its own, the final observation where an episode ended
        )

    @property
    def storage(self) -> ReplayStorage:
        """The storage that holds the data.

        ``buffer.storage.save(folder)`` saves it with its random generator, and
        ``buffer.storage = ReplayStorage.load(folder)`` goes on with it, in a buffer that was made with the same
        arguments; a storage that does not fit is refused.
        """
        return self._storage

    @storage.setter
    def storage(self, storage: ReplayStorage) -> None:
        if type(storage) is not ReplayStorage:
            raise InvalidInputError(
                f"storage is a {type(storage).__name__}; give a ReplayStorage. Nothing was changed."
            )
        for name in _SETTINGS:
            own, other = getattr(self._storage, name), getattr(storage, name)
            if own != other:
                raise InvalidInputError(
                    f"{name} of this storage is {other}, and this {_OWNER} needs {own}, fixed by its arguments; give "
                    "one that a buffer with the same arguments has saved. Nothing was changed."
                )
        self._storage = storage

    @property
    def ptr(self) -> int:
        """Steps added so far."""
        return self._storage._added

    def extend(self, tensor_dict: TensorDictBase) -> None:
        """Add one step of all environments; everything is checked before anything is written.

        Args:
            tensor_dict: TensorDict ``[n_env]`` with ``observations``, ``actions``, and under ``next``
                ``observations`` (the final observation where an episode ended), ``rewards``, ``dones`` (the episode
                ended) and ``truncations`` (by a time limit); with ``asymmetric_obs`` also ``critic_observations`` in
                both places.
        """
        named = {key: entry(tensor_dict, ("next", key), "tensor_dict") for key in ("rewards", "dones", "truncations")}
        dones, truncations = named["dones"], named["truncations"]
        if dones.shape != truncations.shape:
            raise InvalidInputError(
                f"dones is {tuple(dones.shape)} and truncations {tuple(truncations.shape)}; give both as "
                f"{(self.n_env,)}, fixed by n_env. Nothing was written."
            )
        truncated = truncations != 0
        terminated = (dones != 0) & ~truncated
        actions, following = entry(tensor_dict, "actions", "tensor_dict"), self._observed(tensor_dict, ("next",))
        observed = self._observed(tensor_dict, ())
        self._storage.add(observed, actions, named["rewards"], terminated, truncated, {}, following)

    def _observed(self, tensor_dict: TensorDictBase, place: tuple[str, ...]) -> Tensor | dict[str, Tensor]:
        """The observations before or after a step, as the storage holds them."""
        observations = entry(tensor_dict, (*place, "observations"), "tensor_dict")
        key = (*place, "critic_observations")
        if not self.asymmetric_obs:
            if tensor_dict.get(key, None) is not None:
                raise InvalidInputError(
                    f"tensor_dict holds {key!r}, and this {_OWNER} was made with asymmetric_obs=False: it would not "
                    "store them. Nothing was written."
                )
            return observations
        critic = entry(tensor_dict, key, "tensor_dict")
        if self.playground_mode:
            critic = critic[..., self.n_obs :]
        return {"observations": observations, "critic_observations": critic}

    @torch.inference_mode(False)  # a batch is trained on
    def sample(self, batch_size: int) -> TensorDict:
        """Draw ``n_env * batch_size`` transitions.

        Returns:
            A TensorDict ``[n_env * batch_size]``: ``observations`` and ``actions`` of the first step of a window of k
            steps, and under ``next`` ``rewards`` (``sum_{i<k} gamma^i r_i``), ``observations`` (after the last step),
            ``dones`` and ``truncations`` (of the last step, int64) and ``effective_n_steps`` (k; as in FastTD3 int64
            with ``n_steps=1`` and float32 with more); with ``asymmetric_obs`` also ``critic_observations`` in both
            places.
        """
        check_positive("sample()", batch_size=batch_size)
        count = self.n_env * batch_size
        batch, steps, (terminated, truncated) = sample_windows(self._storage, count, _ENDS)
        following = {
            "rewards": batch["rewards"].squeeze(1),
            "dones": (terminated | truncated).long(),
            "truncations": truncated.long(),
            "effective_n_steps": steps if self.n_steps == 1 else steps.float(),
            **self._served(batch["next_observations"]),
        }
        now = self._served(batch["observations"])
        return TensorDict({**now, "actions": batch["actions"], "next": following}, batch_size=count)

    def _served(self, observed: Tensor | TensorDict) -> dict[str, Tensor]:
        """Observations as a batch has them."""
        if isinstance(observed, Tensor):
            return {"observations": observed}
        observations, critic = observed["observations"], observed["critic_observations"]
        if self.playground_mode:
            critic = torch.cat([observations, critic], dim=1)
        return {"observations": observations, "critic_observations": critic}


def _numbers(length: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (length,))
