// Checks the values of a time row, and launches the CUDA kernel that writes it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <utility>
#include <vector>

#include "bindings_launch.h"
#include "bindings_row_field.h"
#include "bindings_values.h"

namespace rlstore {

// Checks a row as RowWriter does, and launches a kernel that is bound for rows of its kind.
class RowLauncher {
 public:
  // Each target is (block, lead, is_flag, optional).
  explicit RowLauncher(nb::sequence targets) {
    for (nb::handle target : targets) {
      fields_.emplace_back(target);
      blocks_.push_back(nb::borrow(nb::cast<nb::tuple>(target)[0]));
    }
  }

  // Launches the kernel that is bound for the row, and returns None. Or returns the kind of the row, if none is bound for
  // it: bytes that are equal for rows whose values are read in the same way: same dtypes, same strides of the first
  // dimension, same values None. Or returns, for the first value that does not fit, its index i if it must be converted or
  // refused, or ~i if it fits once it is copied into contiguous memory.
  nb::object write(size_t row, nb::tuple values) {
    if (values.size() != fields_.size()) throw nb::value_error("a row has one value for each field");
    std::vector<Kind> kinds(fields_.size());
    std::vector<uint64_t> addresses(fields_.size());
    for (size_t i = 0; i < fields_.size(); i++) {
      const RowField& field = fields_[i];
      PyObject* value = PyTuple_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i));
      if (value == Py_None && field.optional) continue;
      field.check_row(row);
      DLTensor tensor;
      if (!field.describe_fitting(value, &tensor)) return nb::int_(i);
      const bool contiguous = is_contiguous(tensor);
      if ((!contiguous && !has_plain_entries(tensor)) || is_lazy(value)) return nb::int_(~static_cast<int64_t>(i));
      kinds[i] = Kind{tensor.dtype.code, tensor.dtype.bits, contiguous ? -1 : tensor.strides[0]};
      addresses[i] = reinterpret_cast<uint64_t>(address(tensor));
    }
    for (const Plan& plan : plans_) {
      const bool fits = !memcmp(plan.kinds.data(), kinds.data(), kinds.size() * sizeof(Kind));
      if (fits && launch(plan, row, addresses)) return nb::none();
    }
    return nb::bytes(kinds.data(), kinds.size() * sizeof(Kind));
  }

  // Launches rows of a kind with a kernel that takes the values and the blocks of some fields, what is fixed, and the row.
  void bind(nb::bytes kind, nb::object kernel, unsigned programs, std::vector<size_t> places, nb::object fixed) {
    Plan plan{std::vector<Kind>(fields_.size()), std::move(kernel), programs, std::move(places), std::move(fixed)};
    if (kind.size() != plan.kinds.size() * sizeof(Kind)) throw nb::value_error("the kind of a row of other fields");
    memcpy(plan.kinds.data(), kind.c_str(), kind.size());
    for (size_t place : plan.places)
      if (place >= fields_.size()) throw nb::value_error("a field that there is not");
    const size_t parameters = 2 * plan.places.size() + nb::cast<const Fixed&>(plan.fixed).addresses().size() + 1;
    if (nb::cast<const BoundKernel&>(plan.kernel).parameters() != parameters) throw nb::value_error("a kernel of other parameters");
    plans_.push_back(std::move(plan));
  }

 private:
  // Compared as bytes, so it has no padding.
  struct Kind {
    int32_t code = 0, bits = 0;  // of the dtype; 0 bits where there is no value
    int64_t stride = 0;          // of the first dimension; -1 for contiguous memory
  };
  static_assert(sizeof(Kind) == 16);

  struct Plan {
    std::vector<Kind> kinds;
    nb::object kernel;  // a BoundKernel
    unsigned programs;
    std::vector<size_t> places;
    nb::object fixed;  // a Fixed
  };

  // False if the kernel cannot take the row: see BoundKernel::launch.
  bool launch(const Plan& plan, size_t row, const std::vector<uint64_t>& addresses) const {
    const auto& kernel = *nb::inst_ptr<BoundKernel>(plan.kernel);
    const auto& fixed = *nb::inst_ptr<Fixed>(plan.fixed);
    if (!kernel.is_current() || !fixed.fits(kernel.device())) return false;
    BoundKernel::Parameters parameters;
    for (size_t place : plan.places) {
      if (addresses[place] % 16) return false;
      parameters.add(addresses[place]);
    }
    for (size_t place : plan.places) {
      DLTensor block;  // looked up at each row: a caller may have freed or replaced its memory
      if (exchange->describe(blocks_[place].ptr(), &block)) throw nb::python_error();
      if (!has_memory(blocks_[place], block)) throw nb::value_error("a kernel was given a tensor that has no memory");
      parameters.add(reinterpret_cast<uint64_t>(address(block)));
      if (parameters.words[parameters.count - 1] % 16) return false;
    }
    for (uint64_t word : fixed.addresses()) parameters.add(word);
    parameters.add(row);
    kernel.launch_with(plan.programs, 1, 1, &parameters);
    return true;
  }

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
  std::vector<nb::object> blocks_;
  std::vector<Plan> plans_;
};

}  // namespace rlstore
