"""What every version of a kernel implements: native (C++) on the CPU, Triton on CUDA, plain torch on any other device.

The memory contract of all of them:

- Kernels own no data. Every tensor that they read or write belongs to the caller, is contiguous unless stated
  otherwise, and is on the device of the version. Kernel objects keep references to the tensors they are made with.
- Outputs are written into tensors that the caller gives, whose shape and dtype fit; only :class:`ReplayGather` makes
  its own.
- A refused call has written nothing.

The versions for CUDA never wait for the device, so they do not look at values: what others would refuse, they drop or
replace, as stated at each operation.

A row id is ``time * lanes + lane``, where ``time`` counts the rows ever written to the lane. A generator is int64
``[seed, draws made]``: what is drawn is a function of these two numbers, the same in all versions.
"""

# ruff: noqa: D102  (what is called says what it is in the docstring of its class)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from rlstore.kernels.rules import NO_RULES, Rule

# What a flag may be given as.
FLAG_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64)

# What EpisodeRing.write() returns, besides the index of a value that does not fit.
WRITTEN, NEEDS_EPISODES, NEEDS_STARTS, WRITTEN_WITH_BREAK, BUSY, NEEDS_ROOM, WRITTEN_WITH_REPEAT = range(-1, -8, -1)
DONE = (WRITTEN, WRITTEN_WITH_BREAK, WRITTEN_WITH_REPEAT)  # of a step that was written
# In after_end: the rows of a lane are from before, so its next row may begin an episode although one is open.
RESUMED = -2
# In current: a row of the lane is being written.
WRITING = -2

# Why Priorities.update() refuses: no priority, a row that was never written, a row at which no window begins, or values
# that it does not read as they are.
NOT_A_PRIORITY, NEVER_WRITTEN, NO_WINDOW, NOT_READ = 1, 2, 3, 4

Target = tuple[Tensor, int, bool, bool]  # block [rows, ...], lead, is a flag, is optional
Leaf = tuple[Tensor, tuple[int, ...], int, int]  # block [lanes, rows, *frame], shape of a stack, stack, outer
Column = tuple[Tensor, tuple[int, ...]]  # block [lanes, rows, *shape], shape
Request = tuple[int, int, bool, tuple[int, ...]]  # part, leaf or column, as float32, shape of one row


class Part(IntEnum):
    """What one tensor of a batch of transitions holds."""

    OBSERVATION = 0
    NEXT_OBSERVATION = 1  # what followed the n-step window
    COLUMN = 2
    REWARDS = 3  # sum of gamma^i r_i over the window
    DISCOUNTS = 4  # gamma^k after a window of k steps; 0 after a termination
    TERMINATED = 5  # the window ends with a termination
    TRUNCATED = 6
    IS_FIRST = 7  # the row is the first of its episode
    IS_HELD = 8  # there is a row


# ---------------------------------------------------------------------------------------------------- rollouts: rows


class RowWriter(Protocol):
    """Writes one time row into several blocks ``[rows, ...]`` at once, or into none of them.

    Args:
        targets: For each field ``(block, lead, is_flag, optional)``: the value of row t goes to ``block[t + lead]``,
            and None may be given for an optional one.
        rules: By the index of a field the values that it may hold, where not all are valid.
    """

    def __init__(self, targets: Sequence[Target], rules: Mapping[int, Rule] = NO_RULES) -> None: ...

    def write(self, row: int, values: tuple[Any, ...]) -> int:
        """Write, and return -1; or the index of the first value that does not fit, having written nothing.

        A value fits if it is on the block's device, has the block's dtype (a flag: any of ``FLAG_DTYPES``, without NaN)
        and the shape of a row, and obeys its rule; rows of scalars are ``[n]`` or ``[n, 1]``. None leaves an optional
        field's row as it is. On CUDA a NaN among flags counts as True, and what breaks a rule is written and counted.
        A version may also take numpy arrays, and numbers of another dtype if it holds them: integers exactly, floats
        rounded.

        Raises:
            ValueError: If there is not one value for each field.
            IndexError: If the row is beyond the end of a block.
        """


class Gather(Protocol):
    """``targets[k][i] = sources[k].flatten(0, 1)[rows[i]]``, converted to the target's dtype."""

    def __call__(self, sources: tuple[Tensor, ...], rows: Tensor, targets: tuple[Tensor, ...], /) -> None: ...


class GatherBatches(Protocol):
    """:class:`Gather` of an epoch's rows ``[batches * size]``, as mini-batches in pieces of memory.

    Mini-batch b has the fields f with ``places[f] == p`` in ``pieces[p][b]``, which is flat and of the dtype to serve:
    one field ``[size, ...]`` after another, each beginning at a multiple of 16 entries.
    """

    def __call__(
        self, sources: tuple[Tensor, ...], rows: Tensor, places: tuple[int, ...], pieces: Sequence[Sequence[Tensor]], /
    ) -> None: ...


class Permutation(Protocol):
    """Row e of ``rows``, int64 ``[epochs, wanted]``: the first entries of a permutation of ``[0, held)``, ``keys[e]``.

    A Feistel network of six rounds shuffles ``[0, 2**bits)``, the smallest such range that holds them and is no smaller
    than 64; what falls outside of ``[0, held)`` is shuffled again until it falls inside. Keys are any int64; equal keys
    give equal permutations. ``rows`` may be strided in its first dimension.
    """

    def __call__(self, keys: Tensor, held: int, rows: Tensor, /) -> None: ...


class GatherSlots(Protocol):
    """``targets[k][t, i] = sources[k][slots[i], t]``: the rollouts of some hand-off slots, side by side."""

    def __call__(self, sources: tuple[Tensor, ...], slots: Tensor, targets: tuple[Tensor, ...], /) -> None: ...


# ---------------------------------------------------------------------------------------------------- rollouts: scans
#
# Shapes: [steps, lanes], last_values [lanes], each with or without a trailing dimension of 1. Rewards, values and
# outputs are all float32 or all float64; flags are one-byte tensors.
#
# The end of an episode means the same in every scan:
# - terminated: no bootstrap, and nothing flows in from later steps;
# - truncated and not terminated: bootstrap from final_values, and nothing flows in from later steps; where the final
#   value is not known (final_values is None, or NaN there) the target of the step is its own value;
# - neither: bootstrap from the next step's value; after the last step from last_values.


class Gae(Protocol):
    """``A_t = delta_t + gamma * lam * A_{t+1}``, ``R_t = A_t + V_t``; cut where an episode ends."""

    def __call__(
        self, rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
        final_values: Tensor | None, gamma: float, lam: float, advantages: Tensor, returns: Tensor, /,
    ) -> None: ...  # fmt: skip


class FillGae(Protocol):
    """:class:`Gae` from flags of any dtype; with an ``epsilon`` the advantages are normalized, a single one to 0.

    On the CPU flags have one byte. With ``dones``, ``terminated`` flags every end, and those that ``truncated`` flags
    too were only cut off.
    """

    def __call__(
        self, rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
        final_values: Tensor | None, dones: bool, gamma: float, lam: float, epsilon: float | None, advantages: Tensor,
        returns: Tensor, /,
    ) -> None: ...  # fmt: skip


class DiscountedReturns(Protocol):
    """``R_t = r_t + gamma * R_{t+1}``. There are no values here: an unknown final value counts as 0."""

    def __call__(
        self, rewards: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
        final_values: Tensor | None, gamma: float, returns: Tensor, /,
    ) -> None: ...  # fmt: skip


class NStepReturns(Protocol):
    """``G_t = sum_{i<k} gamma^i r_{t+i} + gamma^k V_{t+k}``, k the smaller of n and the steps to the end."""

    def __call__(
        self, rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
        final_values: Tensor | None, gamma: float, n: int, returns: Tensor, /,
    ) -> None: ...  # fmt: skip


class Vtrace(Protocol):
    """V-trace (Espeholt et al. 2018): ``v_t = V_t + delta_t + gamma * lam * c_t * (v_{t+1} - V_{t+1})``."""

    def __call__(
        self, rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
        final_values: Tensor | None, log_rhos: Tensor, gamma: float, lam: float, clip_rho: float, clip_c: float,
        clip_pg_rho: float, targets: Tensor, advantages: Tensor, /,
    ) -> None: ...  # fmt: skip


class Normalize(Protocol):
    """``x = (x - mean) / (std + epsilon)`` in place, std unbiased, moments in float64; at least two entries."""

    def __call__(self, x: Tensor, epsilon: float, /) -> None: ...


# ------------------------------------------------------------------------------------------- rollouts: trajectories


class CountSegments(Protocol):
    """The number of trajectories in the lanes ``[first, last)`` of ``dones``, one-byte flags ``[steps, lanes]``."""

    def __call__(self, dones: Tensor, first: int, last: int, /) -> int: ...


class SplitSegments(Protocol):
    """Each trajectory's lane, first step and length, lane by lane: int64 ``[trajectories]`` each."""

    def __call__(
        self, dones: Tensor, first: int, last: int, lanes: Tensor, starts: Tensor, lengths: Tensor, /
    ) -> None: ...


class PadSegments(Protocol):
    """``target[t, s] = source[starts[s] + t, lanes[s]]`` within the trajectory, else zeros; and the mask of it."""

    def __call__(
        self, sources: tuple[Tensor, ...], lanes: Tensor, starts: Tensor, lengths: Tensor,
        targets: tuple[Tensor, ...], mask: Tensor, /,
    ) -> None: ...  # fmt: skip


class CopyLanes(Protocol):
    """``target[t, i] = source[t, first + i]`` for the lanes ``[first, last)``."""

    def __call__(self, sources: tuple[Tensor, ...], first: int, last: int, targets: tuple[Tensor, ...], /) -> None: ...


class FirstStates(Protocol):
    """``target[l, s] = states[starts[s], l, lanes[s]]`` for states ``[steps, layers, lanes, hidden]``."""

    def __call__(self, states: Tensor, lanes: Tensor, starts: Tensor, target: Tensor, /) -> None: ...


class TabulateTrajectories(Protocol):
    """Where the trajectories of each mini-batch of ``width`` lanes are, lane by lane.

    Args:
        dones: ``[steps, lanes]``, perhaps with a trailing dimension of 1.
        width: Mini-batch b has the lanes from ``b * width`` on.
        table: int32 ``[3, batches * width * steps]``: lane, first step and length of each trajectory. Mini-batch b has
            its own from ``b * width * steps`` on; the rest is not written.
        totals: int32 ``[batches]``: the number of trajectories of each mini-batch.
    """

    def __call__(self, dones: Tensor, width: int, table: Tensor, totals: Tensor, /) -> None: ...


class FillTrajectories(Protocol):
    """The tensors of one recurrent mini-batch, from the table of :class:`TabulateTrajectories`.

    Args:
        padded: Sources padded as in :class:`PadSegments`.
        states: Sources of first states, as in :class:`FirstStates`.
        copied: Sources copied as in :class:`CopyLanes`.
        table: As for :class:`TabulateTrajectories`.
        totals: As for :class:`TabulateTrajectories`.
        batch: Which mini-batch.
        width: Its lanes.
        targets: The outputs, in this order.
        mask: bool ``[steps, trajectories]``. Columns beyond the trajectories that there are become padding; if there
            are more trajectories than columns, the last ones are left out.
    """

    def __call__(
        self, padded: tuple[Tensor, ...], states: tuple[Tensor, ...], copied: tuple[Tensor, ...], table: Tensor,
        totals: Tensor, batch: int, width: int, targets: tuple[Tensor, ...], mask: Tensor, /,
    ) -> None: ...  # fmt: skip


# ---------------------------------------------------------------------------------------------------- replay


class Guard(Protocol):
    """The lock of a storage, which one thread at a time has, and may take again. It exists in C++ alone."""

    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...


class EpisodeRing(Protocol):
    """A ring of lanes whose rows belong to episodes.

    Frames are compared and copied as bytes: a NaN equals itself, and -0.0 is not 0.0. Everything is on one device; the
    portable version also takes blocks, final observations and starts on one and all the rest on the CPU.

    Args:
        steps: Rows that a lane holds.
        counters: written, begun, current, after_end, free_count, int64 ``[lanes]`` each: rows ever written, the first
            of them since the last clear; the index of the episode that is open, that of the one that ended last, each
            -1 if none; and episode indices that are free.
        episode_of: The index of each row's episode, int32 ``[lanes, rows]``; rows may be strided, as those of blocks.
        leaves: ``(block, shape of a whole stack, stack, outer)`` for each observation leaf. A block
            ``[lanes, rows, *frame]`` holds one frame a row, contiguous in itself, of at least ``steps + stack`` rows.
            A stack is ``outer`` pieces, each of ``stack`` frames one after another.
        columns: ``(block, shape)`` for each other field.
        reward: Which column holds the rewards, float32.
        resets: What the step after an end is: 0 a reset step if it looks like one, 1 always, 2 never, 3 never, and one
            that looks like it is reported. It looks like one if it repeats the final observation, without a flag and
            with a reward of 0 (3: any reward), and no final observation was given apart.
        first: Of the lanes that the tables serve, the one that is the first here.
        rules: By the index of a column the values that it may hold, where not all are valid. Lanes that take no part
            are not looked at. On CUDA what breaks a rule is written and counted.
    """

    def __init__(
        self, steps: int, counters: tuple[Tensor, ...], episode_of: Tensor, leaves: tuple[Leaf, ...],
        columns: tuple[Column, ...], reward: int, resets: int, first: int, rules: Mapping[int, Rule] = NO_RULES,
    ) -> None: ...  # fmt: skip

    def set_tables(
        self, episodes: Tensor, free_slots: Tensor, finals: tuple[Tensor, ...], starts: tuple[Tensor | None, ...]
    ) -> None:
        """Use these tables from now on; also called when counters were changed from outside.

        Args:
            episodes: int64 ``[episodes, 4]``: start, stop (-1 while it is open), end (bits: 1 terminated, 2 truncated)
                and padding (what was before the first frame: -1 that frame repeated, -2 zeros, 0 what ``starts`` has).
            free_slots: A stack of free episode indices for each lane, int32 ``[episodes / lanes, lanes]``.
            finals: For each leaf the final observation's newest frame, ``[episodes, *frame]``.
            starts: For each leaf the older frames of the first stack, ``[episodes, stack - 1, *frame]``, or None.
        """

    def write(self, values: tuple[object, ...]) -> int:
        """Write one step of all lanes.

        Args:
            values: Observation leaves, next observation leaves, columns; terminated and truncated ``[lanes]``; which
                lanes take part (None: all); final observation leaves, each None if there are none, and which lanes have
                one (None: all that end). In C++ values may be anything that means the same numbers, and a single leaf
                of final observations a list with None for lanes that have none.

        Returns:
            ``WRITTEN``, or ``WRITTEN_WITH_BREAK`` if an episode was broken off: its observations do not continue it,
            no end was flagged, and the lane was not ``RESUMED``; else ``WRITTEN_WITH_REPEAT`` if a step after an end
            repeats the final observation without a flag, and is not a reset step: with ``resets`` 0 because it has a
            reward, with 3 in any case (on CUDA a later write returns these, the second once). Or, having written
            nothing: the index of the first value that has to be converted or refused, ``NEEDS_EPISODES`` if
            more episode indices are needed (on CUDA asked for ahead of the need), ``NEEDS_STARTS`` if tables of
            starts are, or ``NEEDS_ROOM`` if no step may be written before the next :meth:`allow`.
        """

    def write_steps(
        self, values: tuple[object, ...], steps: int, begin: int, end: int, resumed: bool, checked: bool
    ) -> tuple[int, int]:
        """Write the steps from ``begin`` to before ``end``, or the first of them.

        Args:
            values: Those of :meth:`write`, of ``steps`` steps: ``[steps, lanes, ...]``.
            steps: The steps that there are.
            begin: The first to write.
            end: One past the last.
            resumed: None of them is a reset step, and the first need not continue what is held.
            checked: Whether all values are tensors that fit. If not, a version that does not check all of them before
                it writes one says that the first does not fit.

        Returns:
            The first step that was not written, and what :meth:`write` returns: ``WRITTEN_WITH_BREAK`` if any step did,
            else ``WRITTEN_WITH_REPEAT`` if any did, or if none was written why not. A value that has to be converted or
            refused is found before any is.
        """

    def guard_with(
        self,
        guard: Guard,
        steps: Tensor,
        whole: EpisodeRing | None,
        windows: WindowIndex | None,
        priorities: Priorities | None,
    ) -> bool:
        """Let :meth:`append` write while no thread has the guard, and :meth:`write_held`.

        False in a version that cannot.

        Args:
            guard: That of the storage.
            steps: int64 ``[1]`` on the CPU; each step is counted in it.
            whole: What observes the rows that are written here and in other processes, if they are others than its own.
            windows: Windows of the rows, which follow each step. The caller keeps them as long as it appends.
            priorities: Priorities of the rows, likewise.
        """

    def append(self, values: tuple[object, ...]) -> int:
        """:meth:`write`, and what follows from it, in one step as other threads see it.

        Returns:
            What :meth:`write` does; or ``BUSY``, having written nothing, if a thread has the guard or no step may be
            written.
        """

    def write_held(self, values: tuple[object, ...]) -> int:
        """:meth:`append` for a caller that has the guard; it returns what :meth:`write` does."""

    def repeated(self) -> int:
        """The row for which ``WRITTEN_WITH_REPEAT`` was returned last, the largest of several; -1 before any."""

    def allow(self, steps: int) -> None:
        """So many steps may be written from now on, whatever part of the lanes takes part in each; at first none.

        Raises:
            ValueError: If ``steps`` is negative.
        """

    def watch(self, written: Tensor) -> None:
        """Other processes write: ``written`` is the shared count; this ring's own is that of the last catch_up()."""

    def catch_up(self) -> None:
        """See what was written through other rings on the same memory."""

    def overrun(self, flags: Tensor) -> bool:
        """Set ``flags``, uint8 ``[lanes]``, where rows that count as held may have been overwritten; True if any."""

    def draw(self, generator: Tensor, rows: Tensor) -> None:
        """Fill ``rows``, int64, with rows drawn uniformly from all that are held.

        Raises:
            ValueError: If none is held; not on CUDA.
        """

    def bounds(self, rows: Tensor, first: Tensor, stop: Tensor) -> None:
        """The times of the first held row of each row's episode and of one past its last, int64 ``[n]``.

        Raises:
            IndexError: If a row is not held; on CUDA the nearest one that is held is taken.
        """

    def windows(self, starts: Tensor, length: int, across: bool, rows: Tensor) -> None:
        """The rows of windows that begin at ``starts``, int64 ``[n, length]``; -1 after the end of the episode.

        With ``across``, windows do not end with an episode. Raises as :meth:`bounds`.
        """


class ReplayGather(Protocol):
    """The tensors of a batch of transitions or sequences, bound to a ring of the same version.

    Args:
        ring: The rows.
        requests: ``(part, leaf or column, as float32, shape of one row)`` for each tensor: see :class:`Part`.
        n_step: Steps of an n-step window, at most.
        gamma: The discount factor.
    """

    def __init__(self, ring: EpisodeRing, requests: tuple[Request, ...], n_step: int, gamma: float) -> None: ...

    def gather(self, rows: Tensor, given: tuple[Tensor | None, ...] | None) -> tuple[Tensor, ...] | None:
        """One tensor ``[*rows.shape, ...]`` for each request: those given or (None) new ones on the blocks' device.

        A row of -1 gives zeros. Rows ``[windows, length]`` are windows of rows that follow one another.

        Returns:
            The tensors; None if another process overwrote some of the rows meanwhile.

        Raises:
            IndexError: If a row is not held; on CUDA it gives zeros.
        """

    def sample(self, generator: Tensor, count: int) -> tuple[Tensor, ...] | None:
        """:meth:`gather` of ``count`` rows drawn by :meth:`EpisodeRing.draw`."""

    def sample_by_priority(
        self, priorities: Priorities, generator: Tensor, beta: float, count: int
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor] | None:
        """:meth:`gather` of ``count`` rows drawn by :meth:`Priorities.draw`, in fewer launches than the two.

        Returns:
            The tensors, the weights float32 ``[count, 1]`` and the rows int64 ``[count]``; None, having drawn nothing,
            if every priority is 0, or in a version that has no such shorter way.
        """

    def sample_windows(
        self, windows: WindowIndex, priorities: Priorities | None, generator: Tensor, beta: float, count: int
    ) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor] | None:
        """:meth:`gather` of ``count`` windows drawn by :meth:`WindowIndex.draw` or, with priorities, by theirs.

        Returns:
            The tensors, the weights float32 ``[count, 1]`` where there are priorities, and the rows int64 ``[count]``
            at which the windows begin; None, having drawn nothing, if there is nothing to draw from, or in a version
            that has no such shorter way.
        """


class WindowIndex(Protocol):
    """Windows of ``length`` rows that begin every ``stride`` rows of an episode, or (``across``) of a lane.

    An episode that is over has one more, which ends with it, if none does; one that is shorter than a window has a
    single, shorter one.

    Args:
        ring: The rows.
        length: Rows of a window.
        stride: Rows from the beginning of one to that of the next.
        across: Whether windows are of lanes.
        memory: For each lane a queue of the times at which windows begin, int64 ``[lanes, steps]``, its head and its
            tail, which only increase, the rows that were seen, and one more than the start of the episode that the
            newest of them belongs to, 0 if that is over; int64 ``[lanes]`` each.
    """

    def __init__(
        self, ring: EpisodeRing, length: int, stride: int, across: bool, memory: tuple[Tensor, ...]
    ) -> None: ...

    def follow(self) -> None:
        """Add the windows of the rows written since, and drop those whose first row was overwritten."""

    def rebuild(self) -> None:
        """Index all rows that are held, whatever was known before."""

    def count(self) -> int:
        """The number of windows. On CUDA this waits for the device."""

    def draw(self, generator: Tensor, rows: Tensor) -> None:
        """Fill ``rows``, int64, with the first rows of windows drawn uniformly.

        Raises:
            ValueError: If there is no window; on CUDA the rows are -1.
        """

    def contains(self, row: int) -> bool:
        """True if a window begins at this row. On CUDA this waits for the device."""

    def keep_priorities(self, leaves: Tensor) -> None:
        """Windows have priorities: ``leaves`` as in :class:`Priorities`.

        On CUDA :meth:`follow` sets those of windows that it adds and drops; elsewhere
        :meth:`Priorities.follow_windows` does, and this does nothing.
        """


class Priorities(Protocol):
    """Priorities of the rows of a ring: leaf ``lane * steps + time % steps`` holds ``priority ** alpha``.

    A new row takes the largest leaf that is held, or 1 if none is above 0. Numbers like alpha and beta count as the
    float32 nearest to them.

    Args:
        ring: The rows.
        memory: Leaves float32, as many as rows rounded up to a multiple of 16; the sums (float64) and maxima (float32)
            of all levels above them, one after another: see :meth:`level_sizes`; and the rows that were seen, int64
            ``[lanes]``.
    """

    def __init__(self, ring: EpisodeRing, memory: tuple[Tensor, ...]) -> None: ...

    @staticmethod
    def level_sizes(leaves: int) -> list[int]:
        """Entries of each level of sums above so many leaves."""

    def total(self) -> float:
        """The sum of all leaves. On CUDA this waits for the device."""

    def rebuild(self) -> None:
        """Recompute every sum; called when leaves were changed from outside."""

    def follow(self) -> None:
        """Set the first priorities of the rows written since; on CUDA the next draw does."""

    def begin(self, before: Tensor, priorities: Tensor, alpha: float) -> None:
        """Set other first priorities, after :meth:`follow`: of the newest row of each lane that has written since.

        Args:
            before: The rows that were written when the lanes began to, int64 ``[lanes]``.
            priorities: Float32 ``[lanes]``, finite and not negative where a row was written. On CUDA others are
                dropped, and counted in :meth:`dropped`.
            alpha: Their exponent.
        """

    def follow_windows(self, windows: WindowIndex) -> None:
        """Set the first priorities of windows that ``windows.follow()`` added, and drop those that it dropped."""

    def settle(self) -> None:
        """Set the first priorities that :meth:`follow` left to the next draw, so that the leaves can be read."""

    def dropped(self) -> int | Tensor:
        """Priorities that updates dropped, as their rows were overwritten; on CUDA a tensor ``[]``."""

    def draw(self, generator: Tensor, beta: float, rows: Tensor, weights: Tensor) -> bool:
        """Draw one row in each of as many equal parts of the total: ``rows`` int64 and ``weights`` float32, ``[n]``.

        Weights are ``(P(i) * size) ** -beta`` over the largest of them.

        Returns:
            False, having drawn nothing, if every priority is 0. On CUDA always True: then all weights are 0.
        """

    def update(self, rows: Any, priorities: Any, alpha: float, windows: WindowIndex | None) -> tuple[int, int, int]:
        """Set priorities, or none if any is refused. Where a row comes twice, the later one counts.

        Args:
            rows: int64 ``[n]``, a tensor where the ring is.
            priorities: float32 ``[n]`` or ``[n, 1]``, a tensor where the ring is.
            alpha: The exponent.
            windows: The windows, if only rows at which one begins have a priority.

        Returns:
            Why one was refused (0: none was; else ``NOT_A_PRIORITY``, ``NEVER_WRITTEN`` or ``NO_WINDOW``, or
            ``NOT_READ`` if the values are anything else that this version does not read), its index, and the number of
            rows dropped because they were overwritten, which :meth:`dropped` has counted. On CUDA else always
            (0, 0, 0): what others refuse is dropped, too.
        """


class DrawUnits(Protocol):
    """Fill ``units``, float64, with numbers uniform in [0, 1)."""

    def __call__(self, generator: Tensor, units: Tensor, /) -> None: ...
