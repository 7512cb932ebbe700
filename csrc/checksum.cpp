// Bytes are the coefficients of a polynomial over GF(2), that of the highest degree first and in the lowest bit; the checksum is
// its remainder modulo P. The register starts inverted and is inverted at the end.
#include "checksum.h"

#include <array>

#if defined(__x86_64__) && defined(__GNUC__)
#define RLSTORE_FOLDS
#include <immintrin.h>
#endif

namespace rlstore {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // P without x^32, the highest degree in the lowest bit

constexpr uint32_t times_x(uint32_t value) { return (value >> 1) ^ (value & 1 ? kPolynomial : 0); }

constexpr size_t kBlock = 16;
using Tables = std::array<std::array<uint32_t, 256>, kBlock>;

// tables[k][byte]: the register after `byte` and k zeros.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < kBlock; ++k)
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

uint32_t feed(uint32_t reg, const unsigned char* data, size_t size) {
  for (; size >= kBlock; data += kBlock, size -= kBlock) {
    uint32_t next = 0;
    for (size_t i = 0; i < 4; ++i) next ^= kTables[kBlock - 1 - i][((reg >> (8 * i)) & 255) ^ data[i]];
    for (size_t i = 4; i < kBlock; ++i) next ^= kTables[kBlock - 1 - i][data[i]];
    reg = next;
  }
  for (; size > 0; ++data, --size) reg = (reg >> 8) ^ kTables[0][(reg ^ *data) & 255];
  return reg;
}

#ifdef RLSTORE_FOLDS

// x^exponent mod P as a factor of a carry-less product. That product reads its operands, 64 coefficients each, one degree too
// low, and a factor of 32 coefficients 32 degrees too high: hence the shift, and the 32 that callers subtract.
constexpr int64_t factor(int exponent) {
  uint32_t value = 0x80000000;
  for (int i = 0; i < exponent; ++i) value = times_x(value);
  return int64_t{value} << 1;
}

// What 16 bytes contribute `distance` bytes later, as 16 bytes there: the lower half has the higher degrees.
template <int distance>
__attribute__((target("pclmul"))) inline __m128i moved(__m128i block) {
  const __m128i factors = _mm_set_epi64x(factor(8 * distance - 32), factor(8 * distance + 64 - 32));
  return _mm_xor_si128(_mm_clmulepi64_si128(block, factors, 0x00), _mm_clmulepi64_si128(block, factors, 0x11));
}

__attribute__((target("pclmul"))) inline __m128i load(const unsigned char* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

constexpr size_t kStride = 4 * kBlock;  // four chains, because a product takes several cycles

// feed() for at least kStride bytes.
__attribute__((target("pclmul"))) uint32_t fold(uint32_t reg, const unsigned char* data, size_t size) {
  __m128i a = load(data), b = load(data + kBlock), c = load(data + 2 * kBlock), d = load(data + 3 * kBlock);
  a = _mm_xor_si128(a, _mm_cvtsi32_si128(static_cast<int>(reg)));
  for (data += kStride, size -= kStride; size >= kStride; data += kStride, size -= kStride) {
    a = _mm_xor_si128(moved<kStride>(a), load(data));
    b = _mm_xor_si128(moved<kStride>(b), load(data + kBlock));
    c = _mm_xor_si128(moved<kStride>(c), load(data + 2 * kBlock));
    d = _mm_xor_si128(moved<kStride>(d), load(data + 3 * kBlock));
  }
  b = _mm_xor_si128(b, moved<kBlock>(a));
  c = _mm_xor_si128(c, moved<kBlock>(b));
  d = _mm_xor_si128(d, moved<kBlock>(c));
  unsigned char last[kBlock];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(last), d);
  return feed(feed(0, last, kBlock), data, size);
}

const bool kCanFold = __builtin_cpu_supports("pclmul");

#endif

}  // namespace

uint32_t crc32_by_tables(const void* data, size_t size, uint32_t value) {
  return ~feed(~value, static_cast<const unsigned char*>(data), size);
}

uint32_t crc32(const void* data, size_t size, uint32_t value) {
#ifdef RLSTORE_FOLDS
  if (size >= kStride && kCanFold) return ~fold(~value, static_cast<const unsigned char*>(data), size);
#endif
  return crc32_by_tables(data, size, value);
}

}  // namespace rlstore
