// Joins the rollouts of several hand-off slots into a batch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rlstore {

// One field of every slot: slot s holds `rows` rows of `row_bytes` at source + s * slot_bytes.
struct SlotField {
  const char* source;
  char* target;  // [rows, slots taken, row_bytes]
  size_t slots, slot_bytes, rows, row_bytes;
};

// target[t][i] = source[slots[i]][t].
void gather_slots(const SlotField& field, const int64_t* slots, size_t count);

}  // namespace rlstore
