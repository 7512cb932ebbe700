"""Worked examples of targets: a rollout in, every kind of target out, small enough to check by hand.

Most are variations of one lane with gamma = lam = 1/2, so that gamma * lam = 1/4 and all numbers are exact:

    r = 1 2 3 4    V = 2 4 6 8    value after the last step = 10

where nothing ends every delta is 1: r_t + V_{t+1} / 2 - V_t = 1 + 4/2 - 2 = 2 + 6/2 - 4 = 3 + 8/2 - 6 = 4 + 10/2 - 8.
"""

from __future__ import annotations

from dataclasses import dataclass

NAN = float("nan")


@dataclass(frozen=True)
class ReturnsCase:
    """One lane. ``final_values`` None: not given. ``n_step`` maps n to the n-step returns."""

    name: str
    advantages: tuple[float, ...]
    returns: tuple[float, ...]
    discounted: tuple[float, ...]
    n_step: dict[int, tuple[float, ...]]
    rewards: tuple[float, ...] = (1, 2, 3, 4)
    values: tuple[float, ...] = (2, 4, 6, 8)
    last_value: float = 10
    terminated: tuple[int, ...] = (0, 0, 0, 0)
    truncated: tuple[int, ...] = (0, 0, 0, 0)
    final_values: tuple[float, ...] | None = None
    gamma: float = 0.5
    lam: float = 0.5


def _unknown_truncation(name: str, final_values: tuple[float, ...] | None) -> ReturnsCase:
    return ReturnsCase(
        name=name,
        truncated=(0, 1, 0, 0),
        final_values=final_values,
        # A_1 = 0 by the neutral choice, A_0 = 1 + 0/4; later steps as if nothing ended
        advantages=(1, 0, 1.25, 1),
        returns=(3, 4, 7.25, 9),
        # no values to fall back on: R_1 = 2, R_0 = 1 + 2/2
        discounted=(2, 2, 7.5, 9),
        # G_1 = V_1 = 4 whatever n is; G_0 = 1 + 4/2 from there on
        n_step={1: (3, 4, 7, 9), 2: (3, 4, 7.5, 9), 9: (3, 4, 7.5, 9)},
    )


CASES = [
    ReturnsCase(
        name="nothing ends",
        # A_3 = 1, A_2 = 1 + 1/4, A_1 = 1 + 1.25/4, A_0 = 1 + 1.3125/4
        advantages=(1.328125, 1.3125, 1.25, 1),
        returns=(3.328125, 5.3125, 7.25, 9),
        # R_3 = 4 + 10/2, R_2 = 3 + 9/2, R_1 = 2 + 7.5/2, R_0 = 1 + 5.75/2
        discounted=(3.875, 5.75, 7.5, 9),
        # n = 1: r_t + V_{t+1}/2; n = 2: 1 + 2/2 + 6/4, 2 + 3/2 + 8/4, 3 + 4/2 + 10/4, 4 + 10/2
        n_step={1: (3, 5, 7, 9), 2: (3.5, 5.5, 7.5, 9), 9: (3.875, 5.75, 7.5, 9)},
    ),
    ReturnsCase(
        name="terminated in the middle",
        terminated=(0, 1, 0, 0),
        # A_1 = 2 - 4, A_0 = 1 - 2/4
        advantages=(0.5, -2, 1.25, 1),
        returns=(2.5, 2, 7.25, 9),
        # R_1 = 2, R_0 = 1 + 2/2
        discounted=(2, 2, 7.5, 9),
        n_step={1: (3, 2, 7, 9), 2: (2, 2, 7.5, 9), 9: (2, 2, 7.5, 9)},
    ),
    ReturnsCase(
        name="truncated in the middle, final value known",
        truncated=(0, 1, 0, 0),
        final_values=(NAN, 12, NAN, NAN),
        # A_1 = 2 + 12/2 - 4, A_0 = 1 + 4/4
        advantages=(2, 4, 1.25, 1),
        returns=(4, 8, 7.25, 9),
        # R_1 = 2 + 12/2, R_0 = 1 + 8/2
        discounted=(5, 8, 7.5, 9),
        n_step={1: (3, 8, 7, 9), 2: (5, 8, 7.5, 9), 9: (5, 8, 7.5, 9)},
    ),
    _unknown_truncation("truncated in the middle, no final values", None),
    _unknown_truncation("truncated in the middle, final value nan", (100, NAN, 100, 100)),
    ReturnsCase(
        name="both flags at once: termination wins over a known final value",
        terminated=(0, 1, 0, 0),
        truncated=(0, 1, 0, 0),
        final_values=(NAN, 12, NAN, NAN),
        advantages=(0.5, -2, 1.25, 1),
        returns=(2.5, 2, 7.25, 9),
        discounted=(2, 2, 7.5, 9),
        n_step={1: (3, 2, 7, 9), 2: (2, 2, 7.5, 9), 9: (2, 2, 7.5, 9)},
    ),
    ReturnsCase(
        name="both flags at once: termination wins over an unknown final value",
        terminated=(0, 1, 0, 0),
        truncated=(0, 1, 0, 0),
        advantages=(0.5, -2, 1.25, 1),
        returns=(2.5, 2, 7.25, 9),
        discounted=(2, 2, 7.5, 9),
        n_step={1: (3, 2, 7, 9), 2: (2, 2, 7.5, 9), 9: (2, 2, 7.5, 9)},
    ),
    ReturnsCase(
        name="both kinds in one rollout",
        terminated=(0, 0, 1, 0),
        truncated=(1, 0, 0, 0),
        final_values=(6, NAN, NAN, NAN),
        # A_2 = 3 - 6, A_1 = 1 - 3/4, A_0 = 1 + 6/2 - 2
        advantages=(2, 0.25, -3, 1),
        returns=(4, 4.25, 3, 9),
        # R_2 = 3, R_1 = 2 + 3/2, R_0 = 1 + 6/2
        discounted=(4, 3.5, 3, 9),
        n_step={1: (4, 5, 3, 9), 2: (4, 3.5, 3, 9), 9: (4, 3.5, 3, 9)},
    ),
    ReturnsCase(
        name="terminated with the last step, whose next value is not read",
        terminated=(0, 0, 0, 1),
        last_value=NAN,
        # A_3 = 4 - 8, A_2 = 1 - 4/4, A_1 = 1 + 0/4, A_0 = 1 + 1/4
        advantages=(1.25, 1, 0, -4),
        returns=(3.25, 5, 6, 4),
        # R_3 = 4, R_2 = 3 + 4/2, R_1 = 2 + 5/2, R_0 = 1 + 4.5/2
        discounted=(3.25, 4.5, 5, 4),
        n_step={1: (3, 5, 7, 4), 2: (3.5, 5.5, 5, 4), 9: (3.25, 4.5, 5, 4)},
    ),
    ReturnsCase(
        name="truncated with the last step, final value known",
        truncated=(0, 0, 0, 1),
        final_values=(NAN, NAN, NAN, 2),
        last_value=NAN,
        # A_3 = 4 + 2/2 - 8, A_2 = 1 - 3/4, A_1 = 1 + 0.25/4, A_0 = 1 + 1.0625/4
        advantages=(1.265625, 1.0625, 0.25, -3),
        returns=(3.265625, 5.0625, 6.25, 5),
        # R_3 = 4 + 2/2, R_2 = 3 + 5/2, R_1 = 2 + 5.5/2, R_0 = 1 + 4.75/2
        discounted=(3.375, 4.75, 5.5, 5),
        n_step={1: (3, 5, 7, 5), 2: (3.5, 5.5, 5.5, 5), 9: (3.375, 4.75, 5.5, 5)},
    ),
    ReturnsCase(
        name="truncated with the last step, no final values",
        truncated=(0, 0, 0, 1),
        last_value=NAN,
        # A_3 = 0, A_2 = 1 + 0/4, A_1 = 1 + 1/4, A_0 = 1 + 1.25/4
        advantages=(1.3125, 1.25, 1, 0),
        returns=(3.3125, 5.25, 7, 8),
        # R_3 = 4, R_2 = 3 + 4/2, R_1 = 2 + 5/2, R_0 = 1 + 4.5/2
        discounted=(3.25, 4.5, 5, 4),
        # G_3 = V_3 = 8; n = 2: G_2 = 3 + 8/2; long: G_1 = 2 + 7/2, G_0 = 1 + 5.5/2
        n_step={1: (3, 5, 7, 8), 2: (3.5, 5.5, 7, 8), 9: (3.75, 5.5, 7, 8)},
    ),
    ReturnsCase(
        name="a value that is nan after a termination does not leak back",
        terminated=(0, 1, 0, 0),
        values=(2, 4, NAN, 8),
        advantages=(0.5, -2, NAN, 1),
        returns=(2.5, 2, NAN, 9),
        discounted=(2, 2, 7.5, 9),
        n_step={1: (3, 2, 7, 9), 2: (2, 2, 7.5, 9), 9: (2, 2, 7.5, 9)},
    ),
    ReturnsCase(
        name="a value that is nan after a truncation does not leak back",
        truncated=(0, 1, 0, 0),
        final_values=(NAN, 12, NAN, NAN),
        values=(2, 4, NAN, 8),
        advantages=(2, 4, NAN, 1),
        returns=(4, 8, NAN, 9),
        discounted=(5, 8, 7.5, 9),
        n_step={1: (3, 8, 7, 9), 2: (5, 8, 7.5, 9), 9: (5, 8, 7.5, 9)},
    ),
    ReturnsCase(
        name="every step ends, each in its own way",
        terminated=(1, 0, 0, 1),
        truncated=(0, 1, 1, 1),
        final_values=(NAN, 12, NAN, 12),
        # A_0 = 1 - 2, A_1 = 2 + 12/2 - 4, A_2 = 0 (unknown), A_3 = 4 - 8 (terminated)
        advantages=(-1, 4, 0, -4),
        returns=(1, 8, 6, 4),
        discounted=(1, 8, 3, 4),
        n_step={1: (1, 8, 6, 4), 2: (1, 8, 6, 4), 9: (1, 8, 6, 4)},
    ),
    ReturnsCase(
        name="gamma 0: the reward alone",
        gamma=0,
        advantages=(-1, -2, -3, -4),
        returns=(1, 2, 3, 4),
        discounted=(1, 2, 3, 4),
        n_step={1: (1, 2, 3, 4), 2: (1, 2, 3, 4), 9: (1, 2, 3, 4)},
    ),
    ReturnsCase(
        name="gamma 1, lambda 1: the sum to the end",
        gamma=1,
        lam=1,
        # 4 + 10 = 14, 3 + 14 = 17, 2 + 17 = 19, 1 + 19 = 20
        advantages=(18, 15, 11, 6),
        returns=(20, 19, 17, 14),
        discounted=(20, 19, 17, 14),
        # n = 1: r_t + V_{t+1}; n = 2: 1 + 2 + 6, 2 + 3 + 8, 3 + 4 + 10, 4 + 10
        n_step={1: (5, 8, 11, 14), 2: (9, 13, 17, 14), 9: (20, 19, 17, 14)},
    ),
    ReturnsCase(
        name="lambda 0: the one-step error",
        lam=0,
        advantages=(1, 1, 1, 1),
        returns=(3, 5, 7, 9),
        discounted=(3.875, 5.75, 7.5, 9),
        n_step={1: (3, 5, 7, 9), 2: (3.5, 5.5, 7.5, 9), 9: (3.875, 5.75, 7.5, 9)},
    ),
    ReturnsCase(
        name="lambda 1: the discounted return less the value",
        lam=1,
        advantages=(1.875, 1.75, 1.5, 1),
        returns=(3.875, 5.75, 7.5, 9),
        discounted=(3.875, 5.75, 7.5, 9),
        n_step={1: (3, 5, 7, 9), 2: (3.5, 5.5, 7.5, 9), 9: (3.875, 5.75, 7.5, 9)},
    ),
]
