"""The examples on replay storages in a short form: they run, keep in the storage what really happened, and learn."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    """Examples import each other as scripts do; what they change for the whole process is put back."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def keep_storage(monkeypatch, module, name):
    """A list to which ``module`` adds every storage that it makes of the class ``name``; they stay open."""
    made, original = [], getattr(module, name)

    def make(*args, **kwargs):
        storage = original(*args, **kwargs)
        monkeypatch.setattr(storage, "close", lambda: None)
        made.append(storage)
        return storage

    monkeypatch.setattr(module, name, make)
    return made


def check_result(result, storage, *, steps, num_envs):
    """What must be true of any run whose steps the storage can all hold; returns the storage's data, [T, N, ...]."""
    assert steps <= result.env_steps < steps + num_envs
    assert len(storage) == result.env_steps
    data = storage.get_all_buffer_data()
    rewards = data["rewards"].reshape(-1, num_envs)
    ended = (data["terminated"] | data["truncated"]).reshape(-1, num_envs)
    returns = []
    for env in range(num_envs):
        start = 0
        for end in ended[:, env].nonzero().flatten().tolist():
            returns.append(rewards[start : end + 1, env].sum().item())
            start = end + 1
    assert result.episodes == len(result.curve) == len(returns) > 0
    assert sorted(returns) == pytest.approx(sorted(value for _, value in result.curve), rel=1e-4)
    assert len(result.losses) > 0
    assert all(math.isfinite(loss) for loss in result.losses)
    assert 0 < result.storage_seconds < result.seconds
    return data


def test_dqn_keeps_final_observations_and_feeds_back_priorities(monkeypatch):
    import dqn

    made = keep_storage(monkeypatch, dqn, "PrioritizedReplayStorage")
    result = dqn.train(2000, seed=3)
    data = check_result(result, made[0], steps=2000, num_envs=dqn.NUM_ENVS)
    terminated = data["terminated"].reshape(-1, dqn.NUM_ENVS)
    position, angle = data["next_observations"][terminated][:, [0, 2]].abs().T
    assert ((position > 2.4) | (angle > 0.2)).all()  # fallen, not the start of the next episode
    batch = made[0].sample()
    assert batch.observations.shape == (dqn.BATCH_SIZE, 4)
    assert batch.weights.min() < 0.9 < batch.weights.max() == 1
    assert set(np.round(batch.discounts.flatten().tolist(), 4)) <= {0.0, 0.99, 0.9801, 0.9703}


def test_dqn_learns_to_hold_the_pole_a_while():
    import dqn

    result = dqn.train(30_000, seed=3, threshold=60.0)
    assert result.mean_return >= 60.0
    assert np.mean([value for _, value in result.curve[:50]]) < 40.0


def test_dqn_is_repeatable():
    import dqn

    first, second = dqn.train(1200, seed=5), dqn.train(1200, seed=5)
    assert first.curve == second.curve
    assert first.losses == second.losses


def test_dqn_plays_minatar(monkeypatch):
    pytest.importorskip("minatar")
    import dqn

    made = keep_storage(monkeypatch, dqn, "PrioritizedReplayStorage")
    result = dqn.train(1100, seed=3, env="MinAtar/Breakout-v1")
    assert result.name == "dqn_Breakout-v1"
    data = check_result(result, made[0], steps=1100, num_envs=dqn.NUM_ENVS)
    observations = data["observations"].reshape(-1, 10, 10, 4)
    assert observations.dtype == torch.bool
    assert (observations[..., 1].sum((1, 2)) == 1).all()  # one ball
    assert (observations[:, 9, :, 0].sum(1) == 1).all()  # one paddle, on the floor
    assert made[0].sample().observations.dtype == torch.bool


def test_dqn_says_how_to_install_minatar(monkeypatch):
    import dqn

    monkeypatch.setitem(sys.modules, "minatar", None)
    monkeypatch.delitem(sys.modules, "minatar.gym", raising=False)
    with pytest.raises(SystemExit, match=r"pip install 'rlstore\[minatar\]'"):
        dqn.train(100, env="MinAtar/Breakout-v1")


def test_sac_bootstraps_where_the_clock_cut_an_episode_off(monkeypatch):
    import sac

    made = keep_storage(monkeypatch, sac, "ReplayStorage")
    result = sac.train(1040, seed=3)
    data = check_result(result, made[0], steps=1040, num_envs=sac.NUM_ENVS)
    assert result.episodes == data["truncated"].sum() == 4
    assert not data["terminated"].any()
    # Pendulum moves by its new speed for 0.05 seconds: so it must be in every row, the last one of an episode too.
    (cosine, sine, _), (next_cosine, next_sine, next_speed) = (
        data[name].unbind(-1) for name in ("observations", "next_observations")
    )
    turned = torch.atan2(next_sine * cosine - next_cosine * sine, next_cosine * cosine + next_sine * sine)
    torch.testing.assert_close(turned, next_speed * 0.05, atol=1e-4, rtol=0)
    discounts = made[0].sample(1000).discounts
    torch.testing.assert_close(discounts, torch.full((1000, 1), sac.GAMMA))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_offline_learns_from_what_sac_has_seen(monkeypatch, tmp_path, share):
    import offline
    import sac

    collected = keep_storage(monkeypatch, sac, "ReplayStorage")
    mixed, original = [], offline.MixedReplay
    monkeypatch.setattr(
        offline, "MixedReplay", lambda *given, **named: mixed.append(original(*given, **named)) or mixed[0]
    )
    batches = keep_batches(monkeypatch, offline.Agent)
    monkeypatch.setattr(offline, "EVALUATED", 4)
    sac.train(1040, seed=3, dataset=tmp_path / "pendulum.npz")
    result = offline.train(30, seed=3, online_share=share, dataset=tmp_path / "pendulum.npz")

    assert len(batches) == len(result.losses) == result.env_steps == 30
    assert result.unit == "updates"
    assert [update for update, _ in result.curve] == [30] * 4
    assert result.extra == {"transitions_in_the_dataset": 1040, "percent_own": 100 * share}
    seen = known_transitions(collected[0])
    own = known_transitions(mixed[0].online) if share else set()
    assert len(seen) == 1040
    assert len(own) == (0 if share == 0 else 30 * offline.NUM_ENVS)
    for batch in batches:
        rows = [tuple(row) for row in transitions_of(batch).tolist()]
        assert len(rows) == offline.BATCH_SIZE
        assert sum(row in own for row in rows) == share * offline.BATCH_SIZE
        assert sum(row in seen for row in rows) == (1 - share) * offline.BATCH_SIZE


def keep_batches(monkeypatch, agent):
    """A list to which ``agent`` adds every batch from which its critics learn."""
    batches, original = [], agent.update_critics
    monkeypatch.setattr(agent, "update_critics", lambda self, batch: batches.append(batch) or original(self, batch))
    return batches


def transitions_of(batch):
    """Observation, action, reward and next observation, ``[batch, 8]``."""
    parts = (batch.observations, batch.actions, batch.rewards.reshape(-1, 1), batch.next_observations)
    return torch.cat(parts, -1)


def known_transitions(storage):
    """All transitions that a storage holds."""
    held = SimpleNamespace(**storage[storage.held_rows()])
    return {tuple(row) for row in transitions_of(held).tolist()}


def test_sac_knows_the_density_of_its_actions():
    import gymnasium as gym
    import sac

    torch.manual_seed(0)
    actor = sac.Actor(3, gym.spaces.Box(-2.0, 2.0, (2,), np.float32))
    obs = torch.randn(16, 3)
    actions, log_prob = actor(obs)
    mean, log_std = actor.layers(obs).chunk(2, dim=-1)
    policy = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform()])
    assert actions.abs().max() <= 2
    torch.testing.assert_close(log_prob.squeeze(-1), policy.log_prob(actions / 2), atol=1e-4, rtol=1e-4)


def test_drqv2_keeps_stacks_of_frames(monkeypatch):
    import drqv2

    made = keep_storage(monkeypatch, drqv2, "NStepReplayStorage")
    result = drqv2.train(1020, seed=3)
    data = check_result(result, made[0], steps=1020, num_envs=drqv2.NUM_ENVS)
    assert result.episodes == data["truncated"].sum() == 20
    stacks, next_stacks = data["observations"], data["next_observations"]
    assert stacks.shape == (255, 4, 3, 3, 24, 24)
    assert stacks.dtype == torch.uint8
    assert torch.equal(next_stacks[:, :, :-1], stacks[:, :, 1:])  # all the same but for the newest frame, at ends too
    assert (next_stacks != stacks).flatten(2).any(2).float().mean() > 0.5  # a point stuck in a corner does not move
    started = torch.cat([torch.ones(1, 4, dtype=torch.bool), data["truncated"].reshape(-1, 4)[:-1]])
    assert (stacks[started] == stacks[started][:, :1]).all()  # the first frame, three times


def steering_return(policy, episodes=100):
    """The mean return of a policy that sees the environment's inside."""
    import drqv2

    env, total = drqv2.Steering(), 0.0
    for episode in range(episodes):
        env.reset(seed=episode)
        over = False
        while not over:
            _, reward, terminated, over, _ = env.step(policy(env))
            assert not terminated
            total += reward
    return total / episodes


def test_drqv2_has_a_threshold_that_takes_more_than_one_frame():
    import drqv2

    rng = np.random.default_rng(0)
    by_chance = steering_return(lambda env: rng.uniform(-1, 1, 2))
    without_speed = steering_return(lambda env: drqv2.helmsman(env, sees_speed=False))
    best = steering_return(drqv2.helmsman)
    assert by_chance == pytest.approx(5, abs=1)
    assert without_speed == pytest.approx(27, abs=1)
    assert best == pytest.approx(43, abs=1)
    threshold = by_chance + 0.75 * (best - by_chance)
    assert threshold == pytest.approx(drqv2.THRESHOLD, abs=1)
    assert without_speed < drqv2.THRESHOLD


def test_drqv2_shifts_each_stack_as_one():
    import drqv2

    torch.manual_seed(0)
    stacks = torch.randint(256, (40, 2, 6, 5), dtype=torch.uint8)
    shifted, reach = drqv2.random_shift(stacks), drqv2.SHIFT
    padded = torch.nn.functional.pad(stacks.float(), [reach] * 4, mode="replicate").to(torch.uint8)
    found = []
    for before, after in zip(padded, shifted, strict=True):
        corners = [(y, x) for y in range(2 * reach + 1) for x in range(2 * reach + 1)]
        found += [corner for corner in corners if torch.equal(after, before[:, corner[0] :, corner[1] :][:, :6, :5])]
    assert len(found) == 40
    assert len(set(found)) > 10


def test_hindsight_solves_five_bits(monkeypatch):
    import her

    made = keep_storage(monkeypatch, her, "HindsightReplayStorage")
    result = her.train(20_000, seed=3, threshold=0.95, bits=5)
    assert result.mean_return >= 0.95
    check_result(result, made[0], steps=result.env_steps, num_envs=her.NUM_ENVS)


def check_relabelled(batch):
    """A reward says that the goal of its row was reached, and an action turned one bit."""
    achieved, wanted = batch.next_observations["achieved_goal"], batch.next_observations["desired_goal"]
    assert torch.equal(batch.rewards.squeeze(-1), (achieved == wanted).all(-1).float())
    assert torch.equal(batch.observations["desired_goal"], wanted)
    changed = batch.observations["achieved_goal"] != achieved
    assert torch.equal(changed.nonzero()[:, 1], batch.actions)  # one bit, that of the action


def test_hindsight_makes_rewards_where_there_were_none(monkeypatch):
    import her

    made = keep_storage(monkeypatch, her, "HindsightReplayStorage")
    for relabel_fraction in (0.0, her.RELABEL_FRACTION):
        her.train(1040, seed=3, bits=15, relabel_fraction=relabel_fraction)
    plain, hindsight = made
    check_relabelled(hindsight.sample(1000))
    assert plain.sample(1000).rewards.sum() == 0
    # One relabelled row in fifteen is the last step of its episode at least, and that reached what it reached.
    assert hindsight.sample(1000).rewards.sum() > 0.5 * 1000 * her.RELABEL_FRACTION / 15
