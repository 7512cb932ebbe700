"""The device's side of the scans: what flows backward through time, one lane in each thread.

A thread loads what it needs of many steps at once, waits once, and then goes through them from the last to the first.

Loops are written with ``while``: Triton's interpreter cannot count to a number that was an argument.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from rlstore.kernels.cuda.moments_kernels import add_pairs, store_moments


@triton.jit
def _load_ends(terminated, truncated, final_values, at, inside, TRUNCATED: tl.constexpr, FINAL: tl.constexpr):
    """The flags of a step as they are held, and the value of its final observation; anything for what is absent."""
    ended = tl.load(terminated + at, mask=inside, other=0)
    cut, final = ended, tl.zeros(at.shape, final_values.dtype.element_ty)
    if TRUNCATED:
        cut = tl.load(truncated + at, mask=inside, other=0)
        if FINAL:
            final = tl.load(final_values + at, mask=inside, other=0.0)
    return ended, cut, final


@triton.jit
def _read_ends(ended, cut, final, TRUNCATED: tl.constexpr, FINAL: tl.constexpr, DONES: tl.constexpr):
    """Where an episode really ended, where it was only cut off, and where its final value is not known.

    With DONES ``ended`` tells of every end, and those that ``cut`` tells of too were only cut off.
    """
    over = ended != 0
    cut_off = over & (over == 0)
    if TRUNCATED:
        cut_off = cut != 0
        if DONES:
            over = over & (cut_off == 0)
        cut_off = cut_off & (over == 0)
    unknown = cut_off
    if FINAL:
        unknown = cut_off & (final != final)
    return over, cut_off, unknown


@triton.jit(do_not_specialize=["steps", "lanes", "gamma", "rate"])
def scan_advantages(
    rewards,
    values,
    last_values,
    terminated,
    truncated,
    final_values,
    advantages,
    returns,
    moments,
    steps: tl.int64,
    lanes: tl.int64,
    gamma: tl.float64,
    rate: tl.float64,
    TRUNCATED: tl.constexpr,
    FINAL: tl.constexpr,
    DONES: tl.constexpr,
    MOMENTS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Generalised advantage estimation for LANES lanes, STEPS steps at a time.

    With MOMENTS, each program leaves the moments of its advantages: see :func:`store_moments`.
    """
    kind: tl.constexpr = rewards.dtype.element_ty
    first_lane = tl.program_id(0).to(tl.int64) * LANES
    lane = first_lane + tl.arange(0, LANES)
    there = lane < lanes
    zero = tl.zeros([LANES], kind)
    discount, flow = tl.full([LANES], gamma, kind), tl.full([LANES], rate, kind)
    following = tl.load(last_values + lane, mask=there, other=0.0)
    carried = zero
    shift = tl.sum(zero.to(tl.float64), 0)
    sums, squares = zero.to(tl.float64), zero.to(tl.float64)
    stop = steps
    while stop > 0:
        loaded = ()
        for back in tl.static_range(1, STEPS + 1):
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            reward = tl.load(rewards + at, mask=inside, other=0.0)
            value = tl.load(values + at, mask=inside, other=0.0)
            ended, cut, final = _load_ends(terminated, truncated, final_values, at, inside, TRUNCATED, FINAL)
            loaded = loaded + ((reward, value, ended, cut, final),)  # noqa: RUF005  (Triton unpacks no tuples)
        for back in tl.static_range(1, STEPS + 1):
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            reward, value, ended, cut, final = loaded[back - 1]
            over, cut_off, unknown = _read_ends(ended, cut, final, TRUNCATED, FINAL, DONES)
            bootstrap = tl.where(over, zero, tl.where(cut_off, final, following))
            delta = tl.where(unknown, zero, reward + discount * bootstrap - value)
            carried = tl.where(over | cut_off, delta, delta + flow * carried)
            following = value
            tl.store(advantages + at, carried, mask=inside)
            tl.store(returns + at, carried + value, mask=inside)
            if MOMENTS:
                # Deviations from one of the advantages, that of the first lane's last step, so that equal ones have no
                # spread at all.
                if back == 1:
                    here = tl.sum(tl.where(lane == first_lane, carried, zero).to(tl.float64), 0)
                    shift = tl.where(stop == steps, here, shift)
                away = tl.where(inside, carried.to(tl.float64) - shift, 0.0)
                sums += away
                squares += away * away
        stop -= STEPS
    if MOMENTS:
        count = (steps * tl.minimum(lanes - first_lane, LANES)).to(tl.float64)
        total, squared = tl.reduce((sums, squares), 0, add_pairs)
        store_moments(moments, count, shift, total, squared)


@triton.jit(do_not_specialize=["steps", "lanes", "gamma"])
def scan_returns(
    rewards,
    last_values,
    terminated,
    truncated,
    final_values,
    returns,
    steps: tl.int64,
    lanes: tl.int64,
    gamma: tl.float64,
    TRUNCATED: tl.constexpr,
    FINAL: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Discounted returns for LANES lanes, STEPS steps at a time."""
    kind: tl.constexpr = rewards.dtype.element_ty
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = lane < lanes
    zero, discount = tl.zeros([LANES], kind), tl.full([LANES], gamma, kind)
    carried = tl.load(last_values + lane, mask=there, other=0.0)
    stop = steps
    while stop > 0:
        loaded = ()
        for back in tl.static_range(1, STEPS + 1):
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            reward = tl.load(rewards + at, mask=inside, other=0.0)
            ended, cut, final = _load_ends(terminated, truncated, final_values, at, inside, TRUNCATED, FINAL)
            loaded = loaded + ((reward, ended, cut, final),)  # noqa: RUF005
        for back in tl.static_range(1, STEPS + 1):
            reward, ended, cut, final = loaded[back - 1]
            over, cut_off, unknown = _read_ends(ended, cut, final, TRUNCATED, FINAL, False)
            after = tl.where(over | unknown, zero, discount * tl.where(cut_off, final, carried))
            carried = reward + after
            at = (stop - back) * lanes + lane
            tl.store(returns + at, carried, mask=there & (stop - back >= 0))
        stop -= STEPS


@triton.jit(do_not_specialize=["steps", "lanes", "n", "gamma"])
def fold_windows(
    rewards,
    values,
    last_values,
    terminated,
    truncated,
    final_values,
    returns,
    steps: tl.int64,
    lanes: tl.int64,
    n: tl.int64,
    gamma: tl.float64,
    TRUNCATED: tl.constexpr,
    FINAL: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """n-step returns, each window by itself, from its last step to its first; n is at most ``steps``."""
    kind: tl.constexpr = rewards.dtype.element_ty
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < steps * lanes
    start, lane = entry // lanes, entry % lanes
    stop = start + n
    after = tl.load(values + stop * lanes + lane, mask=inside & (stop < steps), other=0.0)
    last = tl.load(last_values + lane, mask=inside & (stop >= steps), other=0.0)
    after = tl.where(stop < steps, after, last)
    zero = tl.zeros([ENTRIES], kind)
    discount = tl.full([ENTRIES], gamma, kind)
    back = 0
    while back < n:
        t = stop - 1 - back
        there = inside & (t < steps)
        at = t * lanes + lane
        ended, cut, final = _load_ends(terminated, truncated, final_values, at, there, TRUNCATED, FINAL)
        over, cut_off, unknown = _read_ends(ended, cut, final, TRUNCATED, FINAL, False)
        bootstrap = tl.where(over, zero, tl.where(cut_off, final, after))
        target = tl.load(rewards + at, mask=there, other=0.0) + discount * bootstrap
        own = tl.load(values + at, mask=there & unknown, other=0.0)
        after = tl.where(there, tl.where(unknown, own, target), after)
        back += 1
    tl.store(returns + entry, after, mask=inside)


@triton.jit
def _at_most(x, bound):
    """The smaller one; NaN if x is."""
    return tl.where(x > bound, bound, x)


@triton.jit(do_not_specialize=["steps", "lanes", "gamma", "rate", "clip_rho", "clip_c", "clip_pg_rho"])
def scan_vtrace(
    rewards,
    values,
    last_values,
    terminated,
    truncated,
    final_values,
    log_rhos,
    targets,
    advantages,
    steps: tl.int64,
    lanes: tl.int64,
    gamma: tl.float64,
    rate: tl.float64,
    clip_rho: tl.float64,
    clip_c: tl.float64,
    clip_pg_rho: tl.float64,
    TRUNCATED: tl.constexpr,
    FINAL: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """V-trace for LANES lanes, STEPS steps at a time."""
    kind: tl.constexpr = rewards.dtype.element_ty
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = lane < lanes
    zero = tl.zeros([LANES], kind)
    discount, flow = tl.full([LANES], gamma, kind), tl.full([LANES], rate, kind)
    most_rho, most_c = tl.full([LANES], clip_rho, kind), tl.full([LANES], clip_c, kind)
    most_pg_rho = tl.full([LANES], clip_pg_rho, kind)
    next_value = tl.load(last_values + lane, mask=there, other=0.0)
    next_target = next_value
    stop = steps
    while stop > 0:
        loaded = ()
        for back in tl.static_range(1, STEPS + 1):
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            reward = tl.load(rewards + at, mask=inside, other=0.0)
            value = tl.load(values + at, mask=inside, other=0.0)
            log_rho = tl.load(log_rhos + at, mask=inside, other=0.0)
            ended, cut, final = _load_ends(terminated, truncated, final_values, at, inside, TRUNCATED, FINAL)
            loaded = loaded + ((reward, value, log_rho, ended, cut, final),)  # noqa: RUF005
        for back in tl.static_range(1, STEPS + 1):
            reward, value, log_rho, ended, cut, final = loaded[back - 1]
            over, cut_off, unknown = _read_ends(ended, cut, final, TRUNCATED, FINAL, False)
            rho = tl.exp(log_rho)
            bootstrap = tl.where(over, zero, tl.where(cut_off, final, next_value))
            delta = _at_most(rho, most_rho) * (reward + discount * bootstrap - value)
            flowing = tl.where(over | cut_off, zero, next_target - next_value)
            target = value + delta + flow * _at_most(rho, most_c) * flowing
            bootstrap = tl.where(over, zero, tl.where(cut_off, final, next_target))
            advantage = _at_most(rho, most_pg_rho) * (reward + discount * bootstrap - value)
            next_target = tl.where(unknown, value, target)
            next_value = value
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            tl.store(targets + at, next_target, mask=inside)
            tl.store(advantages + at, tl.where(unknown, zero, advantage), mask=inside)
        stop -= STEPS
