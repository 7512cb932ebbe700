#include "replay.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "frames.h"
#include "random.h"
#include "rows.h"
#include "simd.h"

namespace rlstore {

namespace {

// Rows are gathered in blocks and in three stages: the memory of a row is prefetched two blocks before it is copied, and its
// episode, whose place is in that memory, one block before.
constexpr size_t kBlock = 32, kStages = 3;
constexpr size_t kInFlight = 32 << 10;  // bytes that are prefetched for one block: a part of the second cache
constexpr size_t kLongField = 1024;  // bytes of a row that the hardware prefetches by itself

// The location of a row and of its n-step window.
struct Found {
  int64_t lane, time, place;
  int64_t slot;
  const Episode* episode;
  int64_t start;  // of its episode; a writer in another process may replace the table entry
  int64_t stop;   // of its episode, as far as it was written
  int64_t taken;  // steps of its n-step window
  bool at_end;    // the window ends with the episode: the next observation is its final observation
};

void convert_row(float* target, const char* source, const DLDataType& dtype, size_t width) {
  static const int64_t first = 0;
  const auto convert = [&](auto element) {
    gather_as_float(target, reinterpret_cast<const decltype(element)*>(source), &first, 1, width);
  };
  switch (dtype.code) {
    case kInt:
      return dtype.bits == 8 ? convert(int8_t{}) : dtype.bits == 16 ? convert(int16_t{}) : dtype.bits == 32 ? convert(int32_t{}) : convert(int64_t{});
    case kFloat:
      if (dtype.bits == 32) return static_cast<void>(memcpy(target, source, width * sizeof(float)));
      return dtype.bits == 16 ? convert(Half{}) : convert(double{});
    case kBfloat: return convert(BrainHalf{});
    default:
      return dtype.bits == 8 ? convert(uint8_t{}) : dtype.bits == 16 ? convert(uint16_t{}) : dtype.bits == 32 ? convert(uint32_t{}) : convert(uint64_t{});
  }
}

// Memory of which a row is read: `bytes` from base + lane * lane_stride + place * row_stride, fields of a record being one span.
struct Span {
  const char* base;
  size_t lane_stride, row_stride, bytes;
  const char* next_end;  // the end of what is read of the row behind the last one: of the next observation, or null
  size_t reach = 0;      // bytes that are read for a row, with the rows behind it
};

template <size_t kHalf>
RLSTORE_INLINE void copy_halves(char* target, const char* const* sources, size_t bytes, size_t count) {
  for (size_t i = 0; i < count; i++, target += bytes) {  // kHalf <= bytes <= 2 * kHalf: the halves may overlap
    memcpy(target, sources[i], kHalf);
    memcpy(target + bytes - kHalf, sources[i] + bytes - kHalf, kHalf);
  }
}

// Copies rows of the same size from anywhere to one after the other.
RLSTORE_INLINE void copy_rows(char* target, const char* const* sources, size_t bytes, size_t count) {
  if (bytes > 128 || bytes < 4)
    for (size_t i = 0; i < count; i++, target += bytes) copy_short(target, sources[i], bytes);
  else if (bytes > 64)
    copy_halves<64>(target, sources, bytes, count);
  else if (bytes > 32)
    copy_halves<32>(target, sources, bytes, count);
  else if (bytes > 16)
    copy_halves<16>(target, sources, bytes, count);
  else if (bytes > 8)
    copy_halves<8>(target, sources, bytes, count);
  else
    copy_halves<4>(target, sources, bytes, count);
}

class Gather {
 public:
  Gather(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns, size_t reward_column,
         const Fold& fold, const std::vector<Output>& outputs)
      : lanes_(lanes), leaves_(leaves), columns_(columns), rewards_(columns[reward_column]), fold_(fold), outputs_(outputs) {
    spans_.reserve(1 + leaves.size() + columns.size());
    add_span({lanes.episode_of, lanes.lane_stride, lanes.row_stride, sizeof(int32_t), nullptr});
    for (const Output& output : outputs) {
      const bool observed = output.part == Part::kObservation || output.part == Part::kNext;
      const Block* block = observed ? &leaves[output.leaf].block : output.part == Part::kColumn ? &columns[output.leaf] : nullptr;
      if (output.part == Part::kRewards) block = &rewards_;
      if (!block) continue;
      if (block->bytes <= kLongField)
        add_span({block->base, block->lane_stride, block->row_stride, block->bytes, output.part == Part::kNext ? block->base + block->bytes : nullptr});
      else
        long_bytes_ += block->bytes;
    }
  }

  // Rows that are not held give zeros.
  RLSTORE_INLINE Gathered run(const int64_t* rows, size_t count) {
    // A long field ends the block: the next observation has much of what is still in the cache.
    const size_t touched = long_bytes_ + reach(static_cast<size_t>(fold_.n_step));
    const size_t size = std::max<size_t>(1, std::min(kBlock, kInFlight / touched)), blocks = (count + size - 1) / size;
    Found found[kStages][kBlock];
    for (size_t step = 0; step < blocks + kStages - 1; step++) {
      const auto rows_of = [&](size_t block) { return std::min(size, count - block * size); };
      if (step < blocks)
        for (size_t i = 0; i < rows_of(step); i++) locate(rows[step * size + i], found[step % kStages][i]);
      const size_t sent_for = step - 1;  // wraps below 0, to beyond the count
      if (sent_for < blocks)
        for (size_t i = 0; i < rows_of(sent_for); i++) find_episode(found[sent_for % kStages][i]);
      if (step < kStages - 1) continue;
      const size_t ready = step - (kStages - 1);
      Found* block = found[ready % kStages];
      for (size_t i = 0; i < rows_of(ready); i++)
        if (block[i].lane >= 0) measure(block[i]);
      for (const Output& output : outputs_) write_block(block, rows_of(ready), output, ready * size);
    }
    return outcome(rows, count);
  }

  // The same for windows of `length` consecutive rows, each possibly padded with -1. Returns kNotHeld also if the rows of a
  // window are not consecutive.
  RLSTORE_INLINE Gathered run_windows(const int64_t* rows, size_t windows, size_t length) {
    Found found[kStages];  // the first row of each window
    reach(length);
    for (size_t w = 0; w < windows + kStages - 1; w++) {
      if (w < windows) locate(rows[w * length], found[w % kStages]);
      const size_t sent_for = w - 1;
      if (sent_for < windows) find_episode(found[sent_for % kStages]);
      if (w < kStages - 1) continue;
      const size_t ready = w - (kStages - 1);
      write_window(found[ready % kStages], rows + ready * length, length, ready * length);
    }
    return outcome(rows, windows * length);
  }

 private:
  Gathered outcome(const int64_t* rows, size_t count) const {
    end_streams();
    if (lanes_.written_now && was_overrun(rows, count)) return Gathered::kOverrun;
    return all_held_ ? Gathered::kAll : Gathered::kNotHeld;
  }

  // True if something may have been overwritten before it was read. Call it after everything was read.
  bool was_overrun(const int64_t* rows, size_t count) const {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (const auto& [episode, stop] : fronts_) {
      const int64_t now = __atomic_load_n(&episode->stop, __ATOMIC_RELAXED);
      if (now != stop) return true;
    }
    for (size_t i = 0; i < count; i++) {
      int64_t lane, time;
      if (rows[i] >= 0 && lanes_.part(rows[i], &lane, &time) && !lanes_.is_intact(lane, time)) return true;
    }
    return false;
  }

  void add_span(Span added) {
    for (Span& span : spans_) {
      if (span.lane_stride != added.lane_stride || span.row_stride != added.row_stride) continue;
      const char *low = std::min(span.base, added.base), *high = std::max(span.base + span.bytes, added.base + added.bytes);
      if (static_cast<size_t>(high - low) > span.row_stride) continue;
      span.base = low, span.bytes = static_cast<size_t>(high - low), span.next_end = std::max(span.next_end, added.next_end);
      return;
    }
    spans_.push_back(added);
  }

  // So many rows behind a row are read with it. Returns how many bytes of cache lines that may be.
  size_t reach(size_t behind) {
    size_t touched = 0;
    for (Span& span : spans_) {
      const size_t next = span.next_end ? static_cast<size_t>(span.next_end - span.base) : 0;
      span.reach = std::max(span.bytes, behind * span.row_stride + next);
      span.reach = std::min(span.reach, span.bytes + 4 * kLongField);  // the hardware prefetches the rest
      touched += span.reach + 64;
    }
    return touched;
  }

  // Finds a row, and prefetches it and those behind it.
  RLSTORE_INLINE void locate(int64_t row, Found& f) {
    f.lane = -1;
    int64_t lane;
    if (!lanes_.part(row, &lane, &f.time)) {
      all_held_ = all_held_ && row < 0;
      return;
    }
    if (!lanes_.holds(lane, f.time)) {
      all_held_ = false;
      return;
    }
    f.lane = lane;
    f.place = lanes_.by_rows.remainder(f.time);
    for (const Span& span : spans_) {
      const char* first = span.base + lane * span.lane_stride + f.place * span.row_stride;
      const char* last = first + span.reach - 1;
      for (const char* line = first; line < last; line += 64) prefetch_far(line);
      prefetch_far(last);  // it may span one more cache line
    }
  }

  // A window whose first row is `f`: runs of rows that are contiguous in memory and of one episode, and zeros after its end.
  RLSTORE_INLINE void write_window(Found f, const int64_t* window, size_t length, size_t index) {
    size_t held = 0, done = 0;
    const uint64_t first = static_cast<uint64_t>(window[0]), apart = static_cast<uint64_t>(lanes_.lanes);
    for (; held < length && static_cast<uint64_t>(window[held]) == first + held * apart; held++) {}
    if (window[0] < 0) held = 0;
    for (size_t j = held; j < length; j++) all_held_ = all_held_ && window[j] == -1;
    while (done < held) {
      if (done > 0) {
        locate(window[done], f);
        find_episode(f);
      }
      if (f.lane >= 0) measure(f);
      if (f.lane < 0) break;
      const size_t run = std::min({held - done, static_cast<size_t>(f.stop - f.time), static_cast<size_t>(lanes_.rows - f.place)});
      Found last = f;
      last.time += static_cast<int64_t>(run - 1), last.place += static_cast<int64_t>(run - 1);
      measure(last);
      for (const Output& output : outputs_) write_run(f, last, run, output, index + done);
      done += run;
    }
    for (const Output& output : outputs_) memset(output.memory + (index + done) * output.bytes, 0, (length - done) * output.bytes);
    all_held_ = all_held_ && done == held;
  }

  // Rows of one episode that are contiguous in memory, from `f` to `last`.
  RLSTORE_INLINE void write_run(Found f, const Found& last, size_t count, const Output& output, size_t index) {
    char* target = output.memory + index * output.bytes;
    if (output.part == Part::kHeld) return static_cast<void>(memset(target, 1, count));
    if (output.part == Part::kFirst) {
      memset(target, 0, count);
      return write(f, output, index);
    }
    size_t done = 0;  // what is left is written row by row
    if (output.part == Part::kColumn && is_plain(output)) {
      const Block& block = columns_[output.leaf];
      return copy_run(target, block.at(f.lane, f.place), block.row_stride, block.bytes, count);
    }
    if (fold_.n_step == 1 && (output.part == Part::kTerminated || output.part == Part::kTruncated)) {
      memset(target, 0, count);
      done = count - 1;
    }
    const bool observed = output.part == Part::kObservation || output.part == Part::kNext;
    if (observed && is_plain(output) && leaves_[output.leaf].stack == 1 && fold_.n_step == 1) {
      // The next observation is that of the following row, except at the end of an episode or of the memory.
      const Observation& leaf = leaves_[output.leaf];
      const size_t shift = output.part == Part::kNext;
      done = count - shift;
      copy_run(target, leaf.block.at(f.lane, f.place) + shift * leaf.block.row_stride, leaf.block.row_stride, leaf.frame_bytes(), done);
    }
    if (done + 1 == count) return write(last, output, index + done);
    for (; done < count; done++, f.time++, f.place++) {
      if (f.lane >= 0) measure(f);
      write(f, output, index + done);
    }
  }

  // Rows at equal distances.
  static RLSTORE_INLINE void copy_run(char* target, const char* source, size_t stride, size_t bytes, size_t count) {
    for (size_t i = 0; i < count; i++, target += bytes, source += stride) copy_short(target, source, bytes);
  }

  static RLSTORE_INLINE bool is_plain(const Output& output) { return !output.as_float && !output.streamed; }

  RLSTORE_INLINE void refuse(Found& f) {
    all_held_ = false;
    f.lane = -1;
  }

  RLSTORE_INLINE void find_episode(Found& f) {
    if (f.lane < 0) return;
    f.slot = lanes_.slot_at(f.lane, f.place);
    if (!lanes_.has_slot(f.slot)) return refuse(f);
    f.episode = lanes_.episodes + f.slot;
    prefetch_far(f.episode);
  }

  RLSTORE_INLINE void measure(Found& f) {
    const int64_t told = __atomic_load_n(&f.episode->stop, __ATOMIC_ACQUIRE), written = lanes_.written[f.lane];
    const bool is_over = told >= 0 && told <= written;
    f.stop = is_over ? told : written;
    f.start = __atomic_load_n(&f.episode->start, __ATOMIC_RELAXED);
    // Tables from a damaged file, or being overwritten at this moment, must not cause accesses out of bounds.
    if (f.time < f.start || f.time >= f.stop) return refuse(f);
    f.taken = std::min(fold_.n_step, f.stop - f.time);
    f.at_end = is_over && f.time + f.taken == f.stop;
    // The next observation of the newest row is where the next row will be written: a broken episode overwrites it.
    if (lanes_.written_now && !is_over && f.time + f.taken == f.stop) fronts_.emplace_back(f.episode, told);
  }

  RLSTORE_INLINE int64_t next_place(int64_t place) const { return place + 1 == lanes_.rows ? 0 : place + 1; }

  // Rows from anywhere, one after the other.
  RLSTORE_INLINE void write_block(const Found* rows, size_t count, const Output& output, size_t index) {
    const char* sources[kBlock];
    const bool observed = output.part == Part::kObservation || output.part == Part::kNext;
    if (observed && is_plain(output) && leaves_[output.leaf].stack == 1) {
      for (size_t i = 0; i < count; i++) sources[i] = frame_of(rows[i], leaves_[output.leaf], output.part == Part::kNext);
    } else if (output.part == Part::kColumn && is_plain(output)) {
      for (size_t i = 0; i < count; i++)
        sources[i] = rows[i].lane < 0 ? zeros(output.bytes) : columns_[output.leaf].at(rows[i].lane, rows[i].place);
    } else if (output.part == Part::kRewards) {
      for (size_t i = 0; i < count; i++) write_rewards(rows[i], output, index + i);
      return;
    } else if (output.part == Part::kDiscounts) {
      for (size_t i = 0; i < count; i++) write_discount(rows[i], output, index + i);
      return;
    } else {
      for (size_t i = 0; i < count; i++) write(rows[i], output, index + i);
      return;
    }
    copy_rows(output.memory + index * output.bytes, sources, output.bytes, count);
  }

  // The observation of a row, or the next observation of its n-step window, where frames are not stacked.
  RLSTORE_INLINE const char* frame_of(const Found& f, const Observation& leaf, bool next) {
    if (f.lane < 0) return zeros(leaf.frame_bytes());
    if (next && f.at_end) return leaf.finals + f.slot * leaf.frame_bytes();
    return leaf.block.at(f.lane, next ? place_of(f, f.time + f.taken) : f.place);
  }

  const char* zeros(size_t bytes) {
    if (zeros_.size() < bytes) zeros_.assign(bytes, 0);
    return zeros_.data();
  }

  RLSTORE_INLINE void write(const Found& f, const Output& output, size_t index) {
    switch (output.part) {
      case Part::kObservation: return write_observation(f, output, index, false);
      case Part::kNext: return write_observation(f, output, index, true);
      case Part::kColumn: return write_column(f, output, index);
      case Part::kRewards: return write_rewards(f, output, index);
      case Part::kDiscounts: return write_discount(f, output, index);
      case Part::kTerminated: output.memory[index] = f.lane >= 0 && f.at_end && (f.episode->end & kTerminated); return;
      case Part::kTruncated: output.memory[index] = f.lane >= 0 && f.at_end && (f.episode->end & kTruncated); return;
      case Part::kFirst: output.memory[index] = f.lane >= 0 && f.start == f.time; return;
      case Part::kHeld: output.memory[index] = f.lane >= 0; return;
    }
  }

  static void convert_out(const Output& output, float* target, const char* source, const DLDataType& dtype, size_t count) {
    if (!output.streamed) return convert_row(target, source, dtype, count);
    constexpr size_t kBlock = 1024;  // stays in the nearest cache
    float block[kBlock];
    for (size_t first = 0; first < count; first += kBlock) {
      const size_t width = std::min(kBlock, count - first);
      convert_row(block, source + first * dtype.bits / 8, dtype, width);
      copy_streamed(reinterpret_cast<char*>(target + first), reinterpret_cast<const char*>(block), width * sizeof(float));
    }
  }

  static RLSTORE_INLINE void copy_out(const Output& output, char* target, const char* source, const Block& block, size_t bytes) {
    if (output.as_float)
      convert_out(output, reinterpret_cast<float*>(target), source, block.dtype, bytes * 8 / block.dtype.bits);
    else if (output.streamed)
      copy_streamed(target, source, bytes);
    else
      copy_short(target, source, bytes);
  }

  static RLSTORE_INLINE size_t bytes_out(const Output& output, const Block& block, size_t bytes) {
    return output.as_float ? bytes * 8 / block.dtype.bits * sizeof(float) : bytes;
  }

  RLSTORE_INLINE void write_column(const Found& f, const Output& output, size_t index) {
    const Block& block = columns_[output.leaf];
    char* target = output.memory + index * output.bytes;
    if (f.lane < 0)
      memset(target, 0, output.bytes);
    else
      copy_out(output, target, block.at(f.lane, f.place), block, block.bytes);
  }

  RLSTORE_INLINE void write_rewards(const Found& f, const Output& output, size_t index) {
    const size_t width = rewards_.bytes / sizeof(float);
    float* target = reinterpret_cast<float*>(output.memory) + index * width;
    for (size_t w = 0; w < width; w++) {
      float sum = 0;
      int64_t place = f.place;
      for (int64_t i = 0; f.lane >= 0 && i < f.taken; i++, place = next_place(place))
        sum += fold_.powers[static_cast<size_t>(i)] * reinterpret_cast<const float*>(rewards_.at(f.lane, place))[w];
      target[w] = sum;
    }
  }

  RLSTORE_INLINE void write_discount(const Found& f, const Output& output, size_t index) {
    const bool over = f.lane < 0 || (f.at_end && (f.episode->end & kTerminated));
    reinterpret_cast<float*>(output.memory)[index] = over ? 0.0f : fold_.powers[static_cast<size_t>(f.taken)];
  }

  // The observation of the row, or the next observation of its n-step window.
  RLSTORE_INLINE void write_observation(const Found& f, const Output& output, size_t index, bool after) {
    const Observation& leaf = leaves_[output.leaf];
    char* target = output.memory + index * output.bytes;
    if (f.lane < 0) return static_cast<void>(memset(target, 0, output.bytes));
    if (leaf.stack == 1) return copy_out(output, target, frame_of(f, leaf, after), leaf.block, leaf.frame_bytes());
    write_stack(f, output, leaf, target, f.time + (after ? f.taken : 0), after && f.at_end);
  }

  RLSTORE_INLINE int64_t place_of(const Found& f, int64_t time) const {
    int64_t place = f.place + (time - f.time);
    if (place >= lanes_.rows) place -= lanes_.rows;
    return place < 0 ? place + lanes_.rows : place;
  }

  void write_stack(const Found& f, const Output& output, const Observation& leaf, char* target, int64_t time, bool is_final) {
    frames_.resize(leaf.stack);
    for (size_t j = 0; j < leaf.stack; j++) {
      const int64_t at = time - static_cast<int64_t>(leaf.stack - 1 - j);
      if (at < f.start)
        frames_[j] = padding_frame(lanes_, leaf, f.lane, f.slot, f.episode->padding, f.start, at);
      else if (is_final && at == time)
        frames_[j] = leaf.finals + f.slot * leaf.frame_bytes();
      else
        frames_[j] = leaf.block.at(f.lane, place_of(f, at));
    }
    if (is_interleaved(leaf))
      write_interleaved(output, leaf, target);
    else
      write_pieces(output, leaf, target);
  }

  // The stack of `frames_`, a block at a time.
  void write_interleaved(const Output& output, const Observation& leaf, char* target) {
    const size_t most = pieces_in_block(leaf), width = leaf.stack * leaf.inner;
    for (size_t first = 0; first < leaf.outer; first += most) {
      const size_t count = std::min(most, leaf.outer - first), bytes = count * width;
      if (output.as_float) {
        char block[kFrameBlock];
        interleave(block, frames_.data(), leaf, first, count, false);
        copy_out(output, target, block, leaf.block, bytes);
      } else {
        interleave(target, frames_.data(), leaf, first, count, output.streamed);
      }
      target += bytes_out(output, leaf.block, bytes);
    }
  }

  // The same, a piece of a frame at a time, or several that are one after another in memory.
  void write_pieces(const Output& output, const Observation& leaf, char* target) {
    for (size_t o = 0; o < leaf.outer; o++)
      for (size_t j = 0, run; j < leaf.stack; j += run) {
        const char* piece = frames_[j];
        for (run = 1; piece && leaf.outer == 1 && j + run < leaf.stack && frames_[j + run] == piece + run * leaf.inner;) run++;
        const size_t bytes = run * leaf.inner, bytes_there = bytes_out(output, leaf.block, bytes);
        if (piece)
          copy_out(output, target, piece + o * leaf.inner, leaf.block, bytes);
        else
          memset(target, 0, bytes_there);
        target += bytes_there;
      }
  }

  const Lanes& lanes_;
  const std::vector<Observation>& leaves_;
  const std::vector<Block>& columns_;
  const Block& rewards_;
  const Fold& fold_;
  const std::vector<Output>& outputs_;
  std::vector<Span> spans_;
  size_t long_bytes_ = 0;  // of a row
  bool all_held_ = true;
  std::vector<std::pair<const Episode*, int64_t>> fronts_;  // episodes whose newest row was read, with their stop at that time
  std::vector<char> zeros_;
  std::vector<const char*> frames_;  // of the stack that is being written
};

}  // namespace

RLSTORE_CLONES
Gathered gather_transitions(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                            size_t reward_column, const Fold& fold, const int64_t* rows, size_t count,
                            const std::vector<Output>& outputs) {
  return Gather(lanes, leaves, columns, reward_column, fold, outputs).run(rows, count);
}

RLSTORE_CLONES
Gathered gather_windows(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                        size_t reward_column, const Fold& fold, const int64_t* rows, size_t windows, size_t length,
                        const std::vector<Output>& outputs) {
  return Gather(lanes, leaves, columns, reward_column, fold, outputs).run_windows(rows, windows, length);
}

bool rows_are_held(const Lanes& lanes, const int64_t* rows, size_t count) {
  for (size_t i = 0; i < count; i++) {
    int64_t lane, time;
    if (!lanes.part(rows[i], &lane, &time) || !lanes.holds(lane, time)) return false;
    if (!lanes.has_slot(lanes.slot_at(lane, lanes.by_rows.remainder(time)))) return false;
  }
  return true;
}

void episode_bounds(const Lanes& lanes, const int64_t* rows, size_t count, int64_t* first, int64_t* stop) {
  for (size_t i = 0; i < count; i++) {
    int64_t time;
    const int64_t lane = lanes.by_lanes.remainder(rows[i], &time);
    const Episode& episode = lanes.episodes[lanes.slot_at(lane, lanes.by_rows.remainder(time))];
    first[i] = std::max(episode.start, lanes.oldest(lane));
    stop[i] = lanes.stop_of(episode, lane);
  }
}

RLSTORE_CLONES
bool counts_can_be(const Lanes& lanes) {
  uint64_t wrong = 0;  // the sign bit is set if any is; differences wrap around
  for (int64_t lane = 0; lane < lanes.lanes; lane++) {
    const uint64_t begun = static_cast<uint64_t>(lanes.begun[lane]), written = static_cast<uint64_t>(lanes.written[lane]);
    wrong |= begun | written | (written - begun) | (static_cast<uint64_t>(kCountLimit) - 1 - written);
  }
  return static_cast<int64_t>(wrong) >= 0;
}

namespace {

// What lanes have in common: then the lane of a row that is drawn is known without counting the rows of every lane.
enum class Alike { kNot, kFull, kSameTimes };

RLSTORE_CLONES
Alike lanes_alike(const Lanes& lanes) {
  int64_t differs = 0, is_short = 0;  // negative if any is short
  for (int64_t lane = 0; lane < lanes.lanes; lane++) {
    differs |= (lanes.written[lane] ^ lanes.written[0]) | (lanes.oldest(lane) ^ lanes.oldest(0));
    is_short |= lanes.written[lane] - lanes.begun[lane] - lanes.steps;
  }
  return differs == 0 ? Alike::kSameTimes : is_short >= 0 ? Alike::kFull : Alike::kNot;
}

}  // namespace

bool draw_rows(const Lanes& lanes, int64_t* generator, int64_t* rows, size_t count) {
  const uint64_t seed = static_cast<uint64_t>(generator[0]), counter = static_cast<uint64_t>(generator[1]);
  const Alike alike = lanes_alike(lanes);
  std::vector<int64_t> ends;  // rows held by this lane and all lanes before it
  int64_t total = (lanes.written[0] - lanes.oldest(0)) * lanes.lanes;
  if (alike == Alike::kNot) {
    total = 0;
    for (int64_t lane = 0; lane < lanes.lanes; lane++) ends.push_back(total += lanes.written[lane] - lanes.oldest(lane));
  }
  if (total == 0) return false;
  for (size_t i = 0; i < count; i++) {
    const int64_t drawn = random_below(seed, counter + i, total);
    if (alike == Alike::kSameTimes) {
      rows[i] = lanes.oldest(0) * lanes.lanes + drawn;
      continue;
    }
    int64_t lane, after;  // the row of its lane, counted from the oldest
    if (alike == Alike::kFull) {
      after = lanes.by_steps.remainder(drawn, &lane);
    } else {
      lane = std::upper_bound(ends.begin(), ends.end(), drawn) - ends.begin();
      after = drawn - (lane ? ends[static_cast<size_t>(lane - 1)] : 0);
    }
    rows[i] = (lanes.oldest(lane) + after) * lanes.lanes + lane;
  }
  advance(generator, count);
  return true;
}

bool expand_windows(const Lanes& lanes, const int64_t* starts, size_t count, size_t length, bool across, int64_t* out) {
  // In three passes, because the place of an episode is in the memory of its row, and each may be out of the cache.
  struct Start {
    int64_t lane, time;
    const int32_t* slot;
  };
  std::vector<Start> found(count);
  for (size_t w = 0; w < count; w++) {
    Start& f = found[w];
    if (!lanes.part(starts[w], &f.lane, &f.time) || !lanes.holds(f.lane, f.time)) return false;
    f.slot = &lanes.slot_at(f.lane, lanes.by_rows.remainder(f.time));
    prefetch_far(f.slot);
  }
  for (const Start& f : found) {
    if (!lanes.has_slot(*f.slot)) return false;
    prefetch_far(lanes.episodes + *f.slot);
  }
  for (size_t w = 0; w < count; w++) {
    const Start& f = found[w];
    const int64_t stop = across ? lanes.written[f.lane] : lanes.stop_of(lanes.episodes[*f.slot], f.lane);
    for (size_t j = 0; j < length; j++) {
      const int64_t at = f.time + static_cast<int64_t>(j);
      out[w * length + j] = at < stop ? at * lanes.lanes + f.lane : -1;
    }
  }
  return true;
}

}  // namespace rlstore
