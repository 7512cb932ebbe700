// Which values a field may hold: finite ones, or whole numbers within bounds.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "bindings_tensor.h"
#include "rows.h"

namespace rlstore {

// The rule of one field, from a sequence of pairs (low, high): one for all entries of a lane, or one for each. Without pairs
// the values are float32 and have to be finite.
struct Rule {
  size_t field;
  DLDataType dtype;
  std::vector<int64_t> low, high;

  // `entries`: the number of entries of one lane.
  Rule(size_t field, DLDataType dtype, nb::sequence pairs, size_t entries) : field(field), dtype(dtype) {
    for (nb::handle item : pairs) {
      nb::tuple pair = nb::cast<nb::tuple>(item);
      if (pair.size() != 2) throw nb::value_error("bounds are pairs (low, high)");
      low.push_back(nb::cast<int64_t>(pair[0])), high.push_back(nb::cast<int64_t>(pair[1]));
    }
    const bool is_float = dtype.code == kFloat;
    const bool known = dtype.lanes == 1 && (is_float ? dtype.bits == 32 || dtype.bits == 64 : dtype.code == kInt || dtype.code == kUInt || dtype.code == kBool);
    if (!known || (low.empty() && !(is_float && dtype.bits == 32))) throw nb::value_error("a rule for values that cannot be checked");
    if (low.size() > 1 && low.size() != entries) throw nb::value_error("one pair of bounds, or one for each entry");
  }

  // True if all values obey; `stride` is in elements, and `first` the index of the first value.
  bool holds(const char* memory, size_t count, int64_t stride = 1, size_t first = 0) const {
    if (low.empty()) return all_finite(reinterpret_cast<const float*>(memory) + first, count, stride);
    const auto within = [&](auto element) {
      const auto* source = reinterpret_cast<const decltype(element)*>(memory) + first;
      return all_within(source, count, stride, low.data(), high.data(), low.size());
    };
    const int bits = dtype.bits;
    if (dtype.code == kFloat) return bits == 32 ? within(float{}) : within(double{});
    if (dtype.code == kInt) return bits == 8 ? within(int8_t{}) : bits == 16 ? within(int16_t{}) : bits == 32 ? within(int32_t{}) : within(int64_t{});
    return bits == 8 ? within(uint8_t{}) : bits == 16 ? within(uint16_t{}) : bits == 32 ? within(uint32_t{}) : within(uint64_t{});
  }
};

}  // namespace rlstore
