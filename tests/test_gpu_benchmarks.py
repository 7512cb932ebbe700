"""The benchmarks for GPUs run, at small sizes on the CPU, and count what a trace holds."""

import io
import json
import os

import pytest
import torch
from rich.console import Console

os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
import rsl_rl.storage  # before the benchmarks, which would do without TensorBoard
from benchmarks import gpu, gpu_measure, gpu_report
from benchmarks.gpu_measure import WINDOW, Counts, Group, Measured, Work, read_trace, time_group
from benchmarks.gpu_report import Figures
from benchmarks.gpu_rollout import (
    ADD,
    RECURRENT,
    RESHUFFLED,
    RETURNS,
    SHUFFLED,
    Ours,
    RolloutData,
    RslRl,
    Sizes,
    rollouts,
)
from benchmarks.gpu_training import Training, TrainingSizes

from rlstore import RolloutStorage

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def result():
    names = [*gpu.SMALL, *gpu.TRAININGS]
    console = Console(file=io.StringIO(), width=200)
    *_, last = gpu.run(names, small=True, profile_only=False, console=console)
    return json.loads(json.dumps(last)) | {"shown": console.file.getvalue()}


def test_every_work_of_every_contender_is_timed_and_profiled(result):
    found = {
        group["name"]: {(line["work"], line["contender"]) for line in group["lines"]} for group in result["groups"]
    }
    flat = {(work, name) for work in (ADD, RETURNS, SHUFFLED, RESHUFFLED) for name in ("rlstore", "rsl_rl")}
    by_hand = {(work, "torch, by hand") for work in (ADD, RESHUFFLED)}
    assert found["rollout_8"] == flat | by_hand | {(SHUFFLED, "rlstore, reuse")}
    both = {(work, name) for work in (ADD, RETURNS, RECURRENT) for name in ("rlstore", "rsl_rl")}
    assert found["recurrent_8"] == both | {(RECURRENT, "rlstore, bounded"), (RECURRENT, "rlstore, reuse")}
    assert {name for _, name in found["pixels"]} == {"rlstore", "torch, indexed"}
    assert {work for work, name in found["replay"] if name == "torch, by hand"} == {work for work, _ in found["replay"]}
    assert len({work for work, _ in found["replay"]}) == 3
    for group in result["groups"]:
        assert set(group["missing"]) <= {"one graph", "TorchRL"}
        for line in group["lines"]:
            assert line["call_us"] > 0
            assert line["first_call_us"] > 0
            assert line["host_us"] > 0
            assert (line["launches"], line["syncs"], line["gpu_us"]) == (0, 0, 0)
            assert line["work"][:20] in result["shown"]


def test_the_figures_are_written_as_tables(result):
    text = gpu_report.markdown(result)
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert sum(len(group["lines"]) for group in result["groups"]) + 6 == len(rows) - 2 * len(result["groups"]) - 4
    assert all(row.count("|") in (6, 14) for row in rows)


def test_trainings_are_timed_with_each_storage(result):
    assert len(result["trainings"]) == 2
    for training in result["trainings"]:
        assert set(training["milliseconds"]) == {"rsl_rl", "rlstore", "rlstore, its compute_returns"}
        for parts in training["milliseconds"].values():
            assert parts["iteration"] == pytest.approx(parts["collection"] + parts["returns"] + parts["update"])


def test_rsl_rl_gets_its_own_class_back_after_a_training_with_ours():
    theirs = rsl_rl.storage.RolloutStorage
    sizes = TrainingSizes(4, 3, 5, 2, 8)
    training = Training(RolloutStorage, sizes, CPU, recurrent=False, own_returns=True)
    training.learn(1)
    assert type(training.algorithm.storage) is RolloutStorage
    assert rsl_rl.storage.RolloutStorage is theirs


@pytest.mark.parametrize("hidden", [0, 5])
def test_contenders_are_given_the_same_and_do_the_same(hidden):
    data = RolloutData(Sizes(6, 7, 3, 4, 2, hidden), CPU, episode_length=4)
    ours, theirs = Ours(data), RslRl(data)
    torch.testing.assert_close(ours.full.returns, theirs.full.returns)
    torch.testing.assert_close(ours.full.advantages, theirs.full.advantages)
    assert torch.equal(ours.full.observations["critic"], theirs.full.observations["critic"])
    assert [each.shuffled() for each in (ours, theirs)] == [20, 20]
    if hidden:
        assert [each.recurrent() for each in (ours, theirs)] == [20, 20]
        batch = next(iter(theirs.full.recurrent_mini_batch_generator(1, 1)))
        assert batch.masks.shape[1] == data.trajectories()
    for each in (ours, theirs):
        for _ in range(9):  # more than a rollout
            each.make_room()
            each.add()
        assert each.adding.step == 2


def test_floors_are_the_bytes_of_each_work():
    floors = rollouts(Sizes(envs=10, steps=2, policy=3, critic=4, actions=2), CPU).floors
    # 7 floats observed, 2 of actions, 2 of the mean; reward, value, log-probability; dones: int64 given, a byte kept.
    assert floors[ADD] == 10 * ((4 * (7 + 2 + 2 + 3) + 8) + (4 * (7 + 2 + 2 + 2 + 3) + 1))
    assert floors[RETURNS] == 20 * 17
    assert floors[SHUFFLED] == 20 * 2 * 4 * (7 + 3 * 2 + 4)
    assert floors[RESHUFFLED] == 5 * floors[SHUFFLED]


def test_what_fails_is_told_and_the_others_run():
    def breaks():
        raise RuntimeError("no such kernel")

    works = {"good": Work(lambda: None), "bad": Work(breaks)}
    group = Group("g", "g", {"good": 1, "bad": 1}, {"ours": lambda: works, "absent": breaks})
    measured = time_group(group, CPU, seconds=0)
    assert list(measured.seconds) == ["ours"]
    assert list(measured.seconds["ours"]) == ["good"]
    assert measured.missing == {
        "absent": "RuntimeError: no such kernel",
        "ours, bad": "RuntimeError: no such kernel",
    }


def event(cat, name, ts, dur=1, correlation=None):
    return {
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {} if correlation is None else {"correlation": correlation},
    }


def test_a_trace_is_read_window_by_window():
    trace = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", WINDOW, 10, 20),
        event("gpu_user_annotation", WINDOW, 12, 50),
        event("cuda_runtime", "cudaLaunchKernel", 11, correlation=1),
        event("cuda_driver", "cuLaunchKernel", 12, correlation=2),
        event("cuda_runtime", "cudaMemcpyAsync", 13, correlation=3),
        event("cuda_runtime", "cudaStreamSynchronize", 14, correlation=4),
        event("cuda_runtime", "cudaEventRecord", 15, correlation=5),
        event("kernel", "a", 40, 5, correlation=1),
        event("kernel", "a", 50, 7, correlation=2),
        event("gpu_memcpy", "Memcpy DtoH", 60, 2, correlation=3),
        # Between the windows: what makes ready for the next call, and our own wait.
        event("cuda_runtime", "cudaDeviceSynchronize", 31, correlation=6),
        event("cuda_runtime", "cudaLaunchKernel", 35, correlation=7),
        event("kernel", "b", 70, 100, correlation=7),
        event("user_annotation", WINDOW, 80, 10),
        event("cuda_runtime", "cudaGraphLaunch", 82, correlation=8),
        event("kernel", "c", 90, 3, correlation=8),
        event("kernel", "d", 95, 4, correlation=8),
        event("kernel", "launched by nobody knows whom", 99, 1, correlation=99),
    ]
    first, second = read_trace(trace)
    assert first == Counts(3, 1, 14.0, {"a": (2, 12.0), "Memcpy DtoH": (1, 2.0)})
    assert second == Counts(2, 0, 8.0, {"d": (1, 4.0), "c": (1, 3.0), "launched by nobody knows whom": (1, 1.0)})


def test_ratios_are_those_of_the_table():
    calls = {"rlstore": {"w": [2e-6]}, "rsl_rl": {"w": [9e-6]}}
    firsts = {"rlstore": {"w": [3e-6]}, "rsl_rl": {"w": [9e-6]}}
    hosts = {"rlstore": {"w": [1e-6]}, "rsl_rl": {"w": [8e-6]}}
    timed = Measured("g", "g", {"w": 8_000}, calls, {}, {}, 2e9, firsts, hosts)
    profiled = Measured("g", "g", {"w": 8_000}, {}, {"rlstore": {"w": Counts(1, 0, 6.0)}})
    figures = Figures(timed, profiled)
    ours, theirs = figures.lines
    assert (ours.floor, figures.peer(ours), figures.peer(theirs)) == (4.0, 4.5, None)
    assert ours.first_call == pytest.approx(3.0)
    assert (ours.host, gpu_report.as_json(figures)["lines"][0]["host_times_faster"]) == pytest.approx((1.0, 8.0))
    assert figures.lines[0].counts.gpu_us / ours.floor == 1.5


def test_the_time_of_the_host_is_that_of_the_calls_alone(monkeypatch):
    now = [0.0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(gpu_measure, "perf_counter", lambda: now[0])
    monkeypatch.setattr(gpu_measure, "synchronize", lambda: passes(1000.0))
    work = gpu_measure.Work(lambda: passes(3.0), lambda: passes(100.0))
    assert gpu_measure._host_time(work, 4) == 3.0
