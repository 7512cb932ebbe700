// Rows in, transitions out: each row's observation, its action, the n-step reward from it on, and what followed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "episodes.h"

namespace rlstore {

// What one output of a gather holds.
enum class Part : int32_t { kObservation, kNext, kColumn, kRewards, kDiscounts, kTerminated, kTruncated, kFirst, kHeld };

// One output [count, ...]. `leaf` counts observation leaves or columns.
struct Output {
  Part part;
  size_t leaf = 0;
  char* memory = nullptr;
  bool as_float = false;  // converted to float; else as stored
  bool streamed = false;  // written past the cache
};

struct Fold {
  int64_t n_step;
  std::vector<float> powers;  // gamma^0 .. gamma^n
};

// kOverrun: a writer of another process has overwritten some of what was read meanwhile.
enum class Gathered { kAll, kNotHeld, kOverrun };

// Writes row i of each output for rows[i] = time * lanes + lane; zeros for a row of -1. kNotHeld if any
// other row is not one that is held.
Gathered gather_transitions(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                            size_t reward_column, const Fold& fold, const int64_t* rows, size_t count,
                            const std::vector<Output>& outputs);

// The same for windows of `length` rows that follow one another in their lane, rows [windows, length], padded with -1.
Gathered gather_windows(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                        size_t reward_column, const Fold& fold, const int64_t* rows, size_t windows, size_t length,
                        const std::vector<Output>& outputs);

// True if every row is one that is held now, in an episode of the table.
bool rows_are_held(const Lanes& lanes, const int64_t* rows, size_t count);

// The first and one past the last held row of the episode of each row, as times.
void episode_bounds(const Lanes& lanes, const int64_t* rows, size_t count, int64_t* first, int64_t* stop);

// `count` rows drawn uniformly from all that are held, from the generator {seed, counter}, which moves on.
void draw_rows(const Lanes& lanes, int64_t* generator, int64_t* rows, size_t count);

// The rows of windows that begin at `starts`: out[w, j] = the j-th row of the window or -1 after the end of its episode
// (`across`: of the lane).
void expand_windows(const Lanes& lanes, const int64_t* starts, size_t count, size_t length, bool across, int64_t* out);

}  // namespace rlstore
