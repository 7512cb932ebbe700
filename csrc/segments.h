// Trajectories: the parts of a lane between episode ends, in lane-major order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rlstore {

// The trajectories of the lanes [first, last) of `dones` [steps, lanes].
size_t count_segments(const uint8_t* dones, size_t steps, size_t lanes, size_t first, size_t last);
void split_segments(const uint8_t* dones, size_t steps, size_t lanes, size_t first, size_t last, int64_t* segment_lanes,
                    int64_t* starts, int64_t* lengths);

struct Segments {
  size_t count;
  const int64_t *lanes, *starts, *lengths;
};

// target[t, s] = source[starts[s] + t, lanes[s]] for t < lengths[s], else zeros. source rows are `row_bytes` wide.
void pad_segments(char* target, const char* source, const Segments& segments, size_t steps, size_t lanes, size_t row_bytes);

// target[t, i] = source[t, first + i] for the lanes [first, last).
void copy_lanes(char* target, const char* source, size_t steps, size_t lanes, size_t first, size_t last, size_t row_bytes);

// mask[t, s] = t < lengths[s]
void mask_segments(uint8_t* mask, const Segments& segments, size_t steps);

// target[l, s] = states[starts[s], l, segment_lanes[s]] for states [steps, layers, lanes, state_bytes].
void first_states(char* target, const char* states, const int64_t* segment_lanes, const int64_t* starts, size_t count,
                  size_t layers, size_t lanes, size_t state_bytes);

}  // namespace rlstore
