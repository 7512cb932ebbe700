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
  size_t field, entries;  // entries of one lane
  DLDataType dtype;
  std::vector<int64_t> low, high;

  Rule(size_t field, DLDataType dtype, nb::sequence pairs, size_t entries) : field(field), entries(entries), dtype(dtype) {
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

  // True if the values of so many lanes obey, whose entries are `stride` elements apart.
  bool holds(const char* memory, size_t lanes, int64_t stride = 1) const {
    if (low.empty()) {
      const float* source = reinterpret_cast<const float*>(memory);
      const size_t count = lanes * entries;
      return count <= kFew ? finite_at(source, count, stride) : all_finite(source, count, stride);
    }
    switch (dtype.bits) {
      case 8: return dtype.code == kInt ? within<int8_t>(memory, lanes, stride) : within<uint8_t>(memory, lanes, stride);
      case 16: return dtype.code == kInt ? within<int16_t>(memory, lanes, stride) : within<uint16_t>(memory, lanes, stride);
      case 32:
        if (dtype.code == kFloat) return within<float>(memory, lanes, stride);
        return dtype.code == kInt ? within<int32_t>(memory, lanes, stride) : within<uint32_t>(memory, lanes, stride);
      default:
        if (dtype.code == kFloat) return within<double>(memory, lanes, stride);
        return dtype.code == kInt ? within<int64_t>(memory, lanes, stride) : within<uint64_t>(memory, lanes, stride);
    }
  }

 private:
  static constexpr size_t kFew = 16;  // values for which a call would take longer than the loop

  template <typename Element>
  bool within(const char* memory, size_t lanes, int64_t stride) const {
    const Element* source = reinterpret_cast<const Element*>(memory);
    const size_t count = lanes * entries;
    if (low.size() == 1) return count <= kFew ? within_at(source, count, stride, low[0], high[0]) : all_within(source, count, stride, low[0], high[0]);
    for (size_t k = 0; k < entries; k++)
      if (!all_within(source + static_cast<int64_t>(k) * stride, lanes, stride * static_cast<int64_t>(entries), low[k], high[k])) return false;
    return true;
  }
};

}  // namespace rlstore
