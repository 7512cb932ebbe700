"""Small programs whose draws under a seed, and whose snapshots, must never change. Each step of each lane has an id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict

import rlstore

ENVS = 3


def numbers(value: Any) -> Any:
    """A batch as plain numbers, exactly."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return [list(value.shape), value.detach().cpu().flatten().tolist()]
    if isinstance(value, (Mapping, TensorDict)):
        return {str(key): numbers(value[key]) for key in sorted(value.keys(), key=str)}
    if hasattr(value, "_asdict"):
        return numbers(value._asdict())
    if isinstance(value, (tuple, list)):
        return [numbers(part) for part in value]
    if hasattr(value, "__dict__"):
        return numbers(vars(value))
    return value


def ids(step: int, width: int = 1) -> torch.Tensor:
    """``[ENVS, width]``: 100 a step and 1 a lane."""
    return (100.0 * step + torch.arange(ENVS)).unsqueeze(1).repeat(1, width)


def ends(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lane 0 terminates every fifth step, lane 1 is truncated every seventh, lane 2 goes on."""
    terminated, truncated = torch.zeros(ENVS, dtype=torch.bool), torch.zeros(ENVS, dtype=torch.bool)
    terminated[0], truncated[1] = step % 5 == 4, step % 7 == 6
    return terminated, truncated


# ------------------------------------------------------------------------------------------------------ replay


def step_of(step: int, observe: Callable[[int], Any] = ids) -> tuple[Any, ...]:
    """The arguments of ``add`` for a step; where an episode ends the final observation has an id of its own."""
    terminated, truncated = ends(step)
    final = torch.where((terminated | truncated).unsqueeze(1), ids(step) + 0.5, torch.zeros(ENVS, 1))
    infos = {"final_obs": final} if observe is ids else {}
    actions = torch.arange(ENVS) % 2
    return observe(step), actions, ids(step)[:, 0] / 100, terminated, truncated, infos, observe(step + 1)


def fill(storage: Any, first: int, last: int, observe: Callable[[int], Any] = ids, **more: Any) -> None:
    """Add steps."""
    for step in range(first, last):
        storage.add(*step_of(step, observe), **more)


BOX, DISCRETE = gym.spaces.Box(-1e9, 1e9, (1,)), gym.spaces.Discrete(2)
ARGUMENTS: dict[str, Any] = {"storage_size": 60, "num_envs": ENVS, "batch_size": 8, "seed": 7, "autoreset": "SameStep"}
REPLAY: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "replay": (rlstore.ReplayStorage, {}),
    "replay, three steps": (rlstore.ReplayStorage, {"n_step": 3}),
    "replay, shared": (rlstore.ReplayStorage, {"memory": "shared"}),
    "replay, RAM": (rlstore.ReplayStorage, {"memory": "ram", "n_step": 2, "dtype": torch.float64}),
    "n-step": (rlstore.NStepReplayStorage, {"num_workers": 0}),
    "n-step, ahead": (rlstore.NStepReplayStorage, {"num_workers": 2, "fetch_every": 3}),
    "prioritized": (rlstore.PrioritizedReplayStorage, {"n_step": 2, "beta_steps": 10}),
    "prioritized, ahead": (rlstore.PrioritizedReplayStorage, {"num_workers": 1}),
    "prioritized, shared": (rlstore.PrioritizedReplayStorage, {"memory": "shared"}),
    "sequences": (rlstore.SequenceReplayStorage, {"sequence_length": 4, "burn_in": 1, "overlap": 1}),
    "sequences, by priority": (rlstore.SequenceReplayStorage, {"sequence_length": 3, "alpha": 0.6}),
    "sequences, across": (rlstore.SequenceReplayStorage, {"sequence_length": 4, "across_episodes": True}),
}


def replay_program(storage: Any) -> Iterator[Any]:
    """Fill, draw, wrap, draw; priorities change in between."""
    fill(storage, 0, 15)
    yield storage.sample()
    yield storage.sample(5)
    if hasattr(storage, "alpha") and storage.alpha > 0:
        rows = storage.sample().rows
        storage.update(rows, 0.25 + torch.arange(len(rows)) / 4)
    fill(storage, 15, 40)
    for _ in range(3):
        yield storage.sample()
    yield from storage.generate_batches(2, 3)


def lstm_sequences(device: str) -> Any:
    """Sequences with recurrent states."""
    arguments = {**ARGUMENTS, "hidden_shape": ((1, 2), (1, 2)), "sequence_length": 3}
    return rlstore.SequenceReplayStorage(BOX, DISCRETE, device, **arguments)


def lstm_program(storage: Any) -> Iterator[Any]:
    """Recurrent states that are ids too."""
    for step in range(30):
        state = ids(step, 2).unsqueeze(0).contiguous()
        storage.add(*step_of(step), hidden_states=(state, -state))
    for _ in range(3):
        yield storage.sample()


GOALS = gym.spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), BOX))


def goal(step: int) -> dict[str, torch.Tensor]:
    """Observations with goals."""
    return {"observation": ids(step), "achieved_goal": ids(step) + 10_000, "desired_goal": ids(step) + 20_000}


def same_goal(achieved: Any, desired: Any, _: Any) -> Any:
    """1 where a goal was reached."""
    return (achieved == desired).float()


def hindsight_program(storage: Any) -> Iterator[Any]:
    """Goals relabelled."""
    storage.compute_reward = same_goal
    fill(storage, 0, 30, goal)
    for _ in range(3):
        yield storage.sample()


FRAMES = gym.spaces.Box(0, 255, (4, 1), dtype="uint8")


def frames(step: int) -> torch.Tensor:
    """Stacks of four frames, ``[ENVS, 4, 1]``."""
    stack = torch.stack([torch.full((ENVS, 1), max(step - back, 0) % 250) for back in (3, 2, 1, 0)], 1)
    return (stack + torch.arange(ENVS).view(-1, 1, 1)).to(torch.uint8)


def frames_program(storage: Any) -> Iterator[Any]:
    """Frame stacks put together again."""
    for step in range(30):
        none = torch.zeros(ENVS, dtype=torch.bool)
        storage.add(frames(step), torch.arange(ENVS) % 2, ids(step)[:, 0], none, none, {}, frames(step + 1))
    for _ in range(2):
        yield storage.sample()


# ------------------------------------------------------------------------------------------------------ rollouts

STEPS = 7


def rollout(device: str, **more: Any) -> Any:
    """A rollout storage."""
    obs = TensorDict({"policy": ids(0), "critic": ids(0, 2)}, batch_size=[ENVS])
    return rlstore.RolloutStorage("rl", ENVS, STEPS, obs, [1], device, seed=7, **more)


def add_rollout_step(storage: Any, step: int) -> None:
    """One step of a rollout, with truncation, hidden states and distribution parameters."""
    terminated, truncated = ends(step)
    transition = storage.Transition()
    transition.observations = TensorDict({"policy": ids(step), "critic": ids(step, 2)}, batch_size=[ENVS])
    transition.actions, transition.rewards = ids(step), ids(step)[:, 0] / 100
    transition.dones, transition.truncated = terminated | truncated, truncated
    transition.final_values = torch.full((ENVS,), 0.5)
    transition.values, transition.actions_log_prob = ids(step) / 200, ids(step)[:, 0]
    transition.distribution_params = (ids(step), ids(step) + 0.5)
    state = ids(step, 2).unsqueeze(0).contiguous()
    transition.hidden_states = (state, (state, -state))
    storage.add_transition(transition)


def fill_rollout(storage: Any, first: int) -> None:
    """One whole rollout."""
    for step in range(first, first + STEPS):
        add_rollout_step(storage, step)


def rollout_program(storage: Any) -> Iterator[Any]:
    """Every generator."""
    for first in (0, STEPS):
        fill_rollout(storage, first)
        storage.compute_returns(torch.arange(float(ENVS)), 0.9, 0.8)
        yield from storage.mini_batch_generator(2, 2)
        yield from storage.mini_batch_generator(4, 2, reshuffle=True)
        yield from storage.recurrent_mini_batch_generator(2, 1)
        yield from storage.generate_batches(2, 5, 2)
        storage.clear()
    fill_rollout(storage, 2 * STEPS)
    storage.compute_returns(torch.arange(float(ENVS)), 0.9, 0.8, normalize_advantage=False)


def distillation(device: str, **more: Any) -> Any:
    """A storage for distillation."""
    obs = TensorDict({"policy": ids(0)}, batch_size=[ENVS])
    return rlstore.RolloutStorage("distillation", ENVS, STEPS, obs, [1], device, seed=7, **more)


def distillation_program(storage: Any) -> Iterator[Any]:
    """Steps in order."""
    for step in range(STEPS):
        transition = storage.Transition()
        transition.observations = TensorDict({"policy": ids(step)}, batch_size=[ENVS])
        transition.actions, transition.rewards = ids(step), ids(step)[:, 0]
        transition.privileged_actions, transition.dones = -ids(step), ends(step)[0]
        storage.add_transition(transition)
    yield from storage.generator()
    yield from storage.generate_batches(3)


def decoupled(device: str, **more: Any) -> Any:
    """A decoupled storage."""
    return rlstore.DecoupledRolloutStorage(BOX, DISCRETE, device, STEPS, ENVS, seed=7, **more)


def decoupled_program(storage: Any) -> Iterator[Any]:
    """Two rollouts."""
    for step in range(2 * STEPS):
        terminated, truncated = ends(step)
        scalar = ids(step)[:, 0] / 100
        obs, nexts = ids(step), ids(step + 1)
        storage.add(obs, torch.arange(ENVS) % 2, scalar, terminated, truncated, nexts, -scalar, scalar / 2, scalar / 3)
        if step % STEPS == STEPS - 1:
            storage.compute_returns_and_advantages(torch.arange(float(ENVS)))
            yield from storage.sample(2)
            yield from storage.generate_batches(3, 4)
            storage.update()


# ------------------------------------------------------------------------------------------------------ distributed


def distributed(device: str, **more: Any) -> Any:
    """A distributed storage."""
    arguments: dict[str, Any] = {"num_steps": 2, "num_storages": 12, "batch_size": 2, "state_shapes": ((1, 2),)}
    return rlstore.DistributedStorage(BOX, DISCRETE, device, **arguments, seed=7, **more)


def distributed_step(step: int) -> dict[str, Any]:
    """One step of all environments."""
    terminated, truncated = ends(step)
    return {
        "observations": ids(step),
        "actions": torch.arange(ENVS) % 2,
        "rewards": ids(step)[:, 0],
        "terminated": terminated,
        "truncated": truncated,
        "next_observations": ids(step + 1),
        "values": ids(step)[:, 0] / 2,
        "distribution_params": (ids(step, 2),),
        "hidden_states": (ids(step, 2).unsqueeze(0),),
    }


def distributed_program(storage: Any) -> Iterator[Any]:
    """The ten methods."""
    for step in range(7):
        storage.insert_transition(distributed_step(step))
    yield from storage.generate_batches(2, 3, 2)


def _replay_maker(kind: type[Any], arguments: dict[str, Any]) -> Callable[[str], Any]:
    return lambda device: kind(BOX, DISCRETE, device, **{**ARGUMENTS, **arguments})


def _hindsight_maker(strategy: str) -> Callable[[str], Any]:
    # Without infos: its episodes go on where they ended.
    arguments = {**ARGUMENTS, "autoreset": "Disabled", "compute_reward": same_goal, "strategy": strategy}
    return lambda device: rlstore.HindsightReplayStorage(GOALS, DISCRETE, device, **arguments)


def _frames_maker(device: str) -> Any:
    return rlstore.ReplayStorage(FRAMES, DISCRETE, device, **ARGUMENTS, frame_stack=4, n_step=2)


PROGRAMS: dict[str, tuple[Callable[[str], Any], Callable[[Any], Iterator[Any]]]] = {
    **{name: (_replay_maker(*made), replay_program) for name, made in REPLAY.items()},
    "sequences, LSTM": (lstm_sequences, lstm_program),
    **{
        f"hindsight, {strategy}": (_hindsight_maker(strategy), hindsight_program)
        for strategy in ("future", "final", "episode")
    },
    "frames": (_frames_maker, frames_program),
    "rollout": (rollout, rollout_program),
    "distillation": (distillation, distillation_program),
    "decoupled": (decoupled, decoupled_program),
    "distributed": (distributed, distributed_program),
}
ON_CUDA = [name for name in PROGRAMS if "shared" not in name]


def next_draws(storage: Any) -> list[Any]:
    """What a storage serves next: two batches, and all that it holds."""
    if isinstance(storage, rlstore.HindsightReplayStorage):
        storage.compute_reward = same_goal
    batches = [numbers(batch) for batch in storage.generate_batches(2)]
    return [*batches, numbers(storage.get_all_buffer_data())]
