// Rows of bytes: write them at a cursor, gather them by index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace rlstore {

// Copies a row. A large row is written with non-temporal stores: it is not read again soon, and would otherwise be loaded
// into the cache only to be overwritten.
void copy_row(char* target, const char* source, size_t bytes);

// The same with non-temporal stores whatever the size; source and target must not overlap.
void copy_streamed(char* target, const char* source, size_t bytes);

// The same for a row of a few hundred bytes, without a call.
RLSTORE_INLINE void copy_short(char* target, const char* source, size_t bytes) {
  // In chunks; the last chunk overlaps the one before: no byte loop.
  const auto chunks = [&](auto chunk) {
    size_t i = 0;
    for (; i + chunk <= bytes; i += chunk) memcpy(target + i, source + i, chunk);
    if (bytes - i > 16)
      memcpy(target + bytes - chunk, source + bytes - chunk, chunk);
    else if (i < bytes)  // a short rest: one store that rarely spans two cache lines
      memcpy(target + bytes - (chunk < 16 ? chunk : 16), source + bytes - (chunk < 16 ? chunk : 16), chunk < 16 ? chunk : 16);
  };
  if (bytes > 1024)
    memcpy(target, source, bytes);
  else if (bytes >= 64)
    chunks(std::integral_constant<size_t, 64>{});
  else if (bytes >= 16)
    chunks(std::integral_constant<size_t, 16>{});
  else if (bytes >= 4)
    chunks(std::integral_constant<size_t, 4>{});
  else
    for (size_t i = 0; i < bytes; i++) target[i] = source[i];
}

// target[i] = source[i] != 0, as 0 or 1. Target is uint8_t or float; Source an integer of 1, 4 or 8 bytes, float or double.
template <typename Target, typename Source>
void copy_flags(Target* target, const Source* source, size_t count);

// True if one of the values is NaN, which is not a valid flag.
template <typename Source>
bool has_nan(const Source* source, size_t count);

// True if no value is NaN or infinite; `stride` is in elements.
bool all_finite(const float* source, size_t count, int64_t stride);

// True if every value i is a whole number from low[i % width] to high[i % width]; count is a multiple of width.
template <typename Source>
bool all_within(const Source* source, size_t count, int64_t stride, const int64_t* low, const int64_t* high, size_t width);

// target[i] = source[rows[i]], rows of `row_bytes` bytes.
void gather_rows(char* target, const char* source, const int64_t* rows, size_t count, size_t row_bytes);

// The bits of the two 16-bit floating types.
struct Half {
  uint16_t bits;
  operator float() const;
};
struct BrainHalf {
  uint16_t bits;
  operator float() const;
};

// Like gather_rows, with each of the `width` elements of a row converted to float.
template <typename Source>
void gather_as_float(float* target, const Source* source, const int64_t* rows, size_t count, size_t width);

// True if every row is in [0, limit).
bool rows_in_range(const int64_t* rows, size_t count, int64_t limit);

}  // namespace rlstore
