// Reads the value of a field of one step: a tensor, a numpy array, or with a single lane a plain number.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "bindings_tensor.h"

namespace rlstore {

// A given value whose memory can be read without conversion. An array may lend its memory only until its view is released.
struct Given {
  const char* memory = nullptr;
  DLDataType dtype{};
  int ndim = 0;
  int64_t shape[8] = {};
  double number = 0;  // a plain number, in which case `memory` is its address
  Py_buffer view{};   // of an array

  Given() = default;
  Given(const Given&) = delete;
  ~Given() { release(); }
  void release() {
    if (view.obj) PyBuffer_Release(&view);
  }
};

inline bool dtype_of_format(const char* format, int64_t item_bytes, DLDataType* dtype) {
  if (!format || format[0] == 0 || format[1] != 0) return false;
  uint8_t code;
  switch (format[0]) {
    case '?': code = kBool; break;
    case 'b': case 'h': case 'i': case 'l': case 'q': code = kInt; break;
    case 'B': case 'H': case 'I': case 'L': case 'Q': code = kUInt; break;
    case 'e': case 'f': case 'd': code = kFloat; break;
    default: return false;
  }
  *dtype = DLDataType{code, static_cast<uint8_t>(item_bytes * 8), 1};
  return true;
}

inline bool read_array(PyObject* value, Given* given) {
  const Py_buffer& view = given->view;
  if (PyObject_GetBuffer(value, &given->view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {
    PyErr_Clear();
    return false;
  }
  if (view.ndim > 8 || !dtype_of_format(view.format, view.itemsize, &given->dtype)) return false;
  given->memory = static_cast<const char*>(view.buf);
  given->ndim = view.ndim;
  for (int i = 0; i < view.ndim; i++) given->shape[i] = view.shape[i];
  return true;
}

// True if the values of a tensor are the negatives of what its memory holds, which DLPack does not report.
inline bool is_negated(PyObject* tensor) {
  PyObject* answer = PyObject_CallMethod(tensor, "is_neg", nullptr);
  if (!answer) PyErr_Clear();
  const bool negated = answer != Py_False;
  Py_XDECREF(answer);
  return negated;
}

inline bool read_tensor(PyObject* value, Given* given) {
  DLTensor tensor;
  if (exchange->describe(value, &tensor)) {
    PyErr_Clear();
    return false;
  }
  if (tensor.device.type != kCpu || !has_memory(value, tensor) || tensor.ndim > 8 || tensor.dtype.code == kComplex || !is_contiguous(tensor))
    return false;
  // The last stride of a lazily negated tensor is 2, even if it has a single element. A number has no strides: it is asked,
  // and what code of a subclass may have done meanwhile is looked at again.
  if (tensor.ndim == 0 && (is_negated(value) || exchange->describe(value, &tensor) || !has_memory(value, tensor) || tensor.ndim != 0)) {
    PyErr_Clear();
    return false;
  }
  if (tensor.ndim > 0 && tensor.strides && element_count(tensor) == 1 && tensor.strides[tensor.ndim - 1] != 1) return false;
  given->memory = address(tensor);
  given->dtype = tensor.dtype;
  given->ndim = tensor.ndim;
  for (int i = 0; i < tensor.ndim; i++) given->shape[i] = tensor.shape[i];
  return true;
}

// Returns false if the value must be converted first.
inline bool read_value(PyObject* value, Given* given) {
  if (PyObject_CheckBuffer(value)) return read_array(value, given);
  if (PyFloat_CheckExact(value) || PyBool_Check(value)) {
    given->number = PyFloat_CheckExact(value) ? PyFloat_AS_DOUBLE(value) : static_cast<double>(value == Py_True);
    given->memory = reinterpret_cast<const char*>(&given->number);
    given->dtype = DLDataType{kFloat, 64, 1};
    given->ndim = 0;
    return true;
  }
  return read_tensor(value, given);
}

// True if the value is `lanes` entries of `shape`. Scalars may be (n,) or (n, 1); with a single lane its axis may be omitted.
inline bool has_shape(const Given& given, int64_t lanes, const std::vector<int64_t>& shape) {
  const size_t ndim = static_cast<size_t>(given.ndim);
  const auto same = [&](const int64_t* dims, size_t count) {
    return count == shape.size() && std::equal(shape.begin(), shape.end(), dims);
  };
  const bool scalar = shape.empty() || (shape.size() == 1 && shape[0] == 1);
  if (ndim >= 1 && given.shape[0] == lanes) {
    if (same(given.shape + 1, ndim - 1)) return true;
    if (scalar && (ndim == 1 || (ndim == 2 && given.shape[1] == 1))) return true;
  }
  return lanes == 1 && (same(given.shape, ndim) || (scalar && ndim == 0));
}

}  // namespace rlstore
