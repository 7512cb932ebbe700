// Values of one dtype as those of another that means the same numbers.
#pragma once

#include <cstddef>

#include "dlpack.h"

namespace rlstore {

// Converts `count` values; false if one of them would lose its meaning, or if the dtypes are none that are converted here. What
// was written is then without meaning. A float may be rounded to a shorter float; a whole number must be representable, and is
// not looked at closely where a float is longer than its own digits: false does not mean that it cannot be converted.
bool convert(char* target, DLDataType to, const char* source, DLDataType from, size_t count);

}  // namespace rlstore
