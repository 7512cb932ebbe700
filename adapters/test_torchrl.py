"""rlstore.torchrl beside TorchRL's own buffer: the same data in both, from its own collector."""

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.postprocs import MultiStep
from torchrl.envs import GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss
from torchrl.trainers.trainers import ReplayBufferTrainer

from rlstore.torchrl import ReplayBuffer

ENVS = 3
ROOT_FLAGS = ("done", "terminated", "truncated")  # which ours does not store


def make_env():
    """Episodes that terminate, and episodes that are truncated."""
    limited = lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=12))  # noqa: E731
    return TransformedEnv(SerialEnv(ENVS, limited), RewardSum())


@pytest.fixture(scope="module")
def collected():
    """Batches of a collector, ``[ENVS, 20]`` each, that go on from one another."""
    torch.manual_seed(0)
    collector = Collector(make_env(), frames_per_batch=20 * ENVS, total_frames=100 * ENVS)
    batches = [data.clone() for data in collector]
    collector.shutdown()
    whole = torch.cat(batches, dim=1)
    assert whole["next", "terminated"].any()
    assert whole["next", "truncated"].any()
    return batches


def filled(batches, **options):
    buffer = ReplayBuffer(10_000, num_envs=ENVS, seed=0, **options)
    for batch in batches:
        buffer.extend(batch)
    return buffer


def identity(row):
    """No two rows of the data are alike in these numbers."""
    return (*row["observation"].tolist(), *row["action"].flatten().tolist(), row["step_count"].item())


def test_samples_have_the_entries_of_theirs(collected):
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=16)
    for batch in collected:
        theirs.extend(batch.reshape(-1))
    forms = [
        {key: (tuple(sample[key].shape), sample[key].dtype) for key in sample.keys(True, True)}
        for sample in (theirs.sample(), filled(collected, batch_size=16).sample())
    ]
    assert {key: form for key, form in forms[0].items() if key not in ROOT_FLAGS} == forms[1]


def test_every_row_is_one_that_the_collector_gave(collected):
    data = torch.cat(collected, dim=1).reshape(-1)
    known = {identity(row): row for row in data.unbind(0)}
    assert len(known) == len(data)
    sample = filled(collected).sample(3000)
    drawn = {identity(row): row for row in sample.exclude("index").unbind(0)}
    assert drawn.keys() == known.keys()
    for key, row in drawn.items():
        expected = known[key].exclude(*ROOT_FLAGS)
        assert (row == expected).all(), key


def test_both_save_and_resume_with_the_same_calls(collected, tmp_path):
    """A resumed buffer draws as the saved one would have, and goes on with the batches of the collector."""
    theirs = [TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=16) for _ in range(2)]
    ours = [filled([], n_step=3, alpha=0.6, batch_size=16) for _ in range(2)]
    for name, (saved, resumed) in (("theirs", theirs), ("ours", ours)):
        for batch in collected[:3]:
            saved.extend(batch if name == "ours" else batch.reshape(-1))
        saved.dumps(tmp_path / name)
        resumed.loads(tmp_path / name)
        assert len(resumed) == len(saved) == 3 * 20 * ENVS
    for batch in collected[3:]:
        samples = [buffer.sample() for buffer in ours]
        assert (samples[0] == samples[1]).all()
        assert torch.equal(*(buffer.extend(batch) for buffer in ours))
    data = torch.cat(collected, dim=1).reshape(-1)
    assert {identity(row) for row in ours[1].sample(5000).unbind(0)} == {identity(row) for row in data.unbind(0)}


def test_n_step_rewards_and_observations_are_those_of_multistep(collected):
    """Theirs leaves the flags of the first step; ours are those of the last, which the observation belongs to."""
    data = torch.cat(collected, dim=1)
    stepped = MultiStep(gamma=0.9, n_steps=3)(data.clone())
    known = {identity(row): row for row in stepped.reshape(-1).unbind(0)}
    flags = {identity(row): row for row in data.reshape(-1).unbind(0)}
    lengths = set()
    for row in filled(collected, n_step=3, gamma=0.9).sample(1500).unbind(0):
        expected = known[identity(row)]
        lengths.add(row["steps_to_next_obs"].item())
        assert row["steps_to_next_obs"].item() == expected["steps_to_next_obs"].item()
        assert torch.equal(row["next", "observation"], expected["next", "observation"])
        torch.testing.assert_close(row["next", "reward"], expected["next", "reward"])
        if row["steps_to_next_obs"].item() == 1:
            assert torch.equal(row["next", "done"], flags[identity(row)]["next", "done"])
    assert lengths == {1, 2, 3}


def test_their_loss_reads_lengths_and_weights(collected):
    """The loss of one row at a time, by hand: it discounts by the steps of the window, and is weighted."""
    torch.manual_seed(0)
    env = make_env()
    network = MLP(in_features=4, out_features=2, num_cells=[8])
    actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec_unbatched)
    loss_module = DQNLoss(actor, action_space=env.action_spec_unbatched, loss_function="l2", reduction="mean")
    loss_module.make_value_estimator(gamma=0.9)
    buffer = filled(collected, n_step=3, gamma=0.9, alpha=1.0, beta=0.5)
    sample = buffer.sample(64)
    sample["td_error"] = torch.rand(64)
    buffer.update_tensordict_priority(sample)
    sample = buffer.sample(64)
    assert len(sample["priority_weight"].unique()) > 10
    with torch.no_grad():
        loss = loss_module(sample)["loss"]
        after = network(sample["next", "observation"]).max(1, keepdim=True).values
        goes_on = (~sample["next", "terminated"]).float()
        target = sample["next", "reward"] + 0.9 ** sample["steps_to_next_obs"] * goes_on * after
        chosen = (network(sample["observation"]) * sample["action"]).sum(1, keepdim=True)
        squares = ((chosen - target) ** 2).squeeze(1)
        weights = sample["priority_weight"]
    assert loss.item() == pytest.approx(((squares * weights).sum() / weights.sum()).item(), rel=1e-4)
    assert sample.get("td_error", None) is not None
    buffer.update_tensordict_priority(sample)


@pytest.mark.parametrize("num_envs", [1, ENVS])
@pytest.mark.parametrize("flatten", [True, False])
def test_the_hooks_of_their_trainer_serve_what_they_serve_with_theirs(collected, num_envs, flatten):
    """Row by row, by the index that both count in the same way where the data are of one environment."""
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=16)
    ours = ReplayBuffer(10_000, num_envs=num_envs, seed=0)
    hooks = [ReplayBufferTrainer(buffer, batch_size=500, flatten_tensordicts=flatten) for buffer in (theirs, ours)]
    given = []
    for batch in collected:
        for hook in hooks:
            data = hook.extend((batch if flatten or num_envs == ENVS else batch.reshape(-1)).clone())
        given.append(data.reshape(-1))
    known = {identity(row): row for row in torch.cat(given).unbind(0)}
    assert flatten == any(row["next", "truncated"] > row["next", "done"] for row in known.values())
    sample = hooks[1].sample(data)
    assert len(sample) == 500
    for row in sample.unbind(0):
        assert (row.exclude("index") == known[identity(row)].exclude(*ROOT_FLAGS)).all()
        if num_envs == 1 and flatten:
            stored = theirs[row["index"].item()]
            assert (row.exclude("index") == stored.exclude("index", *ROOT_FLAGS)).all()


@pytest.mark.parametrize("options", [{}, {"n_step": 3, "alpha": 0.6}], ids=str)
def test_the_hooks_of_their_trainer_save_and_resume(collected, tmp_path, options):
    hooks = [ReplayBufferTrainer(filled([], **options), batch_size=16, flatten_tensordicts=True) for _ in range(2)]
    for batch in collected[:3]:
        hooks[0].extend(batch.clone())
    sample = hooks[0].sample(None)
    sample["td_error"] = torch.rand(16)
    hooks[0].update_priority(sample)
    torch.save(hooks[0].state_dict(), tmp_path / "trainer.pt")
    hooks[1].load_state_dict(torch.load(tmp_path / "trainer.pt", weights_only=True, mmap=True))
    for batch in collected[3:]:
        samples = [hook.sample(None) for hook in hooks]
        assert (samples[0] == samples[1]).all()
        for hook in hooks:
            hook.extend(batch.clone())
