"""Rollouts in which every number tells its step and environment, and plain models of what must be served.

The row of step ``t`` and environment ``e`` has the id ``offset + t * envs + e``. Every field is a different function of
that id, so a row that is duplicated, swapped or put together from two rows cannot pass.
"""

import torch
from tensordict import TensorDict

from rlstore import RolloutStorage

ENVS, STEPS, ACTIONS, HIDDEN = 5, 6, 2, 3
TRANSITION_FIELDS = (
    "observations",
    "actions",
    "rewards",
    "dones",
    "values",
    "actions_log_prob",
    "distribution_params",
    "privileged_actions",
    "hidden_states",
)
BATCH_FIELDS = (
    "observations",
    "actions",
    "values",
    "advantages",
    "returns",
    "old_actions_log_prob",
    "old_distribution_params",
    "hidden_states",
    "masks",
    "privileged_actions",
    "dones",
)
DEFAULT_DONES = (
    (0, 0, 1, 0, 1),
    (0, 1, 0, 0, 1),
    (0, 0, 0, 0, 1),
    (0, 1, 1, 0, 1),
    (0, 0, 0, 0, 1),
    (1, 0, 0, 0, 1),
)


def ids_of_step(step, offset=0, envs=ENVS):
    """(envs, 1) float32; whole numbers below 2**24 are exact."""
    return offset + step * envs + torch.arange(envs, dtype=torch.float32).unsqueeze(1)


def observations_of(ids):
    """Ids of any shape ``(..., 1)`` to observations of every kind: vectors, scalars, images, nested, several dtypes."""
    batch = ids.shape[:-1]
    flat = ids.squeeze(-1)
    return TensorDict(
        {
            "policy": torch.cat([ids, ids + 0.25, -ids], dim=-1),
            "scalar": flat + 0.5,
            "double": (ids / 3).double(),
            "count": ids.long() * 2**33,
            "odd": ids % 2 == 1,
            "image": ((ids.long() * 7) % 251 + 1).to(torch.uint8).unsqueeze(-1).expand(*batch, 2, 3).contiguous(),
            "nested": TensorDict({"deep": ids + 0.125, "deeper": {"deepest": ids - 0.5}}, batch_size=batch),
        },
        batch_size=batch,
    )


def hidden_of(ids, layers=1, sign=1.0):
    """(layers, envs, HIDDEN) of a step's ids."""
    layer = torch.arange(layers).view(-1, 1, 1) / 8
    unit = torch.arange(HIDDEN).view(1, 1, -1) / 64
    return sign * (ids.view(1, -1, 1) + layer + unit)


def fields_of(ids):
    """The served fields of ids ``(..., 1)``, without observations; returns and advantages as ``fill`` writes them."""
    return {
        "actions": torch.cat([ids + 0.25, -ids], dim=-1),
        "values": ids + 0.5,
        "returns": ids + 1000.0,
        "advantages": -ids - 2000.0,
        "old_actions_log_prob": -ids - 0.125,
        "old_distribution_params": (torch.cat([ids, ids + 0.0625], dim=-1), ids + 3000.0),
    }


def transition_of(ids, dones=None, hidden_states=(None, None)):
    """A full transition for either mode."""
    fields = fields_of(ids)
    transition = RolloutStorage.Transition()
    transition.observations = observations_of(ids)
    transition.actions = fields["actions"]
    transition.rewards = ids.squeeze(-1) + 0.375
    transition.dones = torch.zeros(len(ids), dtype=torch.bool) if dones is None else torch.as_tensor(dones)
    transition.values = fields["values"]
    transition.actions_log_prob = fields["old_actions_log_prob"].squeeze(-1)
    transition.distribution_params = fields["old_distribution_params"]
    transition.privileged_actions = fields["actions"] + 5000.0
    transition.hidden_states = hidden_states
    return transition


def build(training_type="rl", envs=ENVS, steps=STEPS, **options):
    return RolloutStorage(
        training_type, envs, steps, observations_of(torch.zeros(envs, 1)), [ACTIONS], "cpu", **options
    )


def fill(storage, steps=None, *, offset=0, dones=DEFAULT_DONES, hidden=None):
    """Add ``steps`` transitions, with states from ``hidden(step, ids)``; write returns and advantages as PPO does."""
    envs = storage.num_envs
    for step in range(storage.num_transitions_per_env if steps is None else steps):
        ids = ids_of_step(step, offset, envs)
        states = (None, None) if hidden is None else hidden(step, ids)
        storage.add_transition(transition_of(ids, dones[step % len(dones)][:envs] if dones else None, states))
        if storage.training_type == "rl":
            storage.returns[step] = fields_of(ids)["returns"]
            storage.advantages[step] = fields_of(ids)["advantages"]
    return storage


def filled(training_type="rl", **options):
    return fill(build(training_type, **options))


def tensors_of(value, name=""):
    """Every tensor in a batch, a TensorDict, a tuple or a list, by a name that says where it is."""
    if value is None:
        return {}
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, RolloutStorage.Batch | RolloutStorage.Transition):
        names = BATCH_FIELDS if isinstance(value, RolloutStorage.Batch) else TRANSITION_FIELDS
        parts = {field: getattr(value, field) for field in names}
    else:
        parts = dict(enumerate(value)) if isinstance(value, tuple | list) else dict(value.items())
    return {key: leaf for part, inner in parts.items() for key, leaf in tensors_of(inner, f"{name}.{part}").items()}


def assert_equal(actual, expected):
    """The same tensors, to the bit, of the same dtypes, under the same names."""
    actual, expected = tensors_of(actual), tensors_of(expected)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert same(actual[name], tensor), name


def same(one, other):
    """Whether two tensors are equal; a NaN equals another."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def snapshot(storage):
    """A copy of everything the storage documents: a refused call must leave it as it was."""
    names = [
        "observations",
        "rewards",
        "actions",
        "dones",
        "saved_hidden_state_a",
        "saved_hidden_state_c",
        *(
            ["values", "actions_log_prob", "returns", "advantages", "distribution_params"]
            if storage.training_type == "rl"
            else ["privileged_actions"]
        ),
    ]
    copies = {name: tensor.clone() for name, tensor in tensors_of([getattr(storage, name) for name in names]).items()}
    return {"step": torch.tensor(storage.step), **copies}


def ids_in(batch):
    """The ids of a feed-forward batch, once every field has been found to speak of the same rows."""
    ids = batch.values - 0.5
    assert_equal(batch.observations, observations_of(ids))
    assert batch.observations.batch_size == ids.shape[:1]
    assert_equal({name: getattr(batch, name) for name in fields_of(ids)}, fields_of(ids))
    return [int(value) for value in ids.flatten()]


def trajectories(dones, envs):
    """(environment, first step, one past the last step) of every piece between dones, environment after environment."""
    pieces = []
    for env in range(*envs):
        start = 0
        for step in range(len(dones)):
            if dones[step][env] or step == len(dones) - 1:
                pieces.append((env, start, step + 1))
                start = step + 1
    return pieces


def recurrent_batch(dones, envs, states, offset=0, num_envs=ENVS):
    """The batch that environments ``envs[0]`` to ``envs[1] - 1`` of a rollout with these dones must give.

    ``states(step)`` is the pair of hidden states that the storage holds for a step: each ``[layers, num_envs, HIDDEN]``
    or a tuple of such or None.
    """
    steps = len(dones)
    ids = torch.stack([ids_of_step(step, offset, num_envs) for step in range(steps)])
    pieces = trajectories(dones, envs)
    masks = torch.zeros(steps, len(pieces), dtype=torch.bool)
    for column, (_, start, stop) in enumerate(pieces):
        masks[: stop - start, column] = True

    def padded(rollout):
        columns = torch.zeros(steps, len(pieces), *rollout.shape[2:], dtype=rollout.dtype)
        for column, (env, start, stop) in enumerate(pieces):
            columns[: stop - start, column] = rollout[start:stop, env]
        return columns

    return RolloutStorage.Batch(
        observations=observations_of(ids).apply(padded, batch_size=masks.shape),
        hidden_states=tuple(first_states(pieces, states, side) for side in (0, 1)),
        masks=masks,
        **fields_of(ids[:, slice(*envs)]),
    )


def first_states(pieces, states, side):
    """The state of one side at the first step of every trajectory, side by side in the batch dimension."""
    found = [(states(start)[side], env) for env, start, _ in pieces]
    if found[0][0] is None:
        return None
    if isinstance(found[0][0], tuple):
        parts = range(len(found[0][0]))
        return tuple(torch.stack([state[part][:, env] for state, env in found], dim=1) for part in parts)
    return torch.stack([state[:, env] for state, env in found], dim=1)
