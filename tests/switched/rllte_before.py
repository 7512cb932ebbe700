"""rllte's DrQ-v2, on states: nothing is shifted."""

from rllte.agent import DrQv2
from rllte_toy_env import ReachVector


def main(num_train_steps=1200, seed=1):
    """Train; returns whether each episode reached the goal."""
    env = ReachVector(limit=12, nearest=3.3, furthest=5.0, seed=3)
    agent = DrQv2(env=env, seed=seed, num_init_steps=300, storage_size=2000, batch_size=64, hidden_dim=64, lr=1e-3)
    agent.aug = None
    agent.train(num_train_steps=num_train_steps, save_interval=10**9, log_interval=10**9)
    return [terminated for _, _, _, terminated, truncated, _ in env.transitions if terminated or truncated]


if __name__ == "__main__":
    print(len(main()))
