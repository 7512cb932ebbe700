#include "convert.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "simd.h"

namespace rlstore {

namespace {

struct Bool {
  uint8_t byte;
  operator uint8_t() const { return byte != 0; }
};

// True if a whole number is one of the target type, too.
template <typename To, typename From>
RLSTORE_INLINE bool fits(From value) {
  if constexpr (std::is_floating_point_v<To>) {
    constexpr int digits = std::numeric_limits<To>::digits;
    if constexpr (std::numeric_limits<From>::digits <= digits) return true;
    else if constexpr (std::is_signed_v<From>) return value <= (From{1} << digits) && value >= -(From{1} << digits);
    else return value <= (From{1} << digits);
  } else {
    return static_cast<From>(static_cast<To>(value)) == value && (value < From{0}) == (static_cast<To>(value) < To{0});
  }
}

template <typename To, typename From>
bool convert_to(char* target, const char* source, size_t count) {
  bool all_fit = true;
  for (size_t i = 0; i < count; i++) {
    From given;
    memcpy(&given, source + i * sizeof given, sizeof given);
    To made;
    if constexpr (std::is_same_v<From, Bool>) {
      made = static_cast<To>(static_cast<uint8_t>(given));
    } else {
      if constexpr (std::is_integral_v<From>) all_fit &= fits<To>(given);
      made = static_cast<To>(given);
    }
    memcpy(target + i * sizeof made, &made, sizeof made);
  }
  return all_fit;
}

template <typename From>
bool convert_from(char* target, DLDataType to, const char* source, size_t count) {
  if (to.code == kFloat && to.bits == 32) return convert_to<float, From>(target, source, count);
  if (to.code == kFloat && to.bits == 64) return convert_to<double, From>(target, source, count);
  if constexpr (std::is_integral_v<From> || std::is_same_v<From, Bool>) {
    if (to.code == kInt || to.code == kUInt) {
      const bool is_signed = to.code == kInt;
      switch (to.bits) {
        case 8: return is_signed ? convert_to<int8_t, From>(target, source, count) : convert_to<uint8_t, From>(target, source, count);
        case 16: return is_signed ? convert_to<int16_t, From>(target, source, count) : convert_to<uint16_t, From>(target, source, count);
        case 32: return is_signed ? convert_to<int32_t, From>(target, source, count) : convert_to<uint32_t, From>(target, source, count);
        case 64: return is_signed ? convert_to<int64_t, From>(target, source, count) : convert_to<uint64_t, From>(target, source, count);
        default: return false;
      }
    }
  }
  return false;
}

}  // namespace

bool convert(char* target, DLDataType to, const char* source, DLDataType from, size_t count) {
  if (from.lanes != 1 || to.lanes != 1) return false;
  switch (from.code << 8 | from.bits) {
    case kFloat << 8 | 32: return convert_from<float>(target, to, source, count);
    case kFloat << 8 | 64: return convert_from<double>(target, to, source, count);
    case kBool << 8 | 8: return convert_from<Bool>(target, to, source, count);
    case kInt << 8 | 8: return convert_from<int8_t>(target, to, source, count);
    case kInt << 8 | 16: return convert_from<int16_t>(target, to, source, count);
    case kInt << 8 | 32: return convert_from<int32_t>(target, to, source, count);
    case kInt << 8 | 64: return convert_from<int64_t>(target, to, source, count);
    case kUInt << 8 | 8: return convert_from<uint8_t>(target, to, source, count);
    case kUInt << 8 | 16: return convert_from<uint16_t>(target, to, source, count);
    case kUInt << 8 | 32: return convert_from<uint32_t>(target, to, source, count);
    case kUInt << 8 | 64: return convert_from<uint64_t>(target, to, source, count);
    default: return false;
  }
}

}  // namespace rlstore
