"""A stand-in for the module of this name in FastTD3, which is on no package index: its replay buffer as it is used."""

import torch


class SimpleReplayBuffer:
    """Steps in a list. An n-step window ends with its episode; only starts with a whole window are drawn."""

    def __init__(self, n_env, buffer_size, n_obs, n_act, n_critic_obs, n_steps=1, gamma=0.99):
        self.n_env, self.buffer_size, self.n_steps, self.gamma, self.steps = n_env, buffer_size, n_steps, gamma, []

    def extend(self, tensor_dict):
        self.steps = [*self.steps[1 - self.buffer_size :], tensor_dict.clone()]

    def sample(self, batch_size):
        starts = max(len(self.steps) - self.n_steps + 1, 1)
        count = self.n_env * batch_size
        envs, times = torch.arange(self.n_env).repeat(batch_size), torch.randint(starts, (count,))
        stacked = torch.stack(self.steps)
        out = stacked[times, envs].clone()
        out["next", "effective_n_steps"] = torch.ones(count)
        for step in range(1, self.n_steps):
            goes_on = (out["next", "dones"] == 0) & (times + step < len(self.steps))
            row = stacked[(times + step).clamp(max=len(self.steps) - 1), envs]["next"]
            row["rewards"] = out["next", "rewards"] + self.gamma**step * row["rewards"]
            row["effective_n_steps"] = out["next", "effective_n_steps"] + 1
            for key, value in row.items():
                mask = goes_on.view(-1, *[1] * (value.dim() - 1))
                out["next", key] = torch.where(mask, value, out["next", key])
        return out
