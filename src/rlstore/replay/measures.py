"""What ``stats()`` of a replay storage tells of its rows and of those who write them."""

from __future__ import annotations

import math

import torch

from rlstore.engine.measures import Measures, Most, Ratio, count_nonfinite, episodes, invalid, newest_steps
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.episode_table import episode_table, held_places
from rlstore.replay.sharing import Sharing


def measured_rows(ring: EpisodeRing) -> Measures:
    """The ages of the rows that are held, their episodes, and what is not finite; no device is waited for."""
    held, is_held = ring.held(), held_places(ring)
    table = episode_table(ring, is_held)
    ages = torch.where(held > 0, held - 1.0, -math.inf)
    rewards = ring.blocks["rewards"][:, : is_held.shape[1]]
    # Where all sums are finite so is every reward. A device is not asked: that would be a wait.
    is_fine = ring.device.type == "cpu" and bool(table.totals.isfinite().all())
    measures: Measures = {
        **episodes(
            table.lengths,
            table.totals,
            table.ends & 1 != 0,
            table.ends & 2 != 0,
            table.is_whole,
            table.is_over,
        ),
        "row_age_mean": Ratio((held * (held - 1)).sum() / 2, held.sum()),
        "row_age_max": Most(ages.amax()),
        "nonfinite_rewards": 0 if is_fine else count_nonfinite(rewards, is_held),
    }
    floats = [leaf for leaf in ring.leaves if leaf.field.dtype.is_floating_point]
    if floats:
        numbers = sum(math.prod(leaf.frame_shape) for leaf in floats)
        since = torch.arange(newest_steps(ring.reached(ring.steps), ring.lanes, numbers), device=ring.device)
        lane = torch.arange(ring.lanes, device=ring.device).unsqueeze(1)
        place, is_newest = (ring.written.unsqueeze(1) - 1 - since) % ring.rows, since < held.unsqueeze(1)
        found = [count_nonfinite(ring.blocks[leaf.field.name][lane, place], is_newest) for leaf in floats]
        measures["nonfinite_observations"] = torch.stack(found).sum()
    return {**measures, **invalid(ring.invalid)}


def measured_sharing(sharing: Sharing) -> Measures:
    """The writers that died, and with a rate limit how often and how long each side has waited for the other."""
    limiter, measures = sharing.control.limiter, Measures(lost_writers=sharing.lost_writers)
    if not limiter.is_on:
        return measures
    return {**measures, **limiter.insert_waits.measure("insert"), **limiter.sample_waits.measure("sample")}
