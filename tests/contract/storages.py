"""Every storage class as the contract suite sees it: how it is made, what a sample of it is, and what sets it apart.

A new storage class joins the suite with one entry in CASES. The sample of step ``s`` holds for environment ``e`` the
number ``1 + s * N + e``, in a different guise in each field, so a row that is swapped, doubled or mixed cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlstore import DecoupledRolloutStorage, RolloutStorage

NUM_ENVS = 3
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A storage class in one of its forms.

    Attributes:
        name: What the tests are called after.
        create_factory: ``(size, gamma, lam, **options)`` to ``f(device, actor, algorithm)``.
        make_sample: A sample from the ids of its environments and the flags ``terminated`` and ``truncated``.
        optional: What a sample may lack.
        size_name: How the class calls its size.
        discount_names: How it calls gamma and lambda; empty if it computes no targets.
        epsilon: What is added to the standard deviation of the advantages.
        learns_midway: Whether batches can be had before the rollout is complete.
        restarts: Whether an insert into a full rollout begins a new one; else it is refused.
        is_lazy: Whether the factory knows no shapes, and the first sample brings them.
    """

    name: str
    create_factory: Callable[..., Callable[..., Any]]
    make_sample: Callable[..., dict[str, Any]]
    optional: tuple[str, ...]
    size_name: str
    discount_names: tuple[str, ...]
    epsilon: float
    learns_midway: bool
    restarts: bool
    is_lazy: bool = True

    @property
    def computes_targets(self) -> bool:
        return bool(self.discount_names)

    def sample(self, step: int, terminated: Sequence[int] = (), truncated: Sequence[int] = ()) -> dict[str, Any]:
        """The sample of a step; its flags are set for the environments named."""
        ids = torch.arange(1, NUM_ENVS + 1, dtype=torch.float32) + step * NUM_ENVS
        sample = self.make_sample(ids)
        sample["terminated"] = torch.tensor([env in terminated for env in range(NUM_ENVS)])
        sample["truncated"] = torch.tensor([env in truncated for env in range(NUM_ENVS)])
        return sample


class Actor:
    """Values everything it sees at an eighth of the id that is in it, and remembers what it was shown."""

    def __init__(self, column: bool = True) -> None:
        self.column = column
        self.seen: list[list[int]] = []

    def get_values(self, observations: Any) -> torch.Tensor:
        ids = ids_in(observations)
        self.seen.append(ids.long().tolist())
        return ids.unsqueeze(-1) / 8 if self.column else ids / 8


class Algorithm:
    """Any object with the attributes given."""

    def __init__(self, **attributes: float) -> None:
        self.__dict__.update(attributes)


def ids_in(observations: Any) -> torch.Tensor:
    """The ids in observations of any of the forms below."""
    while not isinstance(observations, torch.Tensor):
        observations = observations["policy"]
    return observations[..., 0]


def _vector(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([ids, -ids], -1)


def _nest(ids: torch.Tensor) -> dict[str, Any]:
    pixels = torch.stack([ids % 256, ids // 256], -1).to(torch.uint8)
    return {"policy": _vector(ids), "camera": {"image": pixels.view(-1, 1, 2), "exposure": ids.double() / 3}}


def _common(ids: torch.Tensor, observe: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    return {"observations": observe(ids), "rewards": ids / 4 + 1, "next_observations": observe(ids + NUM_ENVS)}


def _evaluated(ids: torch.Tensor) -> dict[str, Any]:
    """What every sample with a critic holds; a final value is known in every other environment."""
    known = torch.where(ids % 2 == 0, ids / 16, NAN)
    return {"values": (ids / 8).unsqueeze(-1), "log_probs": -ids, "final_values": known}


def rl_sample(ids: torch.Tensor) -> dict[str, Any]:
    params = (torch.stack([ids, ids + 0.25], -1), torch.stack([ids + 0.5, ids + 0.75], -1))
    return {
        **_common(ids, _nest),
        **_evaluated(ids),
        "actions": torch.stack([ids, ids / 2], -1),
        "distribution_params": params,
    }


def distillation_sample(ids: torch.Tensor) -> dict[str, Any]:
    actions, teacher = torch.stack([ids, ids / 2], -1), torch.stack([-ids, ids / 4], -1)
    return {**_common(ids, lambda i: {"policy": _vector(i)}), "actions": actions, "privileged_actions": teacher}


def discrete_sample(ids: torch.Tensor) -> dict[str, Any]:
    return {**_common(ids, _vector), **_evaluated(ids), "adv_preds": ids + 0.5, "actions": ids.long()}


def box_sample(ids: torch.Tensor) -> dict[str, Any]:
    actions = torch.stack([ids, ids / 2, ids / 4], -1)
    return {**_common(ids, _nest), **_evaluated(ids), "adv_preds": (ids + 0.5).unsqueeze(-1), "actions": actions}


def _rollout_factory(training_type: str) -> Callable[..., Any]:
    def create(size: int, gamma: float = 0.99, lam: float = 0.95, **options: Any) -> Any:
        return RolloutStorage.create_factory(size, training_type, gamma=gamma, lam=lam, **options)

    return create


def _decoupled_factory(*given: Any) -> Callable[..., Any]:
    def create(size: int, gamma: float = 0.99, lam: float = 0.95, **options: Any) -> Any:
        return DecoupledRolloutStorage.create_factory(size, *given, discount=gamma, gae_lambda=lam, **options)

    return create


_NEST_SPACE = spaces.Dict(
    {
        "policy": spaces.Box(-1e9, 1e9, (2,)),
        "camera": spaces.Dict(
            {"image": spaces.Box(0, 255, (1, 2), np.uint8), "exposure": spaces.Box(-1e9, 1e9, (), np.float64)}
        ),
    }
)
_RL = {
    "optional": ("next_observations", "final_values", "distribution_params"),
    "size_name": "num_transitions_per_env",
    "discount_names": ("gamma", "lam"),
    "epsilon": 1e-8,
    "learns_midway": True,
    "restarts": False,
}
_DECOUPLED = {
    "optional": ("final_values",),
    "size_name": "num_steps",
    "discount_names": ("discount", "gae_lambda"),
    "epsilon": 1e-5,
    "learns_midway": False,
    "restarts": True,
}


def _spaces_factory(size: int, gamma: float = 0.99, lam: float = 0.95, **options: Any) -> Any:
    def create(device: Any = "cpu", actor: Any = None, algorithm: Any = None) -> RolloutStorage:
        actions = spaces.Box(-1e9, 1e9, (2,))
        given = {"gamma": gamma, "lam": lam, "autoreset": "SameStep", **options}
        storage = RolloutStorage.from_spaces(_NEST_SPACE, actions, NUM_ENVS, size, device, **given)
        storage._give(actor, algorithm)
        return storage

    return create


CASES = [
    Case("rl", _rollout_factory("rl"), rl_sample, **_RL),
    Case("rl-spaces", _spaces_factory, rl_sample, **_RL, is_lazy=False),
    Case(
        "distillation",
        _rollout_factory("distillation"),
        distillation_sample,
        **{**_RL, "optional": ("next_observations",), "discount_names": ()},
    ),
    Case("decoupled-discrete", _decoupled_factory(), discrete_sample, **_DECOUPLED),
    Case("decoupled-box", _decoupled_factory(), box_sample, **_DECOUPLED),
    Case(
        "decoupled-spaces",
        _decoupled_factory(_NEST_SPACE, spaces.Box(-1e9, 1e9, (3,)), NUM_ENVS),
        box_sample,
        **_DECOUPLED,
        is_lazy=False,
    ),
]
