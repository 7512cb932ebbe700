"""The device's side of the scans: what flows backward through time, lane by lane, and moments over all lanes.

Loops are written with ``while``: Triton's interpreter cannot count to a number that was an argument.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _after(later_rate, later, rate, own):
    """``x -> own + rate * x`` after ``x -> later + later_rate * x``; where an episode ends between them, only ``own``.

    The rate is NaN there, which it stays whatever it is multiplied with. At a rate of 0 all flows as at any other: a
    NaN too, as in the reference.
    """
    return later_rate * rate, tl.where(rate != rate, own, own + rate * later)


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    """For sums of two tensors in one pass: threads meet once, not twice."""
    return a + other_a, b + other_b


@triton.jit
def _add_triples(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _load_ends(
    terminated, truncated, final_values, at, inside, TRUNCATED: tl.constexpr, FINAL: tl.constexpr, DONES: tl.constexpr
):
    """Where an episode really ended, where it was only cut off, where its final value is not known, and that value.

    With DONES ``terminated`` tells of every end, and those that ``truncated`` tells of too were only cut off.
    """
    over = tl.load(terminated + at, mask=inside, other=0) != 0
    if TRUNCATED:
        cut_off = tl.load(truncated + at, mask=inside, other=0) != 0
        if DONES:
            over = over & (cut_off == 0)
        cut_off = cut_off & (over == 0)
    else:
        cut_off = over & (over == 0)
    if FINAL:
        final = tl.load(final_values + at, mask=inside & cut_off, other=0.0)
        unknown = cut_off & (final != final)
    else:
        final = tl.zeros(at.shape, final_values.dtype.element_ty)
        unknown = cut_off
    return over, cut_off, unknown, final


@triton.jit
def _load_following(values, last_values, at, t, lane, steps, lanes, inside):
    """The value after step t: that of the step after it, and after the last step ``last_values``."""
    following = tl.load(values + at + lanes, mask=inside & (t < steps - 1), other=0.0)
    last = tl.load(last_values + lane + 0 * t, mask=inside & (t == steps - 1), other=0.0)
    return tl.where(t == steps - 1, last, following)


@triton.jit
def _load_deltas(
    rewards,
    values,
    last_values,
    terminated,
    truncated,
    final_values,
    t,
    lane,
    steps,
    lanes,
    inside,
    gamma,
    TRUNCATED: tl.constexpr,
    FINAL: tl.constexpr,
    DONES: tl.constexpr,
):
    """The value of each step, what it adds to its advantage, and whether its episode ends with it."""
    at = t * lanes + lane
    zero = tl.zeros(at.shape, rewards.dtype.element_ty)
    discount = tl.full(at.shape, gamma, rewards.dtype.element_ty)
    over, cut_off, unknown, final = _load_ends(terminated, truncated, final_values, at, inside, TRUNCATED, FINAL, DONES)
    value = tl.load(values + at, mask=inside, other=0.0)
    following = _load_following(values, last_values, at, t, lane, steps, lanes, inside)
    bootstrap = tl.where(over, zero, tl.where(cut_off, final, following))
    delta = tl.load(rewards + at, mask=inside, other=0.0) + discount * bootstrap - value
    return value, tl.where(unknown | (inside == 0), zero, delta), over | cut_off


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
    EVEN: tl.constexpr,
    LONG: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Generalised advantage estimation for LANES lanes, STEPS steps at a time from the last to the first.

    EVEN says that there are a multiple of 16 lanes, which makes for wider accesses; LONG, that there are more steps
    than that. With MOMENTS, each program leaves the moments of its advantages: see :func:`_store_moments`.
    """
    kind: tl.constexpr = rewards.dtype.element_ty
    if EVEN:
        lanes = lanes // 16 * 16
    first_lane = tl.program_id(0).to(tl.int64) * LANES
    lane = first_lane + tl.arange(0, LANES)[None, :]
    row = tl.arange(0, STEPS)[:, None]
    zero = tl.zeros([STEPS, LANES], kind)
    nothing = tl.full([STEPS, LANES], float("nan"), kind)
    flow = tl.full([STEPS, LANES], rate, kind)
    carried = tl.zeros([LANES], kind)
    if MOMENTS:
        # Sums of deviations from one of the advantages, so that equal ones have no spread at all: from that of the
        # first lane's last step, which is known without waiting for the scan.
        _, shift, _ = _load_deltas(
            rewards,
            values,
            last_values,
            terminated,
            truncated,
            final_values,
            steps - 1,
            first_lane,
            steps,
            lanes,
            steps > 0,
            gamma,
            TRUNCATED,
            FINAL,
            DONES,
        )
        shift = shift.to(tl.float64)
    sums = tl.zeros([LANES], tl.float64)
    squares = tl.zeros([LANES], tl.float64)
    first = 0
    while first < steps:
        t = steps - first - STEPS + row
        inside = (t >= 0) & (lane < lanes)
        at = t * lanes + lane
        value, delta, ended = _load_deltas(
            rewards,
            values,
            last_values,
            terminated,
            truncated,
            final_values,
            t,
            lane,
            steps,
            lanes,
            inside,
            gamma,
            TRUNCATED,
            FINAL,
            DONES,
        )
        flows = tl.where(ended | (inside == 0), nothing, flow)
        through, own = tl.associative_scan((flows, delta), 0, _after, reverse=True)
        advantage = tl.where(through != through, own, own + through * carried[None, :])
        tl.store(advantages + at, advantage, mask=inside)
        tl.store(returns + at, advantage + value, mask=inside)
        if LONG:
            carried = tl.sum(tl.where(row == 0, advantage, zero), 0)
        if MOMENTS:
            away = tl.where(inside, advantage.to(tl.float64) - shift, 0.0)
            own_sums, own_squares = tl.reduce((away, away * away), 0, _add_pairs)
            sums += own_sums
            squares += own_squares
        first += STEPS
    if MOMENTS:
        count = (steps * tl.minimum(lanes - first_lane, LANES)).to(tl.float64)
        total, squared = tl.reduce((sums, squares), 0, _add_pairs)
        _store_moments(moments, count, shift, total, squared)


@triton.jit
def _store_moments(moments, count, shift, total, squares):
    """What a program's part counts, a number near it, and the sums of the differences from that and of their squares.

    One row of ``moments[4, programs]`` each.
    """
    parts = tl.num_programs(0)
    place = moments + tl.program_id(0)
    tl.store(place, count)
    tl.store(place + parts, shift)
    tl.store(place + 2 * parts, total)
    tl.store(place + 3 * parts, squares)


@triton.jit(do_not_specialize=["count"])
def measure(x, moments, count: tl.int64, ENTRIES: tl.constexpr):
    """The moments of each program's part of ``x``: see :func:`_store_moments`."""
    first = tl.program_id(0).to(tl.int64) * ENTRIES
    entry = first + tl.arange(0, ENTRIES)
    inside = entry < count
    shift = tl.load(x + first).to(tl.float64)
    away = tl.where(inside, tl.load(x + entry, mask=inside, other=0.0).to(tl.float64) - shift, 0.0)
    held = tl.minimum(count - first, ENTRIES).to(tl.float64)
    _store_moments(moments, held, shift, tl.sum(away, 0), tl.sum(away * away, 0))


@triton.jit(do_not_specialize=["parts", "count", "epsilon"])
def normalize_entries(
    x,
    moments,
    parts: tl.int64,
    count: tl.int64,
    epsilon: tl.float64,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """``x = (x - mean) / (std + epsilon)`` in place, with the moments that its parts were found to have."""
    if EVEN:  # a multiple of 16: this makes for wider accesses
        count = count // 16 * 16
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    own = tl.load(x + entry, mask=inside, other=0.0).to(tl.float64)
    base = tl.load(moments + parts)
    counts = tl.zeros([PARTS], tl.float64)
    sums = tl.zeros([PARTS], tl.float64)
    squares = tl.zeros([PARTS], tl.float64)
    first = 0
    while first < parts:
        part = first + tl.arange(0, PARTS)
        there = part < parts
        held = tl.load(moments + part, mask=there, other=0.0)
        away = tl.load(moments + parts + part, mask=there, other=0.0) - base
        own_sum = tl.load(moments + 2 * parts + part, mask=there, other=0.0)
        own_squares = tl.load(moments + 3 * parts + part, mask=there, other=0.0)
        counts += held
        sums += own_sum + held * away
        squares += own_squares + away * (2 * own_sum + held * away)
        first += PARTS
    total, summed, squared = tl.reduce((counts, sums, squares), 0, _add_triples)
    mean = summed / total
    spread = squared - mean * mean * total
    # Of a single entry there is no spread; rounding may leave a little less than none.
    variance = tl.where(total > 1, spread / tl.where(total > 1, total - 1, total), 0.0)
    std = tl.sqrt(tl.where(variance < 0, 0.0, variance))
    scale = 1.0 / (std + epsilon)  # one division in all: those of float64 are slow
    tl.store(x + entry, (((own - base) - mean) * scale).to(x.dtype.element_ty), mask=inside)


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
    """Discounted returns for LANES lanes, STEPS steps at a time from the last to the first."""
    kind: tl.constexpr = rewards.dtype.element_ty
    own_lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    lane = own_lane[None, :]
    row = tl.arange(0, STEPS)[:, None]
    zero = tl.zeros([STEPS, LANES], kind)
    nothing = tl.full([STEPS, LANES], float("nan"), kind)
    flow = tl.full([STEPS, LANES], gamma, kind)
    carried = tl.load(last_values + own_lane, mask=own_lane < lanes, other=0.0)
    first = 0
    while first < steps:
        t = steps - first - STEPS + row
        inside = (t >= 0) & (lane < lanes)
        at = t * lanes + lane
        over, cut_off, unknown, final = _load_ends(
            terminated, truncated, final_values, at, inside, TRUNCATED, FINAL, False
        )
        reward = tl.load(rewards + at, mask=inside, other=0.0)
        own = reward + tl.where(cut_off & (unknown == 0), flow * final, zero)
        flows = tl.where(over | cut_off | (inside == 0), nothing, flow)
        through, own = tl.associative_scan((flows, own), 0, _after, reverse=True)
        found = tl.where(through != through, own, own + through * carried[None, :])
        tl.store(returns + at, found, mask=inside)
        carried = tl.sum(tl.where(row == 0, found, zero), 0)
        first += STEPS


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
        over, cut_off, unknown, final = _load_ends(
            terminated, truncated, final_values, at, there, TRUNCATED, FINAL, False
        )
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
    LANES: tl.constexpr,
):
    """V-trace for LANES lanes, step by step from the last to the first."""
    kind: tl.constexpr = rewards.dtype.element_ty
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = lane < lanes
    zero = tl.zeros([LANES], kind)
    discount = tl.full([LANES], gamma, kind)
    flow = tl.full([LANES], rate, kind)
    next_value = tl.load(last_values + lane, mask=inside, other=0.0)
    next_target = next_value
    back = 0
    while back < steps:
        at = (steps - 1 - back) * lanes + lane
        over, cut_off, unknown, final = _load_ends(
            terminated, truncated, final_values, at, inside, TRUNCATED, FINAL, False
        )
        value = tl.load(values + at, mask=inside, other=0.0)
        reward = tl.load(rewards + at, mask=inside, other=0.0)
        rho = tl.exp(tl.load(log_rhos + at, mask=inside, other=0.0))
        bootstrap = tl.where(over, zero, tl.where(cut_off, final, next_value))
        delta = _at_most(rho, tl.full([LANES], clip_rho, kind)) * (reward + discount * bootstrap - value)
        flowing = tl.where(over | cut_off, zero, next_target - next_value)
        target = value + delta + flow * _at_most(rho, tl.full([LANES], clip_c, kind)) * flowing
        bootstrap = tl.where(over, zero, tl.where(cut_off, final, next_target))
        advantage = _at_most(rho, tl.full([LANES], clip_pg_rho, kind)) * (reward + discount * bootstrap - value)
        next_target = tl.where(unknown, value, target)
        next_value = value
        tl.store(targets + at, next_target, mask=inside)
        tl.store(advantages + at, tl.where(unknown, zero, advantage), mask=inside)
        back += 1
