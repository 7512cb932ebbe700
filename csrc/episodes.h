// A ring of lanes whose rows belong to episodes: one copy of each observation; final observations are stored by episode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dlpack.h"

namespace rlstore {

// How an episode ended, as bits.
enum EpisodeEnd : int64_t { kTerminated = 1, kTruncated = 2 };
// The older frames of the first frame stack of an episode; 0 and above: stored in the table of starts.
enum Padding : int64_t { kKept = 0, kRepeated = -1, kZeros = -2 };

// In Lanes::current while a write overwrites parts of the oldest row: in a mapped file it shows that a process was killed there.
constexpr int64_t kWriting = -2;

// One entry of the table of episodes. Rows are counted from the first row of the lane and never wrap.
struct Episode {
  int64_t start;
  int64_t stop;  // one past its last row; -1 while it is open
  int64_t end;   // EpisodeEnd bits; 0 with a stop: a broken episode, whose observations were not continued
  int64_t padding;
};

// Division by a constant through its reciprocal: exact for numbers below kCountLimit.
constexpr int64_t kCountLimit = int64_t{1} << 52;

class Divider {
 public:
  explicit Divider(int64_t divisor = 1) : divisor_(divisor), inverse_(1.0 / static_cast<double>(divisor)) {}
  int64_t remainder(int64_t x, int64_t* quotient) const {
    int64_t q = static_cast<int64_t>(static_cast<double>(x) * inverse_), r = x - q * divisor_;
    if (r < 0) r += divisor_, q--;
    if (r >= divisor_) r -= divisor_, q++;
    *quotient = q;
    return r;
  }
  int64_t remainder(int64_t x) const {
    int64_t q;
    return remainder(x, &q);
  }

 private:
  int64_t divisor_;
  double inverse_;
};

// The counters and tables of all lanes, or of some consecutive lanes. All memory belongs to the caller. Each lane has one
// writer at a time. Where other processes write, a reader has its own counters: `written` is what it has observed so far,
// and `written_now` is the count of the writers. "Slot" here is the index of an episode in the table.
struct Lanes {
  int64_t lanes = 0, steps = 0, rows = 0;  // rows: capacity in memory, more than the steps held
  int64_t kept = 0;  // rows that a writer does not overwrite, at least the steps held: the margin gives readers time
  Divider by_lanes, by_rows, by_steps;
  int64_t* written = nullptr;    // [lanes] rows ever written; a write changes it last, with release order
  const int64_t* written_now = nullptr;  // [lanes] the count of the writers, or null if no other process writes
  int64_t* begun = nullptr;      // [lanes] rows written before the last reset
  int64_t* current = nullptr;    // [lanes] the slot of the open episode, or -1; kWriting during a write
  // [lanes] The slot of the episode that ended in the previous row, if what looks like a reset step may follow; kResumed if the next
  // row may begin an episode although one is open.
  int64_t* after_end = nullptr;
  int64_t slots = 0;             // capacity of the table
  Episode* episodes = nullptr;   // [slots]
  int32_t* free_slots = nullptr; // [slots / table_lanes, table_lanes] a stack of free slots per lane, from the first of these
  int64_t table_lanes = 0;       // lanes of the tables, which may be more than these
  int64_t* free_count = nullptr; // [lanes]
  char* episode_of = nullptr;    // int32 [lanes, rows] with strides: the slot of the episode of each row
  size_t lane_stride = 0, row_stride = 0;

  int32_t& slot_at(int64_t lane, int64_t place) const {
    return *reinterpret_cast<int32_t*>(episode_of + lane * lane_stride + place * row_stride);
  }
  int64_t oldest(int64_t lane) const {
    return written[lane] - begun[lane] > steps ? written[lane] - steps : begun[lane];
  }
  int32_t& free_slot(int64_t lane, int64_t depth) const { return free_slots[depth * table_lanes + lane]; }
  // One past the last row of an episode that has been written.
  int64_t stop_of(const Episode& episode, int64_t lane) const {
    const int64_t stop = __atomic_load_n(&episode.stop, __ATOMIC_ACQUIRE);
    return stop < 0 || stop > written[lane] ? written[lane] : stop;
  }
  // True if no writer can have overwritten a row or its episode.
  bool is_intact(int64_t lane, int64_t time) const {
    return __atomic_load_n(written_now + lane, __ATOMIC_ACQUIRE) - time < kept;
  }
  // Splits a row id into lane and time; false if the id is out of range.
  bool part(int64_t row, int64_t* lane, int64_t* time) const {
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(kCountLimit)) return false;
    *lane = by_lanes.remainder(row, time);
    return true;
  }
  // The id of a row; a time from a damaged file may wrap.
  int64_t row(int64_t lane, int64_t time) const {
    return static_cast<int64_t>(static_cast<uint64_t>(time) * static_cast<uint64_t>(lanes) + static_cast<uint64_t>(lane));
  }
  bool holds(int64_t lane, int64_t time) const { return time >= oldest(lane) && time < written[lane]; }
  bool has_slot(int64_t slot) const { return static_cast<uint64_t>(slot) < static_cast<uint64_t>(slots); }
};

// One field: rows of `bytes` bytes at base + lane * lane_stride + place * row_stride.
struct Block {
  char* base = nullptr;
  size_t lane_stride = 0, row_stride = 0, bytes = 0;
  DLDataType dtype{};
  char* at(int64_t lane, int64_t place) const { return base + lane * lane_stride + place * row_stride; }
};

// One leaf of the observations. A row of its block is one frame; a caller passes and receives stacks of `stack` frames, with
// the layout [outer, stack, inner bytes].
struct Observation {
  Block block;
  char* finals = nullptr;  // [slots, frame]
  char* starts = nullptr;  // [slots, stack - 1, frame]; null until an episode needs it
  size_t stack = 1, outer = 1, inner = 0;
  size_t frame_bytes() const { return block.bytes; }
  size_t stack_bytes() const { return block.bytes * stack; }
};

// The frame at time `at`, before the first one of an episode, in the first stack of it; null: zeros.
const char* padding_frame(const Lanes& lanes, const Observation& leaf, int64_t lane, int64_t slot, int64_t padding, int64_t start, int64_t at);

// The effect of a write on a lane.
enum class Move : uint8_t {
  kSkip,
  kContinue,
  kBegin,
  kBreak,
  kRepeat,  // begins an episode with the final observation of the one before
};

constexpr int64_t kResumed = -2;  // in Lanes::after_end

// One step of all lanes; every value is contiguous [lanes, ...] and has been checked.
struct Step {
  std::vector<const char*> observations, next_observations, columns;
  std::vector<const char*> finals;  // separate final observations, or empty
  const uint8_t* terminated = nullptr;
  const uint8_t* truncated = nullptr;
  const uint8_t* mask = nullptr;       // null: all take part
  const uint8_t* has_final = nullptr;  // where finals are given
  const float* rewards = nullptr;      // [lanes, reward_width], one of the columns
  size_t reward_width = 1;
};

// kTell: a step is one if it looks like one. kReport: none is, and one that looks like one is reported.
enum class ResetSteps { kTell, kAlways, kNever, kReport };

// What there is to tell of a step that was written.
struct Told {
  bool has_broken = false;  // a broken episode was closed
  int64_t repeat = -1;      // a row that repeats the final observation of the episode before, and was not taken to be a reset step
};

// What must be allocated before a planned step can be written.
enum class Need { kNothing, kSlots, kStarts };

// Plans the effect on each lane, and changes nothing.
Need plan_step(const Lanes& lanes, const std::vector<Observation>& leaves, const Step& step, ResetSteps resets, Move* moves);

// Steps of a single lane, one after another, as the first of them: each value is contiguous [steps, ...].
using Steps = Step;

// How many of the first `count` steps continue the open episode of a single lane one after another, none ends it, and none
// overwrites a row or wraps: those may be written at once. 0 where observations are stacks of frames.
int64_t count_continuing(const Lanes& lanes, const std::vector<Observation>& leaves, const Steps& steps, int64_t count);

// Writes so many steps, which continue the open episode of a single lane.
void write_continuing(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns, const Steps& steps,
                      int64_t count);

// Writes the step as planned.
Told write_step(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                const Step& step, ResetSteps resets, const Move* moves);

}  // namespace rlstore
