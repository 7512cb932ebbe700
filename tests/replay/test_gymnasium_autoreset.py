"""Vector environments of gymnasium in every autoreset mode: what is stored is what each environment says it did."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from combinations import pairs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation
from replay_world import PLAIN_KINDS, Vector

from rlstore import ReplayStorage

ENVS = 3
STEPS = 40
KINDS = {kind.name: kind for kind in PLAIN_KINDS}


class Diarist(gym.Env):
    """Shows numbers of its own, ends after 1 to 5 steps, and writes down what it did."""

    def __init__(self, kind: Vector, number: int) -> None:
        self.kind, self.number = kind, number
        self.observation_space, self.action_space = kind.space, spaces.Discrete(100)
        self.shown, self.diary, self.length = 1000 * number, [], 0

    def reset(self, *, seed=None, options=None):
        self.shown, self.length = self.shown + 1, 0
        return self.kind.render((self.shown,)), {}

    def step(self, action):
        before, self.shown, self.length = self.shown, self.shown + 1, self.length + 1
        ends = self.length == 1 + (self.shown + self.number) % 5
        terminated, truncated = ends and self.shown % 2 == 0, ends and self.shown % 3 != 0
        if ends and not terminated and not truncated:
            truncated = True
        reward = 0.0 if self.shown % 4 == 0 else self.shown / 8
        self.diary.append((before, int(action), reward, terminated, truncated, self.shown))
        return self.kind.render((self.shown,)), reward, terminated, truncated, {}


def walk(envs, storage, mode):
    """A plain training loop."""
    observations, _ = envs.reset(seed=0)
    for step in range(STEPS):
        actions = np.array([(7 * step + env) % 100 for env in range(ENVS)])
        following, rewards, terminated, truncated, infos = envs.step(actions)
        storage.add(observations, actions, rewards, terminated, truncated, infos, following)
        observations = following
        ended = terminated | truncated
        if mode is AutoresetMode.DISABLED and ended.any():
            observations, _ = envs.reset(options={"reset_mask": ended})


def make(kind, mode, wrap=lambda env: env):
    diarists = [Diarist(kind, number + 1) for number in range(ENVS)]
    makers = [lambda env=env: wrap(env) for env in diarists]
    return SyncVectorEnv(makers, autoreset_mode=mode), [one.diary for one in diarists]


@pytest.mark.parametrize(("name", "mode", "told"), pairs([*KINDS], list(AutoresetMode), ["nothing", "member", "value"]))
def test_what_is_stored_is_what_the_environments_did(name, mode, told):
    kind = KINDS[name]
    envs, diaries = make(kind, mode)
    autoreset = {"nothing": None, "member": mode, "value": mode.value}[told]
    storage = ReplayStorage(kind.space, spaces.Discrete(100), "cpu", 500, ENVS, autoreset=autoreset)
    walk(envs, storage, mode)
    assert len(storage) == sum(map(len, diaries))
    assert (len(storage) < STEPS * ENVS) == (mode is AutoresetMode.NEXT_STEP)
    batch = storage.sample(4000)
    seen = kind.read(batch.observations)
    following = kind.read(batch.next_observations)
    served = {
        (one[0], action, reward, discount == 0, after[0])
        for one, action, reward, discount, after in zip(
            seen,
            batch.actions.tolist(),
            batch.rewards.flatten().tolist(),
            batch.discounts.flatten().tolist(),
            following,
            strict=True,
        )
    }
    told_by_envs = {(one[0], one[1], one[2], one[3], one[5]) for diary in diaries for one in diary}
    assert served == told_by_envs


@pytest.mark.parametrize(
    ("count", "mode", "padding"),
    pairs([2, 4], [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ["reset", "zero"]),
)
def test_frame_stacks_of_a_wrapper_come_back_as_they_were_given(count, mode, padding):
    envs, diaries = make(KINDS["Image"], mode, lambda env: FrameStackObservation(env, count, padding_type=padding))
    space = envs.single_observation_space
    storage = ReplayStorage(
        space, spaces.Discrete(100), "cpu", 60, ENVS, frame_stack=count, stack_axis=0, autoreset=mode, n_step=1
    )
    given = {}
    add = storage.add

    def remember(observations, *rest):
        for observation in (
            *observations,
            *rest[-1],
            *(one for one in rest[4].get("final_obs", ()) if one is not None),
        ):
            given[observation.tobytes()] = True
        add(observations, *rest)

    storage.add = remember
    walk(envs, storage, mode)
    data = storage.get_all_buffer_data()
    for lane, diary in enumerate(diaries):
        held = diary[-int(data["masks"][:, lane].sum()) :]
        for time, one in enumerate(held):
            for name, number in (("observations", one[0]), ("next_observations", one[5])):
                stack = data[name][time, lane].numpy()
                assert stack.tobytes() in given
                assert KINDS["Image"].read(torch.from_numpy(stack[-1:])) == [(number,)]
