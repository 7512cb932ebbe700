"""rlstore.torchrl: TensorDicts as TorchRL's collectors return them, against a naive model; on CUDA if asked for."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from where import DEVICE, SEES_VALUES

from rlstore import Journal, NotReadyError, NStepReplayStorage, ReplayStorage, SnapshotError, Storage
from rlstore.torchrl import ReplayBuffer

ENVS, GAMMA = 2, 0.5
FLAGS = ("done", "terminated", "truncated")
EXTRA = ("sample_log_prob", ("collector", "traj_ids"), ("next", "cost"))


def play(steps, *, seed=0, first=0.0):
    """Steps ``[ENVS, steps]``: unique observations, a nested one, and entries that are only before or after a step."""
    draw = torch.Generator().manual_seed(seed)
    ids, made = first + 100.0 * torch.arange(1, ENVS + 1), []
    for _ in range(steps):
        terminated = (torch.rand(ENVS, generator=draw) < 0.2).unsqueeze(1)
        truncated = (torch.rand(ENVS, generator=draw) < 0.2).unsqueeze(1) & ~terminated
        done = terminated | truncated
        step = observed(ids)
        step.update({"action": ids.long().unsqueeze(1), "sample_log_prob": -ids, "done": torch.zeros(ENVS, 1) > 0})
        step["collector"] = TensorDict({"traj_ids": ids.long() // 5000}, batch_size=[ENVS])
        step["next"] = observed(ids + 1)
        flags = {"done": done, "terminated": terminated, "truncated": truncated}
        step["next"].update({"reward": ids.unsqueeze(1) + 0.5, "cost": ids + 0.25, **flags})
        made.append(step)
        ids = torch.where(done.squeeze(1), ids + 5000, ids + 1)  # the next episode begins elsewhere
    return torch.stack(made, dim=1).to(DEVICE)


def observed(ids):
    now = TensorDict({"observation": torch.stack([ids, -ids], dim=1), "step_count": ids.long()}, batch_size=[ENVS])
    now["agents"] = TensorDict({"state": (ids / 8).unsqueeze(1)}, batch_size=[ENVS])
    return now


def expected(steps, n_step=1):
    """By the first number of its observation: the first and the last step of a transition, its reward and length."""
    found = {}
    for lane in steps.cpu().unbind(0):
        rows = lane.unbind(0)
        for start, row in enumerate(rows):
            last, total, taken = row, 0.0, 0
            for following in rows[start : start + n_step]:
                if taken and not torch.equal(following["observation"], last["next", "observation"]):
                    break
                last = following
                total += GAMMA**taken * last["next", "reward"].item()
                taken += 1
                if any(last["next", name] for name in FLAGS):
                    break
            found[row["observation"][0].item()] = (row, last, total, taken)
    return found


def make(size, **options):
    return ReplayBuffer(size, device=DEVICE, **options)


def assert_served(batch, lines):
    assert {tensor.device.type for tensor in batch.values(True, True)} == {DEVICE}
    for row in batch.cpu().unbind(0):
        first, last, total, taken = lines[row["observation"][0].item()]
        for key in ("observation", "step_count", ("agents", "state"), "action", *EXTRA):
            assert torch.equal(row[key], first[key]), key
        for key in ("observation", "step_count", ("agents", "state"), "done", "terminated", "truncated"):
            assert torch.equal(row["next"][key], last["next"][key]), key
        assert row["next", "reward"].item() == pytest.approx(total)
        assert row.get("steps_to_next_obs", torch.tensor(1)).item() == taken


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_everything_that_was_given_is_served(n_step, flat):
    buffer = make(1000, num_envs=ENVS, n_step=n_step, gamma=GAMMA, seed=0)
    data = play(40)
    for part in (data[:, :13], data[:, 13:14], data[:, 14:]):  # windows reach from one call into the next
        buffer.extend(part.reshape(-1) if flat else part)
    batch, lines = buffer.sample(500), expected(data, n_step)
    assert len(buffer) == data.numel() == 80
    assert {row.item() for row in batch["observation"][:, 0]} == lines.keys()
    assert_served(batch, lines)


@pytest.mark.parametrize("options", [{}, {"alpha": 0.6}], ids=str)
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("marked", [True, False])
def test_environments_one_after_another_are_served_with_their_own_flags(n_step, marked, options):
    """TorchRL's trainer marks the last step of each environment as truncated, not as done, and flattens the batch."""
    buffer, lines = make(1000, n_step=n_step, gamma=GAMMA, seed=0, **options), {}
    for part in play(40, seed=1).split(8, dim=1):
        if marked:
            part["next", "truncated"][:, -1] = True
        buffer.extend(part.reshape(-1))
        lines.update(expected(part, n_step))  # no window reaches from one environment into the next
    cut = [row for row, *_ in lines.values() if row["next", "truncated"] > row["next", "done"]]
    assert bool(cut) == marked
    batch = buffer.sample(1000)
    assert {row.item() for row in batch["observation"][:, 0]} == lines.keys()
    assert_served(batch, lines)


@pytest.mark.parametrize("n_step", [1, 3])
def test_flags_that_contradict_each_other_are_served_as_they_are(n_step, tmp_path):
    buffer, data = make(60, num_envs=ENVS, n_step=n_step, gamma=GAMMA, seed=0), play(40)
    draw = torch.Generator().manual_seed(0)
    for name in FLAGS:
        data["next", name] = (torch.rand(ENVS, 40, 1, generator=draw) < 0.2).to(DEVICE)
    buffer.extend(data[:, :7].reshape(-1))
    buffer.extend(data[:, 7:])
    assert_served(buffer.sample(500), expected(data[:, 10:], n_step))
    buffer.dumps(tmp_path / "saved")
    resumed = make(60, num_envs=ENVS, n_step=n_step, gamma=GAMMA)
    resumed.loads(tmp_path / "saved")
    assert_served(resumed.sample(500), expected(data[:, 10:], n_step))


def test_the_oldest_are_overwritten():
    buffer, data = make(20, num_envs=ENVS, n_step=3, gamma=GAMMA, seed=0), play(40)
    buffer.extend(data)
    lines = expected(data[:, 30:], 3)
    batch = buffer.sample(300)
    assert len(buffer) == 20
    assert {row.item() for row in batch["observation"][:, 0]} == lines.keys()
    assert_served(batch, lines)


def test_names_shapes_and_dtypes_are_those_of_torchrl():
    buffer = make(100, num_envs=ENVS, n_step=2, alpha=0.6, batch_size=7)
    buffer.extend(play(5))
    batch = buffer.sample()
    found = {key: (tuple(batch[key].shape), batch[key].dtype) for key in batch.keys(True, True)}
    flag, column = ((7, 1), torch.bool), ((7, 1), torch.float32)
    number, whole = ((7,), torch.float32), ((7,), torch.int64)
    assert batch.batch_size == (7,)
    assert found == {
        "observation": ((7, 2), torch.float32),
        "step_count": whole,
        ("agents", "state"): column,
        "action": ((7, 1), torch.int64),
        "sample_log_prob": number,
        ("collector", "traj_ids"): whole,
        ("next", "observation"): ((7, 2), torch.float32),
        ("next", "step_count"): whole,
        ("next", "agents", "state"): column,
        ("next", "reward"): column,
        ("next", "cost"): number,
        ("next", "done"): flag,
        ("next", "terminated"): flag,
        ("next", "truncated"): flag,
        "index": whole,
        "steps_to_next_obs": ((7, 1), torch.int64),
        "priority_weight": number,
        "_weight": number,
    }


def test_priorities_decide_what_is_drawn_and_weights_are_their_inverse():
    buffer, data = make(100, num_envs=ENVS, alpha=1.0, beta=1.0, seed=0), play(3)
    rows = buffer.extend(data)
    assert rows.shape == (ENVS, 3)
    buffer.update_priority(rows, 0.0)
    buffer.update_priority(rows[1, :2], torch.tensor([1.0, 3.0]))
    batch = buffer.sample(4000)
    drawn = {row: int((batch["index"] == row).sum()) for row in rows.flatten().tolist()}
    rare, often = rows[1, 0].item(), rows[1, 1].item()
    assert drawn[rare] + drawn[often] == 4000
    assert drawn[often] / drawn[rare] == pytest.approx(3.0, rel=0.15)
    weights = {row: batch["priority_weight"][batch["index"] == row].unique() for row in (rare, often)}
    assert weights[rare].item() == pytest.approx(1.0)
    assert weights[often].item() == pytest.approx(1 / 3, rel=1e-5)
    first = batch["index"] == rare
    assert (batch["observation"][first] == data["observation"][1, 0]).all()


def test_the_entry_of_a_sample_sets_its_priorities():
    buffer = make(100, num_envs=ENVS, alpha=1.0, eps=0.0, seed=0, priority_key="error")
    data = play(2)
    data["error"] = torch.tensor([[0.0, 2.0], [0.0, 0.0]])  # of new data, too
    rows = buffer.extend(data)
    batch = buffer.sample(50)
    assert (batch["index"] == rows[0, 1]).all()
    batch["error"] = torch.tensor([[1.0, 4.0]]).expand(50, 2)
    buffer.update_tensordict_priority(batch)
    assert buffer.storage.priority_total == 4.0  # the largest of several numbers
    buffer.update_tensordict_priority(batch[:0])
    batch["error"] = torch.tensor(3.0).expand(50)
    buffer.update_tensordict_priority(batch.reshape(5, 10))
    assert buffer.storage.priority_total == 3.0
    with pytest.raises(ValueError, match=r"'error' is \(50, 0\) torch.float32; give at least one real number"):
        buffer.update_tensordict_priority(batch.set("error", torch.zeros(50, 0)))


def test_uniform_buffers_take_priorities_and_do_nothing():
    buffer = make(100, num_envs=ENVS)
    rows = buffer.extend(play(2))
    buffer.update_priority(rows, 1.0)
    buffer.update_tensordict_priority(buffer.sample(3))


def test_a_priority_for_an_overwritten_row_is_dropped():
    buffer = make(4, num_envs=ENVS, alpha=1.0)
    rows = buffer.extend(play(2))
    buffer.extend(play(2, first=50_000.0))
    buffer.update_priority(rows, 9.0)
    assert buffer.storage.stale_updates == 4


def test_single_steps_are_added():
    data = play(6)
    one, both = make(100, n_step=3, gamma=GAMMA, seed=0), make(100, num_envs=ENVS, seed=0)
    rows = [one.add(step).item() for step in data[0].unbind(0)]
    assert rows == [0, 1, 2, 3, 4, 5]
    assert_served(one.sample(50), expected(data[:1], 3))
    assert both.add(data[:, 0]).tolist() == [0, 1]
    assert len(both) == 2


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_priorities_that_are_refused_leave_their_data_out(wrong):
    buffer, data, more = make(100, num_envs=ENVS, alpha=1.0, eps=0.0), play(3), play(3, first=900.0)
    if not SEES_VALUES:
        pytest.skip("on CUDA they are left out when they are set")
    data["td_error"] = torch.ones(ENVS, 3, 2)
    data["td_error"][1, 2] = wrong
    with pytest.raises(ValueError, match=r"'td_error' is .* in row 5 of 6.* Nothing was written"):
        buffer.extend(data)
    assert len(buffer) == 0
    data["td_error"][1, 2] = torch.tensor([4.0, 2.0])
    rows = buffer.extend(data)
    more["td_error"] = torch.full((ENVS, 3), wrong)
    with pytest.raises(ValueError, match="Nothing was written"):
        buffer.extend(more)
    assert len(buffer) == 6
    assert buffer.storage.priorities(rows.flatten()).tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 4.0]
    more["td_error"] = torch.ones(ENVS, 3, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'td_error' is \(2, 3\) torch.complex64.* Nothing was written"):
        buffer.extend(more)


def test_an_entry_of_priorities_is_data_where_draws_are_uniform():
    buffer, data = make(100, num_envs=ENVS), play(3)
    data["td_error"] = data["observation"][..., 0] / 4
    buffer.extend(data)
    batch = buffer.sample(20)
    assert torch.equal(batch["td_error"], batch["observation"][:, 0] / 4)


def test_rewards_and_lengths_of_windows_before_a_step_are_data():
    buffer, data = make(100, num_envs=ENVS), play(3)
    ids = data["observation"][..., :1]
    data["reward"], data["steps_to_next_obs"] = ids - 0.5, ids.long() % 7  # of the step before; of MultiStep
    buffer.extend(data)
    batch = buffer.sample(20)
    assert torch.equal(batch["reward"], batch["observation"][:, :1] - 0.5)
    assert torch.equal(batch["next", "reward"], batch["observation"][:, :1] + 0.5)
    assert torch.equal(batch["steps_to_next_obs"], batch["observation"][:, :1].long() % 7)
    with pytest.raises(ValueError, match=r"would sum them over n_step=3 again.* Nothing was written"):
        make(100, num_envs=ENVS, n_step=3).extend(data)


def test_what_a_sample_has_of_its_own_is_not_taken_from_data():
    """So that samples can be given to another buffer."""
    source, target = make(100, num_envs=ENVS, alpha=1.0), make(100)
    source.extend(play(3, first=4000.0))
    sample = source.sample(12)
    rows = target.extend(sample)
    again = target.sample(40)
    assert {"priority_weight", "_weight"}.isdisjoint(again.keys())
    by_row = dict(zip(rows.tolist(), sample["observation"].tolist(), strict=True))
    assert [by_row[row] for row in again["index"].tolist()] == again["observation"].tolist()
    target.extend(sample.exclude("index", "priority_weight", "_weight"))
    assert len(target) == 24


ODD_KEYS = (
    "my.reward",
    "a Q_b",
    ("Q2d_", "x y"),
    "\N{GREEK SMALL LETTER ALPHA}",
    "_",
    "__",
    "Q",
    ("next", "class"),
    "0",
)


def test_every_key_is_served_as_it_was_given_also_after_a_resume(tmp_path):
    buffer, data = make(100, num_envs=ENVS, seed=0), play(4)
    for offset, key in enumerate(ODD_KEYS):
        data.set(key, data["observation"][..., 0] + offset / 16)
    buffer.extend(data)
    buffer.dumps(tmp_path / "saved")
    resumed = make(100, num_envs=ENVS)
    resumed.loads(tmp_path / "saved")
    for batch in (buffer.sample(30), resumed.sample(30)):
        for offset, key in enumerate(ODD_KEYS):
            assert torch.equal(batch[key], batch["observation"][:, 0] + offset / 16), key


def test_the_storage_is_made_with_the_first_data_and_stays(tmp_path):
    buffer = make(100, num_envs=ENVS, alpha=1.0)
    message = r"this ReplayBuffer is empty.*call extend\(\) or add\(\)"
    for call in (
        lambda: buffer.storage,
        lambda: buffer.sample(2),
        lambda: buffer.update_priority(0, 1.0),
        lambda: buffer.dumps(tmp_path / "saved"),
    ):
        with pytest.raises(NotReadyError, match=message):
            call()
    assert len(buffer) == 0
    buffer.extend(play(2))
    storage = buffer.storage
    buffer.extend(play(2, first=500.0))
    assert buffer.storage is storage
    with pytest.raises(AttributeError):
        buffer.storage = storage


# ---------------------------------------------------------------------------------------------------------------------
# Saving and resuming


def by_folder(saved, resumed, folder):
    saved.dumps(folder / "saved")
    resumed.loads(folder / "saved")


def by_state_dict(saved, resumed, folder):
    torch.save({"replay_buffer": saved.state_dict()}, folder / "saved.pt")
    resumed.load_state_dict(torch.load(folder / "saved.pt", weights_only=True)["replay_buffer"])


@pytest.mark.parametrize("save_and_resume", [by_folder, by_state_dict])
@pytest.mark.parametrize("options", [{}, {"n_step": 3}, {"n_step": 3, "alpha": 0.7, "beta": 0.5}], ids=str)
def test_a_resumed_buffer_goes_on_as_the_saved_one_does(tmp_path, options, save_and_resume):
    options = {"num_envs": ENVS, "gamma": GAMMA, "batch_size": 30, **options}
    first, data = make(60, seed=3, **options), play(40)
    first.extend(data[:, :25])
    sample = first.sample()
    sample["td_error"] = torch.rand(30, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    first.update_tensordict_priority(sample)
    second = make(60, seed=9, **options)
    second.extend(play(5, first=800.0))  # which is dropped
    save_and_resume(first, second, tmp_path)
    assert len(second) == len(first) == 50
    lines = expected(data[:, :25], options.get("n_step", 1))
    for _ in range(2):
        batches = [buffer.sample() for buffer in (first, second)]
        assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
        assert (batches[0] == batches[1]).all()
        assert_served(batches[1], lines)
        rows = [buffer.extend(data[:, 25:]) for buffer in (first, second)]
        assert torch.equal(*rows)
        lines = expected(data[:, 10:], options.get("n_step", 1))  # the newest 30 of each environment


def test_the_state_dict_of_an_empty_buffer_makes_another_one_empty():
    buffer = make(100, num_envs=ENVS)
    assert buffer.state_dict() == {}
    buffer.extend(play(4))
    buffer.load_state_dict(make(100, num_envs=ENVS).state_dict())
    assert len(buffer) == 0
    buffer.extend(play(3).exclude("sample_log_prob"))  # nor are there first data
    assert len(buffer) == 6


def test_a_state_dict_of_something_else_is_refused_and_nothing_is_changed(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    buffer = make(100, num_envs=ENVS, seed=0)
    buffer.extend(play(4))
    state, byte = buffer.state_dict(), torch.zeros(1, dtype=torch.uint8)
    assert {tensor.dtype for tensor in state.values()} == {torch.uint8}
    for wrong in (
        [state],
        {"_storage": {"_storage": {}}, "_batch_size": None},  # of TorchRL's own
        {**state, "../outside": byte},
        {**state, str(tmp_path / "outside"): byte},
        {**state, "manifest.json": byte.float()},
        {**state, 3: byte},
    ):
        with pytest.raises(ValueError, match=r"state_dict is .*state_dict\(\) of|state_dict is none that.*Nothing was"):
            buffer.load_state_dict(wrong)
    rows = next(name for name in state if name.startswith("rows-"))
    for name, wrong in {"manifest.json": byte, rows: state[rows][:-9], "tensors-000001.safetensors": byte}.items():
        with pytest.raises(SnapshotError):
            buffer.load_state_dict({**state, name: wrong})
    with pytest.raises(SnapshotError):
        buffer.load_state_dict({"manifest.json": state["manifest.json"]})
    with pytest.raises(ValueError, match="n_step is 2, and 1 in what was saved"):
        make(100, num_envs=ENVS, n_step=2).load_state_dict(state)
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
    assert list(folder.iterdir()) == []
    assert len(buffer) == 8
    buffer.load_state_dict(state)
    assert_served(buffer.sample(40), expected(play(4)))


def test_a_buffer_with_a_journal_goes_on_with_it(tmp_path):
    folder, data = tmp_path / "journal", play(12)
    options = {"num_envs": ENVS, "alpha": 1.0, "journal": Journal(folder, interval=1000.0)}
    killed = make(100, **options)
    with pytest.raises(ValueError, match="data has no tensor"):
        killed.extend(data.exclude(("next", "done"), ("next", "terminated"), ("next", "truncated")))
    assert not folder.exists()  # data that are refused begin none
    rows = killed.extend(data[:, :5])
    killed.update_priority(rows, torch.arange(1.0, 11.0))
    killed.storage.journal.commit()
    killed.storage.close()

    resumed = make(100, **options)
    with pytest.raises(ValueError, match=r"already holds what.*call loads\(\) of its folder first"):
        resumed.extend(data[:, 5:])
    assert len(resumed) == 0
    resumed.loads(folder)
    assert len(resumed) == 10
    resumed.extend(data[:, 5:])
    resumed.storage.journal.commit()
    resumed.storage.close()

    read = make(100, num_envs=ENVS, alpha=1.0)
    read.loads(folder)
    assert read.storage.journal is None
    assert read.storage.priorities(rows.flatten()).tolist() == pytest.approx(list(range(1, 11)))
    assert_served(read.sample(50), expected(data))
    assert len(read) == 24


def test_what_another_buffer_has_saved_is_refused_and_nothing_is_changed(tmp_path):
    saved = make(100, num_envs=ENVS, n_step=2, alpha=0.5)
    saved.extend(play(4))
    saved.dumps(tmp_path / "saved")
    fitting = {"size": 100, "num_envs": ENVS, "n_step": 2, "alpha": 0.5}
    for name, other in {"size": 50, "num_envs": 1, "n_step": 3, "gamma": 0.5, "alpha": None}.items():
        buffer = make(**{**fitting, name: other}, journal=tmp_path / "journal")
        with pytest.raises(ValueError, match=rf"{name} is {other}, and .* Nothing was changed"):
            buffer.loads(tmp_path / "saved")
        assert len(buffer) == 0
    box = {"shape": (2,)}
    spaces = ReplayStorage(box, {"shape": 1, "type": "Box"}, storage_size=100, num_envs=ENVS)
    single = ReplayStorage(None, None, storage_size=100, num_envs=None)
    step = {"observations": torch.zeros(ENVS, 2), "actions": torch.zeros(ENVS, 1), "rewards": torch.zeros(ENVS)}
    step |= {"terminated": torch.zeros(ENVS), "truncated": torch.zeros(ENVS), "next_observations": torch.zeros(ENVS, 2)}
    single.insert_transition(step)
    alike = []
    flags, number = {"next_flags": ((3,), torch.bool)}, {"td_number": ((), torch.float32)}
    for extra in ({}, {"next_flags": ((1,), torch.bool)}, {"next_flags": ((3,), torch.uint8)}, {**number, **flags}):
        made = ReplayStorage(None, None, storage_size=100, num_envs=ENVS, n_step=1, discount=0.99, extra_fields=extra)
        named = {name: torch.zeros(ENVS, *shape, dtype=dtype) for name, (shape, dtype) in extra.items()}
        keyed = {name: {"observation": step[name]} for name in ("observations", "next_observations")}
        made.insert_transition({**step, **keyed, **named})
        alike.append(made)
    n_step = NStepReplayStorage(box, {"shape": 1, "type": "Box"}, storage_size=100, num_envs=ENVS)
    buffer = make(100, num_envs=ENVS, journal=tmp_path / "journal")
    buffer.extend(play(4))
    for number, storage in enumerate((spaces, single, n_step, ReplayStorage(None, None), *alike)):
        storage.save(tmp_path / str(number))
        with pytest.raises(SnapshotError, match="no ReplayBuffer of this version has saved"):
            buffer.loads(tmp_path / str(number))
    with pytest.raises(SnapshotError, match="there is no snapshot"):
        buffer.loads(tmp_path / "nowhere")
    with pytest.raises(TypeError, match=r"path is 3; loads\(\) needs"):
        buffer.loads(3)
    assert len(buffer) == 8


def test_what_was_saved_in_the_background_is_resumed_too(tmp_path):
    buffer, data = make(100, num_envs=ENVS), play(6)
    buffer.extend(data)
    saving = buffer.storage.save(tmp_path / "saved", background=True)
    buffer.extend(play(2, first=700.0))
    saving.wait()
    resumed = make(100, num_envs=ENVS)
    resumed.loads(tmp_path / "saved")
    assert_served(resumed.sample(40), expected(data))
    assert len(Storage.load(tmp_path / "saved")) == len(resumed) == 12


@pytest.mark.parametrize(
    ("given", "terminates", "truncates"),
    [
        (("done",), True, False),
        (("done", "terminated"), False, True),
        (("done", "truncated"), False, True),
        (("truncated",), False, True),
        (("terminated", "truncated"), False, True),
    ],
)
def test_flags_that_are_missing_follow_from_the_others(given, terminates, truncates):
    """The last step of the data was truncated."""
    data = play(1)
    for name in ("done", "terminated", "truncated"):
        data["next", name] = torch.full((ENVS, 1, 1), name != "terminated")
        if name not in given:
            del data["next", name]
    buffer = make(10, num_envs=ENVS)
    buffer.extend(data)
    batch = buffer.sample(4)
    assert batch["next", "done"].all()
    assert (batch["next", "terminated"] == terminates).all()
    assert (batch["next", "truncated"] == truncates).all()


def test_what_does_not_fit_is_refused_and_nothing_is_written():
    buffer, data = make(100, num_envs=ENVS), play(4)
    with pytest.raises(ValueError, match="batch_size is None"):
        buffer.sample()
    for name in FLAGS:
        wrong = data.clone().set(("next", name), torch.zeros(ENVS, 4, 3))
        with pytest.raises(
            ValueError, match=rf"data has \('next', '{name}'\) of \(3,\).*one flag.* Nothing was written"
        ):
            buffer.extend(wrong)
    with pytest.raises(ValueError, match="data is a dict; give a TensorDict"):
        buffer.extend(data.to_dict())
    with pytest.raises(ValueError, match="data has no tensor 'action'"):
        buffer.extend(data.exclude("action"))
    with pytest.raises(ValueError, match=r"data has no tensor \('next', 'reward'\)"):
        buffer.extend(data.exclude("next"))
    with pytest.raises(ValueError, match=r"data has no tensor \('next', 'done'\)"):
        buffer.extend(data.exclude(*[("next", name) for name in ("done", "terminated", "truncated")]))
    with pytest.raises(ValueError, match="no entry that is before and"):
        buffer.extend(data.exclude("observation", "step_count", "agents"))
    for wrong in (data[:1], data.reshape(-1)[:3], data[:, :0], data.reshape(2, 2, 2)):
        with pytest.raises(ValueError, match=r"give \[num_envs, steps\], num_envs=2"):
            buffer.extend(wrong)
    with pytest.raises(ValueError, match=r"data is \(0,\); give \[num_envs, steps\]"):
        make(100).extend(data[0, :0])
    with pytest.raises(ValueError, match=r"add\(\) takes one step of 2 environments"):
        buffer.add(data)
    assert len(buffer) == 0
    buffer.extend(data)
    with pytest.raises(ValueError, match="data has no tensor 'sample_log_prob'"):
        buffer.extend(data.exclude("sample_log_prob"))
    with pytest.raises(ValueError, match="no tensor 'step_count'"):
        buffer.extend(data.exclude(("next", "step_count")))
    for new in ("cost", ("next", "cost2"), ("collector", "mask")):
        with pytest.raises(ValueError, match=r"data has \[.*\], which the first data did not have.* Nothing was"):
            buffer.extend(data.clone().set(new, torch.zeros(ENVS, 4)))
    for text in ("prompt", ("next", "prompt")):
        with pytest.raises(ValueError, match=r"prompt'\)?, a NonTensorData; only tensors.* Nothing was written"):
            buffer.extend(data.clone().set(text, NonTensorData("go", batch_size=[ENVS, 4])))
    other = data.clone()
    other["observation"] = torch.zeros(ENVS, 4, 3)
    with pytest.raises(ValueError, match=r'observations\["observation"\] is .* Nothing was'):
        buffer.extend(other)
    for wrong in (0, 1.5, "all"):
        with pytest.raises(ValueError, match=r"batch_size is .*; sample\(\) needs a whole number"):
            buffer.sample(wrong)
    assert len(buffer) == 8
    for wrong in ({"alpha": 2.0}, {"eps": -1.0}, {"n_step": 0}, {"num_envs": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make(100, **wrong)
    with pytest.raises(TypeError, match="Did you mean 'size'"):
        ReplayBuffer(max_size=100)
