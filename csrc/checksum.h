// The checksum of everything on disk: CRC-32 as zlib computes it, several times as fast.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rlstore {

// The checksum of `size` bytes that follow bytes whose checksum is `value`; of no bytes it is 0.
uint32_t crc32(const void* data, size_t size, uint32_t value);

// The same with tables alone, for processors that cannot multiply polynomials.
uint32_t crc32_by_tables(const void* data, size_t size, uint32_t value);

}  // namespace rlstore
