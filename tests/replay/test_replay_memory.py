"""What replay storages cost: bytes a transition, memory that does not grow, and memory that is not RAM."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from combinations import each
from gymnasium import spaces
from nstep_steps import BOX, make_step, obs_of
from replay_kinds import GOALS, KINDS, assert_same, assert_same_draws, state

from rlstore import NStepReplayStorage, PrioritizedReplayStorage, ReplayStorage, StorageError

EPISODE = 200  # steps
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc")


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------------------------- bytes a transition


class Stacks:
    """Stacks of the last few frames of a film; every frame's first pixels tell its (environment, episode, time)."""

    def __init__(self, frames, channels, envs, size=84):
        self.frames, self.channels, self.envs, self.size = frames, channels, envs, size
        self.space = spaces.Box(0, 255, (frames * channels, size, size), np.uint8)

    def frame(self, env, episode, time):
        picture = np.zeros((self.channels, self.size, self.size), np.uint8)
        picture[:, 0, :4] = (env + 1, episode % 251, time // 250, time % 250)
        return picture

    def stack(self, env, episode, time):
        """At an episode's start the first frame stands for those before it."""
        return np.concatenate([self.frame(env, episode, max(0, time - back)) for back in reversed(range(self.frames))])

    def fill(self, storage, steps):
        for step in range(steps):
            episode, time = divmod(step, EPISODE)
            over = time == EPISODE - 1
            after = (episode + 1, 0) if over else (episode, time + 1)
            final = [self.stack(env, episode, EPISODE) for env in range(self.envs)]
            storage.add(
                np.stack([self.stack(env, episode, time) for env in range(self.envs)]),
                np.zeros(self.envs, int),
                np.zeros(self.envs),
                np.zeros(self.envs),
                np.full(self.envs, over),
                {"final_obs": np.stack(final)} if over else {},
                np.stack([self.stack(env, *after) for env in range(self.envs)]),
            )

    def check(self, observations, next_observations):
        """Every stack is the one that was given, and the next one is one frame on, at an episode's end as well."""
        for stack, after in zip(observations.numpy(), next_observations.numpy(), strict=True):
            env, episode, high, low = (int(x) for x in stack[-1, 0, :4])
            time = 250 * high + low
            assert np.array_equal(stack, self.stack(env - 1, episode, time))
            assert np.array_equal(after, self.stack(env - 1, episode, time + 1))


@pytest.mark.parametrize(
    ("storage_class", "picture", "envs"),
    each(
        [ReplayStorage, NStepReplayStorage, PrioritizedReplayStorage],
        [(4, 1, 7_400), (3, 3, 22_000)],  # grey and colour: frames, channels, and the bytes that a transition may cost
        [1, 2],
    ),
)
def test_stacks_cost_little_more_than_one_frame_with_exact_final_observations(storage_class, picture, envs):
    frames, channels, most = picture
    film = Stacks(frames, channels, envs)
    options = {"n_step": 1, "num_workers": 0, "pin_memory": False, "dtype": None, "seed": 0}
    storage = storage_class(
        film.space,
        spaces.Discrete(2),
        num_envs=envs,
        storage_size=1600 * envs,
        batch_size=64,
        frame_stack=frames,
        **options,
    )
    film.fill(storage, 2000)
    assert len(storage) == 1600 * envs
    assert storage.nbytes / len(storage) <= most
    for _ in range(4):
        batch = storage.sample()
        film.check(batch.observations, batch.next_observations)
    storage.close()


@pytest.mark.parametrize(("storage_class", "envs"), [(ReplayStorage, 16), (NStepReplayStorage, 4)])
def test_a_vector_transition_costs_at_most_110_bytes(storage_class, envs):
    """17 numbers seen, 6 done: 92 bytes; a reward, two flags, and what is left for final observations and counters."""
    steps = 16_000
    storage = storage_class(
        spaces.Box(-1e9, 1e9, (17,)), spaces.Box(-1.0, 1.0, (6,)), num_envs=envs, storage_size=steps, num_workers=0
    )
    obs, nothing = torch.zeros(envs, 17), torch.zeros(envs)
    for step in range(steps // envs + 500):
        over = torch.full((envs,), step % EPISODE == EPISODE - 1)
        infos = {"final_obs": obs} if over[0] else {}
        storage.add(obs, torch.zeros(envs, 6), nothing, nothing, over, infos, obs)
    assert len(storage) == steps
    assert storage.nbytes / steps <= 110
    storage.close()


MEASURE = """
import json, os, sys
import numpy as np, torch
from gymnasium import spaces
from pathlib import Path
from rlstore import ReplayStorage

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def build(size):
    storage = ReplayStorage(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(2), storage_size=size,
        batch_size=32, frame_stack=4, seed=0)
    stack = np.ones((1, 4, 84, 84), np.uint8)
    for step in range(size + 100):
        over = step % 200 == 199
        storage.add(stack, [0], [0.0], [False], [over], {"final_obs": stack} if over else {}, stack)
    for _ in range(10):
        storage.sample()
    return storage

small = build(50)
before = resident()
large = build(3000)
print(json.dumps({"grown": resident() - before, "nbytes": large.nbytes, "held": len(large)}))
"""


@needs_proc
def test_the_bytes_a_storage_tells_are_those_the_process_has_grown_by():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["held"] == 3000
    assert told["nbytes"] <= 3000 * 7_400
    assert told["grown"] <= 1.05 * told["nbytes"] + (8 << 20)


# ------------------------------------------------------------------------------------------------- nothing grows


class Loop:
    """Steps that end here and there, samples and priorities, in a storage that has long been full."""

    def __init__(self, kind):
        box = spaces.Box(-1e9, 1e9, (64,))
        space = box if kind.space is BOX else spaces.Dict(dict.fromkeys(GOALS, box))
        self.kind, self.number = kind, 0
        self.storage = kind.make(4, 64, observation_space=space)
        obs = torch.zeros(4, 64)
        self.obs = obs if kind.space is BOX else dict.fromkeys(GOALS, obs)

    def run(self, steps):
        for _ in range(steps):
            self.number += 1
            ended = torch.full((4,), self.number % 7 == 0)
            infos = {"final_obs": self.obs} if ended[0] else {}
            self.storage.add(self.obs, [0, 1, 2, 3], [0.5] * 4, ended, [False] * 4, infos, self.obs)
            if self.number < 10 or self.number % 4:  # a sequence has to be complete first
                continue
            batch = self.storage.sample()
            if self.kind.name.startswith("prioritized"):
                self.storage.update(batch.rows, torch.rand(len(batch.rows)))


@needs_proc
@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_resident_memory_is_flat_over_thousands_of_steps_and_batches(kind):
    loop = Loop(kind)
    loop.run(300)
    gc.collect()
    before = resident_bytes()
    loop.run(2400)
    gc.collect()
    grown = resident_bytes() - before
    loop.storage.close()
    # A step is 1 kB and a batch 12 kB: if either were kept each time, it would be 2.4 MB or 7 MB.
    assert grown < 2 << 20


@needs_proc
def test_resident_memory_does_not_grow_with_storages_that_are_gone():
    def one(number):
        storage = KINDS[number % len(KINDS)].make(2, 3000, storage_size=6000)
        KINDS[number % len(KINDS)].fill(storage, 40)
        storage.sample()

    for number in range(16):
        one(number)
    gc.collect()
    before = resident_bytes()
    for number in range(80):
        one(number)
    gc.collect()
    assert resident_bytes() - before < 8 << 20


# ------------------------------------------------------------------------------------------------- other memory

LIMITED = """
import json, os, resource, sys
import numpy as np, torch
from gymnasium import spaces
from pathlib import Path
from rlstore import ReplayStorage

torch.set_num_threads(1)
WIDTH, LIMIT = 16384, 32 << 20
space = spaces.Box(0, 255, (WIDTH,), np.uint8)

def make(size, **options):
    return ReplayStorage(space, spaces.Discrete(2), storage_size=size, batch_size=64, seed=0, **options)

def observe(step):
    obs = np.full((1, WIDTH), step % 251, np.uint8)
    obs[0, :4] = np.frombuffer(np.uint32(step).tobytes(), np.uint8)
    return obs

def fill(storage, steps):
    obs = observe(0)
    for step in range(steps):
        after = observe(step + 1)
        storage.add(obs, [0], [float(step)], [False], [False], {}, after)
        obs = after

small = make(100)
fill(small, 100)
small.sample()

status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
private = int(status["VmData"].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (private + LIMIT, resource.RLIM_INFINITY))
try:
    torch.zeros(2 * LIMIT, dtype=torch.uint8)
except (RuntimeError, MemoryError):
    bites = True
else:
    bites = False

rows = 4 * LIMIT // WIDTH
storage = make(rows, memory="mapped", path=sys.argv[1])
fill(storage, rows)
held = len(storage)
counts, wrong = np.zeros(32, int), 0
for _ in range(200):
    batch = storage.sample()
    steps = batch.observations[:, :4].contiguous().view(torch.int32).flatten()
    wrong += int((steps != batch.rewards.flatten()).sum())
    wrong += int((batch.observations[:, -1] != steps % 251).sum())
    after = batch.next_observations[:, :4].contiguous().view(torch.int32).flatten()
    wrong += int((after != steps + 1).sum())
    wrong += int((batch.next_observations[:, -1] != (steps + 1) % 251).sum())
    counts += np.bincount(steps.numpy() // (rows // 32), minlength=32)
on_disk = sum(path.stat().st_blocks * 512 for path in Path(sys.argv[1]).rglob("*") if path.is_file())
storage.close()
print(json.dumps({"bites": bites, "held": held, "wrong": wrong, "counts": counts.tolist(), "on_disk": on_disk,
    "limit": LIMIT, "rows": rows}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private memory on Linux")
def test_a_mapped_file_four_times_larger_than_the_memory_limit_samples_uniformly(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "mapped")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["bites"], "the limit did not hold back a tensor of twice its size"
    assert told["held"] == told["rows"]
    assert told["on_disk"] >= 4 * told["limit"]
    assert told["wrong"] == 0
    # 12,800 draws over 32 parts: a chi-square of 31 degrees of freedom is above 84 once in 10**6 seeds.
    assert sum(told["counts"]) == 12_800
    assert sum((count - 400) ** 2 / 400 for count in told["counts"]) < 84


@pytest.mark.parametrize(("kind", "memory"), each([*KINDS, KINDS[0]], ["shared", "mapped"]), ids=repr)
def test_other_memory_serves_what_ram_serves(kind, memory, tmp_path):
    options = {"path": tmp_path / "folder"} if memory == "mapped" else {}
    storage, plain = kind.make(memory=memory, **options), kind.make()
    for step in range(0, 15, 3):
        for either in (storage, plain):
            kind.fill(either, 3, first=step)
        assert_same_draws(storage, plain)
    data, expected = state(storage), state(plain)
    data.pop("nbytes"), expected.pop("nbytes")
    assert_same(data, expected)
    for either in (storage, plain):
        either.reset()
        kind.fill(either, 2, first=30)
    assert_same_draws(storage, plain)
    storage.close()
    plain.close()


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_a_mapped_folder_is_found_again_as_it_was(kind, tmp_path):
    folder = tmp_path / "folder"
    first, plain = kind.make(memory="mapped", path=folder), kind.make()
    for either in (first, plain):
        kind.fill(either, 9)
    before = state(first)
    first.close()
    again = kind.make(memory="mapped", path=folder)
    assert_same(state(again), before)
    again.add(**kind.step(9))
    plain.add(**kind.step(9))
    assert len(again) == len(plain)
    data, expected = state(again), state(plain)
    for numbers in (data, expected):
        numbers.pop("nbytes")
    assert_same(data, expected)
    again.close()
    plain.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"observation_space": spaces.Box(-1, 1, (3,))},
        {"observation_space": spaces.Box(0, 255, (2,), np.uint8)},
        {"action_space": spaces.Box(-1, 1, (2,))},
        {"storage_size": 100},
        {"num_envs": 3},
        {"reward_shape": (2,)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_mapped_folder_of_another_schema_is_refused_and_left_as_it_was(changed, tmp_path):
    (kind,) = [kind for kind in KINDS if kind.name == "replay"]
    folder = tmp_path / "folder"
    first = kind.make(memory="mapped", path=folder)
    kind.fill(first, 9)
    before = state(first)
    first.close()
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="folder") as refused:
        kind.make(memory="mapped", path=folder, **changed)
    assert isinstance(refused.value, StorageError)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    again = kind.make(memory="mapped", path=folder)
    assert_same(state(again), before)
    again.close()


def test_a_folder_that_holds_something_else_is_refused_and_left_as_it_was(tmp_path):
    (kind,) = [kind for kind in KINDS if kind.name == "replay"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    with pytest.raises((ValueError, OSError), match="folder"):
        kind.make(memory="mapped", path=tmp_path / "folder")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((ValueError, OSError), match="file"):
        kind.make(memory="mapped", path=tmp_path / "file")
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thesis.txt"]
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="shared memory is not a folder here")
def test_shared_memory_is_given_back():
    before = set(os.listdir("/dev/shm"))
    (kind,) = [kind for kind in KINDS if kind.name == "replay"]
    closed, forgotten = kind.make(memory="shared"), kind.make(memory="shared")
    for storage in (closed, forgotten):
        kind.fill(storage, 9)
        storage.sample()
    closed.close()
    del closed, forgotten, storage
    gc.collect()
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_sees_what_is_added_to_shared_memory_before_it():
    """Actions of the parent's 9 steps, drawn by a child."""
    (kind,) = [kind for kind in KINDS if kind.name == "replay"]
    storage = kind.make(memory="shared", batch_size=500)
    kind.fill(storage, 9)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(sorted(set(storage.sample().actions.tolist()))).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert json.load(told) == list(range(7, 19))


def test_every_stack_of_a_film_is_one_that_was_given():
    """The film of these tests, without a storage: a stack tells itself."""
    film = Stacks(4, 1, 2)
    first, later = film.stack(0, 3, 0), film.stack(1, 3, 260)
    assert first[:, 0, :4].tolist() == [[1, 3, 0, 0]] * 4
    assert later[:, 0, :4].tolist() == [[2, 3, 1, 7], [2, 3, 1, 8], [2, 3, 1, 9], [2, 3, 1, 10]]
    assert make_step(0, 1)["observations"].tolist() == obs_of(torch.ones(1)).tolist()
