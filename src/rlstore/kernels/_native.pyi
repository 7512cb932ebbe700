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
