"""Every replay storage as several write it: how it is made, what is added, and what its batches must be."""

from __future__ import annotations

from functools import partial

from shared_steps import (
    ACTIONS,
    GAMMA,
    Box,
    Goals,
    Nested,
    Stacks,
    check_hindsight,
    check_sequences,
    check_transitions,
    make_plan,
    steps_to_goal,
)

from rlstore import (
    HindsightReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    RateLimit,
    ReplayStorage,
    SequenceReplayStorage,
)


class SharedKind:
    """One storage class on one kind of observations."""

    def __init__(self, name, storage_class, world, check, hidden=False, **options):
        self.name, self.storage_class, self.world, self.hidden = name, storage_class, world, hidden
        self._check, self.options = check, options

    def __repr__(self):
        return self.name

    def make(self, lanes=2, steps=32, **options):
        given = {
            "storage_size": lanes * steps,
            "num_envs": lanes,
            "batch_size": 64,
            "autoreset": "SameStep",
            "seed": 0,
            **self.world.options,
            **self.options,
        }
        return self.storage_class(self.world.space, ACTIONS, **{**given, **options})

    def plan(self, actors, steps, **options):
        return make_plan(self.world, actors, steps, hidden=self.hidden, **options)

    def check(self, batch, **options):
        self._check(self.world, batch, **options)


def full(storage_steps):
    """A limit that lets everything go ahead once so many were added: what waits for it needs no clock."""
    return RateLimit(1.0, min_size=storage_steps, tolerance=1e12)


def n_steps(steps):
    def check(world, batch, cut=False):
        check_transitions(world, batch, steps)

    return check


def windows(size, stride, hidden=False):
    return partial(check_sequences, size=size, stride=stride, hidden=hidden)


def goals(world, batch, cut=False):
    check_hindsight(world, batch)


_FOLDED = {"n_step": 3, "discount": GAMMA}
_PLAIN = {**_FOLDED, "dtype": None, "pin_memory": False}
SHARED = [
    SharedKind("replay", ReplayStorage, Box(), n_steps(3), **_FOLDED),
    SharedKind("n-step", NStepReplayStorage, Box(), n_steps(3), **_PLAIN, num_workers=0),
    SharedKind("n-step prepared ahead", NStepReplayStorage, Box(), n_steps(3), **_PLAIN, num_workers=2),
    SharedKind("prioritized", PrioritizedReplayStorage, Box(), n_steps(3), **_FOLDED),
    SharedKind(
        "sequence",
        SequenceReplayStorage,
        Box(),
        partial(check_sequences, size=4, stride=3),
        sequence_length=4,
        overlap=1,
    ),
    SharedKind(
        "sequence with states",
        SequenceReplayStorage,
        Box(),
        windows(5, 5, hidden=True),
        hidden=True,
        sequence_length=5,
        hidden_shape=(2, 2),
    ),
    SharedKind(
        "prioritized sequence",
        SequenceReplayStorage,
        Box(),
        windows(3, 1),
        sequence_length=3,
        overlap=2,
        alpha=0.6,
    ),
    SharedKind("hindsight", HindsightReplayStorage, Goals(), goals, compute_reward=steps_to_goal, discount=GAMMA),
    SharedKind("nested", ReplayStorage, Nested(), n_steps(3), **_FOLDED),
    SharedKind("stacks", ReplayStorage, Stacks(), n_steps(2), n_step=2, discount=GAMMA),
    SharedKind(
        "sequences of stacks",
        SequenceReplayStorage,
        Stacks(),
        partial(check_sequences, size=3, stride=3),
        sequence_length=3,
    ),
]
REPLAY, PRIORITIZED, SEQUENCE = (
    next(kind for kind in SHARED if kind.name == name) for name in ("replay", "prioritized", "sequence")
)


def part_of(value, lanes, *, hidden=False):
    """A step of some lanes alone: entries ``lanes`` of every array in it."""
    if isinstance(value, dict):
        return {key: part_of(entry, lanes, hidden=key == "hidden_states") for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(part_of(entry, lanes) for entry in value)
    return value[:, lanes.start : lanes.stop] if hidden else value[lanes.start : lanes.stop]


def vocabulary(step):
    """The arguments of add() as insert_transition() calls them."""
    named = {"terminateds": "terminated", "truncateds": "truncated"}
    sample = {named.get(name, name): value for name, value in step.items() if name != "infos"}
    return sample | ({"final_observations": step["infos"]["final_obs"]} if step["infos"] else {})
