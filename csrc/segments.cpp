#include "segments.h"

#include <cstring>

#include "rows.h"
#include "simd.h"

namespace rlstore {

size_t count_segments(const uint8_t* dones, size_t steps, size_t lanes, size_t first, size_t last) {
  if (steps == 0) return 0;
  size_t count = last - first;
  for (size_t t = 0; t + 1 < steps; t++)
    for (size_t lane = first; lane < last; lane++) count += dones[t * lanes + lane] != 0;
  return count;
}

void split_segments(const uint8_t* dones, size_t steps, size_t lanes, size_t first, size_t last, int64_t* segment_lanes,
                    int64_t* starts, int64_t* lengths) {
  size_t s = 0;
  for (size_t lane = first; lane < last; lane++) {
    size_t start = 0;
    for (size_t t = 0; t < steps; t++) {
      if (!dones[t * lanes + lane] && t + 1 < steps) continue;
      segment_lanes[s] = static_cast<int64_t>(lane);
      starts[s] = static_cast<int64_t>(start);
      lengths[s] = static_cast<int64_t>(t + 1 - start);
      start = t + 1;
      s++;
    }
  }
}

RLSTORE_CLONES
void pad_segments(char* target, const char* source, const Segments& segments, size_t steps, size_t lanes, size_t row_bytes) {
  if (row_bytes == 0) return;  // without memory
  for (size_t t = 0; t < steps; t++) {
    for (size_t s = 0; s < segments.count; s++, target += row_bytes) {
      if (static_cast<int64_t>(t) < segments.lengths[s])
        copy_short(target, source + ((segments.starts[s] + t) * lanes + segments.lanes[s]) * row_bytes, row_bytes);
      else
        memset(target, 0, row_bytes);
    }
  }
}

void copy_lanes(char* target, const char* source, size_t steps, size_t lanes, size_t first, size_t last, size_t row_bytes) {
  const size_t bytes = (last - first) * row_bytes;
  if (bytes == 0) return;  // without memory
  for (size_t t = 0; t < steps; t++) memcpy(target + t * bytes, source + (t * lanes + first) * row_bytes, bytes);
}

void mask_segments(uint8_t* mask, const Segments& segments, size_t steps) {
  for (size_t t = 0; t < steps; t++)
    for (size_t s = 0; s < segments.count; s++) *mask++ = static_cast<int64_t>(t) < segments.lengths[s];
}

RLSTORE_CLONES
void first_states(char* target, const char* states, const int64_t* segment_lanes, const int64_t* starts, size_t count,
                  size_t layers, size_t lanes, size_t state_bytes) {
  constexpr size_t kAhead = 4;  // states are far apart in memory: prefetch the next ones
  const auto state = [&](size_t layer, size_t s) {
    return states + ((starts[s] * layers + layer) * lanes + segment_lanes[s]) * state_bytes;
  };
  for (size_t layer = 0; layer < layers; layer++) {
    for (size_t s = 0; s < count; s++, target += state_bytes) {
      if (s + kAhead < count)
        for (size_t line = 0; line < state_bytes && line < 4096; line += 64) __builtin_prefetch(state(layer, s + kAhead) + line);
      copy_short(target, state(layer, s), state_bytes);
    }
  }
}

}  // namespace rlstore
