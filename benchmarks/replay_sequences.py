"""Replay of sequences, as for R2D2 and Dreamer: 64 windows of 16 steps each, out of 1M vector transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import repeat
from typing import Any

import torch

from benchmarks.harness import Phase, Target, Workload
from benchmarks.replay_buffers import Buffer, Rlox, Rlstore, TorchRl, one_step_discounts
from benchmarks.replay_contenders import Copies, Sampling
from benchmarks.replay_data import check_batches
from benchmarks.replay_vector import ACTIONS, CAPACITY, OBS, source

WINDOWS, LENGTH = 64, 16
SAMPLES = 50
# Bytes of a step: two observations, an action, a reward, two flags.
SERVED = 4 * (2 * OBS + ACTIONS + 1) + 2


class RlstoreSequences(Rlstore):
    """Our SequenceReplayStorage; a window may begin at any step, as the peers' do."""

    def __init__(self) -> None:
        super().__init__(
            source(), CAPACITY, "SequenceReplayStorage", sequence_length=LENGTH, overlap=LENGTH - 1, batch_size=WINDOWS
        )

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        return {
            "observations": drawn.observations,
            "actions": drawn.actions,
            "rewards": drawn.rewards.squeeze(-1),
            "discounts": one_step_discounts(drawn.terminated.squeeze(-1)),
            "next_observations": drawn.next_observations,
        }


class TorchRlSequences(TorchRl):
    """TorchRL's SliceSampler with the settings that it documents as fast: ends by flag, searched once and cached.

    A buffer that is appended to between batches searches for every batch; this is not timed here.
    """

    def __init__(self) -> None:
        from torchrl.data.replay_buffers.samplers import SliceSampler

        sampler = SliceSampler(slice_len=LENGTH, end_key=("next", "done"), cache_values=True)
        super().__init__(source(), CAPACITY, sampler=sampler)

    def arguments(self, batch_size: int, calls: int) -> Iterable[tuple[Any, ...]]:
        return repeat((batch_size * LENGTH,), calls)

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        return super().batch(drawn.reshape(WINDOWS, LENGTH))


class RloxSequences(Rlox):
    """rlox's SequenceReplayBuffer."""

    def __init__(self) -> None:
        super().__init__(source(), CAPACITY, "SequenceReplayBuffer")
        self.sample = self.buffer.sample_sequences

    def fill(self) -> None:
        push = self.buffer.push
        for steps in self.source.fill(self.capacity):
            for step in steps.each():
                observation, action, reward, terminated, truncated, following = self.single(step)
                push(observation, following, action, reward, terminated, truncated)

    def arguments(self, batch_size: int, calls: int) -> Iterable[tuple[Any, ...]]:
        return zip(repeat(batch_size, calls), repeat(LENGTH), self.seeds, strict=False)


def check(evidence: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Check the transitions, and that the steps of a window are consecutive."""
    check_batches(source(), (WINDOWS, LENGTH), 1, evidence)
    for name, batch in evidence.items():
        if (
            batch
            and (source().ids(batch["observations"])[:, 1:] != source().ids(batch["next_observations"])[:, :-1]).any()
        ):
            raise RuntimeError(f"{name} served steps that are not consecutive")


def workload() -> Workload:
    makers: dict[str, Callable[[], Buffer]] = {
        "rlstore": RlstoreSequences,
        "TorchRL": TorchRlSequences,
        "rlox": RloxSequences,
    }
    floor = Copies({"sample": (WINDOWS * LENGTH * SERVED, SAMPLES)})
    return Workload(
        name="replay_sequences",
        title="Sequences of 1M transitions, observations 17, actions 6",
        phases=(Phase("sample", "sample 64 x 16", SAMPLES),),
        contenders={
            name: partial(Sampling, name, make, {"sample": (WINDOWS, SAMPLES)}) for name, make in makers.items()
        }
        | {"memcpy": lambda: floor},
        check=check,
        rounds=10,
        targets=(Target("sample", ("rlox",), 0.9, row="sequences 64 x 16 with next observations"),),
    )
