"""Worked examples of n-step targets: one lane in, what each of its transitions is served as, small enough for the hand.

The observations of a lane are letters in alphabetical order: step 0 was taken in "a" and came to "b". Where an episode
ends, the observation it ended in is written beside the end, and the next step starts in the next letter. gamma is 1/2
and the rewards are powers of 2 unless a case says otherwise, so that all numbers are exact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NStepCase:
    """One lane.

    ``ends`` maps a step to how its episode ended there and in what. ``served`` has a line for each step: the sum of
    discounted rewards, the discount that is left for the value of the next observation, and that observation.
    """

    name: str
    rewards: tuple[float, ...]
    ends: dict[int, tuple[str, str]]
    served: tuple[tuple[float, float, str], ...]
    n_step: int = 3
    gamma: float = 0.5


CASES = [
    NStepCase(
        name="an episode that terminates",
        rewards=(1, 2, 4, 8, 16),
        ends={4: ("terminated", "Z")},
        served=(
            (3, 0.125, "d"),  # 1 + 2/2 + 4/4, three steps on
            (6, 0.125, "e"),  # 2 + 4/2 + 8/4
            (12, 0, "Z"),  # 4 + 8/2 + 16/4, and nothing follows
            (16, 0, "Z"),  # 8 + 16/2
            (16, 0, "Z"),
        ),
    ),
    NStepCase(
        name="an episode that is truncated",
        rewards=(1, 2, 4, 8, 16),
        ends={4: ("truncated", "Z")},
        served=(
            (3, 0.125, "d"),
            (6, 0.125, "e"),
            (12, 0.125, "Z"),  # what it was cut off in is still worth something, three steps on
            (16, 0.25, "Z"),  # two steps on
            (16, 0.5, "Z"),  # one
        ),
    ),
    NStepCase(
        name="an episode shorter than n that terminates, and the one after it",
        rewards=(1, 2, 4, 8, 16, 32),
        ends={1: ("terminated", "Z")},
        served=(
            (2, 0, "Z"),  # 1 + 2/2: the next episode is not touched
            (2, 0, "Z"),
            (12, 0.125, "f"),  # 4 + 8/2 + 16/4
            (24, 0.125, "g"),  # 8 + 16/2 + 32/4
            (32, 0.25, "g"),  # 16 + 32/2: the newest row is as far as it goes
            (32, 0.5, "g"),
        ),
    ),
    NStepCase(
        name="an episode shorter than n that is truncated, and the one after it",
        rewards=(1, 2, 4, 8, 16, 32),
        ends={1: ("truncated", "Z")},
        served=(
            (2, 0.25, "Z"),
            (2, 0.5, "Z"),
            (12, 0.125, "f"),
            (24, 0.125, "g"),
            (32, 0.25, "g"),
            (32, 0.5, "g"),
        ),
    ),
    NStepCase(
        name="an episode of a single step",
        rewards=(1, 2, 4),
        ends={0: ("truncated", "Y"), 1: ("terminated", "Z")},
        served=((1, 0.5, "Y"), (2, 0, "Z"), (4, 0.5, "d")),
    ),
    NStepCase(
        name="an episode of exactly n steps",
        rewards=(1, 2, 4, 8),
        ends={2: ("truncated", "Z")},
        served=((3, 0.125, "Z"), (4, 0.25, "Z"), (4, 0.5, "Z"), (8, 0.5, "e")),
    ),
    NStepCase(
        name="an episode that goes on",
        rewards=(1, 2, 4, 8),
        ends={},
        served=((3, 0.125, "d"), (6, 0.125, "e"), (8, 0.25, "e"), (8, 0.5, "e")),
    ),
    NStepCase(
        name="fewer steps than n so far",
        rewards=(1, 2),
        ends={},
        served=((2, 0.25, "c"), (2, 0.5, "c")),
    ),
    NStepCase(
        name="both flags at once: termination wins",
        rewards=(1, 2, 4),
        ends={1: ("both", "Z")},
        served=((2, 0, "Z"), (2, 0, "Z"), (4, 0.5, "d")),
    ),
    NStepCase(
        name="every step ends, each in its own way",
        rewards=(1, 2, 4, 8),
        ends={0: ("terminated", "W"), 1: ("truncated", "X"), 2: ("both", "Y"), 3: ("truncated", "Z")},
        served=((1, 0, "W"), (2, 0.5, "X"), (4, 0, "Y"), (8, 0.5, "Z")),
    ),
    NStepCase(
        name="n = 1: plain transitions",
        n_step=1,
        rewards=(1, 2, 4, 8),
        ends={1: ("terminated", "Y"), 2: ("truncated", "Z")},
        served=((1, 0.5, "b"), (2, 0, "Y"), (4, 0.5, "Z"), (8, 0.5, "e")),
    ),
    NStepCase(
        name="n = 2",
        n_step=2,
        rewards=(1, 2, 4, 8),
        ends={1: ("terminated", "Y")},
        served=((2, 0, "Y"), (2, 0, "Y"), (8, 0.25, "e"), (8, 0.5, "e")),
    ),
    NStepCase(
        name="n = 9: to the end, or as far as it goes",
        n_step=9,
        rewards=(1, 2, 4, 8, 16),
        ends={2: ("truncated", "Z")},
        # 1 + 2/2 + 4/4, 2 + 4/2, 4; 8 + 16/2, 16
        served=((3, 0.125, "Z"), (4, 0.25, "Z"), (4, 0.5, "Z"), (16, 0.25, "f"), (16, 0.5, "f")),
    ),
    NStepCase(
        name="gamma = 1: the plain sum",
        gamma=1,
        rewards=(1, 2, 4, 8),
        ends={3: ("truncated", "Z")},
        served=((7, 1, "d"), (14, 1, "Z"), (12, 1, "Z"), (8, 1, "Z")),
    ),
    NStepCase(
        name="gamma = 0: the reward alone",
        gamma=0,
        rewards=(1, 2, 4, 8),
        ends={3: ("truncated", "Z")},
        served=((1, 0, "d"), (2, 0, "Z"), (4, 0, "Z"), (8, 0, "Z")),
    ),
    NStepCase(
        name="rewards of both signs",
        rewards=(-1, 2, -4, 8),
        ends={3: ("terminated", "Z")},
        # -1 + 2/2 - 4/4, 2 - 4/2 + 8/4, -4 + 8/2
        served=((-1, 0.125, "d"), (2, 0, "Z"), (0, 0, "Z"), (8, 0, "Z")),
    ),
]
