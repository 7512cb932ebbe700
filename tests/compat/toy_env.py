"""A batch of point masses that learn to reach the origin: a VecEnv in pure torch, small enough for a test."""

import torch
from rsl_rl.env import VecEnv
from tensordict import TensorDict

ARENA = 3.0
GOAL = 0.25
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class PointMassEnv(VecEnv):
    """Points on a plane, pushed by accelerations in [-1, 1].

    An episode ends in three ways, so that dones fall at different steps in different environments: at the goal
    (terminated, rewarded), outside the arena (terminated, punished) and at a time limit that differs from one
    environment to the next (``extras["time_outs"]``). ``policy`` sees only the position, so a memory helps;
    ``privileged`` sees position and velocity.
    """

    step_dt = 1.0

    def __init__(self, num_envs=32, seed=0):
        self.num_envs = num_envs
        self.num_actions = 2
        self.device = DEVICE
        self.cfg = {}
        self.max_episode_length = 20 + torch.arange(num_envs, device=DEVICE) % 11
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=DEVICE)
        self.generator = torch.Generator().manual_seed(seed)
        self.position = self._draw_positions()
        self.velocity = torch.zeros(num_envs, 2, device=DEVICE)
        self.episode_return = torch.zeros(num_envs, device=DEVICE)
        self.finished_returns = []

    @property
    def unwrapped(self):
        return self

    def get_observations(self):
        state = torch.cat([self.position, self.velocity], dim=-1)
        return TensorDict({"policy": self.position.clone(), "privileged": state}, batch_size=[self.num_envs])

    def step(self, actions):
        self.velocity = 0.5 * self.velocity + 0.3 * actions.clamp(-1.0, 1.0)
        self.position = self.position + self.velocity
        self.episode_length_buf += 1
        distance = self.position.norm(dim=-1)
        reached = distance < GOAL
        lost = distance > ARENA
        time_outs = (self.episode_length_buf >= self.max_episode_length) & ~reached & ~lost
        rewards = -0.1 * distance + 1.0 * reached - 4.0 * lost
        dones = reached | lost | time_outs
        self._count(rewards, dones)
        self._reset(dones)
        return self.get_observations(), rewards, dones.long(), {"time_outs": time_outs}

    def mean_return(self, episodes=200, *, first=False):
        """Mean return of the first or of the last finished episodes."""
        returns = self.finished_returns[:episodes] if first else self.finished_returns[-episodes:]
        return sum(returns) / len(returns)

    def _count(self, rewards, dones):
        self.episode_return = self.episode_return + rewards
        self.finished_returns += self.episode_return[dones].tolist()
        self.episode_return = self.episode_return * ~dones

    def _reset(self, dones):
        self.position = torch.where(dones.unsqueeze(-1), self._draw_positions(), self.position)
        self.velocity = self.velocity * ~dones.unsqueeze(-1)
        self.episode_length_buf = self.episode_length_buf * ~dones

    def _draw_positions(self):
        return (2.0 * torch.rand(self.num_envs, 2, generator=self.generator) - 1.0).to(DEVICE)


def mirror(env, obs, actions):
    """Append the point reflection of every sample: the task looks the same from the other side."""
    if obs is not None:
        obs = torch.cat([obs, obs.apply(torch.neg)], dim=0)
    if actions is not None:
        actions = torch.cat([actions, -actions], dim=0)
    return obs, actions
