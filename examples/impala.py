"""IMPALA on CartPole: actor processes pass rollouts to a learner, which corrects for stale policies with V-trace.

``python examples/impala.py --out out`` takes about a minute on two cores. ``--memory lstm`` hides the velocities, so
that the policy needs a memory. ``--ray`` runs on a Ray cluster, a local one if none is running
(``pip install 'rlstore[ray]'``).

An actor acts with the newest weights that it finds, and stores their version with each rollout. When the learner uses
the rollout, the policy has changed; V-trace weights each step by how likely the new policy is to take it.

On one machine the rollouts go through DistributedStorage, and the weights through shared memory. On Ray the rollouts go
through a queue on the cluster, and the weights through the object store. If an actor dies, a warning names it, and the
others continue.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from common import HideVelocities, Result, Run, actors, arguments, make_envs, report
from torch import Tensor, nn
from torch.distributions import Categorical

from rlstore import ActorHandle, DistributedStorage, PeerLostError, RolloutBatch, StorageClosedError
from rlstore.engine.returns import vtrace

NUM_ACTORS = 2
ENVS_PER_ACTOR = 16
NUM_STEPS = 32  # per rollout
BATCH_SIZE = 32  # rollouts
NUM_STORAGES = 2 * BATCH_SIZE  # hand-off slots: with fewer, rollouts are less stale
HIDDEN = 64
LEARNING_RATE = 3e-3
GAMMA = 0.99
LAM = 0.95
ENTROPY_WEIGHT = 0.005
MAX_GRAD_NORM = 0.5
REWARD_SCALE = 0.1  # scales the returns to [0, 10]
OBS_SCALES = {"none": (1.0, 1.0, 1.0, 1.0), "lstm": (1 / 2.4, 1 / 0.21)}  # the latter scales observations to [-1, 1]

THRESHOLDS = {"none": 475.0, "lstm": 400.0}

State = tuple[Tensor, ...]
Rows = dict[str, Tensor]


def environments(memory: str) -> gym.vector.SyncVectorEnv:
    """An actor's environments."""
    return make_envs(ENVS_PER_ACTOR, wrapper=HideVelocities if memory == "lstm" else None)


class ActorCritic(nn.Module):
    """A policy and a value on top of one network, which is recurrent with ``memory="lstm"``."""

    def __init__(self, memory: str) -> None:
        super().__init__()
        self.scale = torch.tensor(OBS_SCALES[memory])
        self.encoder = nn.Sequential(nn.Linear(len(self.scale), HIDDEN), nn.Tanh())
        self.core = nn.LSTM(HIDDEN, HIDDEN) if memory == "lstm" else nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.policy, self.value = nn.Linear(HIDDEN, 2), nn.Linear(HIDDEN, 1)
        nn.init.orthogonal_(self.policy.weight, 0.01)
        self.state_shapes = ((1, HIDDEN),) * 2 if memory == "lstm" else ()

    def fresh_state(self, sequences: int) -> State:
        """The state before an episode's first step."""
        return tuple(torch.zeros(layers, sequences, hidden) for layers, hidden in self.state_shapes)

    def forward(self, obs: Tensor, begins: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Logits and values of whole sequences [steps, sequences, ...], and the state after them.

        Where ``begins`` is set an episode begins, and the state is reset.
        """
        features = self.encoder(obs * self.scale)
        if isinstance(self.core, nn.LSTM):
            outputs = []
            for t, keep in enumerate(~begins.unsqueeze(-1)):
                output, state = self.core(features[t : t + 1], (state[0] * keep, state[1] * keep))
                outputs.append(output)
            features = torch.cat(outputs)
        else:
            features = self.core(features)
        return self.policy(features), self.value(features).squeeze(-1), state


class Player:
    """The environments of an actor, its network and its recurrent state."""

    def __init__(self, memory: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.envs, self.network = environments(memory), ActorCritic(memory)
        self.state = self.network.fresh_state(ENVS_PER_ACTOR)
        obs, zeros = torch.from_numpy(self.envs.reset(seed=1000 * seed)[0]), torch.zeros(ENVS_PER_ACTOR)
        self.seen: Rows = {"obs": obs, "reward": zeros, "episode_return": zeros}
        self.seen |= {"terminated": zeros.bool(), "truncated": zeros.bool()}

    @torch.inference_mode()
    def rollouts(self) -> Iterator[tuple[Rows, State]]:
        """A rollout of each environment, rows [steps + 1, ...] by key, and its initial recurrent state."""
        rows, before = list[Rows](), self.state
        for _ in range(NUM_STEPS):
            begins = self.seen["terminated"] | self.seen["truncated"]
            logits, _, self.state = self.network(self.seen["obs"].unsqueeze(0), begins.unsqueeze(0), self.state)
            actions = Categorical(logits=logits[0], validate_args=False).sample()
            rows.append({**self.seen, "policy_outputs": logits[0], "action": actions})
            self._step(actions, begins)
        rows.append({**rows[-1], **self.seen})  # the next rollout has the action of this row
        together = {key: torch.stack([row[key] for row in rows], dim=1) for key in rows[0]}
        for i in range(ENVS_PER_ACTOR):
            yield {key: value[i] for key, value in together.items()}, tuple(part[:, i : i + 1] for part in before)

    def _step(self, actions: Tensor, begins: Tensor) -> None:
        obs, rewards, terminated, truncated, _ = self.envs.step(actions.numpy())
        reward = torch.from_numpy(rewards).float()
        self.seen |= {"obs": torch.from_numpy(obs), "reward": reward}
        self.seen |= {"terminated": torch.from_numpy(terminated), "truncated": torch.from_numpy(truncated)}
        self.seen["episode_return"] = self.seen["episode_return"] * ~begins + reward


def update(network: ActorCritic, optimizer: torch.optim.Optimizer, batch: RolloutBatch) -> float:
    """One step of the V-trace actor-critic."""
    terminated, truncated = batch["terminated"], batch["truncated"]
    logits, values, _ = network(batch["obs"], terminated | truncated, batch.states)
    policy = Categorical(logits=logits[:-1], validate_args=False)
    played = Categorical(logits=batch["policy_outputs"][:-1], validate_args=False)
    log_prob = policy.log_prob(batch["action"][:-1])
    # Row t + 1 holds the reward and flags of the action in row t. At a truncation the next observation already belongs
    # to another episode, and without a final value the TD error of the step is 0.
    targets, advantages = vtrace(
        batch["reward"][1:] * REWARD_SCALE,
        values[:-1],
        values[-1],
        terminated[1:],
        truncated[1:],
        log_rhos=log_prob - played.log_prob(batch["action"][:-1]),
        gamma=GAMMA,
        lam=LAM,
    )
    policy_loss = -(log_prob * advantages).mean()
    value_loss = (values[:-1] - targets).pow(2).mean()
    loss: Tensor = policy_loss + value_loss - ENTROPY_WEIGHT * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return loss.item()


Batches = Iterator[RolloutBatch]
Publish = Callable[[int], None]


# ---------------------------------------------------------------------------------------------------- on this machine


def play(handle: ActorHandle, shared: ActorCritic, memory: str, seed: int) -> None:
    """An actor process: rollouts with the newest weights, until the learner closes the storage."""
    player = Player(memory, seed)
    with handle, suppress(StorageClosedError, PeerLostError):  # the learner has finished or died
        while True:
            version = handle.published
            player.network.load_state_dict(shared.state_dict())
            for rows, state in player.rollouts():
                with handle.rollout(version) as rollout:
                    for key, value in rows.items():
                        rollout[key].copy_(value)
                    rollout.set_states(state)


@contextmanager
def on_this_machine(network: ActorCritic, memory: str, seed: int) -> Iterator[tuple[Batches, Publish]]:
    """Start actor processes; yields an iterator over their batches, and a function that publishes the weights."""
    envs = environments(memory)
    storage = DistributedStorage(
        envs.single_observation_space,
        envs.single_action_space,
        num_steps=NUM_STEPS,
        num_storages=NUM_STORAGES,
        batch_size=BATCH_SIZE,
        state_shapes=network.state_shapes,
        seed=seed,
    )
    shared = deepcopy(network).share_memory()
    given = [(storage.actor(f"actor {i}"), shared, memory, seed * NUM_ACTORS + i) for i in range(NUM_ACTORS)]
    with actors(play, given, storage.close), storage.learner() as learner:

        def publish(version: int) -> None:
            shared.load_state_dict(network.state_dict())
            learner.publish(version)

        yield learner, publish


# ---------------------------------------------------------------------------------------------------- on a Ray cluster


class RayActor:
    """An actor on the cluster. It acts in one thread and receives weights in another."""

    def __init__(self, memory: str, seed: int) -> None:
        self.player = Player(memory, seed)

    def take(self, version: int, weights: Rows) -> None:
        """Receive new weights, from the object store."""
        self.newest = (version, weights)

    def play(self, queue: Any) -> None:
        """Produce rollouts with the newest weights, forever."""
        while True:
            version, weights = self.newest
            self.player.network.load_state_dict(weights)
            for rows, state in self.player.rollouts():
                queue.put(rows, version, state)


@contextmanager
def on_ray(network: ActorCritic, memory: str, seed: int) -> Iterator[tuple[Batches, Publish]]:
    """Like :func:`on_this_machine`, on the Ray cluster of RAY_ADDRESS or else on a local one."""
    import ray

    from rlstore.ray import rollout_queue

    is_ours = not ray.is_initialized()
    if is_ours:
        address = os.environ.get("RAY_ADDRESS", "local")
        # The actors need this file and the modules that it imports.
        ray.init(address, runtime_env={"working_dir": str(Path(__file__).parent)}, log_to_driver=False)
    queue, kind = rollout_queue(capacity=NUM_STORAGES), ray.remote(RayActor).options(max_concurrency=2)
    players: list[Any] = [kind.remote(memory, seed * NUM_ACTORS + i) for i in range(NUM_ACTORS)]

    def send(version: int) -> list[Any]:
        weights = ray.put(network.state_dict())
        return [player.take.remote(version, weights) for player in players]

    def publish(version: int) -> None:
        send(version)
        for run in ray.wait(list(runs), timeout=0)[0] if runs else ():  # an actor never returns, so this one failed
            try:
                ray.get(run)
            except ray.exceptions.RayError as error:
                warnings.warn(f"{runs.pop(run)} died: {error}", RuntimeWarning, stacklevel=2)

    try:
        ray.get(send(0))  # waits until all actors have started
        runs = {player.play.remote(queue): f"actor {i}" for i, player in enumerate(players)}
        with queue.learner(BATCH_SIZE) as learner:
            yield learner, publish
    finally:
        for player in players:
            ray.kill(player)
        queue.shutdown()
        if is_ours:
            ray.shutdown()


# ---------------------------------------------------------------------------------------------------- the learner


def train(
    steps: int, seed: int = 0, threshold: float | None = None, memory: str = "none", use_ray: bool = False
) -> Result:
    """Train until the threshold is reached or the steps are used up; ``memory`` is "none" or "lstm"."""
    torch.manual_seed(seed)
    network = ActorCritic(memory)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, eps=1e-5)
    place = on_ray if use_ray else on_this_machine
    with place(network, memory, seed) as (batches, publish):
        run = Run(f"impala_{memory}{'_ray' if use_ray else ''}", NUM_ACTORS * ENVS_PER_ACTOR, steps, threshold)
        lag = 0.0
        for version, batch in enumerate(run.storage_watch.around(batches)):
            ended = (batch["terminated"] | batch["truncated"])[1:]
            run.note(ended.numel(), batch["episode_return"][1:][ended].tolist())
            lag += version - batch.versions.double().mean().item()
            run.show(update(network, optimizer, batch))
            if not run.active:
                break
            publish(version + 1)
    return run.finish(versions_behind=lag / len(run.losses))


def main() -> None:
    """Read the command line, train, and report."""
    parser = arguments(__doc__, steps=1_500_000)
    parser.add_argument("--memory", choices=["none", "lstm"], default="none", help="default: %(default)s")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster")
    parser.add_argument("--threshold", type=float, help="stop at this mean return (default: 475, with LSTM 400)")
    options = parser.parse_args()
    threshold = THRESHOLDS[options.memory] if options.threshold is None else options.threshold
    report(train(options.steps, options.seed, threshold, options.memory, options.ray), options.out)


if __name__ == "__main__":
    main()
