"""What ``stats()`` has to be, worked out from lists of all steps that were ever taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

OPEN, BROKEN = None, 0  # how an episode ended, or the bits 1 (terminated) and 2 (truncated)


@dataclass
class Lane:
    """All steps of one environment: rewards, and the number of the episode that each belongs to."""

    rewards: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    ends: list[int | None] = field(default_factory=lambda: [OPEN])  # of each episode, by number

    def step(self, reward: float, end: int, breaks: bool = False) -> None:
        """One more; ``breaks``: it does not continue the episode that was open."""
        if breaks and self.numbers and self.ends[-1] is OPEN and self.numbers[-1] == len(self.ends) - 1:
            self.ends[-1] = BROKEN
            self.ends.append(OPEN)
        self.rewards.append(reward)
        self.numbers.append(len(self.ends) - 1)
        if end:
            self.ends[-1] = end
            self.ends.append(OPEN)

    def held(self, capacity: int) -> range:
        """The times of the newest steps."""
        return range(max(len(self.rewards) - capacity, 0), len(self.rewards))

    def episodes(self, capacity: int) -> list[tuple[int, list[float], int | None]]:
        """Of each that is held: the time at which it began, the rewards that are held, and how it ended."""
        found: dict[int, list[float]] = {}
        for time in self.held(capacity):
            found.setdefault(self.numbers[time], []).append(self.rewards[time])
        return [(self.numbers.index(number), rewards, self.ends[number]) for number, rewards in found.items()]

    def windows(self, capacity: int, length: int, stride: int) -> list[int]:
        """The times at which windows of ``length`` steps begin, every ``stride`` steps of an episode."""
        oldest, found = self.held(capacity).start, []
        for number in dict.fromkeys(self.numbers):
            first = self.numbers.index(number)
            stop = first + self.numbers.count(number)
            starts = {start for start in range(first, stop, stride) if start + length <= stop}
            if self.ends[number] is not OPEN:
                starts.add(max(first, stop - length))
            found += [start for start in sorted(starts) if start >= oldest]
        return found


def episode_numbers(lanes: list[Lane], capacity: int) -> dict[str, float]:
    """The numbers about episodes."""
    held = [
        (end, begun in lane.held(capacity), rewards)
        for lane in lanes
        for begun, rewards, end in lane.episodes(capacity)
    ]
    complete = [rewards for end, is_whole, rewards in held if end and is_whole]
    return {
        "episodes": len(held),
        "episodes_open": sum(end is OPEN for end, _, _ in held),
        "episodes_broken": sum(end == BROKEN and end is not OPEN for end, _, _ in held),
        "episodes_terminated": sum(bool((end or 0) & 1) for end, _, _ in held),
        "episodes_truncated": sum(bool((end or 0) & 2) for end, _, _ in held),
        "episodes_complete": len(complete),
        **spread("length", [len(rewards) for rewards in complete]),
        **spread("return", [total for total in map(sum, complete) if math.isfinite(total)]),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Mean, smallest and largest; nothing of nothing."""
    if not values:
        return {}
    return {f"{name}_mean": sum(values) / len(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def ages(counts: list[int]) -> dict[str, float]:
    """Of rows that lanes hold, so many each: how many steps of their lane came after them."""
    every = [age for count in counts for age in range(count)]
    return {} if not every else {"row_age_mean": sum(every) / len(every), "row_age_max": max(every)}


def fragment_numbers(
    rewards: list[list[float]], ends: list[list[int]], resets: list[list[bool]], begins: list[bool]
) -> dict[str, float]:
    """The numbers about episodes in a rollout, of lists ``[steps][envs]``; ``begins``: the first step begins one."""
    runs = []
    for env, is_whole in enumerate(begins):
        run: list[float] = []
        for reward, end, reset in zip(rewards, ends, resets, strict=True):
            if reset[env]:
                is_whole = True
                continue
            run.append(reward[env])
            if end[env]:
                runs.append((run, end[env], is_whole))
                run, is_whole = [], True
        if run:
            runs.append((run, 0, is_whole))
    complete = [run for run, end, is_whole in runs if end and is_whole]
    return {
        "episodes": len(runs),
        "episodes_open": sum(not end for _, end, _ in runs),
        "episodes_terminated": sum(bool(end & 1) for _, end, _ in runs),
        "episodes_truncated": sum(bool(end & 2) for _, end, _ in runs),
        "episodes_complete": len(complete),
        **spread("length", [len(run) for run in complete]),
        **spread("return", [sum(run) for run in complete]),
    }
