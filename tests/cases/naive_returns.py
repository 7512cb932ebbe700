"""Targets of one lane in plain Python, each from its definition: sums over a window, no backward scan shared with ours.

Every function takes lists and a :class:`Lane`, and knows of an episode's end only through ``Lane.window``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Lane:
    rewards: list[float]
    values: list[float]
    last_value: float
    terminated: list[bool]
    truncated: list[bool]
    final_values: list[float] | None
    gamma: float

    def unknown(self, t: int) -> bool:
        """Truncated, and nobody said what the final observation was worth."""
        final = math.nan if self.final_values is None else self.final_values[t]
        return self.truncated[t] and not self.terminated[t] and math.isnan(final)

    def window(self, t: int, n: int) -> tuple[list[int], float]:
        """The steps from t on, at most n of them and none beyond an end, and the value that follows the last."""
        steps = []
        for k in range(t, min(t + n, len(self.rewards))):
            steps.append(k)
            if self.terminated[k]:
                return steps, 0.0
            if self.truncated[k]:
                return steps, math.nan if self.final_values is None else self.final_values[k]
        after = steps[-1] + 1
        return steps, self.values[after] if after < len(self.values) else self.last_value


def n_step(lane: Lane, t: int, n: int, unknown: list[float]) -> float:
    """``unknown[k]`` is the target of a step k that was truncated with no final value known."""
    steps, after = lane.window(t, n)
    if lane.unknown(steps[-1]):
        after = unknown[steps.pop()]
    discounted = [lane.gamma ** (k - t) * lane.rewards[k] for k in steps]
    return math.fsum([*discounted, lane.gamma ** len(steps) * after])


def discounted_return(lane: Lane, t: int) -> float:
    return n_step(lane, t, len(lane.rewards), unknown=lane.rewards)


def lambda_return(lane: Lane, t: int, lam: float) -> float:
    """The weighted mean of all n-step returns, ``(1 - lam) * lam^(n-1)`` each and the rest on the longest."""
    if lane.unknown(t):
        return lane.values[t]
    longest = len(lane.window(t, len(lane.rewards))[0])
    targets = [n_step(lane, t, n, unknown=lane.values) for n in range(1, longest + 1)]
    weights = [(1 - lam) * lam ** (n - 1) for n in range(1, longest)] + [lam ** (longest - 1)]
    return math.fsum(weight * target for weight, target in zip(weights, targets, strict=True))


def vtrace_target(lane: Lane, t: int, rhos: list[float], lam: float, clip_rho: float, clip_c: float) -> float:
    """``V_t + sum_k gamma^(k-t) (prod_{i<k} lam c_i) delta_k`` over the steps of the episode."""
    if lane.unknown(t):
        return lane.values[t]
    terms = [lane.values[t]]
    trace = 1.0
    for k in lane.window(t, len(lane.rewards))[0]:
        if lane.unknown(k):
            break
        after = lane.window(k, 1)[1]
        delta = min(clip_rho, rhos[k]) * (lane.rewards[k] + lane.gamma * after - lane.values[k])
        terms.append(trace * delta)
        trace *= lane.gamma * lam * min(clip_c, rhos[k])
    return math.fsum(terms)
