#include "rollouts.h"

#include <cstring>

#include "rows.h"

namespace rlstore {

namespace {

// Outputs of this size do not stay in the cache until they are read: they are written with non-temporal stores.
constexpr size_t kLargeOutput = 1 << 20;
constexpr size_t kLargeRow = 1 << 10;

template <size_t Bytes>
void gather_fixed(const SlotField& field, const int64_t* slots, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const char* source = field.source + slots[i] * field.slot_bytes;
    char* target = field.target + i * Bytes;
    for (size_t t = 0; t < field.rows; t++) memcpy(target + t * count * Bytes, source + t * Bytes, Bytes);
  }
}

// Slot by slot, so that each slot is read sequentially.
template <typename Copy>
void gather_with(const SlotField& field, const int64_t* slots, size_t count, Copy copy) {
  const size_t bytes = field.row_bytes;
  for (size_t i = 0; i < count; i++) {
    const char* source = field.source + slots[i] * field.slot_bytes;
    for (size_t t = 0; t < field.rows; t++) copy(field.target + (t * count + i) * bytes, source + t * bytes, bytes);
  }
}

}  // namespace

void gather_slots(const SlotField& field, const int64_t* slots, size_t count) {
  const size_t bytes = field.row_bytes;
  switch (bytes) {
    case 0: return;
    case 1: return gather_fixed<1>(field, slots, count);
    case 2: return gather_fixed<2>(field, slots, count);
    case 4: return gather_fixed<4>(field, slots, count);
    case 8: return gather_fixed<8>(field, slots, count);
  }
  if (bytes >= kLargeRow && bytes * field.rows * count >= kLargeOutput) {
    gather_with(field, slots, count, copy_streamed);
    end_streams();
  } else {
    gather_with(field, slots, count, copy_short);
  }
}

}  // namespace rlstore
