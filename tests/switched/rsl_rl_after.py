"""rsl_rl's PPO with a recurrent policy."""

import torch
from rlstore.rsl_rl import use_rlstore
from rsl_rl.runners import OnPolicyRunner
from toy_env import PointMassEnv

MODEL = {"class_name": "RNNModel", "hidden_dims": [32], "rnn_type": "gru", "rnn_hidden_dim": 16}
CONFIG = {
    "num_steps_per_env": 24,
    "save_interval": 1000,
    "obs_groups": {"actor": ["policy"], "critic": ["privileged"]},
    "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 4, "learning_rate": 3e-3},
    "actor": {**MODEL, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.6}},
    "critic": MODEL,
}


def main(num_iterations=5, seed=1):
    """Train; returns the returns of all episodes, in the order in which they ended."""
    torch.manual_seed(seed)
    runner = OnPolicyRunner(PointMassEnv(seed=seed), CONFIG, device="cpu")
    use_rlstore(runner)
    torch.manual_seed(seed)
    runner.learn(num_iterations)
    return runner.env.finished_returns


if __name__ == "__main__":
    print(len(main()))
