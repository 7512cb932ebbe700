"""The pattern of DrQ-v2's loader: episodes as files, and worker processes that each hold a share of them.

A worker samples an episode, then a window in it, and yields its n-step transition; a DataLoader collates batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from benchmarks.replay_data import Array, Steps

Transition = tuple[Array, Array, Array, Array, Array]


def save_episode(folder: Path, number: int, steps: Steps) -> None:
    """Write an episode of one environment, with its final observation; the discount is 0 where it terminates."""
    episode = steps.flat()
    np.savez(
        folder / f"{number:06d}_{len(episode.rewards)}.npz",
        observations=np.concatenate([episode.observations, episode.next_observations[-1:]]),
        actions=episode.actions,
        rewards=episode.rewards[:, None],
        discounts=1.0 - episode.terminated[:, None].astype(np.float32),
    )


class EpisodeWindows(IterableDataset[Transition]):
    """An infinite stream of n-step windows from the files of a folder, which is scanned again from time to time.

    ``size`` is the number of transitions that each worker may hold; the oldest episodes are evicted.
    """

    def __init__(self, folder: Path, size: int, n_step: int, discount: float, fetch_every: int = 1000) -> None:
        self._folder = folder
        self._size = size
        self._n_step = n_step
        self._discount = discount
        self._fetch_every = fetch_every
        self._episodes: dict[Path, dict[str, Array]] = {}
        self._rng = np.random.default_rng()

    def __iter__(self) -> Iterator[Transition]:
        worker = get_worker_info()
        share, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        self._rng = np.random.default_rng(number)
        while True:
            self._fetch(share, number)
            names = list(self._episodes)
            for _ in range(self._fetch_every):
                yield self._window(self._episodes[names[self._rng.integers(len(names))]])

    def _fetch(self, share: int, number: int) -> None:
        for path in sorted(self._folder.glob("*.npz")):
            if int(path.stem.split("_")[0]) % share == number and path not in self._episodes:
                with np.load(path) as arrays:
                    self._episodes[path] = dict(arrays)
        while sum(len(episode["rewards"]) for episode in self._episodes.values()) > self._size:
            del self._episodes[next(iter(self._episodes))]

    def _window(self, episode: dict[str, Array]) -> Transition:
        first = int(self._rng.integers(len(episode["rewards"]) - self._n_step + 1))
        reward = np.zeros(1, dtype=np.float32)
        discount = np.ones(1, dtype=np.float32)
        for i in range(first, first + self._n_step):
            reward += discount * episode["rewards"][i]
            discount *= episode["discounts"][i] * self._discount
        observations = episode["observations"]
        return observations[first], episode["actions"][first], reward, discount, observations[first + self._n_step]
