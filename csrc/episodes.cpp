#include "episodes.h"

#include <algorithm>
#include <cstring>

#include "frames.h"
#include "rows.h"

namespace rlstore {

const char* padding_frame(const Lanes& lanes, const Observation& leaf, int64_t lane, int64_t slot, int64_t padding, int64_t start, int64_t at) {
  if (padding == kRepeated) return leaf.block.at(lane, lanes.by_rows.remainder(start));
  if (padding != kKept || !leaf.starts) return nullptr;
  // The first stack was [starts..., first frame].
  const int64_t older = static_cast<int64_t>(leaf.stack) - 1, kept = older - (start - at);
  return leaf.starts + (slot * older + kept) * static_cast<int64_t>(leaf.frame_bytes());
}

namespace {

void take_newest(char* frame, const char* stack, const Observation& leaf) {
  if (leaf.stack == 1)
    copy_row(frame, stack, leaf.frame_bytes());
  else
    take_frame(frame, stack, leaf, leaf.stack - 1);
}

// True if all frames of a stack continue the lane's newest row, whose episode is `slot`. The newest frame is given, the
// others are read from the ring.
bool stack_continues(const Lanes& lanes, const Observation& leaf, const char* stack, int64_t lane, int64_t slot, const char* newest) {
  if (leaf.stack == 1) return !memcmp(newest, stack, leaf.frame_bytes());
  const int64_t count = lanes.written[lane];
  const Episode& episode = lanes.episodes[slot];
  // Tables from a damaged file must not cause accesses out of bounds.
  const bool is_stored = episode.padding != kZeros && episode.padding != kRepeated;
  if (episode.start > count || (is_stored && !leaf.starts)) return false;
  std::vector<const char*> frames(leaf.stack, newest);
  for (size_t j = 0; j + 1 < leaf.stack; j++) {
    const int64_t time = count - static_cast<int64_t>(leaf.stack - 1 - j);
    frames[j] = time < episode.start ? padding_frame(lanes, leaf, lane, slot, episode.padding, episode.start, time)
                                     : leaf.block.at(lane, lanes.by_rows.remainder(time));
  }
  return stack_equals(stack, frames.data(), leaf);
}

bool continues(const Lanes& lanes, const std::vector<Observation>& leaves, const Step& step, int64_t lane) {
  const int64_t place = lanes.by_rows.remainder(lanes.written[lane]);
  for (size_t k = 0; k < leaves.size(); k++) {
    const char* given = step.observations[k] + lane * leaves[k].stack_bytes();
    if (!stack_continues(lanes, leaves[k], given, lane, lanes.current[lane], leaves[k].block.at(lane, place))) return false;
  }
  return true;
}

bool has_reward(const Step& step, int64_t lane) {
  for (size_t i = 0; i < step.reward_width; i++)
    if (step.rewards[lane * step.reward_width + i] != 0.0f) return true;
  return false;
}

// True if a step without a flag shows the final observation of the episode before.
bool repeats_final(const Lanes& lanes, const std::vector<Observation>& leaves, const Step& step, int64_t lane) {
  if (step.terminated[lane] || step.truncated[lane]) return false;
  const int64_t slot = lanes.after_end[lane];
  for (size_t k = 0; k < leaves.size(); k++) {
    const char *given = step.observations[k] + lane * leaves[k].stack_bytes(), *final = leaves[k].finals + slot * leaves[k].frame_bytes();
    if (!stack_continues(lanes, leaves[k], given, lane, slot, final)) return false;
  }
  return true;
}

// The effect of a step after an end. In next-step autoreset it repeats the final observation, with a reward of 0 and no flag.
Move move_after_end(const Lanes& lanes, const std::vector<Observation>& leaves, const Step& step, ResetSteps resets, int64_t lane) {
  if (resets == ResetSteps::kAlways) return Move::kSkip;
  if (resets == ResetSteps::kNever || !repeats_final(lanes, leaves, step, lane)) return Move::kBegin;
  return resets == ResetSteps::kTell && !has_reward(step, lane) ? Move::kSkip : Move::kRepeat;
}

// Which of the two usual paddings the older frames of a first stack have, or kKept if neither.
Padding padding_of(const char* stack, const Observation& leaf) {
  std::vector<char> newest(leaf.frame_bytes());
  take_frame(newest.data(), stack, leaf, leaf.stack - 1);
  std::vector<const char*> frames(leaf.stack, newest.data());
  if (stack_equals(stack, frames.data(), leaf)) return kRepeated;
  std::fill(frames.begin(), frames.end() - 1, nullptr);
  return stack_equals(stack, frames.data(), leaf) ? kZeros : kKept;
}

// The padding of all leaves: the episode has one value for it, so leaves that differ are stored.
Padding padding_of_all(const std::vector<Observation>& leaves, const Step& step, int64_t lane) {
  Padding padding = kRepeated;
  bool first = true;
  for (size_t k = 0; k < leaves.size(); k++) {
    if (leaves[k].stack == 1) continue;
    const Padding found = padding_of(step.observations[k] + lane * leaves[k].stack_bytes(), leaves[k]);
    padding = first || found == padding ? found : kKept;
    first = false;
  }
  return padding;
}

void keep_start(const std::vector<Observation>& leaves, const Step& step, int64_t lane, int64_t slot) {
  for (size_t k = 0; k < leaves.size(); k++) {
    const Observation& leaf = leaves[k];
    for (size_t j = 0; j + 1 < leaf.stack; j++)
      take_frame(leaf.starts + (slot * (leaf.stack - 1) + j) * leaf.frame_bytes(), step.observations[k] + lane * leaf.stack_bytes(), leaf, j);
  }
}

bool lacks_starts(const std::vector<Observation>& leaves) {
  for (const Observation& leaf : leaves)
    if (leaf.stack > 1 && !leaf.starts) return true;
  return false;
}

void free_oldest(const Lanes& lanes, int64_t lane) {
  const int64_t gone = lanes.written[lane] - lanes.kept;
  const int32_t slot = lanes.slot_at(lane, lanes.by_rows.remainder(gone));
  if (!lanes.has_slot(slot) || lanes.episodes[slot].stop != gone + 1 || lanes.free_count[lane] * lanes.table_lanes >= lanes.slots) return;
  lanes.free_slot(lane, lanes.free_count[lane]++) = slot;
}

void write_row(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns, const Step& step,
               ResetSteps resets, int64_t lane, Move move) {
  const int64_t count = lanes.written[lane], place = lanes.by_rows.remainder(count);
  int64_t slot = lanes.current[lane];
  if (move == Move::kBreak) {
    // The expected next observation is where the new one will be written: it becomes the final observation.
    for (const Observation& leaf : leaves)
      memcpy(leaf.finals + slot * leaf.frame_bytes(), leaf.block.at(lane, place), leaf.frame_bytes());
    __atomic_store_n(&lanes.episodes[slot].stop, count, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);  // a reader that reads the new observation also sees that the episode was closed
  }
  if (count - lanes.begun[lane] >= lanes.kept) {
    lanes.current[lane] = kWriting;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);  // before anything of the oldest row is overwritten
    free_oldest(lanes, lane);
  }
  if (move != Move::kContinue) {
    slot = lanes.free_slot(lane, --lanes.free_count[lane]);
    const Padding padding = padding_of_all(leaves, step, lane);
    if (padding == kKept) keep_start(leaves, step, lane, slot);
    lanes.episodes[slot] = Episode{count, -1, 0, padding};
  }
  lanes.after_end[lane] = -1;
  for (size_t k = 0; k < leaves.size(); k++)
    take_newest(leaves[k].block.at(lane, place), step.observations[k] + lane * leaves[k].stack_bytes(), leaves[k]);
  for (size_t k = 0; k < columns.size(); k++) copy_row(columns[k].at(lane, place), step.columns[k] + lane * columns[k].bytes, columns[k].bytes);
  lanes.slot_at(lane, place) = static_cast<int32_t>(slot);

  const bool ended = step.terminated[lane] || step.truncated[lane];
  const bool given = ended && !step.finals.empty() && (!step.has_final || step.has_final[lane]);
  const int64_t after = place + 1 == lanes.rows ? 0 : place + 1;
  for (size_t k = 0; k < leaves.size(); k++) {
    const Observation& leaf = leaves[k];
    const char* next = (given ? step.finals[k] : step.next_observations[k]) + lane * leaf.stack_bytes();
    take_newest(ended ? leaf.finals + slot * leaf.frame_bytes() : leaf.block.at(lane, after), next, leaf);
  }
  // Prefetches the row after next, so that it is in the cache when it is written, and what the next step frees; beyond the last
  // row of a lane there is nothing to prefetch, and no harm.
  for (const Observation& leaf : leaves) __builtin_prefetch(leaf.block.at(lane, after) + leaf.block.row_stride, 1);
  __builtin_prefetch(&lanes.slot_at(lane, after + lanes.rows - lanes.kept), 1);
  if (ended) {
    lanes.episodes[slot].end = (step.terminated[lane] ? +kTerminated : 0) | (step.truncated[lane] ? +kTruncated : 0);
    __atomic_store_n(&lanes.episodes[slot].stop, count + 1, __ATOMIC_RELEASE);
    // With a final observation of its own, the new episode has begun, unless resets are known to take a step.
    const bool may_repeat = resets == ResetSteps::kAlways || (resets != ResetSteps::kNever && !given);
    lanes.after_end[lane] = may_repeat ? slot : -1;
  }
  __atomic_store_n(lanes.written + lane, count + 1, __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_RELEASE);  // published before the next row overwrites anything, and before the oldest row counts as whole
  lanes.current[lane] = ended ? -1 : slot;
}

// Rows of `bytes` bytes, one after another, to places that are `stride` bytes apart.
RLSTORE_CLONES
void scatter_rows(char* target, size_t stride, const char* source, size_t bytes, size_t count) {
  if (stride == bytes)
    copy_row(target, source, bytes * count);
  else if (bytes == 4)
    for (size_t i = 0; i < count; i++) memcpy(target + i * stride, source + i * 4, 4);
  else if (bytes == 8)
    for (size_t i = 0; i < count; i++) memcpy(target + i * stride, source + i * 8, 8);
  else
    for (size_t i = 0; i < count; i++) copy_short(target + i * stride, source + i * bytes, bytes);
}

}  // namespace

int64_t count_continuing(const Lanes& lanes, const std::vector<Observation>& leaves, const Steps& steps, int64_t count) {
  const int64_t written = lanes.written[0], place = lanes.by_rows.remainder(written);
  if (lanes.current[0] < 0) return 0;
  // Also the observation after the last of them has its place behind it.
  count = std::min({count, lanes.kept - (written - lanes.begun[0]), lanes.rows - 1 - place});
  for (int64_t i = 0; i < count; i++)
    if (steps.terminated[i] || steps.truncated[i] || (steps.mask && !steps.mask[i])) count = i;
  for (const Observation& leaf : leaves) {
    if (leaf.stack > 1) return 0;
    const size_t k = static_cast<size_t>(&leaf - leaves.data()), bytes = leaf.frame_bytes();
    const char *given = steps.observations[k], *following = steps.next_observations[k];
    if (count > 0 && memcmp(leaf.block.at(0, place), given, bytes)) return 0;
    if (given + bytes == following) continue;  // the same memory, one step on
    for (int64_t i = 1; i < count; i++)
      if (memcmp(following + (i - 1) * bytes, given + i * bytes, bytes)) count = i;
  }
  return std::max<int64_t>(count, 0);
}

void write_continuing(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns, const Steps& steps,
                      int64_t count) {
  constexpr int64_t kTogether = 64;  // rows whose fields are written one field after another while they are in the cache
  const int64_t written = lanes.written[0], first = lanes.by_rows.remainder(written);
  const int32_t slot = static_cast<int32_t>(lanes.current[0]);
  for (int64_t done = 0; done < count; done += kTogether) {
    const int64_t place = first + done;
    const size_t rows = static_cast<size_t>(std::min(kTogether, count - done));
    for (size_t k = 0; k < leaves.size(); k++) {
      const Block& block = leaves[k].block;
      scatter_rows(block.at(0, place), block.row_stride, steps.observations[k] + done * block.bytes, block.bytes, rows);
    }
    for (size_t k = 0; k < columns.size(); k++)
      scatter_rows(columns[k].at(0, place), columns[k].row_stride, steps.columns[k] + done * columns[k].bytes, columns[k].bytes, rows);
    for (size_t i = 0; i < rows; i++) lanes.slot_at(0, place + static_cast<int64_t>(i)) = slot;
  }
  for (size_t k = 0; k < leaves.size(); k++) {
    const Block& block = leaves[k].block;
    copy_row(block.at(0, first + count), steps.next_observations[k] + (count - 1) * block.bytes, block.bytes);
  }
  lanes.after_end[0] = -1;
  __atomic_store_n(lanes.written, written + count, __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_RELEASE);  // published before the next row overwrites anything
}

Need plan_step(const Lanes& lanes, const std::vector<Observation>& leaves, const Step& step, ResetSteps resets, Move* moves) {
  Need need = Need::kNothing;
  const bool no_starts = lacks_starts(leaves);
  for (int64_t lane = 0; lane < lanes.lanes; lane++) {
    if (step.mask && !step.mask[lane])
      moves[lane] = Move::kSkip;
    else if (lanes.current[lane] >= 0)
      moves[lane] = continues(lanes, leaves, step, lane) ? Move::kContinue : Move::kBreak;
    else
      moves[lane] = lanes.after_end[lane] >= 0 ? move_after_end(lanes, leaves, step, resets, lane) : Move::kBegin;
    if (moves[lane] == Move::kSkip || moves[lane] == Move::kContinue) continue;
    if (lanes.free_count[lane] == 0)
      need = Need::kSlots;
    else if (need == Need::kNothing && no_starts && padding_of_all(leaves, step, lane) == kKept)
      need = Need::kStarts;
  }
  return need;
}

Told write_step(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                const Step& step, ResetSteps resets, const Move* moves) {
  Told told;
  for (int64_t lane = 0; lane < lanes.lanes; lane++) {
    if (moves[lane] == Move::kBreak && lanes.after_end[lane] != kResumed) told.has_broken = true;
    if (moves[lane] == Move::kRepeat) told.repeat = std::max(told.repeat, lanes.row(lane, lanes.written[lane]));
    if (moves[lane] != Move::kSkip)
      write_row(lanes, leaves, columns, step, resets, lane, moves[lane]);
    else if (!(step.mask && !step.mask[lane]))
      lanes.after_end[lane] = -1;  // the reset step is dropped; the next step is a transition again
  }
  return told;
}

}  // namespace rlstore
