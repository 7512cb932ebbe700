"""TorchRL's DQN on CartPole, with two environments."""

import torch
from rlstore.torchrl import ReplayBuffer
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate


def main(total_frames=8_000, seed=1):
    """Train; returns the lengths of all episodes, in the order in which they ended."""
    torch.manual_seed(seed)
    env = SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), RewardSum()))
    env.set_seed(seed)
    value = MLP(in_features=4, out_features=2, num_cells=[64, 64])
    actor = QValueActor(value, in_keys=["observation"], spec=env.action_spec_unbatched)
    exploration = EGreedyModule(env.action_spec, annealing_num_steps=total_frames // 2, eps_end=0.05)
    policy = TensorDictSequential(actor, exploration)
    collector = Collector(env, policy, frames_per_batch=32, total_frames=total_frames, init_random_frames=512)
    rb = ReplayBuffer(10_000, num_envs=2, batch_size=64)
    loss_module = DQNLoss(actor, action_space=env.action_spec_unbatched, delay_value=True)
    loss_module.make_value_estimator(gamma=0.98)
    updater = SoftUpdate(loss_module, eps=0.98)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    lengths = []
    for data in collector:
        rb.extend(data.reshape(-1))
        lengths += data["next", "episode_reward"][data["next", "done"]].tolist()
        exploration.step(data.numel())
        for _ in range(4):
            sample = rb.sample()
            loss_module(sample)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            updater.step()
    collector.shutdown()
    return lengths


if __name__ == "__main__":
    lengths = main()
    print(sum(lengths[-20:]) / 20)
