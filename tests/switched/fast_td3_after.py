"""TD3 on many environments at once in the style of FastTD3, with its replay buffer and three-step returns."""

import torch
from rlstore.fast_td3 import SimpleReplayBuffer
from tensordict import TensorDict
from torch import nn
from torch.nn.functional import mse_loss

NUM_ENVS, BUFFER_SIZE, BATCH_SIZE, NUM_UPDATES, NUM_STEPS = 64, 200, 256, 2, 3
GAMMA, TAU, NOISE, LEARNING_RATE = 0.97, 0.1, 0.2, 1e-3


class Reach:
    """Points on a line that are to stay at 0; those that leave it are terminated, and after 20 steps all others."""

    def __init__(self):
        self.position, self.steps = torch.rand(NUM_ENVS) * 2 - 1, torch.zeros(NUM_ENVS)

    def observe(self):
        return torch.stack([self.position, self.steps / 20], dim=1)

    def step(self, actions):
        self.position, self.steps = self.position + 0.3 * actions.squeeze(1), self.steps + 1
        outside, time_outs = self.position.abs() > 1.5, self.steps >= 20
        rewards, final, dones = 1 - self.position.abs(), self.observe(), outside | time_outs
        self.position = torch.where(dones, torch.rand(NUM_ENVS) * 2 - 1, self.position)
        self.steps = torch.where(dones, 0.0, self.steps)
        return self.observe(), rewards, dones, {"time_outs": time_outs & ~outside, "final": final}


def network(inputs, *last):
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), *last)


def main(total_timesteps=400, seed=1):
    """Train; returns the mean reward of each step."""
    torch.manual_seed(seed)
    envs, actor, qnet, qnet_target = Reach(), network(2, nn.Tanh()), network(3), network(3)
    qnet_target.load_state_dict(qnet.state_dict())
    optimizers = [torch.optim.AdamW(part.parameters(), lr=LEARNING_RATE) for part in (actor, qnet)]
    rb = SimpleReplayBuffer(
        n_env=NUM_ENVS, buffer_size=BUFFER_SIZE, n_obs=2, n_act=1, n_critic_obs=2, n_steps=NUM_STEPS, gamma=GAMMA
    )
    obs, mean_rewards = envs.observe(), []
    for _ in range(total_timesteps):
        with torch.no_grad():
            actions = (actor(obs) + NOISE * torch.randn(NUM_ENVS, 1)).clamp(-1, 1)
        next_obs, rewards, dones, infos = envs.step(actions)
        true_next_obs = torch.where(dones[:, None], infos["final"], next_obs)
        following = {"observations": true_next_obs, "rewards": rewards, "dones": dones.long()}
        following["truncations"] = infos["time_outs"].long()
        rb.extend(TensorDict({"observations": obs, "actions": actions, "next": following}, batch_size=NUM_ENVS))
        obs = next_obs
        mean_rewards.append(rewards.mean().item())
        for _ in range(NUM_UPDATES):
            data = rb.sample(BATCH_SIZE // NUM_ENVS)
            update(data, actor, qnet, qnet_target, *optimizers)
    return mean_rewards


def update(data, actor, qnet, qnet_target, actor_optimizer, q_optimizer):
    after, dones = data["next", "observations"], data["next", "dones"].bool()
    bootstrap = (data["next", "truncations"].bool() | ~dones).float()
    discount = GAMMA ** data["next", "effective_n_steps"]
    with torch.no_grad():
        following = qnet_target(torch.cat([after, actor(after)], dim=1)).squeeze(1)
        target = data["next", "rewards"] + bootstrap * discount * following
    loss = mse_loss(qnet(torch.cat([data["observations"], data["actions"]], dim=1)).squeeze(1), target)
    q_optimizer.zero_grad()
    loss.backward()
    q_optimizer.step()
    actor_optimizer.zero_grad()
    (-qnet(torch.cat([data["observations"], actor(data["observations"])], dim=1)).mean()).backward()
    actor_optimizer.step()
    with torch.no_grad():
        for parameter, target in zip(qnet.parameters(), qnet_target.parameters(), strict=True):
            target.lerp_(parameter, TAU)


if __name__ == "__main__":
    print(sum(main()[-50:]) / 50)
