from collections.abc import Sequence

from torch import Tensor

class RowWriter:
    def __init__(self, targets: Sequence[tuple[Tensor, int, bool, bool]], counters: Tensor) -> None: ...
    def write(self, row: int, values: tuple[Tensor | None, ...]) -> int: ...

def gather(sources: tuple[Tensor, ...], rows: Tensor, targets: tuple[Tensor, ...]) -> None: ...
def gae(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor,
) -> None: ...
def discounted_returns(
    rewards: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    gamma: float,
    returns: Tensor,
) -> None: ...
def n_step_returns(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    gamma: float,
    n: int,
    returns: Tensor,
) -> None: ...
def vtrace(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    log_rhos: Tensor,
    gamma: float,
    lam: float,
    clip_rho: float,
    clip_c: float,
    clip_pg_rho: float,
    targets: Tensor,
    advantages: Tensor,
) -> None: ...
def normalize(x: Tensor, epsilon: float) -> None: ...
def count_segments(dones: Tensor, first: int, last: int) -> int: ...
def split_segments(dones: Tensor, first: int, last: int, lanes: Tensor, starts: Tensor, lengths: Tensor) -> None: ...
def pad_segments(
    sources: tuple[Tensor, ...],
    lanes: Tensor,
    starts: Tensor,
    lengths: Tensor,
    targets: tuple[Tensor, ...],
    mask: Tensor,
) -> None: ...
def copy_lanes(sources: tuple[Tensor, ...], first: int, last: int, targets: tuple[Tensor, ...]) -> None: ...
def first_states(states: Tensor, lanes: Tensor, starts: Tensor, target: Tensor) -> None: ...

class EpisodeRing:
    def __init__(
        self,
        steps: int,
        counters: tuple[Tensor, ...],
        episode_of: Tensor,
        leaves: tuple[tuple[Tensor, tuple[int, ...], int, int], ...],
        columns: tuple[tuple[Tensor, tuple[int, ...]], ...],
        reward: int,
        resets: int,
    ) -> None: ...
    def set_tables(
        self, episodes: Tensor, free_slots: Tensor, finals: tuple[Tensor, ...], starts: tuple[Tensor | None, ...]
    ) -> None: ...
    def write(self, values: tuple[object, ...]) -> int: ...
    def draw(self, generator: Tensor, rows: Tensor) -> None: ...
    def bounds(self, rows: Tensor, first: Tensor, stop: Tensor) -> None: ...
    def windows(self, starts: Tensor, length: int, across: bool, rows: Tensor) -> None: ...

class ReplayGather:
    def __init__(
        self,
        ring: EpisodeRing,
        requests: tuple[tuple[int, int, bool, tuple[int, ...]], ...],
        n_step: int,
        gamma: float,
    ) -> None: ...
    def gather(self, rows: Tensor, given: tuple[Tensor | None, ...] | None) -> tuple[Tensor, ...]: ...
    def sample(self, generator: Tensor, count: int) -> tuple[Tensor, ...]: ...

class WindowIndex:
    def __init__(
        self, ring: EpisodeRing, length: int, stride: int, across: bool, memory: tuple[Tensor, ...]
    ) -> None: ...
    def follow(self) -> None: ...
    def rebuild(self) -> None: ...
    def count(self) -> int: ...
    def draw(self, generator: Tensor, rows: Tensor) -> None: ...
    def contains(self, row: int) -> bool: ...

class Priorities:
    def __init__(self, ring: EpisodeRing, memory: tuple[Tensor, ...]) -> None: ...
    @staticmethod
    def level_sizes(leaves: int) -> list[int]: ...
    def total(self) -> float: ...
    def rebuild(self) -> None: ...
    def follow(self) -> None: ...
    def follow_windows(self, windows: WindowIndex) -> None: ...
    def draw(self, generator: Tensor, beta: float, rows: Tensor, weights: Tensor) -> None: ...
    def update(
        self, rows: Tensor, priorities: Tensor, alpha: float, windows: WindowIndex | None
    ) -> tuple[int, int, int]: ...

def draw_units(generator: Tensor, units: Tensor) -> None: ...
