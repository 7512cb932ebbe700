"""rsl_rl's own runners and algorithms, unchanged, with our RolloutStorage in the place of theirs; on CUDA if there."""

import copy
import importlib
import pkgutil
import sys
from itertools import chain

import pytest
import rsl_rl
import torch
from combinations import each
from rsl_rl.algorithms import PPO
from rsl_rl.extensions import Symmetry
from rsl_rl.runners import DistillationRunner, OnPolicyRunner
from rsl_rl.storage import RolloutStorage as TheirStorage
from tensordict import TensorDict
from toy_env import DEVICE, PointMassEnv, mirror

from rlstore import RolloutStorage
from rlstore.rsl_rl import use_rlstore

KNOWN_SITES = {
    "rsl_rl.storage",
    "rsl_rl.storage.rollout_storage",
    "rsl_rl.algorithms.ppo",
    "rsl_rl.algorithms.distillation",
    "rsl_rl.extensions.symmetry",
}

MLP = {"class_name": "MLPModel", "hidden_dims": [32]}
GRU = {"class_name": "RNNModel", "hidden_dims": [32], "rnn_type": "gru", "rnn_hidden_dim": 16}
LSTM = {**GRU, "rnn_type": "lstm", "rnn_num_layers": 2}
GAUSSIAN = {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.6}}
EXTENSIONS = {
    "normalize_advantage_per_mini_batch": True,
    "symmetry_cfg": {
        "data_augmentation_func": mirror,
        "use_data_augmentation": True,
        "use_mirror_loss": True,
        "mirror_loss_coeff": 0.1,
    },
    "rnd_cfg": {
        "num_outputs": 4,
        "predictor_hidden_dims": [8],
        "target_hidden_dims": [8],
        "weight": 0.01,
        "state_normalization": True,
        "reward_normalization": True,
    },
}


class WatchedStorage(RolloutStorage):
    """Ours, with an eye on every batch: rsl_rl rolls out in inference mode, and none of it may reach the update."""

    batches_served = 0

    def generator(self):
        return self._watch(super().generator())

    def mini_batch_generator(self, *args, **kwargs):
        return self._watch(super().mini_batch_generator(*args, **kwargs))

    def recurrent_mini_batch_generator(self, *args, **kwargs):
        return self._watch(super().recurrent_mini_batch_generator(*args, **kwargs))

    def _watch(self, batches):
        for batch in batches:
            assert not [name for name, tensor in tensors_of(batch).items() if tensor.is_inference()]
            self.batches_served += 1
            yield batch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A checkpoint of a trained feed-forward policy that sees positions and velocities."""
    path = tmp_path_factory.mktemp("teacher") / "teacher.pt"
    runner, _ = train(OnPolicyRunner, ppo_config(MLP, MLP, actor_sees="privileged"), seed=3)
    runner.save(str(path))
    return path


def swap(monkeypatch, storage_class):
    """Put ``storage_class`` wherever rsl_rl holds its own class; return the names of those modules."""
    for module in pkgutil.walk_packages(rsl_rl.__path__, "rsl_rl."):
        importlib.import_module(module.name)
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "rsl_rl"}
    sites = {name for name, module in modules.items() if getattr(module, "RolloutStorage", None) is TheirStorage}
    for name in sites:
        monkeypatch.setattr(modules[name], "RolloutStorage", storage_class)
    return sites


def ppo_config(actor, critic, *, actor_sees="policy", **algorithm):
    return {
        "num_steps_per_env": 24,
        "save_interval": 1000,
        "obs_groups": {"actor": [actor_sees], "critic": ["privileged"], "rnd_state": ["privileged"]},
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": 4,
            "num_mini_batches": 4,
            "learning_rate": 3e-3,
            "entropy_coef": 0.0,
            **algorithm,
        },
        "actor": {**actor, **GAUSSIAN},
        "critic": critic,
    }


def distillation_config(student):
    return {
        "num_steps_per_env": 24,
        "save_interval": 1000,
        "obs_groups": {"student": ["policy"], "teacher": ["privileged"]},
        "algorithm": {
            "class_name": "Distillation",
            "num_learning_epochs": 2,
            "gradient_length": 8,
            "learning_rate": 3e-3,
        },
        "student": {**student, **GAUSSIAN},
        "teacher": {**MLP, **GAUSSIAN},
    }


def train(runner_class, config, *, seed, iterations=20, checkpoint=None):
    """Train from scratch; return the runner and the losses of every update."""
    torch.manual_seed(seed)
    runner = runner_class(PointMassEnv(seed=seed), copy.deepcopy(config), device=str(DEVICE))
    if checkpoint is not None:
        runner.load(str(checkpoint))
    losses = []
    update = runner.alg.update
    runner.alg.update = lambda: losses.append(update()) or losses[-1]
    # Seeded again: what a storage draws while it is built must not decide how the two runs compare.
    torch.manual_seed(seed + 1)
    runner.learn(iterations)
    return runner, losses


def train_with_both(monkeypatch, runner_class, config, **options):
    """The same training with their storage and with ours: (theirs, ours), each a runner and its losses."""
    theirs = train(runner_class, config, **options)
    assert type(theirs[0].alg.storage) is TheirStorage
    assert swap(monkeypatch, WatchedStorage) >= KNOWN_SITES
    ours = train(runner_class, config, **options)
    assert_trained_on_ours(ours[0])
    return theirs, ours


def assert_trained_on_ours(runner):
    assert type(runner.alg.storage) is WatchedStorage
    assert isinstance(runner.alg.transition, RolloutStorage.Transition)
    assert runner.alg.storage.batches_served > 0


def assert_learned(env):
    """From missing the goal to reaching it: an episode that reaches it at once is worth 1."""
    assert env.mean_return() > env.mean_return(first=True) + 1.0
    assert env.mean_return() > 0.5


def tensors_of(value, name="batch"):
    """Every tensor inside a batch, by a name that says where it is."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, TensorDict):
        return {f"{name}[{key}]": leaf for key, leaf in value.items(include_nested=True, leaves_only=True)}
    if isinstance(value, tuple | list):
        parts = {f"{name}[{i}]": part for i, part in enumerate(value)}
    else:
        parts = {f"{name}.{key}": part for key, part in vars(value).items()} if value is not None else {}
    return {key: tensor for part_name, part in parts.items() for key, tensor in tensors_of(part, part_name).items()}


# ---------------------------------------------------------------------------------------------------------------------
# Training


def test_every_place_that_holds_their_class_is_swapped(monkeypatch):
    assert swap(monkeypatch, RolloutStorage) >= KNOWN_SITES
    assert swap(monkeypatch, RolloutStorage) == set()


def test_feed_forward_ppo_learns_as_well_as_with_their_storage(monkeypatch):
    theirs, ours = train_with_both(monkeypatch, OnPolicyRunner, ppo_config(MLP, MLP), seed=0, iterations=30)
    for runner, _ in (theirs, ours):
        assert_learned(runner.env)
    assert ours[0].env.mean_return() == pytest.approx(theirs[0].env.mean_return(), abs=0.1)
    # The first rollout is made by the same untrained policy, so only the shuffling tells the first updates apart.
    assert ours[1][0]["value"] == pytest.approx(theirs[1][0]["value"], rel=0.2)


UNTIL_LEARNED = pytest.param(20, marks=pytest.mark.torture)


@pytest.mark.parametrize("iterations", [4, UNTIL_LEARNED])
@pytest.mark.parametrize(("actor", "critic"), [(LSTM, LSTM), (GRU, MLP)], ids=["lstm", "gru actor, mlp critic"])
def test_recurrent_ppo_learns_the_same_as_with_their_storage(monkeypatch, actor, critic, iterations):
    config = ppo_config(actor, critic, num_learning_epochs=3)
    theirs, ours = train_with_both(monkeypatch, OnPolicyRunner, config, seed=1, iterations=iterations)
    if iterations > 4:
        for runner, _ in (theirs, ours):
            assert_learned(runner.env)
    # Recurrent batches are not shuffled, so the two runs are the same run until rounding takes them apart.
    for their_losses, our_losses in zip(theirs[1][:4], ours[1][:4], strict=True):
        assert our_losses == pytest.approx(their_losses, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("student", [MLP, GRU], ids=["mlp student", "gru student"])
def test_distillation_learns_the_same_as_with_their_storage(monkeypatch, teacher, student):
    config = distillation_config(student)
    options = {"seed": 2, "iterations": 15, "checkpoint": teacher}
    theirs, ours = train_with_both(monkeypatch, DistillationRunner, config, **options)
    for runner, losses in (theirs, ours):
        assert losses[-1]["behavior"] < 0.3 * losses[0]["behavior"]
        assert runner.env.mean_return() > runner.env.mean_return(first=True) + 0.3
    for their_losses, our_losses in zip(theirs[1][:4], ours[1][:4], strict=True):
        assert our_losses == pytest.approx(their_losses, rel=1e-3, abs=1e-5)


def test_ppo_learns_with_symmetry_curiosity_and_advantages_normalised_per_mini_batch(monkeypatch):
    swap(monkeypatch, WatchedStorage)
    runner, losses = train(OnPolicyRunner, ppo_config(MLP, MLP, **EXTENSIONS), seed=4)
    assert_trained_on_ours(runner)
    assert_learned(runner.env)
    assert losses[-1]["rnd"] < losses[0]["rnd"]
    assert {"value", "surrogate", "entropy", "rnd", "symmetry"} <= losses[-1].keys()


def test_observation_normalisation_reads_the_whole_rollout(monkeypatch):
    config = ppo_config({**MLP, "obs_normalization": True}, {**MLP, "obs_normalization": True})
    swap(monkeypatch, WatchedStorage)
    runner, _ = train(OnPolicyRunner, config, seed=5, iterations=2)
    assert int(runner.alg.actor.obs_normalizer.count) == 2 * 24 * 32


# ---------------------------------------------------------------------------------------------------------------------
# One call: use_rlstore()


def switched(runner_class):
    """What makes a runner and swaps its storage."""

    def make(*args, **options):
        runner = runner_class(*args, **options)
        assert use_rlstore(runner) is runner.alg.storage
        return runner

    return make


def test_a_runner_whose_storage_was_swapped_learns_the_same():
    config = ppo_config(GRU, MLP, num_learning_epochs=2)
    theirs = train(OnPolicyRunner, config, seed=1, iterations=3)
    ours = train(switched(OnPolicyRunner), config, seed=1, iterations=3)
    assert type(ours[0].alg.storage) is RolloutStorage
    for their_losses, our_losses in zip(theirs[1], ours[1], strict=True):
        assert our_losses == pytest.approx(their_losses, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("per_mini_batch", [False, True])
@pytest.mark.parametrize("model", [MLP, LSTM], ids=["mlp", "lstm"])
def test_targets_are_those_of_ppo_and_the_critic_goes_on_where_it_was(model, per_mini_batch):
    config = ppo_config(model, model, normalize_advantage_per_mini_batch=per_mini_batch)
    runner, _ = train(switched(OnPolicyRunner), config, seed=6, iterations=1)
    env, algorithm = runner.env, runner.alg
    observations = env.get_observations().to(DEVICE)
    with torch.inference_mode():
        for _ in range(24):
            observations, rewards, dones, extras = env.step(algorithm.act(observations))
            algorithm.process_env_step(observations, rewards, dones, extras)
        assert algorithm.storage.dones.any()
        before = copy.deepcopy(algorithm.critic.get_hidden_state())
        algorithm.compute_returns(observations)
        ours = algorithm.storage.returns.clone(), algorithm.storage.advantages.clone()
        torch.testing.assert_close(algorithm.critic.get_hidden_state(), before)
        PPO.compute_returns(algorithm, observations)
    torch.testing.assert_close(ours, (algorithm.storage.returns, algorithm.storage.advantages), rtol=1e-4, atol=1e-5)


def test_distillation_with_a_swapped_storage_learns_the_same(teacher):
    options = {"seed": 2, "iterations": 3, "checkpoint": teacher}
    theirs = train(DistillationRunner, distillation_config(MLP), **options)
    ours = train(switched(DistillationRunner), distillation_config(MLP), **options)
    for their_losses, our_losses in zip(theirs[1], ours[1], strict=True):
        assert our_losses == pytest.approx(their_losses, rel=1e-3, abs=1e-5)


def test_an_algorithm_with_returns_of_its_own_keeps_them():
    class OwnReturns(PPO):
        def compute_returns(self, obs):
            super().compute_returns(obs)

    runner = OnPolicyRunner(PointMassEnv(seed=0), ppo_config(MLP, MLP), device=str(DEVICE))
    runner.alg.__class__ = OwnReturns
    use_rlstore(runner.alg)  # the algorithm will do as well as its runner
    assert runner.alg.compute_returns.__func__ is OwnReturns.compute_returns
    runner.learn(1)
    assert type(runner.alg.storage) is RolloutStorage
    patched = OnPolicyRunner(PointMassEnv(seed=0), ppo_config(MLP, MLP), device=str(DEVICE)).alg
    patched.compute_returns = own = lambda obs: None
    use_rlstore(patched)
    assert patched.compute_returns is own


def test_an_old_rsl_rl_is_refused(monkeypatch):
    monkeypatch.delattr(TheirStorage, "Batch")
    with pytest.raises(ValueError, match=r"needs rsl-rl-lib 5\.0 or later.*Nothing was changed"):
        use_rlstore(object())


def test_what_has_no_storage_of_rsl_rl_is_refused_and_left_as_it_was():
    with pytest.raises(ValueError, match="runner_or_algorithm is a dict with the storage None"):
        use_rlstore({})
    runner = OnPolicyRunner(PointMassEnv(seed=0), ppo_config(MLP, MLP), device=str(DEVICE))
    theirs = runner.alg.storage
    theirs.step = 3
    with pytest.raises(ValueError, match="the storage holds 3 steps of a rollout"):
        use_rlstore(runner)
    assert runner.alg.storage is theirs
    theirs.step = 0
    with torch.inference_mode():
        runner.alg.act(runner.env.get_observations())
    with pytest.raises(ValueError, match="a step may have begun"):
        use_rlstore(runner)
    assert runner.alg.storage is theirs
    runner.alg.transition.clear()
    ours = use_rlstore(runner)
    with pytest.raises(ValueError, match="one of rlstore already"):
        use_rlstore(runner)
    assert runner.alg.storage is ours


def test_a_storage_that_adds_to_theirs_is_refused():
    class WithReferenceMotions(TheirStorage):
        pass

    runner = OnPolicyRunner(PointMassEnv(seed=0), ppo_config(MLP, MLP), device=str(DEVICE))
    runner.alg.storage.__class__ = WithReferenceMotions
    theirs = runner.alg.storage
    with pytest.raises(ValueError, match=r"the storage is a WithReferenceMotions.* Nothing was changed"):
        use_rlstore(runner)
    assert runner.alg.storage is theirs


@pytest.mark.parametrize("model", [GRU, LSTM], ids=["gru", "lstm"])
def test_a_runner_that_has_learned_is_swapped_and_goes_on_the_same(model):
    runs = []
    for swaps in (False, True):
        runner, losses = train(OnPolicyRunner, ppo_config(model, model, num_learning_epochs=2), seed=1, iterations=2)
        if swaps:
            use_rlstore(runner)
        torch.manual_seed(7)  # what the new storage draws must not decide how the two runs compare
        runner.learn(2)
        runs.append(losses)
    assert len(runs[1]) == 4
    for their_losses, our_losses in zip(*runs, strict=True):
        assert our_losses == pytest.approx(their_losses, rel=1e-3, abs=1e-5)


def test_extensions_and_checkpoints_work_with_a_swapped_storage(tmp_path):
    config = ppo_config(MLP, MLP, **EXTENSIONS)
    first, losses = train(switched(OnPolicyRunner), config, seed=4, iterations=4)
    assert losses[-1]["rnd"] < losses[0]["rnd"]
    assert {"value", "surrogate", "entropy", "rnd", "symmetry"} <= losses[-1].keys()
    first.save(str(tmp_path / "model.pt"))
    second, more = train(switched(OnPolicyRunner), config, seed=5, iterations=2, checkpoint=tmp_path / "model.pt")
    assert second.current_learning_iteration == 4
    assert more[0]["rnd"] < losses[0]["rnd"]


# ---------------------------------------------------------------------------------------------------------------------
# The same transitions in both storages

ENVS, STEPS, LAYERS, HIDDEN = 6, 9, 2, 3


def fill(storage, *, memory=None, first_id=0):
    """One rollout in inference mode: every number of step ``t`` and environment ``e`` is made from a unique id."""
    draw = torch.Generator().manual_seed(first_id)
    with torch.inference_mode():
        for step in range(STEPS):
            ids = first_id + step * ENVS + torch.arange(ENVS, dtype=torch.float32, device=DEVICE).unsqueeze(1)
            transition = storage.Transition()
            transition.observations = observations(ids)
            transition.actions = torch.cat([ids, ids + 0.125], dim=1)
            transition.rewards = ids.squeeze(1)
            transition.dones = (torch.rand(ENVS, generator=draw) < 0.3).to(DEVICE)
            transition.values = ids + 0.25
            transition.actions_log_prob = ids.squeeze(1) + 0.5
            transition.distribution_params = (torch.cat([ids, -ids], dim=1), ids + 0.75)
            # rsl_rl's networks have no state yet at the very first step of a training.
            if step or first_id:
                transition.hidden_states = hidden_states(ids, memory)
            storage.add_transition(transition)
        storage.returns[:] = storage.values + 1000.0
        storage.advantages = storage.returns - 2.0 * storage.values


def observations(ids):
    return TensorDict({"policy": torch.cat([ids, 2 * ids], dim=1), "privileged": -ids}, batch_size=[ENVS])


def hidden_states(ids, memory):
    state = ids.expand(LAYERS, ENVS, HIDDEN) + torch.arange(LAYERS, device=DEVICE).view(-1, 1, 1) / 8
    choices = {
        None: (None, None),
        "gru": (state, -state),
        "lstm": ((state, state + 1), (-state, -state - 1)),
        "gru actor, lstm critic": (state, (-state, -state - 1)),
        "gru critic only": (None, state),
    }
    return choices[memory]


def build(storage_class):
    return storage_class("rl", ENVS, STEPS, observations(torch.zeros(ENVS, 1, device=DEVICE)), [2], str(DEVICE))


def assert_same_batches(ours, theirs):
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        our_tensors, their_tensors = tensors_of(our_batch), tensors_of(their_batch)
        assert our_tensors.keys() == their_tensors.keys()
        for name, tensor in our_tensors.items():
            torch.testing.assert_close(
                tensor, their_tensors[name], rtol=0.0, atol=0.0, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert our_batch.observations.batch_size == their_batch.observations.batch_size


@pytest.mark.parametrize(
    ("memory", "num_mini_batches"),
    each([None, "gru", "lstm", "gru actor, lstm critic", "gru critic only"], [1, 2, 4]),
)
def test_recurrent_batches_are_exactly_theirs(memory, num_mini_batches):
    ours, theirs = build(RolloutStorage), build(TheirStorage)
    for rollout in range(3):
        for storage in (ours, theirs):
            storage.clear()
            fill(storage, memory=memory, first_id=rollout * 100)
        assert_same_batches(
            ours.recurrent_mini_batch_generator(num_mini_batches, 2),
            theirs.recurrent_mini_batch_generator(num_mini_batches, 2),
        )


@pytest.mark.parametrize("num_mini_batches", [1, 3, 6])
def test_feed_forward_epochs_hold_the_same_rows_as_theirs_and_fields_stay_together(num_mini_batches):
    ours, theirs = build(RolloutStorage), build(TheirStorage)
    for storage in (ours, theirs):
        fill(storage, first_id=200)
    size = ENVS * STEPS // num_mini_batches
    epochs = {}
    for name, storage in (("ours", ours), ("theirs", theirs)):
        batches = list(storage.mini_batch_generator(num_mini_batches, 2))
        assert len(batches) == 2 * num_mini_batches
        rows = [rows_of(batch, size) for batch in batches]
        epochs[name] = [sorted(chain(*rows[:num_mini_batches])), sorted(chain(*rows[num_mini_batches:]))]
    assert epochs["ours"] == epochs["theirs"]


def rows_of(batch, size):
    """The ids in a batch, once every field has been found to speak of the same rows."""
    ids = batch.actions[:, :1]
    assert ids.shape == (size, 1)
    expected = RolloutStorage.Batch(
        observations=TensorDict({"policy": torch.cat([ids, 2 * ids], dim=1), "privileged": -ids}, batch_size=[size]),
        actions=torch.cat([ids, ids + 0.125], dim=1),
        values=ids + 0.25,
        advantages=(ids + 1000.25) - 2.0 * (ids + 0.25),
        returns=ids + 1000.25,
        old_actions_log_prob=ids + 0.5,
        old_distribution_params=(torch.cat([ids, -ids], dim=1), ids + 0.75),
    )
    assert_same_batches([batch], [expected])
    return ids.flatten().tolist()


def test_their_transitions_are_taken_too():
    theirs, ours = build(RolloutStorage), build(RolloutStorage)
    theirs.Transition = TheirStorage.Transition
    for storage in (theirs, ours):
        fill(storage, memory="lstm")
    assert_same_batches(theirs.recurrent_mini_batch_generator(2, 1), ours.recurrent_mini_batch_generator(2, 1))


@pytest.mark.parametrize("recurrent", [False, True])
def test_backward_works_on_what_was_collected_in_inference_mode(recurrent):
    storage = build(RolloutStorage)
    fill(storage, memory="gru")
    batches = storage.recurrent_mini_batch_generator(2, 2) if recurrent else storage.mini_batch_generator(2, 2)
    for batch in batches:
        tensors = {name: tensor for name, tensor in tensors_of(batch).items() if tensor.is_floating_point()}
        assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors.values())
        # A product keeps both of its factors for the backward pass, which autograd refuses for inference tensors.
        weights = {name: torch.ones_like(tensor, requires_grad=True) for name, tensor in tensors.items()}
        sum((weights[name] * tensor).sum() for name, tensor in tensors.items()).backward()
        for name, tensor in tensors.items():
            torch.testing.assert_close(weights[name].grad, tensor)


def test_augmented_batches_are_mirrored_once_and_the_next_epoch_is_not():
    storage = build(RolloutStorage)
    fill(storage)
    symmetry = Symmetry(env=None, data_augmentation_func=mirror, use_data_augmentation=True)
    size = ENVS * STEPS // 2
    for batch in storage.mini_batch_generator(2, 3):
        rows_of(batch, size)
        plain = copy.deepcopy(batch)
        symmetry.augment_batch(batch, size)
        assert batch.observations.batch_size == (2 * size,)
        torch.testing.assert_close(batch.observations["policy"][size:], -plain.observations["policy"])
        torch.testing.assert_close(batch.actions, torch.cat([plain.actions, -plain.actions]))
        for name in ("values", "advantages", "returns", "old_actions_log_prob"):
            torch.testing.assert_close(getattr(batch, name), getattr(plain, name).repeat(2, 1))
