"""What a replay storage must hold and serve: lanes of episodes of steps, in plain Python lists.

Nothing is ever thrown away here: a step is held while it is one of the newest ``capacity`` of its lane and was stored
after the last reset. Values are tokens and numbers (see ``replay_world``), never tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from replay_world import Given, Token


@dataclass
class Step:
    """One stored transition; ``time`` counts the steps stored in its lane since the storage was made."""

    time: int
    env: int
    observation: Token
    action: int
    reward: tuple[float, ...]
    terminated: bool
    truncated: bool
    following: Token
    hidden: int = 0


@dataclass
class Episode:
    """The steps of an episode, whether still held or not; ``over`` when none will join them."""

    steps: list[Step] = field(default_factory=list)
    over: bool = False


@dataclass(frozen=True)
class Transition:
    """What is to be served for a step."""

    row: int
    observation: Token
    action: int
    reward: tuple[float, ...]
    discount: float
    following: Token


@dataclass(frozen=True)
class Window:
    """A sequence: the steps that are in it, the oldest first, and how many of them begin an episode."""

    row: int
    steps: tuple[Step, ...]
    firsts: tuple[bool, ...]


class Lane:
    """One environment's steps."""

    def __init__(self, env: int, capacity: int) -> None:
        self.env, self.capacity = env, capacity
        self.written = 0
        self.forget()

    def forget(self) -> None:
        """What reset does: as new, but for the count of steps."""
        self.episodes: list[Episode] = []
        self.kept_from = self.written
        self.resets_after: Token | None = None  # the observation in which a next-step environment would now reset
        self.is_after_end = self.is_resumed = False

    def resume(self) -> None:
        """What a load does: the next step may begin another episode."""
        self.is_resumed = bool(self.episodes) and not self.episodes[-1].over

    # ---------------------------------------------------------------------------------------------- writing

    def add(self, given: Given, autoreset: str | None) -> tuple[bool, bool]:
        """Take a step; returns whether it was stored, and whether it broke an episode."""
        if self._is_reset_step(given, autoreset):
            self.resets_after, self.is_after_end = None, False
            return False, False
        return True, self.store(given)

    def _is_reset_step(self, given: Given, autoreset: str | None) -> bool:
        if autoreset == "NextStep":
            return self.is_after_end
        if autoreset is not None or self.resets_after is None:
            return False
        return given.observation == self.resets_after and not any(given.reward) and not given.ends

    def store(self, given: Given) -> bool:
        """Store a step that is a transition for certain; returns whether it broke an episode, which is to be told."""
        broke, was_resumed, self.is_resumed = False, self.is_resumed, False
        if self.episodes and not self.episodes[-1].over:
            broke = self.episodes[-1].steps[-1].following != given.observation
            self.episodes[-1].over = broke
        if not self.episodes or self.episodes[-1].over:
            self.episodes.append(Episode())
        has_final = given.ends and given.final is not None
        following = given.final if has_final else given.following
        self.episodes[-1].steps.append(
            Step(
                self.written,
                self.env,
                given.observation,
                given.action,
                given.reward,
                given.terminated,
                given.truncated,
                following,
                given.hidden,
            )
        )
        self.written += 1
        self.episodes[-1].over = self.is_after_end = given.ends
        self.resets_after = given.following if given.ends and not has_final else None
        return broke and not was_resumed

    # ---------------------------------------------------------------------------------------------- reading

    @property
    def oldest(self) -> int:
        """The time of the oldest step that is held."""
        return max(self.kept_from, self.written - self.capacity)

    def holds(self, step: Step) -> bool:
        return step.time >= self.oldest

    def held(self) -> list[Step]:
        return [step for episode in self.episodes for step in episode.steps if self.holds(step)]


class ReplayModel:
    """What every replay storage has: lanes, and steps that are served with their n-step targets.

    Args:
        num_envs: Lanes.
        capacity: Steps that a lane holds.
        n_step: Steps in a target.
        discount: Gamma.
        autoreset: None, "NextStep", "SameStep" or "Disabled".
    """

    def __init__(
        self, num_envs: int, capacity: int, n_step: int = 1, discount: float = 0.99, autoreset: str | None = None
    ) -> None:
        self.num_envs, self.capacity = num_envs, capacity
        self.n_step, self.discount, self.autoreset = n_step, discount, autoreset
        self.lanes = [Lane(env, capacity) for env in range(num_envs)]

    def add(self, step: list[Given | None]) -> tuple[list[int], bool]:
        """One call of add; None for an environment that sat out.

        Returns:
            The rows that were stored, and whether an episode was broken.
        """
        rows, broken = [], False
        for lane, given in zip(self.lanes, step, strict=True):
            if given is None:
                continue
            stored, broke = lane.add(given, self.autoreset)
            broken |= broke
            if stored:
                rows.append(self.row(lane.written - 1, lane.env))
        return rows, broken

    def append(self, steps: list[list[Step]]) -> list[int]:
        """What insert_data_slice does with the steps of each lane: they are transitions, and none is a reset step.

        The step after them is one only if it always is, after an end.
        """
        rows = []
        for lane, given in zip(self.lanes, steps, strict=True):
            for step in given:
                lane.store(
                    Given(
                        step.observation,
                        step.action,
                        step.reward,
                        step.following,
                        step.terminated,
                        step.truncated,
                        hidden=step.hidden,
                    )
                )
                rows.append(self.row(lane.written - 1, lane.env))
            lane.resets_after = None
        self.resume()
        return rows

    def resume(self) -> None:
        """The storage was saved and loaded, or opened again."""
        for lane in self.lanes:
            lane.resume()

    def reset(self) -> None:
        for lane in self.lanes:
            lane.forget()

    # ---------------------------------------------------------------------------------------------- what is there

    def row(self, time: int, env: int) -> int:
        return time * self.num_envs + env

    def row_of(self, step: Step) -> int:
        return self.row(step.time, step.env)

    def held(self) -> list[Step]:
        return [step for lane in self.lanes for step in lane.held()]

    def by_lane(self) -> list[list[Step]]:
        return [lane.held() for lane in self.lanes]

    def held_episodes(self) -> list[tuple[list[Step], Episode]]:
        """The steps that are held of each episode, in the order of their first ones, and the episode."""
        found = [([s for s in e.steps if lane.holds(s)], e) for lane in self.lanes for e in lane.episodes]
        return sorted([one for one in found if one[0]], key=lambda one: self.row_of(one[0][0]))

    def rows(self) -> set[int]:
        return {self.row_of(step) for step in self.held()}

    def is_full(self) -> bool:
        return all(len(lane.held()) == self.capacity for lane in self.lanes)

    def was_written(self, row: int) -> bool:
        time, env = divmod(row, self.num_envs)
        return 0 <= time < self.lanes[env].written

    # ---------------------------------------------------------------------------------------------- n steps

    def transitions(self) -> list[Transition]:
        """Every held step, as it is to be served."""
        served = []
        for lane in self.lanes:
            for episode in lane.episodes:
                for place, step in enumerate(episode.steps):
                    if lane.holds(step):
                        served.append(self._folded(step, episode.steps[place : place + self.n_step]))
        return served

    def _folded(self, step: Step, ahead: list[Step]) -> Transition:
        """The target of a step from the steps ahead of it in its episode, itself the first."""
        sums = [0.0] * len(step.reward)
        for power, other in enumerate(ahead):
            sums = [total + self.discount**power * one for total, one in zip(sums, other.reward, strict=True)]
        last = ahead[-1]
        discount = 0.0 if last.terminated else self.discount ** len(ahead)
        return Transition(self.row_of(step), step.observation, step.action, tuple(sums), discount, last.following)

    # ---------------------------------------------------------------------------------------------- sequences

    def windows(self, length: int, stride: int, across_episodes: bool = False) -> list[Window]:
        """Every sequence whose first step is held, whether it may start there or not being a matter of its episode."""
        found = []
        for lane in self.lanes:
            if across_episodes:
                found += self._windows_across(lane, length, stride)
                continue
            for episode in lane.episodes:
                for start in self._starts(len(episode.steps), episode.over, length, stride):
                    steps = episode.steps[start : start + length]
                    if lane.holds(steps[0]):
                        firsts = tuple(start + place == 0 for place in range(len(steps)))
                        found.append(Window(self.row_of(steps[0]), tuple(steps), firsts))
        return found

    @staticmethod
    def _starts(steps: int, over: bool, length: int, stride: int) -> list[int]:
        if steps < length:
            return [0] if over else []
        starts = [start for start in range(0, steps, stride) if start + length <= steps]
        if over and starts[-1] + length < steps:
            starts.append(steps - length)
        return starts

    def _windows_across(self, lane: Lane, length: int, stride: int) -> list[Window]:
        steps = [step for episode in lane.episodes for step in episode.steps]
        firsts = [place == 0 for episode in lane.episodes for place in range(len(episode.steps))]
        return [
            Window(
                self.row_of(steps[start]), tuple(steps[start : start + length]), tuple(firsts[start : start + length])
            )
            for start in range(0, len(steps) - length + 1, stride)
            if lane.holds(steps[start])
        ]

    # ---------------------------------------------------------------------------------------------- goals

    def goals(self, strategy: str) -> dict[int, list[int]]:
        """By row, the achieved goals that may take the place of the desired one, each with the same chance."""
        found = {}
        for lane in self.lanes:
            for episode in lane.episodes:
                for place, step in enumerate(episode.steps):
                    if lane.holds(step):
                        chosen = {
                            "future": episode.steps[place:],
                            "final": episode.steps[-1:],
                            "episode": [other for other in episode.steps if lane.holds(other)],
                        }[strategy]
                        found[self.row_of(step)] = [other.following[1] for other in chosen]
        return found


class Priorities:
    """What prioritized storages hold beside the rows: priority to the power of alpha, by row."""

    def __init__(self, alpha: float, beta: float, beta_steps: int | None) -> None:
        self.alpha, self.beta, self.beta_steps = alpha, beta, beta_steps
        self.held: dict[int, float] = {}
        self.drawn = 0
        self.stale = 0

    def largest(self, rows: set[int] | None = None) -> float:
        """The priority of a new row: the largest of those held (of ``rows``), 1 if none is above 0."""
        return max((value for row, value in self.held.items() if rows is None or row in rows), default=0.0) or 1.0

    def keep(self, rows: set[int]) -> None:
        """Forget all but these rows, which are the ones still there."""
        self.held = {row: value for row, value in self.held.items() if row in rows}

    def update(self, rows: list[int], priorities: list[float]) -> None:
        for row, priority in zip(rows, priorities, strict=True):
            if row in self.held:
                self.held[row] = priority**self.alpha
            else:
                self.stale += 1

    def next_beta(self) -> float:
        """Beta for the next batch, which is thereby drawn."""
        share = 0.0 if self.beta_steps is None else min(1.0, self.drawn / self.beta_steps)
        self.drawn += 1
        return self.beta + share * (1 - self.beta)

    def weights(self, rows: list[int], beta: float) -> list[float]:
        total, size = sum(self.held.values()), len(self.held)
        raw = [(self.held[row] / total * size) ** -beta for row in rows]
        return [weight / max(raw) for weight in raw]
