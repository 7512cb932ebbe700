"""DQN on CartPole in the style of CleanRL: one file, and the replay buffer of Stable-Baselines3."""

import random

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from rlstore.sb3 import ReplayBuffer
from torch import nn

BUFFER_SIZE, BATCH_SIZE, LEARNING_STARTS, TRAIN_FREQUENCY, TARGET_FREQUENCY = 10_000, 128, 1_000, 4, 250
GAMMA, LEARNING_RATE = 0.99, 1e-3


def q_network():
    return nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))


def main(total_timesteps=12_000, seed=1):
    """Train; returns the lengths of all episodes, in the order in which they ended."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")], autoreset_mode=AutoresetMode.SAME_STEP)
    network, target_network = q_network(), q_network()
    target_network.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    rb = ReplayBuffer(
        BUFFER_SIZE,
        envs.single_observation_space,
        envs.single_action_space,
        "cpu",
        handle_timeout_termination=False,
    )

    obs, _ = envs.reset(seed=seed)
    lengths, length = [], 0
    for step in range(total_timesteps):
        epsilon = max(0.05, 1 - step / (total_timesteps / 2))
        with torch.no_grad():
            actions = network(torch.as_tensor(obs)).argmax(1).numpy()
        if random.random() < epsilon:
            actions = np.array([random.randrange(2)])
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        length += 1
        real_next_obs = next_obs.copy()
        if terminations[0] or truncations[0]:
            real_next_obs[0] = infos["final_obs"][0]
            lengths.append(length)
            length = 0
        rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = next_obs

        if step >= LEARNING_STARTS and step % TRAIN_FREQUENCY == 0:
            data = rb.sample(BATCH_SIZE)
            with torch.no_grad():
                target_max = target_network(data.next_observations).max(1).values
                td_target = data.rewards.flatten() + GAMMA * target_max * (1 - data.dones.flatten())
            loss = nn.functional.mse_loss(td_target, network(data.observations).gather(1, data.actions).squeeze())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % TARGET_FREQUENCY == 0:
            target_network.load_state_dict(network.state_dict())
    envs.close()
    return lengths


if __name__ == "__main__":
    print(np.mean(main()[-20:]))
