"""Steps for DecoupledRolloutStorage whose numbers tell their (step, env), and a plain Python model of its targets."""

from __future__ import annotations

import math

import torch
from gymnasium import spaces

from rlstore import DecoupledRolloutStorage

BLOCKS = (
    "actions",
    "rewards",
    "terminateds",
    "truncateds",
    "log_probs",
    "values",
    "adv_preds",
    "returns",
    "advantages",
)


def make_storage(num_steps=3, num_envs=2, action_space=None, observation_space=None, **options):
    return DecoupledRolloutStorage(
        observation_space if observation_space is not None else spaces.Box(-1e9, 1e9, (2,)),
        action_space if action_space is not None else spaces.Discrete(100_000),
        num_steps=num_steps,
        num_envs=num_envs,
        **options,
    )


def ids_of(step, num_envs):
    """One number for each environment of a step, never used twice; 0 belongs to nobody."""
    return torch.arange(1, num_envs + 1, dtype=torch.float32) + step * num_envs


def obs_of(ids):
    return torch.stack([10 * ids, 10 * ids + 1], -1)


def make_step(step, num_envs=2, terminated=(), truncated=(), **changes):
    """The arguments of add() for a step; the observation after it is that of the step after it."""
    ids = ids_of(step, num_envs)
    arguments = {
        "obs": obs_of(ids),
        "actions": ids + 0,
        "rewards": ids + 0.25,
        "terminateds": torch.tensor([env in terminated for env in range(num_envs)]),
        "truncateds": torch.tensor([env in truncated for env in range(num_envs)]),
        "next_obs": obs_of(ids + num_envs),
        "log_probs": -ids,
        "values": ids + 0.5,
        "adv_preds": ids + 0.75,
    }
    assert set(changes) <= {*arguments, "final_values"}
    return {**arguments, **changes}


def fill(storage, first=0, **changes):
    """Add a whole rollout of steps numbered from ``first``."""
    for step in range(storage.num_steps):
        storage.add(**make_step(first + step, storage.num_envs, **changes))


def snapshot(storage):
    """Every tensor of the storage, the number of rows, and the order in which rows will be drawn."""
    tensors = {name: getattr(storage, name).clone() for name in BLOCKS}
    tensors.update({f"obs{path}": leaf.clone() for path, leaf in leaves(storage.obs)})
    tensors.update(
        {f"data {name}": value for name, value in storage.get_all_buffer_data().items() if name == "final_values"}
    )
    return tensors, len(storage), storage._generator.get_state()


def leaves(nest, path=""):
    if isinstance(nest, torch.Tensor):
        return [(path, nest)]
    parts = enumerate(nest) if isinstance(nest, tuple) else nest.items()
    return [found for key, part in parts for found in leaves(part, f"{path}/{key}")]


def assert_same(before, after):
    assert before[0].keys() == after[0].keys()
    for name, tensor in before[0].items():
        torch.testing.assert_close(after[0][name], tensor, rtol=0, atol=0, equal_nan=True, msg=f"{name} has changed")
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])


def naive_advantages(rewards, values, last_values, terminated, truncated, final_values, gamma, lam):
    """Each advantage as the weighted sum of the temporal differences ahead of it, up to the episode's end.

    All are lists [step][env]; ``final_values`` holds None where the value is not known.
    """
    steps, envs = len(rewards), len(rewards[0])
    after = [*values[1:], last_values]
    advantages = [[0.0] * envs for _ in range(steps)]
    for t in range(steps):
        for e in range(envs):
            weight = 1.0
            for k in range(t, steps):
                ended = terminated[k][e] or truncated[k][e]
                if terminated[k][e]:
                    target = rewards[k][e]
                elif not truncated[k][e]:
                    target = rewards[k][e] + gamma * after[k][e]
                elif final_values[k][e] is not None:
                    target = rewards[k][e] + gamma * final_values[k][e]
                else:
                    target = values[k][e]
                advantages[t][e] += weight * (target - values[k][e])
                weight *= gamma * lam
                if ended:
                    break
    return advantages


def normalised(advantages, epsilon=1e-5):
    """(A - mean) / (std + epsilon) over all entries, with the unbiased standard deviation."""
    flat = [a for row in advantages for a in row]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1))
    return [[(a - mean) / (std + epsilon) for a in row] for row in advantages]
