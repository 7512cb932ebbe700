// Random numbers as a pure function of a seed and a counter, so that every device and thread draws the same numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rlstore {

// The output function of SplitMix64 (Steele, Lea and Flood 2014) at position `counter` of the stream of `seed`.
inline uint64_t random_bits(uint64_t seed, uint64_t counter) {
  uint64_t z = seed + (counter + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Moves a generator {seed, counter} on by `count` numbers.
inline void advance(int64_t* generator, size_t count) { generator[1] = static_cast<int64_t>(static_cast<uint64_t>(generator[1]) + count); }

// Uniform over the multiples of 2^-53 in [0, 1).
inline double random_unit(uint64_t seed, uint64_t counter) {
  return static_cast<double>(random_bits(seed, counter) >> 11) * 0x1.0p-53;
}

// Uniform over 0 .. n-1, for n up to about 2^52.
inline int64_t random_below(uint64_t seed, uint64_t counter, int64_t n) {
  const int64_t drawn = static_cast<int64_t>(random_unit(seed, counter) * static_cast<double>(n));
  return drawn < n ? drawn : n - 1;
}

}  // namespace rlstore
