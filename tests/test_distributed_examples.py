"""The examples with actors in other processes, in a short form: they run, count, name who dies, and end cleanly."""

import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS = 120


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    """Examples import each other as scripts do; no process of theirs is left."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert multiprocessing.active_children() == []


@pytest.fixture
def forked_actors(monkeypatch):
    """Actor processes are forked, which takes no second to import torch; that they can be spawned is tested below."""
    fork = torch.multiprocessing.get_context("fork")
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: fork)


def kill_actor(name):
    """Kill an actor process of this one, by its name."""
    process = next(child for child in multiprocessing.active_children() if child.name == name)
    os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS)


def check_episodes(result):
    """What must be true of any run of CartPole, which gives 1 for every step."""
    assert result.episodes == len(result.curve) > 0
    ends, returns = zip(*result.curve, strict=True)
    assert list(ends) == sorted(ends)
    assert sum(returns) <= result.env_steps
    assert all(math.isfinite(loss) for loss in result.losses)
    assert 0 < result.storage_seconds < result.seconds


def go_on_until(monkeypatch, run_class, over):
    """Let runs go on, whatever their steps, until ``over`` is true."""
    monkeypatch.setattr(run_class, "active", property(lambda run: not over(run)))


def is_over(run, storage):
    """Enough steps, episodes too, and a death that was noticed."""
    return run.env_steps >= 3000 and len(run.curve) > 0 and storage.lost_writers == 1


@pytest.mark.usefixtures("forked_actors")
def test_apex_keeps_its_replay_ratio_and_names_an_actor_that_died(monkeypatch):
    import apex_dqn

    storages, batches, killed = [], [], []
    storage_class, hear = apex_dqn.PrioritizedReplayStorage, apex_dqn.read_reports
    close, make_writer = storage_class.close, storage_class.writer

    def writer(storage, *arguments, **options):
        storages.append(storage)
        return make_writer(storage, *arguments, **options)

    def close_after_a_look(storage):
        storage.set_rate_limit(None)
        batches.append(storage.sample(500))
        close(storage)

    def hear_and_kill(connections, run):
        if not killed and connections[0].poll():  # it has begun
            kill_actor("actor 0")
            killed.append(run.env_steps)
        hear(connections, run)

    monkeypatch.setattr(storage_class, "writer", writer)
    monkeypatch.setattr(storage_class, "close", close_after_a_look)
    monkeypatch.setattr(apex_dqn, "read_reports", hear_and_kill)
    go_on_until(monkeypatch, apex_dqn.Run, lambda run: is_over(run, storages[0]))
    with pytest.warns(RuntimeWarning) as warned:
        result = apex_dqn.train(3000, seed=3)
    messages = [str(warning.message) for warning in warned if issubclass(warning.category, RuntimeWarning)]
    assert len(messages) == 2, messages
    first, last = messages
    assert re.match(r'the writer "actor 0" \(process \d+\) of this .* died', first)
    assert last == "actor 0 ended with exit code -9"

    check_episodes(result)
    assert result.env_steps >= 3000
    assert result.env_steps % (apex_dqn.REPORT_EVERY * apex_dqn.ENVS_PER_ACTOR) == 0
    limit, sampled = apex_dqn.LIMIT, len(result.losses) * apex_dqn.BATCH_SIZE
    ahead = (result.env_steps - limit.min_size) * limit.samples_per_insert - sampled
    assert ahead <= limit.tolerance  # the actors did not run away
    assert result.extra["samples_per_insert"] == pytest.approx(sampled / result.env_steps)

    # One reward of 1 a step, over up to three steps, and nothing after a real end.
    (batch,) = batches
    rewards, discounts = batch.rewards.flatten(), batch.discounts.flatten()
    sums = torch.tensor([1.0, 1.99, 2.9701])
    steps = (rewards.unsqueeze(1) - sums).abs().argmin(1)
    torch.testing.assert_close(rewards, sums[steps])
    goes_on = discounts > 0
    torch.testing.assert_close(discounts[goes_on], 0.99 ** (steps[goes_on] + 1).float())
    fallen = (batch.next_observations[:, 2].abs() > 0.2) | (batch.next_observations[:, 0].abs() > 2.4)
    assert (~goes_on).sum() > 0
    assert fallen[~goes_on].all()


def test_apex_actors_differ_in_their_epsilon():
    import apex_dqn

    epsilons = [apex_dqn.epsilon_of(actor) for actor in range(apex_dqn.NUM_ACTORS)]
    assert epsilons == pytest.approx([0.4, 0.4**4.5, 0.4**8])


def comparing(versions, differences):
    """In place of ``update``: learn nothing, and compare the actors' logits with those of the learner."""

    def compare(network, optimizer, batch):
        begins = batch["terminated"] | batch["truncated"]
        assert begins[1:-1].any()
        logits, _, _ = network(batch["obs"], begins, batch.states)
        versions.append(batch.versions)
        differences.append((logits - batch["policy_outputs"])[:-1].abs().max().item())
        return 0.0

    return compare


def check_batches(result, versions, differences):
    import impala

    check_episodes(result)
    assert result.env_steps == len(versions) * impala.BATCH_SIZE * impala.NUM_STEPS
    assert max(differences) < 1e-5  # states go with the rollouts that begin with them, memory ends with the episode
    assert versions[-1].max() > 0  # newer weights were taken up,
    assert all((given <= version).all() for version, given in enumerate(versions))  # and none from the future
    behind = [version - given.double().mean().item() for version, given in enumerate(versions)]
    assert result.extra["versions_behind"] == pytest.approx(sum(behind) / len(behind))


@pytest.mark.usefixtures("forked_actors")
def test_impala_replays_rollouts_of_an_lstm_exactly_and_names_an_actor_that_died(monkeypatch):
    import impala

    storages, killed, versions, differences = [], [], [], []
    storage_class, compare = impala.DistributedStorage, comparing(versions, differences)
    make_learner = storage_class.learner

    def learner(storage):
        storages.append(storage)
        return make_learner(storage)

    def compare_and_kill(network, optimizer, batch):
        if not killed and storages[0].report().actors == 2:
            kill_actor("actor 0")
            killed.append(len(versions))
        return compare(network, optimizer, batch)

    monkeypatch.setattr(storage_class, "learner", learner)
    monkeypatch.setattr(impala, "update", compare_and_kill)
    go_on_until(monkeypatch, impala.Run, lambda run: len(versions) >= 8 and storages[0].report().lost_actors == 1)
    with pytest.warns(RuntimeWarning) as warned:
        result = impala.train(1, seed=3, memory="lstm")
    check_batches(result, versions, differences)
    messages = [str(warning.message) for warning in warned if issubclass(warning.category, RuntimeWarning)]
    assert messages[-1] == "actor 0 ended with exit code -9"
    # The other actor may have been the one to find it.
    assert all(re.match(r'actor "actor 0" \(process \d+\) died', message) for message in messages[:-1])


@pytest.mark.torture
@pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed")
@pytest.mark.filterwarnings("default")  # those of Ray itself
def test_impala_replays_rollouts_of_an_lstm_exactly_on_ray(monkeypatch):
    import impala

    versions, differences = [], []
    monkeypatch.setattr(impala, "update", comparing(versions, differences))
    go_on_until(monkeypatch, impala.Run, lambda run: len(versions) >= 8)
    check_batches(impala.train(1, seed=3, memory="lstm", use_ray=True), versions, differences)


def test_impala_learns_what_an_action_brings():
    """Episodes of one step, in which the second action is worth 1: its reward is in the row behind it."""
    import impala

    from rlstore import RolloutBatch

    torch.manual_seed(0)
    network = impala.ActorCritic("none")
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    shape = (impala.NUM_STEPS + 1, 16)
    for _ in range(60):
        obs = torch.randn(*shape, 4)
        with torch.no_grad():
            logits = network(obs, torch.ones(shape, dtype=torch.bool), ())[0]
        actions = torch.distributions.Categorical(logits=logits).sample()
        rewards = torch.cat([torch.zeros(1, 16), actions[:-1] / impala.REWARD_SCALE])
        tensors = {"obs": obs, "policy_outputs": logits, "action": actions, "reward": rewards}
        flags = {"terminated": torch.ones(shape, dtype=torch.bool), "truncated": torch.zeros(shape, dtype=torch.bool)}
        impala.update(network, optimizer, RolloutBatch({**tensors, **flags}, (), torch.zeros(16, dtype=torch.int64)))
    logits, values, _ = network(torch.randn(1, 50, 4), torch.ones(1, 50, dtype=torch.bool), ())
    assert (logits.softmax(-1)[..., 1] > 0.9).all()
    assert values.mean().item() == pytest.approx(1.0, abs=0.15)


INTERRUPTED = """
import impala
update = impala.update
def say(*arguments):
    print("learning", flush=True)
    return update(*arguments)
if __name__ == "__main__":
    impala.update = say
    impala.train(10_000_000)
"""


def hear_interrupts():
    """As a shell in the foreground starts programs; what runs in the background does not hear Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupting_the_learner_ends_the_actors(tmp_path):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "interrupted.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        preexec_fn=hear_interrupts,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "learning\n"
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to all of them
        _, errors = process.communicate(timeout=SECONDS)  # until the last process that has the pipes is gone
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGINT, errors
    assert errors.count("Traceback") == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
