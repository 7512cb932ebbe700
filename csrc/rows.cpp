#include "rows.h"

#include <cmath>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "simd.h"

namespace rlstore {

namespace {

constexpr size_t kPrefetchAhead = 12;   // rows; far enough to hide a cache miss, near enough to stay in L1
constexpr size_t kSmallRow = 512;       // bytes; above this the library's memcpy is faster

// Copies a row whose size is known only at run time, in chunks; the last one overlaps the one before: no byte loop, no call.
template <size_t Chunk>
RLSTORE_INLINE void copy_chunks(char* target, const char* source, size_t bytes) {
  for (size_t i = 0; i + Chunk < bytes; i += Chunk) memcpy(target + i, source + i, Chunk);
  memcpy(target + bytes - Chunk, source + bytes - Chunk, Chunk);
}

template <size_t Bytes>
RLSTORE_INLINE void gather_fixed(char* target, const char* source, const int64_t* rows, size_t count) {
  for (size_t i = 0; i < count; i++) memcpy(target + i * Bytes, source + rows[i] * Bytes, Bytes);
}

template <size_t Chunk>
RLSTORE_INLINE void gather_chunks(char* target, const char* source, const int64_t* rows, size_t count,
                                                         size_t bytes) {
  for (size_t i = 0; i < count; i++) {
    if (i + kPrefetchAhead < count) {
      const char* next = source + rows[i + kPrefetchAhead] * bytes;
      for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(next + line);
    }
    copy_chunks<Chunk>(target + i * bytes, source + rows[i] * bytes, bytes);
  }
}

}  // namespace

void copy_streamed(char* target, const char* source, size_t bytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  if (bytes < head + kLine) {
    memcpy(target, source, bytes);
    return;
  }
  memcpy(target, source, head);
  size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    __builtin_prefetch(source + i + 8 * kLine);
    for (size_t k = 0; k < kLine; k += sizeof(__m128i))
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i + k)));
  }
  memcpy(target + i, source + i, bytes - i);
#else
  memcpy(target, source, bytes);
#endif
}

void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void copy_row(char* target, const char* source, size_t bytes) {
  constexpr size_t kLarge = 128 << 10;
  if (bytes == 0) return;  // without memory
  const bool apart = target + bytes <= source || source + bytes <= target;
  if (bytes >= kLarge && apart) {
    copy_streamed(target, source, bytes);
    end_streams();
  } else {
    memmove(target, source, bytes);
  }
}

// target_clones does not apply to templates, so each instance is written out.
#define RLSTORE_FLAGS(Target, Source)                                                                       \
  template <>                                                                                              \
  RLSTORE_CLONES void copy_flags<Target, Source>(Target * target, const Source* source, size_t count) {    \
    for (size_t i = 0; i < count; i++) target[i] = source[i] != 0 ? Target(1) : Target(0);                 \
  }
#define RLSTORE_FLAGS_FROM(Source) RLSTORE_FLAGS(uint8_t, Source) RLSTORE_FLAGS(float, Source)
RLSTORE_FLAGS_FROM(uint8_t)
RLSTORE_FLAGS_FROM(int32_t)
RLSTORE_FLAGS_FROM(int64_t)
RLSTORE_FLAGS_FROM(float)
RLSTORE_FLAGS_FROM(double)
#undef RLSTORE_FLAGS_FROM
#undef RLSTORE_FLAGS

template <typename Source>
bool has_nan(const Source* source, size_t count) {
  bool found = false;
  for (size_t i = 0; i < count; i++) found |= source[i] != source[i];
  return found;
}
template bool has_nan<float>(const float*, size_t);
template bool has_nan<double>(const double*, size_t);

RLSTORE_CLONES
bool all_finite(const float* source, size_t count, int64_t stride) {
  return stride == 1 ? finite_at(source, count, 1) : finite_at(source, count, stride);
}

#define RLSTORE_WITHIN(Source)                                                                                           \
  template <>                                                                                                            \
  RLSTORE_CLONES bool all_within<Source>(const Source* source, size_t count, int64_t stride, int64_t low, int64_t high) { \
    return stride == 1 ? within_at(source, count, 1, low, high) : within_at(source, count, stride, low, high);           \
  }
RLSTORE_WITHIN(uint8_t)
RLSTORE_WITHIN(int8_t)
RLSTORE_WITHIN(int16_t)
RLSTORE_WITHIN(int32_t)
RLSTORE_WITHIN(int64_t)
RLSTORE_WITHIN(uint16_t)
RLSTORE_WITHIN(uint32_t)
RLSTORE_WITHIN(uint64_t)
RLSTORE_WITHIN(float)
RLSTORE_WITHIN(double)
#undef RLSTORE_WITHIN

RLSTORE_CLONES
bool rows_in_range(const int64_t* rows, size_t count, int64_t limit) {
  bool ok = true;
  for (size_t i = 0; i < count; i++) ok &= static_cast<uint64_t>(rows[i]) < static_cast<uint64_t>(limit);
  return ok;
}

RLSTORE_CLONES
void gather_rows(char* target, const char* source, const int64_t* rows, size_t count, size_t bytes) {
  switch (bytes) {
    case 0: return;
    case 1: return gather_fixed<1>(target, source, rows, count);
    case 2: return gather_fixed<2>(target, source, rows, count);
    case 4: return gather_fixed<4>(target, source, rows, count);
    case 8: return gather_fixed<8>(target, source, rows, count);
    case 16: return gather_fixed<16>(target, source, rows, count);
  }
  if (bytes > kSmallRow) {
    for (size_t i = 0; i < count; i++) memcpy(target + i * bytes, source + rows[i] * bytes, bytes);
  } else if (bytes >= 64) {
    gather_chunks<64>(target, source, rows, count, bytes);
  } else if (bytes >= 32) {
    gather_chunks<32>(target, source, rows, count, bytes);
  } else if (bytes >= 16) {
    gather_chunks<16>(target, source, rows, count, bytes);
  } else if (bytes >= 8) {
    gather_chunks<8>(target, source, rows, count, bytes);
  } else if (bytes >= 4) {
    gather_chunks<4>(target, source, rows, count, bytes);
  } else {
    gather_chunks<1>(target, source, rows, count, bytes);
  }
}

namespace {

RLSTORE_INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

RLSTORE_INLINE BrainHalf::operator float() const { return float_of(static_cast<uint32_t>(bits) << 16); }

// With its bits shifted into those of a float, a half is too small by 2^112, which a multiplication corrects, also for
// subnormals; infinities and NaNs have all exponent bits set in both formats.
RLSTORE_INLINE Half::operator float() const {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
  const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  const float scaled = float_of(magnitude) * float_of(0x77800000u);
  uint32_t result;
  memcpy(&result, &scaled, sizeof result);
  return float_of(sign | result | special);
}

namespace {

template <typename Source>
RLSTORE_INLINE void convert_rows(float* target, const Source* source, const int64_t* rows, size_t count,
                                                        size_t width) {
  for (size_t i = 0; i < count; i++) {
    const Source* from = source + rows[i] * width;
    float* to = target + i * width;
    for (size_t k = 0; k < width; k++) to[k] = static_cast<float>(from[k]);
  }
}

}  // namespace

#define RLSTORE_CONVERT(Source)                                                                                \
  template <>                                                                                                  \
  RLSTORE_CLONES void gather_as_float<Source>(float* target, const Source* source, const int64_t* rows,       \
                                              size_t count, size_t width) {                                   \
    convert_rows(target, source, rows, count, width);                                                          \
  }
RLSTORE_CONVERT(uint8_t)
RLSTORE_CONVERT(int8_t)
RLSTORE_CONVERT(int16_t)
RLSTORE_CONVERT(int32_t)
RLSTORE_CONVERT(int64_t)
RLSTORE_CONVERT(uint16_t)
RLSTORE_CONVERT(uint32_t)
RLSTORE_CONVERT(uint64_t)
RLSTORE_CONVERT(Half)
RLSTORE_CONVERT(BrainHalf)
RLSTORE_CONVERT(double)
#undef RLSTORE_CONVERT

}  // namespace rlstore
