// The two flags with which an environment reports the end of an episode.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings_tensor.h"
#include "bindings_values.h"

namespace rlstore {

// Finds the memory of flags of one byte each for so many lanes; false if they are anything else, which may still be right.
inline bool find_flags(nb::handle value, size_t lanes, Given* given) {
  const bool is_array = Py_TYPE(value.ptr()) == numpy.array;
  if (!(is_array ? read_array(value.ptr(), given) : read_tensor(value.ptr(), given))) return false;
  const bool is_byte = given->dtype.bits == 8 && given->dtype.lanes == 1 && given->dtype.code != kFloat;
  const bool is_row = given->ndim == 1 || (given->ndim == 2 && given->shape[1] == 1);
  return is_byte && is_row && !given->strides && static_cast<size_t>(given->shape[0]) == lanes;
}

// Writes for each lane whether its episode ended, and whether it was only truncated: where both flags are set, it terminated. Returns
// how many ended; or -1 if the flags cannot be read here, and nothing is written.
inline int64_t join_flags(nb::handle terminated, nb::handle truncated, nb::handle ended, nb::handle cut_off) {
  const size_t lanes = element_count(describe(ended));
  uint8_t *ends = typed<uint8_t>(ended, lanes), *cuts = typed<uint8_t>(cut_off, lanes);
  Given over, cut;
  if (!find_flags(terminated, lanes, &over) || !find_flags(truncated, lanes, &cut)) return -1;
  int64_t count = 0;
  for (size_t i = 0; i < lanes; i++) {
    const bool is_over = over.memory[i] != 0, is_cut = cut.memory[i] != 0;
    ends[i] = is_over | is_cut;
    cuts[i] = is_cut & !is_over;
    count += is_over | is_cut;
  }
  return count;
}

}  // namespace rlstore
