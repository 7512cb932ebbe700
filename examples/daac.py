"""DAAC on CartPole, with DecoupledRolloutStorage.

Decoupled Advantage Actor-Critic (Raileanu and Fergus, "Decoupling Value and Policy for Generalization in
Reinforcement Learning", 2021). The policy network and the value network share no weights. The policy network also
predicts the advantage of the chosen action, which trains its features. The value network is trained separately and for
more epochs.
"""

from __future__ import annotations

import torch
from common import Result, Run, arguments, make_envs, report, true_successors
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from rlstore import DecoupledRolloutStorage

NUM_ENVS = 16
NUM_STEPS = 64
POLICY_EPOCHS = 4
VALUE_EPOCHS = 8
NUM_MINI_BATCHES = 4
LEARNING_RATE = 2e-3
GAMMA = 0.99
LAM = 0.95
CLIP = 0.2
ADVANTAGE_WEIGHT = 0.25
ENTROPY_WEIGHT = 0.005
MAX_GRAD_NORM = 0.5


def trunk(num_obs: int) -> nn.Sequential:
    """Two hidden layers, with which every network here begins."""
    return nn.Sequential(nn.Linear(num_obs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())


class Actor(nn.Module):
    """A policy and, from the same features, the predicted advantage of an action."""

    def __init__(self, num_obs: int = 4, num_actions: int = 2) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.trunk = trunk(num_obs)
        self.logits = nn.Linear(64, num_actions)
        self.advantage = nn.Linear(64 + num_actions, 1)
        nn.init.orthogonal_(self.logits.weight, 0.01)

    def forward(self, obs: Tensor, actions: Tensor | None = None) -> tuple[Categorical, Tensor, Tensor]:
        """The policy, the actions (B,) (sampled from it if not given) and their predicted advantages (B, 1)."""
        features = self.trunk(obs)
        policy = Categorical(logits=self.logits(features), validate_args=False)
        if actions is None:
            actions = policy.sample()
        chosen = one_hot(actions.long(), self.num_actions)
        return policy, actions, self.advantage(torch.cat([features, chosen], dim=-1))


class Agent(nn.Module):
    """The actor and the value network, without shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = Actor()
        self.critic = nn.Sequential(trunk(4), nn.Linear(64, 1))
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=LEARNING_RATE, eps=1e-5)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=LEARNING_RATE, eps=1e-5)


def descend(loss: Tensor, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One gradient step."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
    optimizer.step()


def update_policy(agent: Agent, storage: DecoupledRolloutStorage, run: Run) -> float:
    """PPO on the policy, with the advantage prediction as an auxiliary loss; returns the last loss."""
    loss = torch.zeros(())
    for _ in range(POLICY_EPOCHS):
        for batch in run.storage_watch.around(storage.sample(NUM_MINI_BATCHES)):
            policy, actions, predicted = agent.actor(batch.obs, batch.actions.squeeze(-1))
            ratio = (policy.log_prob(actions).unsqueeze(-1) - batch.old_log_probs).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            policy_loss = -torch.min(ratio * batch.advantages, clipped * batch.advantages).mean()
            # Like the ratio, the prediction is clipped around the one made during the rollout.
            near = batch.adv_preds + (predicted - batch.adv_preds).clamp(-CLIP, CLIP)
            errors = torch.max((predicted - batch.advantages).pow(2), (near - batch.advantages).pow(2))
            loss = policy_loss + ADVANTAGE_WEIGHT * errors.mean() - ENTROPY_WEIGHT * policy.entropy().mean()
            descend(loss, agent.actor, agent.actor_optimizer)
    return loss.item()


def update_value(agent: Agent, storage: DecoupledRolloutStorage, run: Run) -> None:
    """Fit the value network to the returns."""
    for _ in range(VALUE_EPOCHS):
        for batch in run.storage_watch.around(storage.sample(NUM_MINI_BATCHES)):
            loss = 0.5 * (agent.critic(batch.obs) - batch.returns).pow(2).mean()
            descend(loss, agent.critic, agent.critic_optimizer)


def train(steps: int, seed: int = 0, threshold: float | None = None) -> Result:
    """Train until the threshold is reached or the steps are used up."""
    torch.manual_seed(seed)
    agent = Agent()
    envs = make_envs(NUM_ENVS)
    obs = torch.from_numpy(envs.reset(seed=seed)[0])
    storage = DecoupledRolloutStorage(
        envs.single_observation_space,
        envs.single_action_space,
        num_steps=NUM_STEPS,
        num_envs=NUM_ENVS,
        discount=GAMMA,
        gae_lambda=LAM,
        seed=seed,
    )
    run = Run("daac", NUM_ENVS, steps, threshold)

    while run.active:
        with torch.inference_mode():
            for _ in range(NUM_STEPS):
                policy, actions, adv_preds = agent.actor(obs)
                next_obs, rewards, terminated, truncated, infos = envs.step(actions.numpy())
                final_values = agent.critic(true_successors(next_obs, infos)) if truncated.any() else None
                log_probs, values = policy.log_prob(actions), agent.critic(obs)
                with run.storage_watch:
                    storage.add(
                        obs=obs,
                        actions=actions,
                        rewards=torch.from_numpy(rewards),
                        terminateds=torch.from_numpy(terminated),
                        truncateds=torch.from_numpy(truncated),
                        next_obs=torch.from_numpy(next_obs),
                        log_probs=log_probs,
                        values=values,
                        adv_preds=adv_preds,
                        final_values=final_values,
                    )
                run.count(rewards, terminated | truncated)
                obs = torch.from_numpy(next_obs)
            last_values = agent.critic(obs)
        with run.storage_watch:
            storage.compute_returns_and_advantages(last_values)
        loss = update_policy(agent, storage, run)
        update_value(agent, storage, run)
        run.show(loss)
        with run.storage_watch:
            storage.update()

    envs.close()
    return run.finish()


def main() -> None:
    """Read the command line, train, and report."""
    options = arguments(__doc__, steps=400_000, threshold=475.0).parse_args()
    report(train(options.steps, options.seed, options.threshold), options.out)


if __name__ == "__main__":
    main()
