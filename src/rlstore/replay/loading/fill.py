"""From what a caller gives into a storage: all is checked, where it can be, before the first step is written."""

from __future__ import annotations

from rlstore.engine.calls import warn_caller
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError
from rlstore.replay.loading.lanes import Lanes
from rlstore.replay.loading.names import NOTHING
from rlstore.replay.loading.progress import Bar
from rlstore.replay.loading.sources import Source


def check(source: Source, fields: StepFields, bar: Bar) -> None:
    """Refuse episodes that do not fit; those that can be read only once are not looked at.

    Args:
        source: The episodes.
        fields: What a step consists of.
        bar: Shows how far it is.

    Raises:
        InvalidInputError: If one does not fit.
    """
    if source.is_repeatable:
        for _ in bar.over(source.given(fields, checked=True), "Checking", source.count):
            pass


def store(source: Source, fields: StepFields, lanes: Lanes, bar: Bar) -> int:
    """Write all episodes of a source, which were checked; returns the transitions that were written.

    Args:
        source: The episodes. If they can be read only once, each is checked before it is written.
        fields: What a step consists of.
        lanes: Where they go.
        bar: Shows how far it is.

    Raises:
        InvalidInputError: If an episode does not fit; the message says what was written before.
    """
    episodes = stored = lost = 0
    try:
        for given in bar.over(source.given(fields, checked=not source.is_repeatable), "Storing", source.count):
            for steps in given.pieces(alone=lanes.takes_alone, copied=lanes.copies):
                lanes.append(steps)
                stored += steps.count
            episodes, lost = episodes + 1, lost + given.lost
    except InvalidInputError as error:
        told = f"The {episodes:,} episodes before it were stored, {stored:,} transitions."
        raise InvalidInputError(str(error).replace(NOTHING, told if stored else NOTHING)) from error
    finally:
        lanes.flush()
    if lost:
        warn_caller(_LOST.format(lost=lost, stored=stored), UserWarning)
    if lanes.broken:
        warn_caller(_BROKEN.format(broken=lanes.broken, stored=stored), UserWarning)
    return stored


_LOST = (
    "{lost:,} of the steps given were left out, {stored:,} were stored. What was observed after the last step of an "
    "episode is not in arrays without next_observations, and nothing can be learnt from a step that was truncated "
    "without it; the step before is truncated instead. To store all, give next_observations or, of an episode, one "
    "observation more."
)
_BROKEN = (
    "some next_observations are not the observations of the next steps, in {broken:,} of {stored:,} steps, and no end "
    "was flagged there. The episodes were taken to be cut off at those points: n-step targets and sequences stop "
    "there. If they should not, flag all ends, and give observations and next_observations that were not normalized "
    "apart."
)
