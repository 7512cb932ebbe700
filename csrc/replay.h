// Gathers transitions by row: the observation, the action, the n-step reward, the discount and the next observation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "episodes.h"

namespace rlstore {

// The contents of one output of a gather.
enum class Part : int32_t { kObservation, kNext, kColumn, kRewards, kDiscounts, kTerminated, kTruncated, kFirst, kHeld };

// One output [count, ...]. `leaf` is the index of an observation leaf or of a column.
struct Output {
  Part part;
  size_t leaf = 0;
  char* memory = nullptr;
  size_t bytes = 0;       // of one row of the output
  bool as_float = false;  // converted to float; else as stored
  bool streamed = false;  // written with non-temporal stores
};

struct Fold {
  int64_t n_step;
  std::vector<float> powers;  // gamma^0 .. gamma^n
};

// kOverrun: a writer in another process has overwritten some of the rows while they were read.
enum class Gathered { kAll, kNotHeld, kOverrun };

// Writes row i of each output for rows[i] = time * lanes + lane; zeros for a row of -1. Returns kNotHeld if
// any other row is not held.
Gathered gather_transitions(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                            size_t reward_column, const Fold& fold, const int64_t* rows, size_t count,
                            const std::vector<Output>& outputs);

// The same for windows of `length` consecutive rows of a lane, rows [windows, length], padded with -1.
Gathered gather_windows(const Lanes& lanes, const std::vector<Observation>& leaves, const std::vector<Block>& columns,
                        size_t reward_column, const Fold& fold, const int64_t* rows, size_t windows, size_t length,
                        const std::vector<Output>& outputs);

// True if every row is held, in an episode of the table.
bool rows_are_held(const Lanes& lanes, const int64_t* rows, size_t count);

// The first and one past the last held row of the episode of each row, as times.
void episode_bounds(const Lanes& lanes, const int64_t* rows, size_t count, int64_t* first, int64_t* stop);

// True if the counters of all lanes can be.
bool counts_can_be(const Lanes& lanes);

// Draws `count` rows uniformly from all rows held, with the generator {seed, counter}, which is advanced; false if there are none.
bool draw_rows(const Lanes& lanes, int64_t* generator, int64_t* rows, size_t count);

// The rows of windows that begin at `starts`: out[w, j] = the j-th row of the window or -1 after the end of its episode
// (`across`: of the lane). False if one of them is not held.
bool expand_windows(const Lanes& lanes, const int64_t* starts, size_t count, size_t length, bool across, int64_t* out);

}  // namespace rlstore
