// Reads the value of a field of one step: a tensor, a numpy array, or with a single lane a plain number.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "bindings_tensor.h"

namespace rlstore {

// A given value whose memory can be read without conversion. An array may lend its memory only until its view is released; what
// describes a tensor is the tensor's own, and lasts until it is changed.
struct Given {
  const char* memory = nullptr;
  DLDataType dtype{};
  int ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // in elements
  bool contiguous = true;
  double number = 0;  // a plain number, in which case `memory` is its address
  int64_t array_strides[8] = {};
  Py_buffer view{};  // of an array

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
  if (PyObject_GetBuffer(value, &given->view, PyBUF_STRIDES | PyBUF_FORMAT)) {
    PyErr_Clear();
    return false;
  }
  if (view.ndim > 8 || !dtype_of_format(view.format, view.itemsize, &given->dtype)) return false;
  int64_t expected = view.itemsize;
  given->contiguous = true;
  for (int i = view.ndim; i-- > 0;) {
    if (view.strides[i] % view.itemsize) return false;
    given->array_strides[i] = view.strides[i] / view.itemsize;
    given->contiguous &= view.shape[i] == 1 || view.strides[i] == expected;
    expected *= view.shape[i];
  }
  given->contiguous |= expected == 0;
  given->memory = static_cast<const char*>(view.buf);
  given->ndim = view.ndim;
  given->shape = reinterpret_cast<const int64_t*>(view.shape);
  given->strides = given->array_strides;
  return expected == 0 || reinterpret_cast<uintptr_t>(view.buf) % static_cast<uintptr_t>(view.itemsize) == 0;
}
static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));

// What a method of a tensor without arguments answers; an error is a yes.
inline bool says_yes(PyObject* tensor, PyObject* method) {
  PyObject* answer = PyObject_CallMethodNoArgs(tensor, method);
  if (!answer) PyErr_Clear();
  const bool yes = answer != Py_False;
  Py_XDECREF(answer);
  return yes;
}

// True if the memory of a tensor may differ from its values, which DLPack does not report: it may be lazily negated or
// conjugated. Except for a single element, a negated tensor is never contiguous; only complex tensors are conjugated.
inline bool may_be_lazy(const DLTensor& tensor, bool contiguous) {
  return !contiguous || element_count(tensor) == 1 || tensor.dtype.code == kComplex;
}

// True if it does. It is asked, and may run code of the caller's if its class is.
inline bool is_lazy(PyObject* value, const DLTensor& tensor) {
  static PyObject *is_neg = PyUnicode_InternFromString("is_neg"), *is_conj = PyUnicode_InternFromString("is_conj");
  return says_yes(value, is_neg) || (tensor.dtype.code == kComplex && says_yes(value, is_conj));
}

// `may_ask`: false if the tensor is known not to be lazy.
inline bool read_tensor(PyObject* value, Given* given, bool may_ask = true) {
  DLTensor tensor;
  if (exchange->describe(value, &tensor)) {
    PyErr_Clear();
    return false;
  }
  if (tensor.device.type != kCpu || !has_memory(value, tensor)) return false;
  const bool contiguous = is_contiguous(tensor);
  if (may_ask && may_be_lazy(tensor, contiguous)) return !is_lazy(value, tensor) && read_tensor(value, given, false);
  given->memory = address(tensor);
  given->dtype = tensor.dtype;
  given->ndim = tensor.ndim;
  given->shape = tensor.shape;
  given->strides = tensor.strides;
  given->contiguous = contiguous;
  return true;
}

// Returns false if the value must be converted first.
inline bool read_value(PyObject* value, Given* given, bool may_ask = true) {
  given->release();
  if (PyObject_CheckBuffer(value)) return read_array(value, given);
  if (PyFloat_CheckExact(value) || PyBool_Check(value)) {
    given->number = PyFloat_CheckExact(value) ? PyFloat_AS_DOUBLE(value) : static_cast<double>(value == Py_True);
    given->memory = reinterpret_cast<const char*>(&given->number);
    given->dtype = DLDataType{kFloat, 64, 1};
    given->ndim = 0;
    given->contiguous = true;
    return true;
  }
  return read_tensor(value, given, may_ask);
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
