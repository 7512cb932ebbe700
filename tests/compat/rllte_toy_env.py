"""A vector of tiny environments as rllte's agents see them: tensors, float flags, ``final_observation`` in infos."""

import numpy as np
import torch
from gymnasium import spaces


class ReachVector:
    """Points on a line that are moved by actions in [-1, 1] and rewarded for being near 0.

    They start at a distance between ``nearest`` and ``furthest``. An episode terminates at 0 and is truncated after
    ``limit`` steps; same-step autoreset. With ``pixels`` the position is drawn as a bright column of a small image.
    """

    def __init__(self, num_envs=1, *, pixels=False, limit=10, nearest=0.0, furthest=3.0, seed=0):
        self.num_envs, self.pixels, self.limit = num_envs, pixels, limit
        self.nearest, self.furthest = nearest, furthest
        shape, high = ((3, 84, 84), 255) if pixels else ((3,), 10.0)
        dtype = np.uint8 if pixels else np.float32
        self.observation_space = spaces.Box(0 if pixels else -10.0, high, shape, dtype)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.generator = np.random.default_rng(seed)
        self.transitions = []  # (observation, action, reward, terminated, truncated, what really followed) of env 0

    def reset(self, seed=None, options=None):
        self.position = self._draw(self.num_envs)
        self.time = np.zeros(self.num_envs, int)
        return self._observe(), {}

    def _draw(self, count):
        distance = self.generator.uniform(self.nearest, self.furthest, count) * self.generator.choice(
            [-1.0, 1.0], count
        )
        return distance.astype(np.float32)

    def _observe(self):
        if not self.pixels:
            columns = np.stack([self.position, self.time, np.arange(self.num_envs)], -1)
            return torch.as_tensor(columns, dtype=torch.float32)
        image = torch.zeros(self.num_envs, 3, 84, 84, dtype=torch.uint8)
        for env, position in enumerate(self.position):
            image[env, :, :, int(np.clip(42 + 12 * position, 0, 83))] = 255
        return image

    def step(self, actions):
        before = self._observe()
        self.position = self.position + np.clip(actions.detach().cpu().numpy()[:, 0], -1.0, 1.0)
        self.time += 1
        rewards = -np.abs(self.position)
        terminated = np.abs(self.position) < 0.2
        truncated = (self.time >= self.limit) & ~terminated
        ended = terminated | truncated
        real = self._observe()
        infos = {}
        if ended.any():
            final = np.full(self.num_envs, None, dtype=object)
            for env in np.flatnonzero(ended):
                final[env] = real[env].numpy()
            lengths = np.where(ended, self.time, 0)
            infos = {"final_observation": final, "episode": {"r": np.where(ended, rewards, 0.0), "l": lengths}}
        self.position = np.where(ended, self._draw(self.num_envs), self.position).astype(np.float32)
        self.time = np.where(ended, 0, self.time)
        self.transitions.append((before[0], actions[0].clone(), rewards[0], terminated[0], truncated[0], real[0]))
        flags = (torch.as_tensor(flag, dtype=torch.float32) for flag in (terminated, truncated))
        return self._observe(), torch.as_tensor(rewards, dtype=torch.float32), *flags, infos

    def close(self):
        pass
