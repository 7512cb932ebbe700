"""What travels: nests of tensors, and steps stacked by a writer."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlstore import InvalidInputError
from rlstore.ray.steps import Chunk, StepBuffer
from rlstore.ray.wire import join, pack


def plain(shape, dtype):
    return torch.empty(tuple(shape), dtype=dtype)


def sent(packed):
    """As Ray gives it: buffers out of band, read-only."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


def test_a_nest_comes_back_as_it_was_in_memory_of_its_own():
    nest = {
        "a": torch.arange(6).reshape(3, 2),
        "b": {"c": torch.tensor([True, False, True]), "d": (torch.zeros(3, 0), None)},
        "e": TensorDict({"x": torch.arange(3.0), "y": {"z": torch.ones(3, 2)}}, batch_size=[3]),
        "f": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
        "g": torch.tensor([1 + 2j, 0, 3]),
        "n": 7,
    }
    back = join([sent(pack(nest))], plain)
    assert back["n"] == 7
    assert back["b"]["d"][1] is None
    assert back["e"].batch_size == torch.Size([3])
    for path in (("a",), ("b", "c"), ("f",), ("g",)):
        one, other = nest, back
        for key in path:
            one, other = one[key], other[key]
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        other[0] = 0  # writable
    assert torch.equal(back["e"]["y"]["z"], torch.ones(3, 2))
    assert nest["a"][0, 1] == 1


def test_parts_are_joined_on_the_batch_axis_and_states_on_the_second():
    parts = [
        {"x": torch.full((n, 2), n), "hidden_states": (torch.full((1, n, 3), n), torch.full((2, n, 1), -n))}
        for n in (1, 2, 3)
    ]
    joined = join([sent(pack(part)) for part in parts], plain)
    assert torch.equal(joined["x"], torch.cat([part["x"] for part in parts]))
    for index in range(2):
        assert torch.equal(joined["hidden_states"][index], torch.cat([p["hidden_states"][index] for p in parts], 1))


def test_parts_of_rollouts_are_joined_on_the_second_axis():
    parts = [{"x": torch.full((5, n, 2), n), "hidden_states": torch.full((1, n, 3), n)} for n in (1, 2)]
    joined = join([sent(pack(part)) for part in parts], plain, axis=1)
    for name in ("x", "hidden_states"):
        assert torch.equal(joined[name], torch.cat([part[name] for part in parts], 1))


def test_parts_of_different_form_are_refused():
    with pytest.raises(InvalidInputError, match="differ"):
        join([pack({"x": torch.zeros(2)}), pack({"x": torch.zeros(2, dtype=torch.int64)})], plain)


# ---------------------------------------------------------------------------------------------------- steps


def sample(value, envs=2, **more):
    return {"observations": np.full((envs, 3), value), "rewards": [float(value)] * envs, **more}


def test_steps_come_out_as_they_were_added_and_are_copies():
    buffer = StepBuffer(4, 2)
    given = sample(1.0)
    buffer.add(given)
    given["observations"][:] = 99  # the environment writes over its own
    buffer.add(sample(2.0, masks=torch.tensor([True, False])))
    buffer.add(sample(3.0, hidden_states=(torch.full((1, 2, 4), 3.0), None)))
    assert (buffer.steps, buffer.transitions, buffer.is_full) == (3, 5, False)
    steps = list(Chunk.of(sent(buffer.packed())).each())
    assert [count for _, count in steps] == [2, 1, 2]
    assert [float(step["observations"][1, 2]) for step, _ in steps] == [1, 2, 3]
    assert [sorted(step) for step, _ in steps] == [
        ["observations", "rewards"],
        ["masks", "observations", "rewards"],
        ["hidden_states", "observations", "rewards"],
    ]
    assert steps[2][0]["hidden_states"][1] is None
    assert steps[2][0]["hidden_states"][0].shape == (1, 2, 4)
    buffer.clear()
    buffer.add(sample(5.0))
    ((only, _),) = Chunk.of(buffer.packed()).each()
    assert sorted(only) == ["observations", "rewards"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (3, "give a dict"),
        ({"rewards": [1.0, 2.0]}, "needs 'observations'"),
        (sample(1.0, envs=3), "begin with 2 environments"),
        ({"observations": np.zeros((2, 4)), "rewards": [0.0, 0.0]}, "fixed by its first sample"),
        ({"observations": np.zeros((2, 3), complex), "rewards": [0.0, 0.0]}, "complex128"),
        ({"observations": {"a": np.zeros((2, 3))}, "rewards": [0.0, 0.0]}, "consists of"),
    ],
)
def test_a_refused_step_changes_nothing(bad, says):
    buffer = StepBuffer(4, 2)
    buffer.add(sample(1.0))
    with pytest.raises(InvalidInputError, match=says):
        buffer.add(bad)
    buffer.add(sample(2.0))
    assert [float(step["rewards"][0]) for step, _ in Chunk.of(buffer.packed()).each()] == [1, 2]


def test_final_observations_with_gaps_are_filled_with_what_the_environment_showed():
    buffer = StepBuffer(2, 2)
    final = np.array([None, np.full(3, 7.0)], dtype=object)
    buffer.add(sample(1.0, next_observations=np.full((2, 3), 5.0), final_observations=final))
    ((step, _),) = Chunk.of(buffer.packed()).each()
    assert step["final_observations"].tolist() == [[5.0] * 3, [7.0] * 3]


# --------------------------------------------------------------------------------------------------- large observations


def stacks(frames):
    """Observations of one environment, the last three of these frames."""
    return np.stack([np.full((20, 20), frame, np.float32) for frame in frames])[None]


def pass_through(buffer, given):
    """The steps after a writer has sent them, each with what was given for it."""
    for observations, following in given:
        buffer.add({"observations": observations, "next_observations": following})
    sent_steps = sent(buffer.packed())
    return sent_steps, zip([step for step, _ in Chunk.of(sent_steps).each()], given, strict=True)


def assert_same(steps):
    for step, (observations, following) in steps:
        for name, value in (("observations", observations), ("next_observations", following)):
            assert step[name].numpy().tobytes() == value.tobytes(), name


def test_frames_of_large_observations_are_sent_once():
    given = [(stacks((t, t + 1, t + 2)), stacks((t + 1, t + 2, t + 3))) for t in range(5)]
    given += [(stacks((50, 50, 50)), stacks((50, 50, 51)))]  # after a reset
    given += [(stacks((50, 50, 51)), stacks((90, 91, 92)))]  # frames were skipped
    given += [(stacks((90, 91, 92)), stacks((91, 92, 93))), (stacks((7, 8, 9)), stacks((8, 9, 10)))]
    buffer = StepBuffer(16, 1)
    for _ in range(2):  # the memory is used again
        steps, came = pass_through(buffer, given)
        assert [len(frames) for frames in steps.large] == [3 + 5 + 3 + 1 + 3 + 1 + 3 + 1]
        assert_same(came)
        buffer.clear()


def test_observations_are_the_same_only_bit_for_bit():
    zeros, nans = np.zeros((2, 20, 20, 3), np.float32), np.full((2, 20, 20, 3), np.nan, np.float32)
    given = [(zeros, zeros + 1), (zeros + 1, -zeros), (zeros, nans), (nans, zeros), (zeros, zeros)]
    given[-1] = (zeros, np.where(np.arange(3) == 2, zeros, 5).astype(np.float32))  # of two environments
    steps, came = pass_through(StepBuffer(8, 2), given)
    assert [len(frames) for frames in steps.large] == [1 + 1 + 1 + 1 + 1 + 1 + 1]
    assert_same(came)


def test_frames_of_several_environments_in_a_nest_with_small_and_foreign_parts():
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (12, 3, 16, 16), dtype=np.uint8)  # [time, envs, ...]

    def observe(t):
        pixels = torch.from_numpy(np.ascontiguousarray(frames[t : t + 4].swapaxes(0, 1)))
        return {"pixels": pixels, "half": pixels.to(torch.bfloat16), "speed": np.full((3, 2), t)}

    buffer = StepBuffer(8, 3)
    for t in range(8):
        buffer.add({"observations": observe(t), "next_observations": observe(t + 1), "rewards": [t, t, t]})
    steps = sent(buffer.packed())
    assert [len(sent_frames) for sent_frames in steps.large] == [12, 12]
    for t, (step, count) in enumerate(Chunk.of(steps).each()):
        assert count == 3
        for name, at in (("observations", t), ("next_observations", t + 1)):
            for key, value in observe(at).items():
                assert step[name][key].dtype == torch.as_tensor(value).dtype
                assert torch.equal(step[name][key], torch.as_tensor(value)), key


def test_a_buffer_grows_only_where_steps_are_small():
    small, large = StepBuffer(2, 1, growth=8), StepBuffer(2, 1, growth=8)
    for t in range(2):
        small.add({"observations": np.zeros((1, 3)), "next_observations": np.zeros((1, 3))})
        large.add({"observations": np.full((1, 600_000), t), "next_observations": np.full((1, 600_000), t + 1)})
    assert (small.is_full, large.is_full) == (False, True)
