// Checks the values of a time row that a CUDA kernel will write.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "bindings_row_field.h"
#include "bindings_values.h"

namespace rlstore {

// Checks a row as RowWriter does, and returns a key of the kernel variant that the row needs.
class RowChecker {
 public:
  // Each target is (block, lead, is_flag, optional).
  explicit RowChecker(nb::sequence targets) {
    for (nb::handle target : targets) fields_.emplace_back(target);
    kinds_.resize(fields_.size());
  }

  // Returns bytes that are equal for rows whose values are read in the same way: same dtypes, same strides of the first
  // dimension, same values None. Or returns, for the first value that does not fit, its index i if it must be converted or
  // refused, or ~i if it fits once it is copied into contiguous memory.
  nb::object look(size_t row, nb::tuple values) {
    if (values.size() != fields_.size()) throw nb::value_error("a row has one value for each field");
    for (size_t i = 0; i < fields_.size(); i++) {
      const RowField& field = fields_[i];
      PyObject* value = PyTuple_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i));
      kinds_[i] = Kind{};
      if (value == Py_None && field.optional) continue;
      field.check_row(row);
      DLTensor tensor;
      if (!field.describe_fitting(value, &tensor)) return nb::int_(i);
      const bool contiguous = is_contiguous(tensor);
      const bool lazy = may_be_lazy(tensor, contiguous) && is_lazy(value, tensor);
      if ((!contiguous && !has_plain_entries(tensor)) || lazy) return nb::int_(~static_cast<int64_t>(i));
      kinds_[i] = Kind{tensor.dtype.code, tensor.dtype.bits, contiguous ? -1 : tensor.strides[0]};
    }
    return nb::bytes(kinds_.data(), kinds_.size() * sizeof(Kind));
  }

 private:
  // Compared as bytes, so it has no padding.
  struct Kind {
    int32_t code, bits;  // of the dtype; 0 bits where there is no value
    int64_t stride;      // of the first dimension; -1 for contiguous memory
  };
  static_assert(sizeof(Kind) == 16);

  // True if only the stride of the first dimension makes a tensor non-contiguous.
  static bool has_plain_entries(const DLTensor& tensor) {
    int64_t expected = 1;
    for (int i = tensor.ndim; i-- > 1;) {
      if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
      expected *= tensor.shape[i];
    }
    return true;
  }

  std::vector<RowField> fields_;
  std::vector<Kind> kinds_;
};

}  // namespace rlstore
