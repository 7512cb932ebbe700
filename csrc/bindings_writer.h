// Writes one time row of a storage. It inspects Python objects itself, because that is most of the work.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings_row_field.h"
#include "bindings_rules.h"
#include "bindings_tensor.h"
#include "bindings_values.h"
#include "rows.h"

namespace rlstore {

// Copies a non-contiguous value into contiguous memory; contiguous inner dimensions are copied in one piece.
inline void copy_strided(char* target, const char* source, const Given& value, int dim = 0) {
  const size_t item = value.dtype.bits / 8;
  int64_t count = 1;
  bool contiguous = true;
  for (int i = value.ndim; i-- > dim;) {
    contiguous &= value.shape[i] == 1 || value.strides[i] == count;
    count *= value.shape[i];
  }
  const size_t whole = item * static_cast<size_t>(count);
  if (contiguous) {
    memcpy(target, source, whole);
    return;
  }
  const size_t piece = whole / static_cast<size_t>(value.shape[dim]);
  const int64_t stride = value.strides[dim] * static_cast<int64_t>(item);
  for (int64_t i = 0; i < value.shape[dim]; i++) copy_strided(target + i * piece, source + i * stride, value, dim + 1);
}

inline bool is_nan_free(const char* memory, DLDataType dtype, size_t count) {
  if (dtype.code != kFloat) return true;
  if (dtype.bits == 32) return !has_nan(reinterpret_cast<const float*>(memory), count);
  return !has_nan(reinterpret_cast<const double*>(memory), count);
}

template <typename Target>
void write_flags(Target* target, const char* memory, DLDataType dtype, size_t count) {
  const bool is_float = dtype.code == kFloat;
  switch (dtype.bits) {
    case 8: return copy_flags(target, reinterpret_cast<const uint8_t*>(memory), count);
    case 32:
      if (is_float) return copy_flags(target, reinterpret_cast<const float*>(memory), count);
      return copy_flags(target, reinterpret_cast<const int32_t*>(memory), count);
    default:
      if (is_float) return copy_flags(target, reinterpret_cast<const double*>(memory), count);
      return copy_flags(target, reinterpret_cast<const int64_t*>(memory), count);
  }
}

// Writes one time row into several blocks [rows, ...] at once: checks every value first, then copies, so a refused row
// changes nothing. Shapes are bound once; addresses are read at every write, because a caller may replace the memory of a
// tensor (share_memory_(), set_data).
class RowWriter {
 public:
  // Each target is (block, lead, is_flag, optional): a value given for row t is written to block[t + lead]. rules: by the index
  // of a field that may not hold every value, its bounds; see Rule.
  explicit RowWriter(nb::sequence targets, nb::dict rules) {
    for (nb::handle target : targets) {
      Field field{RowField(target), nb::borrow(target[0])};
      field.bytes = field.count * element_bytes(describe(field.block));
      if (field.is_flag && field.dtype.bits != 8 && !(field.dtype == DLDataType{kFloat, 32, 1}))
        throw nb::value_error("flags are held in bytes or in float32");
      fields_.push_back(field);
    }
    givens_ = std::vector<Given>(fields_.size());
    for (auto [index, bounds] : rules) {
      const size_t field = nb::cast<size_t>(index);
      if (field >= fields_.size() || fields_[field].is_flag || fields_[field].shape.empty()) throw nb::value_error("a rule for no field");
      const size_t entries = fields_[field].count / std::max<size_t>(static_cast<size_t>(fields_[field].shape[0]), 1);
      rules_.emplace_back(field, fields_[field].dtype, nb::cast<nb::sequence>(bounds), entries);
    }
  }

  RowWriter(const RowWriter&) = delete;

  // Returns -1 if the row was written, else the index of the first value that must be converted in Python, or refused (nothing
  // is written then). None leaves the row of an optional field unchanged.
  int64_t write(size_t row, nb::tuple values) {
    if (values.size() != fields_.size()) throw nb::value_error("a row has one value for each field");
    const Release release{&givens_};
    const int64_t misfit = find_values(row, values.ptr());
    if (misfit >= 0) return misfit;
    for (const Rule& rule : rules_)
      if (!obeys(rule)) return static_cast<int64_t>(rule.field);
    for (size_t i = 0; i < fields_.size(); i++) {
      const Given& given = givens_[i];
      if (!given.memory) continue;
      const Field& field = fields_[i];
      char* target = field.base + (row + field.lead) * field.bytes;
      if (given.strides)
        copy_strided(target, given.memory, given);
      else if (!field.is_flag)
        copy_row(target, given.memory, field.bytes);
      else if (field.dtype.bits == 8)
        write_flags(reinterpret_cast<uint8_t*>(target), given.memory, given.dtype, field.count);
      else
        write_flags(reinterpret_cast<float*>(target), given.memory, given.dtype, field.count);
    }
    return -1;
  }

 private:
  struct Field : RowField {
    nb::object block;
    char* base = nullptr;
    size_t bytes = 0;  // size of one time row
  };

  struct Release {
    std::vector<Given>* givens;
    ~Release() {
      for (Given& given : *givens) given.release();
    }
  };

  // Finds the memory of every block and value; returns the index of the first value that does not fit, or -1.
  int64_t find_values(size_t row, PyObject* values) {
    for (size_t i = 0; i < fields_.size(); i++) {
      Field& field = fields_[i];
      DLTensor block = describe(field.block);
      if (element_count(block) * element_bytes(block) != field.bytes * field.rows)
        throw nb::value_error("a block has changed its size");
      field.base = address(block);
      PyObject* value = PyTuple_GET_ITEM(values, static_cast<Py_ssize_t>(i));
      givens_[i].memory = nullptr;
      if (value == Py_None && field.optional) continue;
      field.check_row(row);
      const char* target = field.base + (row + field.lead) * field.bytes;
      if (!find_value(value, field, target, &givens_[i])) return static_cast<int64_t>(i);
    }
    return -1;
  }

  // Finds the memory of a value that can be copied, once it is converted; false if Python must convert or refuse it.
  static bool find_value(PyObject* value, const Field& field, const char* target, Given* given) {
    given->release();
    const bool is_array = Py_TYPE(value) == numpy.array;  // what else lends memory may run code of the caller's
    if (!(is_array ? read_array(value, given) : read_tensor(value, given))) return false;
    if (!field.has_shape(given->shape, given->ndim)) return false;
    if (field.is_flag) return !given->strides && can_be_flag(given->dtype) && is_nan_free(given->memory, given->dtype, field.count);
    if (given->strides && (!(given->dtype == field.dtype) || overlaps(*given, target, field.bytes))) return false;
    if (!given->become(field.dtype)) return false;
    static const char empty = 0;  // an empty row has no memory, and is still written
    if (field.bytes == 0) given->memory = &empty;
    return true;
  }

  // False also for values whose memory is more than one run of elements, which must be copied first.
  bool obeys(const Rule& rule) const {
    const Given& given = givens_[rule.field];
    if (!given.memory) return true;
    const size_t lanes = static_cast<size_t>(fields_[rule.field].shape[0]);
    if (!given.strides) return rule.holds(given.memory, lanes);
    return rule.entries == 1 && rule.holds(given.memory, lanes, given.strides[0]);
  }

  // True if a strided value overlaps the row that is to be written, and would be overwritten before it is read.
  static bool overlaps(const Given& given, const char* target, size_t bytes) {
    int64_t last = 0;
    for (int i = 0; i < given.ndim; i++) last += (given.shape[i] - 1) * given.strides[i];
    return given.memory < target + bytes && target < given.memory + (last + 1) * (given.dtype.bits / 8);
  }

  std::vector<Field> fields_;
  std::vector<Given> givens_;
  std::vector<Rule> rules_;
};

}  // namespace rlstore
