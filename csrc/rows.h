// Rows of bytes: write them at a cursor, gather them by index.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace rlstore {

// Copies a row. A large row is written with non-temporal stores: it is not read again soon, and would otherwise be loaded
// into the cache only to be overwritten.
void copy_row(char* target, const char* source, size_t bytes);

// The same with non-temporal stores whatever the size; source and target must not overlap. Other threads may read the target after
// end_streams().
void copy_streamed(char* target, const char* source, size_t bytes);
void end_streams();

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

// True if every value is a whole number from low to high, which are less than 2^63 apart.
template <typename Source>
bool all_within(const Source* source, size_t count, int64_t stride, int64_t low, int64_t high);

// The same for a few values, without a call.
RLSTORE_INLINE bool finite_at(const float* source, size_t count, int64_t stride) {
  int32_t found = 0;
  for (size_t i = 0; i < count; i++) {
    int32_t bits;
    memcpy(&bits, source + static_cast<int64_t>(i) * stride, sizeof bits);
    found |= (bits & 0x7f800000) == 0x7f800000 ? -1 : 0;
  }
  return found == 0;
}

// The sign bit is set if the value is not in the range; the differences wrap around.
RLSTORE_INLINE uint64_t outside(int64_t value, int64_t low, int64_t high) {
  return (static_cast<uint64_t>(value) - static_cast<uint64_t>(low)) | (static_cast<uint64_t>(high) - static_cast<uint64_t>(value));
}
RLSTORE_INLINE uint64_t outside(uint64_t value, int64_t low, int64_t high) {
  return (value | outside(static_cast<int64_t>(value), low, high));  // above the range of int64, it is above any
}
template <typename Float>
RLSTORE_INLINE uint64_t outside(Float value, Float low, Float high) {
  return (value >= low) & (value <= high) & (std::floor(value) == value) ? 0 : uint64_t{1} << 63;
}

template <typename Source>
RLSTORE_INLINE bool within_at(const Source* source, size_t count, int64_t stride, int64_t low, int64_t high) {
  using Number = std::conditional_t<std::is_floating_point_v<Source> || std::is_same_v<Source, uint64_t>, Source, int64_t>;
  using Bound = std::conditional_t<std::is_floating_point_v<Source>, Source, int64_t>;
  uint64_t found = 0;
  for (size_t i = 0; i < count; i++)
    found |= outside(static_cast<Number>(source[static_cast<int64_t>(i) * stride]), static_cast<Bound>(low), static_cast<Bound>(high));
  return static_cast<int64_t>(found) >= 0;
}

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
