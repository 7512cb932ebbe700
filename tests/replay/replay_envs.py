"""Vectorised environments that do as they are told, in every convention of ending and starting an episode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from replay_world import FORMS, Given, Token, Vector, final_info, mapped, reward_of, stacked

# What an environment does in a step: go on, end in one of three ways, sit out, or not go on from where it was.
MOVES = ("go", "go", "go", "go", "terminate", "truncate", "both", "sit", "break", "resemble")
# How it begins again after an end: a reset step, a new episode at once, or a step that looks like a reset step.
STARTS = ("reset", "fresh", "look alike", "near look alike", "ended look alike")
ENDS = {"terminate": (True, False), "truncate": (False, True), "both": (True, True)}


@dataclass
class Place:
    """Where one environment stands: what it shows next, None for a new episode, and how the last one ended."""

    shows: Token | None = None
    final: Token | None = None
    gave_final: bool = False
    is_after_reset_step: bool = False

    @property
    def is_after_end(self) -> bool:
        return self.final is not None


class Envs:
    """The environments of a storage.

    Args:
        kind: What their observations look like.
        action: What their actions look like.
        num_envs: How many there are.
        autoreset: The storage's setting; environments of "NextStep" reset in a step of its own and others need not.
        reward_size: Numbers in a reward.
    """

    def __init__(
        self, kind: Vector, action: Any, num_envs: int, autoreset: str | None = None, reward_size: int = 0
    ) -> None:
        self.kind, self.action, self.num_envs, self.autoreset = kind, action, num_envs, autoreset
        self.reward_size = reward_size
        self.ids = itertools.count(1)
        self.places = [Place() for _ in range(num_envs)]
        self.warning_is_open = False

    def step(
        self,
        moves: Sequence[str],
        start: str = "fresh",
        give_final: tuple[bool, ...] = (False, False, False),
        padding: str = "any",
    ) -> list[Given | None]:
        """What each environment gives, None where it sits out."""
        self.warning_is_open = False
        return [
            None if moves[env] == "sit" else self._one(env, moves[env], start, give_final[env], padding)
            for env in range(self.num_envs)
        ]

    def _one(self, env: int, move: str, start: str, give_final: bool, padding: str) -> Given:
        place, number = self.places[env], next(self.ids)
        reward = reward_of(number, max(1, self.reward_size))
        # An episode that does not begin where the reset step said breaks nothing; whether to warn of it is left open.
        self.warning_is_open |= place.is_after_reset_step and move in ("break", "resemble")
        if place.is_after_end:
            if self.autoreset == "NextStep" or (start == "reset" and self.autoreset is None and not place.gave_final):
                return self._reset_step(env, number, start, padding)
            observation, reward, move = self._begin(place, start, reward, move, padding)
        elif place.shows is None or move == "break":
            observation = self.kind.start(self.ids, padding)
        elif move == "resemble":
            observation = self.kind.resemble(place.shows, self.ids)
        else:
            observation = place.shows
        given = Given(observation, number, reward, self.kind.follow(observation, self.ids), hidden=next(self.ids))
        self.places[env] = Place(given.following)
        if move in ENDS:
            given.terminated, given.truncated = ENDS[move]
            last, give_final = given.following, give_final and self.autoreset != "NextStep"  # where it is refused
            if give_final:
                given.final, given.following = last, self.kind.start(self.ids, padding)
            self.places[env] = Place(given.following if give_final else None, last, give_final)
        return given

    def _reset_step(self, env: int, number: int, start: str, padding: str) -> Given:
        """The step in which a next-step environment resets; "NextStep" promises nothing of what it looks like."""
        final, fresh = self.places[env].final, self.kind.start(self.ids, padding)
        self.places[env] = Place(fresh, is_after_reset_step=True)
        zero = (0.0,) * max(1, self.reward_size)
        if self.autoreset == "NextStep" and start != "reset":
            strange = self.kind.start(self.ids, padding)
            return Given(strange, number, reward_of(number, len(zero)), fresh)
        return Given(final, number, zero, fresh)

    def _begin(
        self, place: Place, start: str, reward: tuple[float, ...], move: str, padding: str
    ) -> tuple[Token, tuple[float, ...], str]:
        """The first step of an episode, which may look like a reset step where those cannot be."""
        if start in ("fresh", "reset") or place.final is None:
            shows = place.shows if place.shows is not None and move != "break" else None
            return shows or self.kind.start(self.ids, padding), reward, move
        if self.autoreset is not None or place.gave_final:
            return place.final, tuple(0.0 for _ in reward), "go"
        if start == "near look alike":
            return self.kind.resemble(place.final, self.ids), tuple(0.0 for _ in reward), "go"
        if start == "ended look alike":
            return place.final, tuple(0.0 for _ in reward), "terminate"
        return place.final, (*(0.0 for _ in reward[:-1]), 0.125), "go"

    def forget(self) -> None:
        """The storage was reset, and so were the environments."""
        self.places = [Place() for _ in range(self.num_envs)]

    # ---------------------------------------------------------------------------------------------- as arguments

    def arguments(
        self, step: list[Given | None], form: str = "tensors", final_form: str = "objects", key: str = "final_obs"
    ) -> tuple[list[Any], torch.Tensor | None]:
        """The seven arguments of add and its mask; what is given for environments that sit out is rubbish."""
        filled = [given or self._rubbish() for given in step]
        to_form = FORMS["lists" if form == "bare" else form]
        if form == "bare":  # one environment, without an axis for it
            assert self.num_envs == 1
            one = filled[0]
            info = {} if one.final is None else {key: self.kind.render(one.final)}
            values = [self.kind.render(one.observation), self.action.render(one.action), self._reward(one)]
            return [*values, one.terminated, one.truncated, info, self.kind.render(one.following)], self._mask(step)
        observations = stacked([self.kind.render(given.observation) for given in filled])
        following = stacked([self.kind.render(given.following) for given in filled])
        arrays = (
            np.stack([self.action.render(given.action) for given in filled]),
            np.array([self._reward(given) for given in filled], np.float32),
            np.array([given.terminated for given in filled]),
            np.array([given.truncated for given in filled]),
        )
        infos = {} if self.autoreset == "NextStep" else final_info(self.kind, step, final_form, key, self.ids)
        return [mapped(observations, to_form), *(to_form(a) for a in arrays), infos, mapped(following, to_form)], (
            self._mask(step)
        )

    def _reward(self, given: Given) -> Any:
        return np.array(given.reward, np.float32) if self.reward_size else given.reward[0]

    def _mask(self, step: list[Given | None]) -> torch.Tensor | None:
        mask = torch.tensor([given is not None for given in step])
        return None if mask.all() else mask

    def _rubbish(self) -> Given:
        token = self.kind.start(self.ids)
        return Given(token, next(self.ids), (float("nan"),) * max(1, self.reward_size), token, True, True)

    def hidden(self, step: list[Given | None], layers: int = 1) -> torch.Tensor:
        """Recurrent states ``[layers, N, 2]`` that tell the numbers of a step."""
        numbers = torch.tensor([float(given.hidden) if given else -7.0 for given in step])
        return torch.stack([torch.stack([numbers, numbers + 0.25 * (layer + 1)], -1) for layer in range(layers)])
