"""PPO on CartPole in the style of CleanRL: one file, a rollout of plain tensors."""

import gymnasium as gym
import numpy as np
import torch
from rlstore.engine.returns import gae
from torch import nn

NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCH_SIZE = 8, 128, 4, 256
GAMMA, GAE_LAMBDA, CLIP, ENTROPY_COEF, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 1e-3


def layers(outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = layers(2), layers(1)

    def get_action_and_value(self, obs, action=None):
        distribution = torch.distributions.Categorical(logits=self.actor(obs))
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(obs).squeeze(-1)


def main(num_iterations=60, seed=1):
    """Train; returns the lengths of all episodes, in the order in which they ended."""
    np.random.seed(seed)
    torch.manual_seed(seed)
    envs = gym.make_vec("CartPole-v1", num_envs=NUM_ENVS)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)

    obs = torch.zeros(NUM_STEPS, NUM_ENVS, 4)
    actions = torch.zeros(NUM_STEPS, NUM_ENVS, dtype=torch.int64)
    logprobs, rewards, dones, values = torch.zeros(4, NUM_STEPS, NUM_ENVS)

    next_obs, next_done = torch.as_tensor(envs.reset(seed=seed)[0]), torch.zeros(NUM_ENVS)
    lengths, length = [], np.zeros(NUM_ENVS)
    for _ in range(num_iterations):
        for step in range(NUM_STEPS):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                actions[step], logprobs[step], _, values[step] = agent.get_action_and_value(next_obs)
            observed, reward, terminated, truncated, _ = envs.step(actions[step].numpy())
            rewards[step] = torch.as_tensor(reward)
            next_obs, next_done = torch.as_tensor(observed), torch.as_tensor(terminated | truncated).float()
            length += 1
            lengths += length[terminated | truncated].tolist()
            length[terminated | truncated] = 0

        with torch.no_grad():
            next_value = agent.critic(next_obs).squeeze(-1)
            ended = torch.cat([dones[1:], next_done.unsqueeze(0)]).bool()
            advantages, returns = gae(rewards, values, next_value, ended, gamma=GAMMA, lam=GAE_LAMBDA)

        b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(), logprobs.flatten()
        b_advantages, b_returns = advantages.flatten(), returns.flatten()
        for _ in range(EPOCHS):
            for mb in torch.randperm(NUM_STEPS * NUM_ENVS).split(MINIBATCH_SIZE):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
                ratio = (newlogprob - b_logprobs[mb]).exp()
                advantage = (b_advantages[mb] - b_advantages[mb].mean()) / (b_advantages[mb].std() + 1e-8)
                pg_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                v_loss = 0.5 * ((newvalue - b_returns[mb]) ** 2).mean()
                optimizer.zero_grad()
                (pg_loss + 0.5 * v_loss - ENTROPY_COEF * entropy.mean()).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    envs.close()
    return lengths


if __name__ == "__main__":
    print(np.mean(main()[-50:]))
