"""The episodes of a mapped folder, read without the storage that made it."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces
from replay_batches import same_nest
from replay_world import Nest, Pair, Stack, Vector, stacked

from rlstore import ReplayStorage, SequenceReplayStorage
from rlstore.engine.disk import manifest, mapped
from rlstore.engine.disk.directory import Directory
from rlstore.engine.memory.backing import Backing
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.episodes import Episodes
from rlstore.replay.held_steps import RingSteps


class Deep(Vector):
    """A tuple in a dict in a tuple."""

    space = spaces.Tuple([spaces.Dict({"in": spaces.Tuple([Vector.space, spaces.Discrete(10**6)])}), Vector.space])

    def render(self, token):
        inner = Pair().render(token)
        return {"in": inner}, inner[0]


@pytest.mark.parametrize("kind", [Vector(), Nest(), Pair(), Deep(), Stack((1, 1, 8), 3, 0)], ids=repr)
def test_a_ring_of_a_folder_alone_lists_and_reads_what_its_storage_did(kind, tmp_path):
    is_sequence = isinstance(kind, Nest)
    storage = (SequenceReplayStorage if is_sequence else ReplayStorage)(
        kind.space,
        spaces.Discrete(10**6),
        storage_size=24,
        num_envs=2,
        memory="mapped",
        path=tmp_path / "mapped",
        extra_fields={"costs": ((), torch.float32), "pose": ((3,), torch.float64)},
        **({"sequence_length": 2, "hidden_shape": ((1, 4), (1, 4))} if is_sequence else {}),
        **kind.options,
    )
    for step in range(17):
        seen, after = (
            stacked([kind.render(tokens(kind, s + env)) for env in (0, 1)]) for s in (2 * step, 2 * step + 2)
        )
        ends = [step % 5 == 4, step % 7 == 6]
        extra = {"costs": [step, -step], "pose": torch.full((2, 3), step / 2)}
        if is_sequence:
            extra["hidden_states"] = (torch.full((1, 2, 4), float(step)), torch.full((1, 2, 4), -float(step)))
        storage.add(seen, [step, step + 100], [1.0 + step, 0.5], ends, [False, False], {}, after, **extra)
    rows, listed = storage.held_rows(), storage.episodes()
    expected = [*listed._listing], storage[rows], [episode.final_observations for episode in listed]
    storage.close()

    with Directory(tmp_path / "mapped") as directory:
        schema = manifest.read_manifest(directory, mapped.KIND, mapped.FIELDS)["schema"]
    files = mapped.PrivateFiles("a look", tmp_path / "mapped")
    ring = EpisodeRing.of_schema(schema, Backing.private("a look", files))
    steps = RingSteps(ring)
    episodes = Episodes(steps, steps.listing())
    assert torch.equal(steps.rows(), rows)
    found = [*episodes._listing], steps.read(rows, steps.names), [episode.final_observations for episode in episodes]
    assert list(expected[1]) == list(found[1])
    assert same_nest(tuple(expected[0]), tuple(found[0]))
    assert same_nest(expected[1], found[1])
    assert same_nest(tuple(expected[2]), tuple(found[2]))
    assert episodes[0]["pose"].shape == (episodes[0].length, 3)
    files.close()


def tokens(kind, number):
    """An observation, whose older frames are those of the steps before."""
    return tuple(number + 1 - 2 * back for back in reversed(range(kind.frames)))
