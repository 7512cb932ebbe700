// The conditions under which a value of a time row can be copied into its block without conversion.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "bindings_tensor.h"

namespace rlstore {

inline bool can_be_flag(const DLDataType& dtype) {
  if (dtype.lanes != 1) return false;
  if (dtype.code == kFloat) return dtype.bits == 32 || dtype.bits == 64;
  if (dtype.code == kInt) return dtype.bits == 8 || dtype.bits == 32 || dtype.bits == 64;
  return dtype.bits == 8 && (dtype.code == kUInt || dtype.code == kBool);
}

// One field of a time row, from (block, lead, is_flag, optional): a value given for row t is written to block[t + lead].
struct RowField {
  DLDevice device;
  DLDataType dtype;
  std::vector<int64_t> shape;  // shape of one time row
  size_t count, rows, lead;
  bool is_flag, optional;

  explicit RowField(nb::handle item) {
    nb::tuple target = nb::cast<nb::tuple>(item);
    if (target.size() != 4) throw nb::value_error("a target is (block, lead, is_flag, optional)");
    DLTensor block;
    if (exchange->describe(target[0].ptr(), &block)) throw nb::python_error();
    if (block.ndim < 1) throw nb::value_error("a block is [rows, ...]");
    device = block.device;
    dtype = block.dtype;
    shape.assign(block.shape + 1, block.shape + block.ndim);
    count = element_count(block, 1);
    rows = static_cast<size_t>(block.shape[0]);
    lead = nb::cast<size_t>(target[1]);
    is_flag = nb::cast<bool>(target[2]);
    optional = nb::cast<bool>(target[3]);
  }

  void check_row(size_t row) const {
    if (row >= rows || lead >= rows - row) throw nb::index_error("a row beyond the end of its block");
  }

  // Describes a value; false if it must be converted or refused.
  bool describe_fitting(PyObject* value, DLTensor* tensor) const {
    if (exchange->describe(value, tensor)) {
      PyErr_Clear();
      return false;
    }
    const bool type_fits = is_flag ? can_be_flag(tensor->dtype) : tensor->dtype == dtype;
    const bool same_device = tensor->device.type == device.type && tensor->device.id == device.id;
    return same_device && type_fits && has_shape(tensor->shape, tensor->ndim) && has_memory(value, *tensor);
  }

  // True if the shape is that of a row, or if both are rows of scalars, (n,) or (n, 1).
  bool has_shape(const int64_t* given, int ndim) const {
    const size_t dims = static_cast<size_t>(ndim);
    if (is_scalar_row(given, dims) && is_scalar_row(shape.data(), shape.size())) return given[0] == shape[0];
    return dims == shape.size() && std::equal(shape.begin(), shape.end(), given);
  }

 private:
  static bool is_scalar_row(const int64_t* shape, size_t ndim) { return ndim == 1 || (ndim == 2 && shape[1] == 1); }
};

}  // namespace rlstore
