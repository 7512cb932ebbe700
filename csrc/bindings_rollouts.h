// Gathers the rollouts of several hand-off slots into a batch.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "bindings_tensor.h"
#include "rollouts.h"
#include "rows.h"

namespace rlstore {

// A source [slots, rows, ...]: each slot is contiguous; there may be a gap after each.
inline SlotField describe_slots(nb::handle object, DLDataType* dtype) {
  const DLTensor tensor = describe_strided(object);
  if (tensor.ndim < 2) throw nb::value_error("gather_slots: a source is [slots, rows, ...]");
  const size_t bytes = element_bytes(tensor), slot_elements = element_count(tensor, 1);
  DLTensor slot = tensor;  // one slot
  slot.ndim--;
  slot.shape++;
  if (slot.strides) slot.strides++;
  const int64_t stride = tensor.strides ? tensor.strides[0] : static_cast<int64_t>(slot_elements);
  if (!is_contiguous(slot) || (tensor.shape[0] > 1 && stride < static_cast<int64_t>(slot_elements)))
    throw nb::value_error("gather_slots: a slot is not contiguous");
  *dtype = tensor.dtype;
  return {address(tensor), nullptr, static_cast<size_t>(tensor.shape[0]), static_cast<size_t>(stride) * bytes,
          static_cast<size_t>(tensor.shape[1]), element_count(tensor, 2) * bytes};
}

// targets[k][t, i] = sources[k][slots[i], t], for every field in one call.
inline void gather_slots_binding(nb::tuple sources, nb::handle slots_tensor, nb::tuple targets) {
  const size_t count = element_count(describe(slots_tensor));
  const int64_t* slots = typed<int64_t>(slots_tensor, count);
  if (sources.size() != targets.size()) throw nb::value_error("gather_slots: as many targets as sources");
  std::vector<SlotField> fields;
  size_t limit = INT64_MAX;
  for (size_t k = 0; k < sources.size(); k++) {
    DLDataType dtype;
    SlotField field = describe_slots(sources[k], &dtype);
    const DLTensor target = describe(targets[k]);
    if (!(target.dtype == dtype) || element_count(target) * element_bytes(target) != field.rows * count * field.row_bytes)
      throw nb::value_error("gather_slots: a target does not fit its source");
    field.target = address(target);
    limit = std::min(limit, field.slots);
    fields.push_back(field);
  }
  nb::gil_scoped_release released;
  if (!rows_in_range(slots, count, static_cast<int64_t>(limit))) throw nb::index_error("gather_slots: a slot is out of range");
  for (const SlotField& field : fields) gather_slots(field, slots, count);
}

}  // namespace rlstore
