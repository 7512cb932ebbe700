"""From what a caller gives into a storage: everything is checked, where it can be, before the first step is written."""

from __future__ import annotations

from rlstore.engine.calls import warn_caller
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError
from rlstore.replay.loading.lanes import Lanes
from rlstore.replay.loading.names import NOTHING
from rlstore.replay.loading.progress import Bar
from rlstore.replay.loading.sources import Source


def fill(source: Source, fields: StepFields, lanes: Lanes, bar: Bar) -> int:
    """Write all episodes of a source; returns the transitions that were written.

    Args:
        source: The episodes. If they can be read twice, all are checked before the first is written.
        fields: What a step consists of.
        lanes: Where they go.
        bar: Shows how far it is.

    Raises:
        InvalidInputError: If an episode does not fit; the message says what was written before.
    """
    if source.is_repeatable:
        for given in bar.over(source.given(fields), "Checking", source.count):
            given.check()
    episodes = stored = lost = 0
    try:
        for given in bar.over(source.given(fields), "Storing", source.count):
            if not source.is_repeatable:
                given.check()
            for steps in given.pieces(alone=lanes.takes_alone):
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
    if lanes.has_broken:
        warn_caller(_BROKEN, UserWarning)
    return stored


_LOST = (
    "{lost:,} of the steps given were left out, {stored:,} were stored. What was observed after the last step of an "
    "episode is not in arrays without next_observations, and nothing can be learnt from a step that was truncated "
    "without it; the step before is truncated instead. To store all, give next_observations or, of an episode, one "
    "observation more."
)
_BROKEN = (
    "some next_observations are not the observations of the next steps, and no end was flagged there. The episodes "
    "were taken to be cut off at those points: n-step targets and sequences stop there. If they should not, flag all "
    "ends, and give observations and next_observations that were not normalized apart."
)
