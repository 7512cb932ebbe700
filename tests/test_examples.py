"""The examples in a short form: they run, count what they did, learn something, and write their files."""

import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Categorical

from rlstore import RolloutStorage

EXAMPLES = Path(__file__).parents[1] / "examples"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    """Examples import each other as scripts do; what they change for the whole process is put back."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_result(result, *, steps, num_envs, rollout):
    """What must be true of any run that took ``steps`` environment steps or a rollout more."""
    assert steps <= result.env_steps < steps + rollout
    assert result.env_steps % rollout == 0
    assert result.episodes == len(result.curve) > 0
    ends, returns = zip(*result.curve, strict=True)
    assert list(ends) == sorted(ends)
    assert all(end % num_envs == 0 for end in ends)
    # CartPole gives 1 for every step, so no step is counted twice, and those of open episodes are all that is missing.
    assert 0 <= result.env_steps - sum(returns) <= 500 * num_envs
    assert result.mean_return == pytest.approx(np.mean(returns[-100:]))
    assert len(result.losses) == result.env_steps // rollout
    assert all(math.isfinite(loss) for loss in result.losses)
    assert 0 < result.storage_seconds < result.seconds


def test_ppo_trains_the_agent_it_is_given():
    import ppo

    agent = ppo.ActorCritic()
    before = [parameter.clone() for parameter in agent.parameters()]
    result = ppo.train(4000, seed=3, agent=agent)
    check_result(result, steps=4000, num_envs=ppo.NUM_ENVS, rollout=ppo.NUM_ENVS * ppo.NUM_STEPS)
    assert all(not torch.equal(old, new) for old, new in zip(before, agent.parameters(), strict=True))


def test_ppo_stops_at_its_threshold():
    import ppo

    result = ppo.train(100_000, seed=3, threshold=15.0)
    assert result.episodes >= 100
    assert result.mean_return >= 15.0
    assert result.env_steps < 10_000


def test_ppo_is_repeatable():
    import ppo

    first, second = ppo.train(2000, seed=5), ppo.train(2000, seed=5)
    assert first.curve == second.curve
    assert first.losses == second.losses
    assert ppo.train(2000, seed=6).curve != first.curve


@pytest.mark.parametrize("memory", ["gru", "none"])
def test_recurrent_ppo_runs_with_each_memory(memory):
    import recurrent_ppo

    result = recurrent_ppo.train(4000, seed=3, memory=memory)
    rollout = recurrent_ppo.NUM_ENVS * recurrent_ppo.NUM_STEPS
    check_result(result, steps=4000, num_envs=recurrent_ppo.NUM_ENVS, rollout=rollout)


@pytest.mark.parametrize("memory", ["gru", "lstm", "none"])
def test_recurrent_ppo_replays_its_rollout_exactly(memory, monkeypatch):
    """Before any gradient step the stored segments give the rollout's values and log-probabilities; memory ends with
    the episode.
    """
    import recurrent_ppo

    differences = []

    def compare(agent, optimizer, storage, run):
        for batch in storage.recurrent_mini_batch_generator(recurrent_ppo.NUM_MINI_BATCHES, 1):
            obs, (actor_state, critic_state) = batch.observations, batch.hidden_states
            logits = recurrent_ppo.valid(agent.actor(obs, actor_state)[0], batch.masks)
            values = recurrent_ppo.valid(agent.critic(obs, critic_state)[0], batch.masks).squeeze(-1)
            actions, old, before = (
                recurrent_ppo.valid(field, batch.step_masks)
                for field in (batch.actions, batch.old_actions_log_prob, batch.values)
            )
            log_prob = Categorical(logits=logits).log_prob(actions)
            differences.append((log_prob - old).abs().max().item())
            differences.append((values - before).abs().max().item())
        if memory != "none":
            resets = storage.reset_steps[:-1]
            for saved in (*storage.saved_hidden_state_a, *storage.saved_hidden_state_c):
                assert (saved[:-1].transpose(1, 2)[resets] != 0).any()  # that of the final observation
                after_reset = saved[1:].transpose(1, 2)[resets]
                assert len(after_reset) > 0
                assert (after_reset == 0).all()
        return 0.0

    monkeypatch.setattr(recurrent_ppo, "update", compare)
    recurrent_ppo.train(5000, seed=3, memory=memory)
    assert len(differences) >= 4
    assert max(differences) < 1e-5


def test_daac_runs():
    import daac

    result = daac.train(4000, seed=3)
    check_result(result, steps=4000, num_envs=daac.NUM_ENVS, rollout=daac.NUM_ENVS * daac.NUM_STEPS)


def test_distillation_measures_student_and_teacher():
    import distill

    result = distill.train(3000, seed=3, teacher_steps=2000)
    check_result(result, steps=3000, num_envs=distill.NUM_ENVS, rollout=distill.NUM_ENVS * distill.NUM_STEPS)
    assert 2000 <= result.extra["teacher_steps"] < 4000
    for name in ("teacher_return_best_action", "student_return_best_action"):
        assert 1 <= result.extra[name] <= 500


def test_distillation_brings_the_student_to_agree_with_its_teacher():
    """The teacher goes by the sign of the angle one step before, so agreeing takes memory, ending with the episode."""
    import distill
    from common import Run

    torch.manual_seed(0)
    envs, steps = distill.NUM_ENVS, distill.NUM_STEPS
    example = TensorDict({"policy": torch.zeros(envs, 2)}, batch_size=[envs])
    storage = RolloutStorage("distillation", envs, steps, example, (1,))
    student, run = distill.Student(), Run("test", envs, max_steps=1)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        obs = torch.rand(steps, envs, 2) * 0.4 - 0.2
        dones = torch.rand(steps, envs) < 0.2
        wanted = torch.zeros(steps, envs, 1)
        wanted[1:] = ((obs[:-1, :, 1:] > 0) & ~dones[:-1].unsqueeze(-1)).float()
        storage.clear()
        for t in range(steps):
            transition = RolloutStorage.Transition()
            transition.observations = TensorDict({"policy": obs[t]}, batch_size=[envs])
            transition.actions = transition.privileged_actions = wanted[t]
            transition.rewards, transition.dones = torch.ones(envs), dones[t]
            storage.add_transition(transition)
        losses.append(distill.update(student, optimizer, storage, torch.zeros(envs, distill.HIDDEN), run))
    assert losses[0] > 0.5
    assert np.mean(losses[-5:]) < 0.1


def test_true_successors_takes_final_observations_where_episodes_ended():
    from common import make_envs, true_successors

    envs = make_envs(3)
    obs, _ = envs.reset(seed=0)
    ended = np.zeros(3, dtype=bool)
    while not ended.any():
        obs, _, terminated, truncated, infos = envs.step(np.zeros(3, dtype=np.int64))
        ended = terminated | truncated
    successors = true_successors(obs, infos).numpy()
    assert (np.abs(obs[ended]) <= 0.05).all()  # a new episode's start
    assert (np.abs(successors[ended, 2]) > 0.2).all()  # a fallen pole
    np.testing.assert_array_equal(successors[~ended], obs[~ended])
    envs.close()


def test_stopwatch_counts_the_arrival_of_items_and_not_their_use(monkeypatch):
    import common

    clock = [0.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])

    def slow():
        for item in range(3):
            clock[0] += 1.0
            yield item

    watch, items = common.Stopwatch(), []
    for item in watch.around(slow()):
        items.append(item)
        clock[0] += 100.0
    assert items == [0, 1, 2]
    assert watch.seconds == 3.0


@pytest.mark.parametrize(
    ("script", "name", "options"),
    [
        ("ppo.py", "ppo", []),
        ("recurrent_ppo.py", "recurrent_ppo_none", ["--feedforward"]),
        ("dqn.py", "dqn", ["--threshold", "500"]),
        ("her.py", "her_plain", ["--plain", "--threshold", "1.1"]),
    ],
)
def test_command_line_writes_curve_and_result(script, name, options, tmp_path, monkeypatch, capsys):
    command = [str(EXAMPLES / script), "--steps", "1040", "--seed", "4", "--out", str(tmp_path / "a" / "b")]
    monkeypatch.setattr(sys, "argv", [*command, *options])
    runpy.run_path(command[0], run_name="__main__")
    shown = capsys.readouterr().out
    assert "environment steps" in shown
    assert "share of it in storage calls" in shown
    written = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert written == [f"{name}.json", f"{name}.png"]
    assert (tmp_path / "a" / "b" / f"{name}.png").read_bytes().startswith(PNG_SIGNATURE)
    result = json.loads((tmp_path / "a" / "b" / f"{name}.json").read_text(encoding="utf-8"))
    assert result["name"] == name
    assert result["episodes"] == len(result["curve"])
    assert result["env_steps"] >= 1040
