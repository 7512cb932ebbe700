// Writes one time row of a storage. It inspects Python objects itself, because that is most of the work.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings_row_field.h"
#include "bindings_rules.h"
#include "bindings_tensor.h"
#include "rows.h"

namespace rlstore {

// One value of a row that fits: its memory and its description.
struct Source {
  const char* memory = nullptr;  // null: nothing to write
  DLDataType dtype{};
  DLTensor strided{};  // the tensor itself, if it is not contiguous
};

// Copies a non-contiguous tensor into contiguous memory; contiguous inner dimensions are copied in one piece.
inline void copy_strided(char* target, const char* source, const DLTensor& tensor, int dim) {
  size_t whole = element_bytes(tensor) * element_count(tensor, dim);
  int64_t expected = 1;
  bool contiguous = true;
  for (int i = tensor.ndim; i-- > dim;) {
    contiguous &= tensor.shape[i] == 1 || tensor.strides[i] == expected;
    expected *= tensor.shape[i];
  }
  if (contiguous) {
    memcpy(target, source, whole);
    return;
  }
  const size_t piece = whole / static_cast<size_t>(tensor.shape[dim]);
  const int64_t stride = tensor.strides[dim] * static_cast<int64_t>(element_bytes(tensor));
  for (int64_t i = 0; i < tensor.shape[dim]; i++) copy_strided(target + i * piece, source + i * stride, tensor, dim + 1);
}

inline bool is_nan_free(const Source& source, size_t count) {
  if (source.dtype.code != kFloat) return true;
  if (source.dtype.bits == 32) return !has_nan(reinterpret_cast<const float*>(source.memory), count);
  return !has_nan(reinterpret_cast<const double*>(source.memory), count);
}

template <typename Target>
void write_flags(Target* target, const Source& source, size_t count) {
  const bool is_float = source.dtype.code == kFloat;
  switch (source.dtype.bits) {
    case 8: return copy_flags(target, reinterpret_cast<const uint8_t*>(source.memory), count);
    case 32:
      if (is_float) return copy_flags(target, reinterpret_cast<const float*>(source.memory), count);
      return copy_flags(target, reinterpret_cast<const int32_t*>(source.memory), count);
    default:
      if (is_float) return copy_flags(target, reinterpret_cast<const double*>(source.memory), count);
      return copy_flags(target, reinterpret_cast<const int64_t*>(source.memory), count);
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
    sources_.resize(fields_.size());
    for (auto [index, bounds] : rules) {
      const size_t field = nb::cast<size_t>(index);
      if (field >= fields_.size() || fields_[field].is_flag || fields_[field].shape.empty()) throw nb::value_error("a rule for no field");
      const size_t entries = fields_[field].count / std::max<size_t>(static_cast<size_t>(fields_[field].shape[0]), 1);
      rules_.emplace_back(field, fields_[field].dtype, nb::cast<nb::sequence>(bounds), entries);
    }
  }

  // Returns -1 if the row was written, else the index of the first value that does not fit without conversion (nothing is
  // written then). None leaves the row of an optional field unchanged.
  int64_t write(size_t row, nb::tuple values) {
    if (values.size() != fields_.size()) throw nb::value_error("a row has one value for each field");
    bool has_run = false;
    int64_t misfit = find_sources(row, values.ptr(), &has_run);
    // Python code that ran meanwhile may have freed memory, or written another row with this writer: everything is found again.
    if (misfit < 0 && has_run) misfit = find_sources(row, values.ptr(), nullptr);
    if (misfit >= 0) return misfit;
    for (const Rule& rule : rules_)
      if (!obeys(rule)) return static_cast<int64_t>(rule.field);
    for (size_t i = 0; i < fields_.size(); i++) {
      if (!sources_[i].memory) continue;
      const Field& field = fields_[i];
      char* target = field.base + (row + field.lead) * field.bytes;
      if (sources_[i].strided.data)
        copy_strided(target, sources_[i].memory, sources_[i].strided, 0);
      else if (!field.is_flag)
        copy_row(target, sources_[i].memory, field.bytes);
      else if (field.dtype.bits == 8)
        write_flags(reinterpret_cast<uint8_t*>(target), sources_[i], field.count);
      else
        write_flags(reinterpret_cast<float*>(target), sources_[i], field.count);
    }
    return -1;
  }

 private:
  struct Field : RowField {
    nb::object block;
    char* base = nullptr;
    size_t bytes = 0;  // size of one time row
  };

  // Finds the memory of every block and value; returns the index of the first value that does not fit, or -1. `has_run` is set
  // if that may have run Python code; if it is null none is run, and no value is lazy.
  int64_t find_sources(size_t row, PyObject* values, bool* has_run) {
    for (size_t i = 0; i < fields_.size(); i++) {
      Field& field = fields_[i];
      DLTensor block = describe(field.block);
      if (element_count(block) * element_bytes(block) != field.bytes * field.rows)
        throw nb::value_error("a block has changed its size");
      field.base = address(block);
      PyObject* value = PyTuple_GET_ITEM(values, static_cast<Py_ssize_t>(i));
      sources_[i] = Source{};
      if (value == Py_None && field.optional) continue;
      field.check_row(row);
      const char* target = field.base + (row + field.lead) * field.bytes;
      if (!find_source(value, field, target, &sources_[i], has_run)) return static_cast<int64_t>(i);
    }
    return -1;
  }

  // Finds the memory of a value that can be copied without conversion; returns false if it must be converted or refused.
  static bool find_source(PyObject* value, const Field& field, const char* target, Source* found, bool* has_run) {
    DLTensor tensor;
    if (!field.describe_fitting(value, &tensor)) return false;
    const bool contiguous = is_contiguous(tensor);
    if (field.is_flag && !contiguous) return false;
    if (has_run) {
      *has_run |= Py_TYPE(value) != tensor_type;  // the methods of a subclass
      if (is_lazy(value, tensor)) return false;
    }
    if (!contiguous && overlaps(tensor, target, field.bytes)) return false;
    static const char empty = 0;  // an empty row has no memory, and is still written
    *found = Source{field.bytes ? address(tensor) : &empty, tensor.dtype, contiguous ? DLTensor{} : tensor};
    return !field.is_flag || is_nan_free(*found, field.count);
  }

  // False also for values whose memory is more than one run of elements, which must be copied first.
  bool obeys(const Rule& rule) const {
    const Source& source = sources_[rule.field];
    if (!source.memory) return true;
    const size_t lanes = static_cast<size_t>(fields_[rule.field].shape[0]);
    if (!source.strided.data) return rule.holds(source.memory, lanes);
    return rule.entries == 1 && rule.holds(source.memory, lanes, source.strided.strides[0]);
  }

  // True if a strided tensor overlaps the row that is to be written, and would be overwritten before it is read.
  static bool overlaps(const DLTensor& tensor, const char* target, size_t bytes) {
    int64_t last = 0;
    for (int i = 0; i < tensor.ndim; i++) last += (tensor.shape[i] - 1) * tensor.strides[i];
    const char* begin = address(tensor);
    return begin < target + bytes && target < begin + (static_cast<size_t>(last) + 1) * element_bytes(tensor);
  }

  std::vector<Field> fields_;
  std::vector<Source> sources_;
  std::vector<Rule> rules_;
};

}  // namespace rlstore
