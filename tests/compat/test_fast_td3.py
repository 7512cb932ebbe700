"""rlstore.fast_td3: what FastTD3's training loop does with its SimpleReplayBuffer, against a naive model.

On CUDA if that is asked for.
"""

import pytest
import torch
from tensordict import TensorDict
from where import DEVICE, SEES_VALUES

from rlstore import NotReadyError, NStepReplayStorage, ReplayStorage
from rlstore.fast_td3 import SimpleReplayBuffer

ENVS, N_OBS, N_ACT, N_CRITIC, GAMMA = 3, 2, 1, 5, 0.5


class NaiveBuffer:
    """The newest steps of each environment, as plain lists; what each must be served as is found step by step."""

    def __init__(self, buffer_size, n_steps):
        self.size, self.n_steps, self.lanes = buffer_size, n_steps, [[] for _ in range(ENVS)]

    def extend(self, step):
        following = step["next"]
        for env, lane in enumerate(self.lanes):
            flat = {key: value[env] for key, value in step.items() if key != "next"}
            flat.update({f"next {key}": value[env] for key, value in following.items()})
            lane.append(flat)
            del lane[: -self.size]

    def expected(self):
        """By the first number of its observation, which is unique: what a transition must be served as."""
        found = {}
        for lane in self.lanes:
            for start in range(len(lane)):
                total, taken = 0.0, 0
                for row in lane[start : start + self.n_steps]:
                    total += GAMMA**taken * float(row["next rewards"])
                    taken += 1
                    if row["next dones"]:
                        break
                found[float(lane[start]["observations"][0])] = (lane[start], row, total, taken)
        return found


def play(steps, *, asymmetric=False, seed=0):
    """The steps of FastTD3's loop: environments that reset in the same step, with the true next observation."""
    draw = torch.Generator().manual_seed(seed)

    def observe(ids):
        observations = torch.stack([ids, ids / 1000], dim=1)
        return observations, torch.cat([observations, -observations, ids.unsqueeze(1) + 0.25], dim=1)

    ids = 100.0 * torch.arange(1, ENVS + 1)
    for _ in range(steps):
        dones = torch.rand(ENVS, generator=draw) < 0.3
        truncations = dones & (torch.rand(ENVS, generator=draw) < 0.5)
        (before, critic), (after, next_critic) = observe(ids), observe(ids + 1)
        following = {"observations": after, "rewards": ids + 0.5}
        following.update(dones=dones.long(), truncations=truncations.long())
        step = TensorDict({"observations": before, "actions": ids.unsqueeze(1) + 0.125}, batch_size=[ENVS])
        step["next"] = TensorDict(following, batch_size=[ENVS])
        if asymmetric:
            step["critic_observations"], step["next", "critic_observations"] = critic, next_critic
        yield step.to(DEVICE)
        ids = torch.where(dones, ids + 5000, ids + 1)  # the first observation of the next episode


def extend_by_each(buffer, steps):
    for step in steps:
        buffer.extend(step)
        if DEVICE == "cuda":
            torch.cuda.synchronize()


def make(n_steps=1, buffer_size=9, **options):
    options |= {"n_steps": n_steps, "gamma": GAMMA, "device": DEVICE}
    return SimpleReplayBuffer(ENVS, buffer_size, N_OBS, N_ACT, N_CRITIC, **options)


@pytest.mark.parametrize("steps", [2, 7, 31], ids=["two steps", "not full", "overwritten"])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("mode", [{}, {"asymmetric_obs": True}, {"asymmetric_obs": True, "playground_mode": True}])
def test_every_row_served_is_one_that_the_naive_model_has(n_steps, steps, mode):
    ours, naive = make(n_steps, **mode), NaiveBuffer(9, n_steps)
    for step in play(steps, asymmetric="asymmetric_obs" in mode):
        ours.extend(step)
        naive.extend(step.cpu())
    ours.storage.seed(0)
    batch, expected = ours.sample(120), naive.expected()
    assert {tensor.device.type for tensor in batch.values(True, True)} == {DEVICE}
    assert batch.batch_size == (120 * ENVS,)
    assert {float(number) for number in batch["observations"][:, 0]} == expected.keys()
    for row in batch.cpu().unbind(0):
        first, last, total, taken = expected[float(row["observations"][0])]
        for key in ("observations", "actions", *(["critic_observations"] if mode else [])):
            assert torch.equal(row[key], first[key]), key
        for key in ("observations", "dones", "truncations", *(["critic_observations"] if mode else [])):
            assert torch.equal(row["next", key], last[f"next {key}"]), key
        assert row["next", "rewards"].item() == pytest.approx(total, rel=1e-6)
        assert row["next", "effective_n_steps"].item() == taken


@pytest.mark.parametrize(("n_steps", "counts"), [(1, torch.int64), (3, torch.float32)])
def test_names_shapes_and_dtypes_are_those_that_fast_td3_serves(n_steps, counts):
    buffer = make(n_steps, asymmetric_obs=True)
    for step in play(5, asymmetric=True):
        buffer.extend(step)
    batch = buffer.sample(4)
    found = {key: (tuple(batch[key].shape), batch[key].dtype) for key in batch.keys(True, True)}
    assert found == {
        "observations": ((12, N_OBS), torch.float32),
        "critic_observations": ((12, N_CRITIC), torch.float32),
        "actions": ((12, N_ACT), torch.float32),
        ("next", "observations"): ((12, N_OBS), torch.float32),
        ("next", "critic_observations"): ((12, N_CRITIC), torch.float32),
        ("next", "rewards"): ((12,), torch.float32),
        ("next", "dones"): ((12,), torch.int64),
        ("next", "truncations"): ((12,), torch.int64),
        ("next", "effective_n_steps"): ((12,), counts),
    }
    batch["observations"] = batch["observations"] * 2  # FastTD3 puts normalized observations back
    assert (buffer.ptr, buffer.n_env, buffer.buffer_size, buffer.n_steps) == (5, ENVS, 9, n_steps)


def test_an_observation_is_stored_once():
    numbers = N_OBS + N_ACT + 1  # and the reward, of each row; four bytes each
    assert make(buffer_size=4000).storage.nbytes < 1.4 * 4 * numbers * 4000 * ENVS


def test_a_reset_without_a_flag_ends_the_window_and_warns():
    # On CUDA a later step tells it.
    buffer, (first, second, *later) = make(3, buffer_size=40), play(2 if SEES_VALUES else 20, seed=4)
    assert not first["next", "dones"][0]
    second = second.clone()
    second["observations"][0] += 77
    buffer.extend(first)
    with pytest.warns(UserWarning, match="no end was flagged"):
        extend_by_each(buffer, (second, *later))
    batch = buffer.sample(200)
    broken = batch["observations"][:, 0] == first["observations"][0, 0]
    assert broken.any()
    assert (batch["next", "effective_n_steps"][broken] == 1).all()
    assert torch.equal(batch["next", "observations"][broken][0], first["next", "observations"][0])


def test_it_works_in_inference_mode_and_what_it_serves_can_be_trained_on():
    buffer = make(2)
    with torch.inference_mode():
        for step in play(4):
            buffer.extend(step)
        batch = buffer.sample(2)
    assert not any(tensor.is_inference() for tensor in batch.values(True, True))


@pytest.mark.parametrize("mode", [{}, {"asymmetric_obs": True}, {"asymmetric_obs": True, "playground_mode": True}])
def test_a_resumed_buffer_goes_on_as_the_saved_one_does(tmp_path, mode):
    saved, resumed, naive = make(3, **mode), make(3, **mode), NaiveBuffer(9, 3)
    steps = list(play(15, asymmetric="asymmetric_obs" in mode))
    for step in steps[:11]:
        saved.extend(step)
        naive.extend(step.cpu())
    saved.storage.save(tmp_path / "saved")
    resumed.storage = ReplayStorage.load(tmp_path / "saved")
    assert (resumed.ptr, len(resumed.storage)) == (11, 9 * ENVS)
    batches = [buffer.sample(40) for buffer in (saved, resumed)]
    assert (batches[0] == batches[1]).all()
    assert {float(number) for number in batches[1]["observations"][:, 0]} <= naive.expected().keys()
    for step in steps[11:]:
        saved.extend(step)
        resumed.extend(step)
        naive.extend(step.cpu())
    batches = [buffer.sample(120) for buffer in (saved, resumed)]
    assert (batches[0] == batches[1]).all()
    assert resumed.ptr == 15
    for row in batches[1].cpu().unbind(0):
        _, last, total, taken = naive.expected()[float(row["observations"][0])]
        assert torch.equal(row["next", "observations"], last["next observations"])
        assert row["next", "rewards"].item() == pytest.approx(total, rel=1e-6)
        assert row["next", "effective_n_steps"].item() == taken


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("n_step", {"n_steps": 2}),
        ("storage_size", {"buffer_size": 7}),
        ("discount", {"gamma": 0.75}),
        ("observation_space", {"asymmetric_obs": True}),
        ("num_envs", {"n_env": 3 * ENVS, "buffer_size": 3}),
        ("action_space", {"n_act": N_ACT + 1}),
    ],
)
def test_the_storage_of_a_buffer_with_other_arguments_is_refused(name, other):
    fitting = {"n_env": ENVS, "buffer_size": 9, "n_obs": N_OBS, "n_act": N_ACT, "n_critic_obs": N_CRITIC}
    other = SimpleReplayBuffer(**{**fitting, "gamma": GAMMA, "device": DEVICE, **other})
    buffer = make()
    for step in play(2):
        buffer.extend(step)
    storage = buffer.storage
    with pytest.raises(ValueError, match=rf"{name} of this storage is .*fixed by its arguments.* Nothing was changed"):
        buffer.storage = other.storage
    with pytest.raises(ValueError, match="storage is a NStepReplayStorage; give a ReplayStorage"):
        buffer.storage = NStepReplayStorage({"shape": 2}, {"shape": 1, "type": "Box"})
    assert buffer.storage is storage
    assert buffer.ptr == 2


def test_what_does_not_fit_is_refused_and_nothing_is_written():
    buffer, (step,) = make(), play(1)
    with pytest.raises(NotReadyError):
        buffer.sample(1)
    with pytest.raises(ValueError, match=r"tensor_dict has no tensor \('next', 'rewards'\); it holds"):
        buffer.extend(step.exclude(("next", "rewards")))
    with pytest.raises(ValueError, match="tensor_dict is a dict; give a TensorDict"):
        buffer.extend(step.to_dict())
    wrong = step.clone()
    wrong["actions"] = torch.zeros(ENVS, N_ACT + 1)
    with pytest.raises(ValueError, match=r"actions is \(3, 2\).*Nothing was written"):
        buffer.extend(wrong)
    for name in ("dones", "truncations"):
        wrong = step.clone()
        wrong["next", name] = wrong["next", name].unsqueeze(1)
        with pytest.raises(ValueError, match=r"dones is \(3.* and truncations \(3.*give both as \(3,\).*Nothing was"):
            buffer.extend(wrong)
    wrong = step.clone()
    wrong["critic_observations"] = torch.zeros(ENVS, N_CRITIC)
    with pytest.raises(ValueError, match="made with asymmetric_obs=False"):
        buffer.extend(wrong)
    assert (len(buffer.storage), buffer.ptr) == (0, 0)
    with pytest.raises(ValueError, match="n_critic_obs is 2; with playground_mode"):
        SimpleReplayBuffer(3, 9, 2, 1, 2, asymmetric_obs=True, playground_mode=True)
    with pytest.raises(TypeError, match="Did you mean 'n_env'"):
        SimpleReplayBuffer(num_envs=3)
    with pytest.raises(ValueError, match="batch_size"):
        buffer.sample(0)
    with pytest.raises(AttributeError):
        buffer.ptr = 3
