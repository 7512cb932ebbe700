"""PPO on CartPole in the style of CleanRL, with a storage in place of the tensors."""

import gymnasium as gym
import numpy as np
import torch
from cleanrl_ppo_before import CLIP, ENTROPY_COEF, EPOCHS, GAE_LAMBDA, GAMMA, LEARNING_RATE, NUM_ENVS, NUM_STEPS, Agent
from rlstore import RolloutStorage
from torch import nn


def main(num_iterations=60, seed=1):
    """Train; returns the lengths of all episodes, in the order in which they ended."""
    torch.manual_seed(seed)
    envs = gym.make_vec("CartPole-v1", num_envs=NUM_ENVS)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    storage = RolloutStorage.from_spaces(
        envs.single_observation_space, envs.single_action_space, NUM_ENVS, NUM_STEPS, seed=seed
    )

    obs, _ = envs.reset(seed=seed)
    lengths, length = [], np.zeros(NUM_ENVS)
    for _ in range(num_iterations):
        for _ in range(NUM_STEPS):
            with torch.no_grad():
                actions, log_probs, _, values = agent.get_action_and_value(torch.as_tensor(obs))
            next_obs, rewards, terminated, truncated, _ = envs.step(actions.numpy())
            storage.add(
                observations=obs,
                actions=actions,
                rewards=rewards,
                terminated=terminated,
                truncated=truncated,
                values=values,
                log_probs=log_probs,
            )
            obs = next_obs
            length += 1
            lengths += length[terminated | truncated].tolist()
            length[terminated | truncated] = 0

        with torch.no_grad():
            storage.compute_returns(agent.critic(torch.as_tensor(obs)), GAMMA, GAE_LAMBDA)
        for batch in storage.mini_batch_generator(4, EPOCHS, reshuffle=True):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(batch.observations, batch.actions)
            ratio = (newlogprob - batch.old_actions_log_prob).exp()
            advantage = batch.advantages
            pg_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            v_loss = 0.5 * ((newvalue - batch.returns) ** 2).mean()
            optimizer.zero_grad()
            (pg_loss + 0.5 * v_loss - ENTROPY_COEF * entropy.mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        storage.clear()
    envs.close()
    return lengths


if __name__ == "__main__":
    print(np.mean(main()[-50:]))
