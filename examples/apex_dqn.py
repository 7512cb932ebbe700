"""Ape-X on CartPole: actor processes append to one prioritized replay storage, from which one learner samples.

``python examples/apex_dqn.py --out out`` takes a minute or two on two cores.

The storage is in shared memory (``memory="shared"``), and each actor has a writer for its own environments. Actors and
learner run at their own speed; the rate limit blocks the side that is ahead, so that eight transitions are sampled for
each one that is added. The network is in shared memory too: actors see each update immediately. If an actor dies, a
warning names it, and the others continue.

Each actor explores with its own epsilon. The reported returns are those of the actor with the smallest one (epsilon
0.0007).
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import gymnasium as gym
import numpy as np
import torch
from common import Result, Run, actors, arguments, make_envs, report
from dqn import CARTPOLE, QNetwork, act, update

from rlstore import PeerLostError, PrioritizedReplayStorage, RateLimit, ReplayWriter, StorageClosedError

NUM_ACTORS = 3
ENVS_PER_ACTOR = 4
STORAGE_SIZE = 99_996  # divisible by the 12 environments
BATCH_SIZE = 128
N_STEP = 3
GAMMA = 0.99
LIMIT = RateLimit(samples_per_insert=8.0, min_size=1_000, tolerance=20 * BATCH_SIZE)
EPSILON, EPSILON_SPREAD = 0.4, 7.0
REPORT_EVERY = 25  # steps of an actor


def epsilon_of(actor: int) -> float:
    """The exploration rate of an actor: from 0.4 for the first to 0.4 ** 8 for the last."""
    return float(EPSILON ** (1 + EPSILON_SPREAD * actor / (NUM_ACTORS - 1)))


def play(actor: int, network: QNetwork, writer: ReplayWriter, learner: Connection, seed: int) -> None:
    """An actor process: step the environments, append the transitions, and report ended episodes to the learner."""
    envs, rng = make_envs(ENVS_PER_ACTOR), np.random.default_rng((seed, actor))
    obs, _ = envs.reset(seed=1000 * seed + ENVS_PER_ACTOR * actor)
    open_returns, returns, steps = np.zeros(ENVS_PER_ACTOR), list[float](), 0
    with writer, suppress(StorageClosedError, PeerLostError, BrokenPipeError):  # the learner has finished or died
        while True:
            actions = act(network, obs, epsilon_of(actor), rng)
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            writer.add(obs, actions, rewards, terminated, truncated, infos, next_obs)
            obs, ended = next_obs, terminated | truncated
            open_returns += rewards
            returns += open_returns[ended].tolist()
            open_returns[ended] = 0.0
            steps += 1
            if steps % REPORT_EVERY == 0:
                learner.send((REPORT_EVERY * ENVS_PER_ACTOR, returns))
                returns = []
    envs.close()


def read_reports(connections: list[Connection], run: Run) -> None:
    """Count the steps that the actors report, and the returns of the last actor, which explores the least."""
    for connection in connections:
        while connection.poll():
            steps, returns = connection.recv()
            run.note(steps, returns if connection is connections[-1] else [])


def train(steps: int, seed: int = 0, threshold: float | None = None) -> Result:
    """Train until the threshold is reached or the steps are used up."""
    torch.manual_seed(seed)
    envs = make_envs(1)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    assert isinstance(obs_space, gym.spaces.Box)
    assert isinstance(action_space, gym.spaces.Discrete)
    network = QNetwork(obs_space, int(action_space.n))
    target = deepcopy(network)
    network.share_memory()
    optimizer = torch.optim.Adam(network.parameters(), lr=CARTPOLE.learning_rate)
    storage = PrioritizedReplayStorage(
        obs_space,
        action_space,
        storage_size=STORAGE_SIZE,
        num_envs=NUM_ACTORS * ENVS_PER_ACTOR,
        batch_size=BATCH_SIZE,
        n_step=N_STEP,
        discount=GAMMA,
        memory="shared",
        rate_limit=LIMIT,
        seed=seed,
    )
    writers = [storage.writer(ENVS_PER_ACTOR, name=f"actor {i}") for i in range(NUM_ACTORS)]
    pipes = [Pipe(duplex=False) for _ in range(NUM_ACTORS)]
    receivers = [receiver for receiver, _ in pipes]
    given = [(i, network, writers[i], pipes[i][1], seed) for i in range(NUM_ACTORS)]
    with actors(play, given, storage.close):
        run = Run("apex_dqn", NUM_ACTORS * ENVS_PER_ACTOR, steps, threshold)
        while run.active:
            run.show(update(network, target, optimizer, storage, run))
            read_reports(receivers, run)
    return run.finish(samples_per_insert=len(run.losses) * BATCH_SIZE / run.env_steps)


def main() -> None:
    """Read the command line, train, and report."""
    options = arguments(__doc__, steps=600_000, threshold=475.0).parse_args()
    report(train(options.steps, options.seed, options.threshold), options.out)


if __name__ == "__main__":
    main()
