// The DLPack exchange table (see dlpack.h) for torch before 2.10, which has none: the same functions through attributes and
// methods of tensors. They take longer, about half a microsecond a tensor.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dlpack.h"

namespace rlstore {

namespace nb = nanobind;

// What these functions use of torch; it lives as long as the process.
struct TorchNames {
  PyTypeObject *tensor, *parameter;
  nb::handle strided, without_overrides, from_dlpack, current_stream;
  std::vector<std::pair<PyObject*, DLDataType>> dtypes;
};
inline TorchNames torch_names{};

// The names that every description looks up.
struct AttributeNames {
  PyObject *layout = made("layout"), *shape = made("shape"), *stride = made("stride"), *dtype = made("dtype");
  PyObject *is_cpu = made("is_cpu"), *device = made("device"), *data_ptr = made("data_ptr");

  static PyObject* made(const char* name) { return PyUnicode_InternFromString(name); }
};
inline AttributeNames* attribute_names = nullptr;

// A description only points at its sizes, and nobody says when it is needed no longer. So every tuple of sizes that occurs is
// kept, once: programs use few.
inline int64_t* kept_sizes(const nb::object& tuple) {
  static auto* all = new std::set<std::vector<int64_t>>;
  std::vector<int64_t> sizes(static_cast<size_t>(PyTuple_GET_SIZE(tuple.ptr())));
  for (size_t i = 0; i < sizes.size(); i++) {
    sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i)));
    if (sizes[i] == -1 && PyErr_Occurred()) throw nb::python_error();
  }
  return const_cast<int64_t*>(all->insert(std::move(sizes)).first->data());
}

inline DLDataType dlpack_dtype(const nb::object& dtype) {
  for (const auto& [known, described] : torch_names.dtypes)
    if (known == dtype.ptr()) return described;
  throw nb::type_error("a tensor of a dtype that DLPack does not describe");
}

inline DLDevice dlpack_device(nb::handle tensor) {
  if (tensor.attr(attribute_names->is_cpu).is(Py_True)) return {kCpu, 0};
  const nb::object device = tensor.attr(attribute_names->device);
  static const std::pair<const char*, int32_t> types[] = {{"cpu", kCpu}, {"cuda", kCuda}, {"mps", 8}, {"xpu", 14}};
  const std::string name = nb::cast<std::string>(device.attr("type"));
  const nb::object index = device.attr("index");
  for (const auto& [type, number] : types)
    if (name == type) return {number, index.is_none() ? 0 : nb::cast<int32_t>(index)};
  throw nb::type_error("a tensor on a device that DLPack does not describe");
}

// The address; 0 for a tensor that has none because it represents other tensors, as torch's own table says it.
inline void* address_of(nb::handle tensor) {
  PyObject* number = PyObject_CallMethodNoArgs(tensor.ptr(), attribute_names->data_ptr);
  if (!number && !PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // an interrupt
  if (!number) PyErr_Clear();
  void* address = number ? PyLong_AsVoidPtr(number) : nullptr;
  Py_XDECREF(number);
  return address;
}

// While it lives, methods of tensors of derived classes are torch's own, and no code of the caller's runs.
class WithoutOverrides {
 public:
  WithoutOverrides() : context_(torch_names.without_overrides()) { context_.attr("__enter__")(); }
  ~WithoutOverrides() { context_.attr("__exit__")(nb::none(), nb::none(), nb::none()); }
  WithoutOverrides(const WithoutOverrides&) = delete;

 private:
  nb::object context_;
};

inline void describe_attributes(nb::handle tensor, DLTensor* out) {
  const AttributeNames& names = *attribute_names;
  if (!tensor.attr(names.layout).is(torch_names.strided)) throw nb::type_error("a tensor whose layout DLPack does not describe");
  const nb::object shape = tensor.attr(names.shape);
  out->ndim = static_cast<int32_t>(PyTuple_GET_SIZE(shape.ptr()));
  out->shape = kept_sizes(shape);
  const nb::object strides = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), names.stride));
  if (!strides.is_valid()) throw nb::python_error();  // a nested tensor
  out->strides = kept_sizes(strides);
  out->dtype = dlpack_dtype(tensor.attr(names.dtype));
  out->device = dlpack_device(tensor);
  out->data = address_of(tensor);
  out->byte_offset = 0;
}

// The functions of the table report an error by -1 and Python's error indicator.
template <typename Function>
int reported(const Function& function) {
  try {
    function();
    return 0;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  }
  return -1;
}

inline int describe_in_python(void* object, DLTensor* out) {
  return reported([&] {
    const nb::handle tensor(static_cast<PyObject*>(object));
    if (Py_TYPE(object) == torch_names.tensor || Py_TYPE(object) == torch_names.parameter) return describe_attributes(tensor, out);
    if (!PyObject_TypeCheck(tensor.ptr(), torch_names.tensor)) throw nb::type_error("not a tensor");
    const WithoutOverrides guard;
    describe_attributes(tensor, out);
  });
}

// torch before 2.9 only imports what DLPack described before its version 1.
struct UnversionedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(UnversionedTensor* self);
};

inline int import_in_python(DLManagedTensor* managed, void** out_py_object) {
  auto* unversioned = new UnversionedTensor{managed->tensor, managed, [](UnversionedTensor* self) {
                                              auto* owner = static_cast<DLManagedTensor*>(self->context);
                                              owner->deleter(owner);
                                              delete self;
                                            }};
  const int failed = reported([&] {
    const nb::object capsule = nb::steal(PyCapsule_New(unversioned, "dltensor", nullptr));
    *out_py_object = torch_names.from_dlpack(capsule).release().ptr();
  });
  if (failed) delete unversioned;  // what it describes is still the caller's
  return failed;
}

inline int current_stream_in_python(int32_t device_type, int32_t device, void** out_stream) {
  return reported([&] {
    const bool has_streams = device_type == kCuda && torch_names.current_stream.is_valid();
    *out_stream = has_streams ? reinterpret_cast<void*>(nb::cast<uintptr_t>(torch_names.current_stream(device))) : nullptr;
  });
}

inline const DLExchangeApi* make_exchange(nb::handle torch) {
  attribute_names = new AttributeNames;
  TorchNames& names = torch_names;
  names.tensor = reinterpret_cast<PyTypeObject*>(nb::object(torch.attr("Tensor")).ptr());
  names.parameter = reinterpret_cast<PyTypeObject*>(nb::object(torch.attr("nn").attr("Parameter")).ptr());
  const nb::object inner = torch.attr("_C");
  names.strided = nb::object(torch.attr("strided")).ptr();
  names.without_overrides = inner.attr("DisableTorchFunctionSubclass").ptr();
  names.from_dlpack = inner.attr("_from_dlpack").ptr();
  if (nb::hasattr(inner, "_cuda_getCurrentRawStream")) names.current_stream = inner.attr("_cuda_getCurrentRawStream").ptr();
  const std::pair<const char*, DLDataType> dtypes[] = {
      {"float32", {kFloat, 32, 1}}, {"uint8", {kUInt, 8, 1}}, {"int64", {kInt, 64, 1}}, {"bool", {kBool, 8, 1}},
      {"float16", {kFloat, 16, 1}}, {"bfloat16", {kBfloat, 16, 1}}, {"float64", {kFloat, 64, 1}}, {"int8", {kInt, 8, 1}},
      {"int16", {kInt, 16, 1}}, {"int32", {kInt, 32, 1}}, {"uint16", {kUInt, 16, 1}}, {"uint32", {kUInt, 32, 1}},
      {"uint64", {kUInt, 64, 1}}, {"complex64", {kComplex, 64, 1}}, {"complex128", {kComplex, 128, 1}},
  };
  for (const auto& [name, described] : dtypes)
    if (nb::hasattr(torch, name)) names.dtypes.emplace_back(nb::object(torch.attr(name)).ptr(), described);
  static const DLExchangeApi table{{{1, 0}, nullptr}, nullptr, nullptr, import_in_python, describe_in_python, current_stream_in_python};
  return &table;
}

}  // namespace rlstore
