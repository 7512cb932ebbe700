// Reads the value of a field of one step, whatever it is: a tensor, a numpy array, a number, a list of numbers.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings_lazy.h"
#include "bindings_tensor.h"
#include "convert.h"

namespace rlstore {

// A given value as plain memory: its own, or a copy. An array may lend its memory only until its view is released; the shape and
// the strides of a tensor are its own, and last until it is changed.
struct Given {
  const char* memory = nullptr;
  DLDataType dtype{};
  int ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // of a tensor that is not contiguous, in elements
  int64_t length = 0;                // of a list
  union {
    double number;
    int64_t integer;
    uint8_t flag;
  };                 // of a plain number, in which case `memory` is its address
  Py_buffer view{};  // of an array
  std::vector<char> copy, converted;  // of a value that was not contiguous, or of another dtype

  Given() : integer(0) {}
  Given(const Given&) = delete;
  ~Given() { release(); }
  void release() {
    if (view.obj) PyBuffer_Release(&view);
  }
  // Frees what a single large value needed.
  void shrink() {
    constexpr size_t kLarge = 1 << 20;
    if (copy.capacity() > kLarge) std::vector<char>().swap(copy);
    if (converted.capacity() > kLarge) std::vector<char>().swap(converted);
  }
  size_t count() const {
    size_t count = 1;
    for (int i = 0; i < ndim; i++) count *= static_cast<size_t>(shape[i]);
    return count;
  }
  void set_scalar(DLDataType type) {
    memory = reinterpret_cast<const char*>(&integer);
    dtype = type;
    ndim = 0, strides = nullptr;
  }
  // Makes it a value of another dtype, if that means the same numbers; see convert().
  bool become(DLDataType type) {
    if (dtype == type) return true;
    const size_t entries = count();
    converted.resize(std::max(converted.size(), entries * (type.bits / 8u)));
    if (!convert(converted.data(), type, memory, dtype, entries)) return false;
    memory = converted.data(), dtype = type;
    return true;
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

inline char* copy_strides(char* target, const char* source, const Py_buffer& view, int dim) {
  if (dim == view.ndim) {
    memcpy(target, source, static_cast<size_t>(view.itemsize));
    return target + view.itemsize;
  }
  for (Py_ssize_t i = 0; i < view.shape[dim]; i++) target = copy_strides(target, source + i * view.strides[dim], view, dim + 1);
  return target;
}

static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
inline bool read_array(PyObject* value, Given* given) {
  const Py_buffer& view = given->view;
  if (PyObject_GetBuffer(value, &given->view, PyBUF_STRIDES | PyBUF_FORMAT)) {
    PyErr_Clear();
    return false;
  }
  if (!dtype_of_format(view.format, view.itemsize, &given->dtype)) return false;
  given->memory = static_cast<const char*>(view.buf);
  given->ndim = view.ndim;
  given->shape = reinterpret_cast<const int64_t*>(view.shape), given->strides = nullptr;
  if (!PyBuffer_IsContiguous(&view, 'C')) {
    constexpr Py_ssize_t kMost = 1 << 30;  // of a value; an array may have any size on a few bytes of memory
    if (view.len < 0 || view.len > kMost) return false;
    given->copy.resize(std::max(given->copy.size(), static_cast<size_t>(view.len)));
    copy_strides(given->copy.data(), given->memory, view, 0);
    given->memory = given->copy.data();
  }
  return true;
}

inline bool read_tensor(PyObject* value, Given* given) {
  DLTensor tensor;
  if (exchange->describe(value, &tensor)) {
    PyErr_Clear();
    return false;
  }
  if (tensor.device.type != kCpu || is_lazy(value) || !has_memory(value, tensor)) return false;
  given->memory = address(tensor);
  given->dtype = tensor.dtype;
  given->ndim = tensor.ndim;
  given->shape = tensor.shape, given->strides = is_contiguous(tensor) ? nullptr : tensor.strides;
  return true;
}

// The scalars of numpy: np.float64 is a float of Python's, and there is one np.True_ and one np.False_.
struct NumpyScalars {
  const PyTypeObject *array, *float32, *integers[8];
  const PyObject *yes, *no;
};
inline NumpyScalars numpy{};

inline void load_numpy() {
  nb::module_ module = nb::module_::import_("numpy");  // whose types live as long as the process
  const auto type = [&](const char* name) { return reinterpret_cast<PyTypeObject*>(nb::object(module.attr(name)).ptr()); };
  numpy.array = type("ndarray"), numpy.float32 = type("float32");
  numpy.yes = nb::object(module.attr("True_")).ptr(), numpy.no = nb::object(module.attr("False_")).ptr();
  const char* names[] = {"int64", "int32", "uint8", "int8", "int16", "uint16", "uint32", "uint64"};
  for (size_t i = 0; i < 8; i++) numpy.integers[i] = type(names[i]);
}

constexpr DLDataType kAnyBool{kBool, 8, 1}, kAnyInteger{kInt, 64, 1}, kAnyNumber{kFloat, 64, 1};

// Reads a number or a truth value; false for anything else. No code of the caller's runs.
inline bool read_scalar(PyObject* value, Given* given) {
  if (PyFloat_Check(value)) {
    given->number = PyFloat_AS_DOUBLE(value);
    given->set_scalar(kAnyNumber);
    return true;
  }
  if (value == Py_False || value == Py_True || value == numpy.no || value == numpy.yes) {
    given->flag = value == Py_True || value == numpy.yes;
    given->set_scalar(kAnyBool);
    return true;
  }
  const PyTypeObject* type = Py_TYPE(value);
  if (type == numpy.float32) {
    given->number = PyFloat_AsDouble(value);
    given->set_scalar(kAnyNumber);
    return true;
  }
  if (type != &PyLong_Type && std::find(numpy.integers, numpy.integers + 8, type) == numpy.integers + 8) return false;
  given->integer = type == &PyLong_Type ? PyLong_AsLongLong(value) : PyNumber_AsSsize_t(value, PyExc_OverflowError);
  given->set_scalar(kAnyInteger);
  if (given->integer != -1 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// Reads a list or tuple of numbers or truth values as numpy would.
inline bool read_list(PyObject* value, Given* given) {
  const bool is_list = PyList_CheckExact(value);
  const size_t size = static_cast<size_t>(is_list ? PyList_GET_SIZE(value) : PyTuple_GET_SIZE(value));
  if (size == 0) return false;
  given->copy.resize(std::max(given->copy.size(), size * 8));
  for (int attempt = 0; attempt < 3; attempt++) {
    // All are truth values, or whole numbers, or numbers: as soon as one is not, everything is read again.
    static constexpr DLDataType kinds[] = {kAnyBool, kAnyInteger, kAnyNumber};
    const DLDataType kind = kinds[attempt];
    size_t i = 0;
    for (; i < size; i++) {
      PyObject* item = is_list ? PyList_GET_ITEM(value, i) : PyTuple_GET_ITEM(value, i);
      if (!read_scalar(item, given)) return false;
      const size_t bytes = kind.bits / 8;
      if (!(given->dtype == kind) && !convert(given->copy.data() + i * bytes, kind, given->memory, given->dtype, 1)) break;
      if (given->dtype == kind) memcpy(given->copy.data() + i * bytes, given->memory, bytes);
    }
    if (i < size) continue;
    given->memory = given->copy.data(), given->dtype = kind, given->ndim = 1, given->length = static_cast<int64_t>(size);
    given->shape = &given->length;
    return true;
  }
  return false;
}

// Returns false if the value must be converted first.
inline bool read_value(PyObject* value, Given* given) {
  given->release();
  const PyTypeObject* type = Py_TYPE(value);
  if (type == numpy.array) return read_array(value, given);
  if (type == tensor_type) return read_tensor(value, given);
  if (read_scalar(value, given)) return true;
  if (type == &PyList_Type || type == &PyTuple_Type) return read_list(value, given);
  if (!PyObject_CheckBuffer(value)) return read_tensor(value, given);
  return !PyBytes_CheckExact(value) && read_array(value, given);  // text is no numbers
}

// True for a list, tuple or array of `count` objects.
inline bool read_objects(PyObject* value, size_t count, Given* given) {
  if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) return static_cast<size_t>(Py_SIZE(value)) == count;
  if (Py_TYPE(value) != numpy.array) return false;
  const Py_buffer& view = given->view;
  if (PyObject_GetBuffer(value, &given->view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {
    PyErr_Clear();
    return false;
  }
  return view.format && !strcmp(view.format, "O") && view.ndim == 1 && static_cast<size_t>(view.shape[0]) == count;
}

// One of these objects, if it is still there.
inline nb::object object_at(PyObject* value, size_t index, const Given& given) {
  if (!PyList_CheckExact(value))
    return nb::borrow(PyTuple_CheckExact(value) ? PyTuple_GET_ITEM(value, index) : static_cast<PyObject**>(given.view.buf)[index]);
  return index < static_cast<size_t>(PyList_GET_SIZE(value)) ? nb::borrow(PyList_GET_ITEM(value, index)) : nb::object();
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

// True if the value is [steps, lanes] entries of `shape`; scalars may have an axis of 1.
inline bool has_steps(const Given& given, int64_t steps, int64_t lanes, const std::vector<int64_t>& shape) {
  if (given.ndim < 2 || given.shape[0] != steps || given.shape[1] != lanes) return false;
  const size_t ndim = static_cast<size_t>(given.ndim - 2);
  const bool scalar = shape.empty() || (shape.size() == 1 && shape[0] == 1);
  if (scalar) return ndim == 0 || (ndim == 1 && given.shape[2] == 1);
  return ndim == shape.size() && std::equal(shape.begin(), shape.end(), given.shape + 2);
}

}  // namespace rlstore
