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

// How many rows ahead the record of a row, and then its episode, are prefetched: far enough to hide a cache miss.
constexpr size_t kRecordAhead = 8, kEpisodeAhead = 3, kPipeline = 16;

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

class Gather {
 public:
  Gather(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns, size_t reward_column,
         const Fold& fold)
      : lanes_(lanes), leaves_(leaves), columns_(columns), rewards_(columns[reward_column]), fold_(fold) {}

  // Rows that are not held give zeros.
  RLSTORE_INLINE Gathered run(const int64_t* rows, size_t count, const Output* outputs, size_t output_count) {
    Found found[kPipeline];
    for (size_t i = 0; i < count + kRecordAhead; i++) {
      if (i < count) locate(rows, i, found);
      const size_t sent_for = i - (kRecordAhead - kEpisodeAhead);  // wraps below 0, to beyond the count
      if (sent_for < count) find_episode(found[sent_for % kPipeline]);
      if (i < kRecordAhead) continue;
      Found& ready = found[(i - kRecordAhead) % kPipeline];
      if (ready.lane >= 0) measure(ready);
      for (size_t k = 0; k < output_count; k++) write(ready, outputs[k], i - kRecordAhead);
    }
    return outcome(rows, count);
  }

  // The same for windows of `length` consecutive rows, each possibly padded with -1. Returns kNotHeld also if the rows of a
  // window are not consecutive.
  RLSTORE_INLINE Gathered run_windows(const int64_t* rows, size_t windows, size_t length, const Output* outputs, size_t output_count) {
    for (size_t w = 0; w < windows; w++) {
      const int64_t* window = rows + w * length;
      if (w + 1 < windows) prefetch_rows(window[length], length);
      size_t held = 0;
      const uint64_t first = static_cast<uint64_t>(window[0]), apart = static_cast<uint64_t>(lanes_.lanes);
      for (; held < length && static_cast<uint64_t>(window[held]) == first + held * apart; held++) {}
      if (window[0] < 0) held = 0;
      for (size_t j = held; j < length; j++) all_held_ = all_held_ && window[j] == -1;
      size_t done = 0;
      while (done < held) {
        Found found[kPipeline];
        Found& f = found[0];
        locate(window + done, 0, found);
        if (f.lane >= 0) find_episode(f);
        if (f.lane >= 0) measure(f);
        if (f.lane < 0) break;
        const size_t run = std::min({held - done, static_cast<size_t>(f.stop - f.time), static_cast<size_t>(lanes_.rows - f.place)});
        for (size_t k = 0; k < output_count; k++) write_run(f, run, outputs[k], w * length + done);
        done += run;
      }
      Found none;
      none.lane = -1;
      for (size_t j = done; j < length; j++)
        for (size_t k = 0; k < output_count; k++) write(none, outputs[k], w * length + j);
      all_held_ = all_held_ && done == held;
    }
    return outcome(rows, windows * length);
  }

 private:
  Gathered outcome(const int64_t* rows, size_t count) const {
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

  // Rows of one episode that are contiguous in memory; `f` is the first.
  RLSTORE_INLINE void write_run(Found f, size_t count, const Output& output, size_t index) {
    const bool plain = !output.as_float && !output.streamed;
    if (plain && output.part == Part::kColumn) {
      const Block& block = columns_[output.leaf];
      return copy_run(output.memory + index * block.bytes, block.at(f.lane, f.place), block.row_stride, block.bytes, count);
    }
    const bool observed = output.part == Part::kObservation || output.part == Part::kNext;
    if (plain && observed && leaves_[output.leaf].stack == 1 && fold_.n_step == 1) {
      const Observation& leaf = leaves_[output.leaf];
      const size_t bytes = leaf.frame_bytes(), shift = output.part == Part::kNext;
      // The next observation is that of the following row, except at the end of an episode or of the memory.
      const size_t in_a_row = shift ? count - 1 : count;
      copy_run(output.memory + index * bytes, leaf.block.at(f.lane, f.place) + shift * leaf.block.row_stride, leaf.block.row_stride, bytes, in_a_row);
      f.time += static_cast<int64_t>(in_a_row), f.place += static_cast<int64_t>(in_a_row), index += in_a_row, count -= in_a_row;
    }
    for (size_t i = 0; i < count; i++, f.time++, f.place++) {
      if (f.lane >= 0) measure(f);
      write(f, output, index + i);
    }
  }

  static RLSTORE_INLINE void copy_run(char* target, const char* source, size_t stride, size_t bytes, size_t count) {
    for (size_t i = 0; i < count; i++, target += bytes, source += stride) copy_short(target, source, bytes);
  }

  RLSTORE_INLINE void prefetch_rows(int64_t row, size_t count) const {
    int64_t lane, time;
    if (!lanes_.part(row, &lane, &time)) return;
    const char* slot = reinterpret_cast<const char*>(&lanes_.slot_at(lane, lanes_.by_rows.remainder(time)));
    const char* end = slot + std::min<size_t>(count * lanes_.row_stride, 4096);  // the hardware prefetches the rest
    for (const char* line = slot - lanes_.row_stride; line < end; line += 64) __builtin_prefetch(line);
  }

  RLSTORE_INLINE void locate(const int64_t* rows, size_t i, Found* found) {
    Found& f = found[i % kPipeline];
    f.lane = -1;
    const Found& before = found[(i + kPipeline - 1) % kPipeline];
    int64_t lane;
    if (i > 0 && before.lane >= 0 && rows[i] == rows[i - 1] + lanes_.lanes) {  // the next row: no division needed
      lane = before.lane, f.time = before.time + 1, f.place = next_place(before.place);
    } else if (lanes_.part(rows[i], &lane, &f.time)) {
      f.place = lanes_.by_rows.remainder(f.time);
    } else {
      all_held_ = all_held_ && rows[i] < 0;
      return;
    }
    if (!lanes_.holds(lane, f.time)) {
      all_held_ = false;
      return;
    }
    f.lane = lane;
    __builtin_prefetch(&lanes_.slot_at(lane, f.place));
    for (const Observation& leaf : leaves_) {
      if (leaf.frame_bytes() > 1024) continue;  // long enough for the hardware prefetcher
      // The next observation is directly behind it.
      const char* row = leaf.block.at(lane, f.place);
      const size_t reach = leaf.frame_bytes() + leaf.block.row_stride;
      for (size_t line = 0; line < reach; line += 64) __builtin_prefetch(row + line);
      __builtin_prefetch(row + reach - 1);  // it may span one more cache line
    }
  }

  RLSTORE_INLINE void refuse(Found& f) {
    all_held_ = false;
    f.lane = -1;
  }

  RLSTORE_INLINE void find_episode(Found& f) {
    if (f.lane < 0) return;
    f.slot = lanes_.slot_at(f.lane, f.place);
    if (!lanes_.has_slot(f.slot)) return refuse(f);
    f.episode = lanes_.episodes + f.slot;
    __builtin_prefetch(f.episode);
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

  RLSTORE_INLINE void write(const Found& f, const Output& output, size_t index) {
    switch (output.part) {
      case Part::kObservation: return write_observation(f, output, index, 0);
      case Part::kNext: return write_observation(f, output, index, 1);
      case Part::kColumn: return write_column(f, output, index);
      case Part::kRewards: return write_rewards(f, output, index);
      case Part::kDiscounts: return write_discount(f, output, index);
      case Part::kTerminated: output.memory[index] = f.lane >= 0 && f.at_end && (f.episode->end & kTerminated); return;
      case Part::kTruncated: output.memory[index] = f.lane >= 0 && f.at_end && (f.episode->end & kTruncated); return;
      case Part::kFirst: output.memory[index] = f.lane >= 0 && f.start == f.time; return;
      case Part::kHeld: output.memory[index] = f.lane >= 0; return;
    }
  }

  static RLSTORE_INLINE void copy_out(const Output& output, char* target, const char* source, const Block& block, size_t bytes) {
    if (output.as_float)
      convert_row(reinterpret_cast<float*>(target), source, block.dtype, bytes * 8 / block.dtype.bits);
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
    const size_t bytes = bytes_out(output, block, block.bytes);
    char* target = output.memory + index * bytes;
    if (f.lane < 0)
      memset(target, 0, bytes);
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

  // The observation of the row (after = 0), or the next observation of its n-step window (after = 1).
  RLSTORE_INLINE void write_observation(const Found& f, const Output& output, size_t index, int after) {
    const Observation& leaf = leaves_[output.leaf];
    const size_t bytes = bytes_out(output, leaf.block, leaf.stack_bytes());
    char* target = output.memory + index * bytes;
    if (f.lane < 0) {
      memset(target, 0, bytes);
      return;
    }
    const int64_t time = f.time + (after ? f.taken : 0);
    const bool is_final = after && f.at_end;
    if (leaf.stack == 1) {
      const char* frame = is_final ? leaf.finals + f.slot * leaf.frame_bytes() : leaf.block.at(f.lane, place_of(f, time));
      return copy_out(output, target, frame, leaf.block, leaf.frame_bytes());
    }
    write_stack(f, output, leaf, target, time, is_final);
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
    const size_t most = pieces_in_block(leaf), width = leaf.stack * leaf.inner, width_out = bytes_out(output, leaf.block, width);
    const bool as_is = !output.as_float && !output.streamed;
    for (size_t first = 0; first < leaf.outer; first += most) {
      const size_t count = std::min(most, leaf.outer - first);
      char* out = target + first * width_out;
      interleave(as_is ? out : block_, frames_.data(), leaf, first, count);
      if (!as_is) copy_out(output, out, block_, leaf.block, count * width);
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
  bool all_held_ = true;
  std::vector<std::pair<const Episode*, int64_t>> fronts_;  // episodes whose newest row was read, with their stop at that time
  std::vector<const char*> frames_;  // of the stack that is being written
  char block_[kFrameBlock];
};

}  // namespace

RLSTORE_CLONES
Gathered gather_transitions(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                            size_t reward_column, const Fold& fold, const int64_t* rows, size_t count,
                            const std::vector<Output>& outputs) {
  return Gather(lanes, leaves, columns, reward_column, fold).run(rows, count, outputs.data(), outputs.size());
}

RLSTORE_CLONES
Gathered gather_windows(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                        size_t reward_column, const Fold& fold, const int64_t* rows, size_t windows, size_t length,
                        const std::vector<Output>& outputs) {
  return Gather(lanes, leaves, columns, reward_column, fold).run_windows(rows, windows, length, outputs.data(), outputs.size());
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

void draw_rows(const Lanes& lanes, int64_t* generator, int64_t* rows, size_t count) {
  const uint64_t seed = static_cast<uint64_t>(generator[0]), counter = static_cast<uint64_t>(generator[1]);
  std::vector<int64_t> ends(static_cast<size_t>(lanes.lanes));  // rows held by this lane and all lanes before it
  int64_t total = 0, oldest = lanes.oldest(0);
  bool alike = true;
  for (int64_t lane = 0; lane < lanes.lanes; lane++) {
    alike = alike && lanes.oldest(lane) == oldest && lanes.written[lane] == lanes.written[0];
    total += lanes.written[lane] - lanes.oldest(lane);
    ends[static_cast<size_t>(lane)] = total;
  }
  for (size_t i = 0; i < count; i++) {
    const int64_t drawn = random_below(seed, counter + i, total);
    if (alike) {
      rows[i] = oldest * lanes.lanes + drawn;
      continue;
    }
    const int64_t lane = std::upper_bound(ends.begin(), ends.end(), drawn) - ends.begin();
    const int64_t before = lane ? ends[static_cast<size_t>(lane - 1)] : 0;
    rows[i] = (lanes.oldest(lane) + drawn - before) * lanes.lanes + lane;
  }
  advance(generator, count);
}

void expand_windows(const Lanes& lanes, const int64_t* starts, size_t count, size_t length, bool across, int64_t* out) {
  const auto slot_of = [&](size_t w, int64_t* lane, int64_t* time) -> const int32_t& {
    *lane = lanes.by_lanes.remainder(starts[w], time);
    return lanes.slot_at(*lane, lanes.by_rows.remainder(*time));
  };
  int64_t lane, time;
  for (size_t w = 0; w < count && !across; w++) __builtin_prefetch(&slot_of(w, &lane, &time));
  for (size_t w = 0; w < count; w++) {
    const int32_t& slot = slot_of(w, &lane, &time);
    const int64_t stop = across ? lanes.written[lane] : lanes.stop_of(lanes.episodes[slot], lane);
    for (size_t j = 0; j < length; j++) {
      const int64_t at = time + static_cast<int64_t>(j);
      out[w * length + j] = at < stop ? at * lanes.lanes + lane : -1;
    }
  }
}

}  // namespace rlstore
