// Whether anybody but us has a tensor, or has left a mark on it.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

#include "bindings_tensor.h"

namespace rlstore {

// What torch tells of a tensor: descriptors of its class, looked up once and never let go.
struct TensorClass {
  PyTypeObject *tensor, *storage;
  PyObject *version, *storage_use_count, *storage_address;
  std::vector<std::pair<PyObject*, PyObject*>> marks;  // an attribute, and what it is as long as nobody set it
  PyObject* has_names = nullptr;                       // torch had named tensors for a time

  TensorClass() {
    nb::module_ torch = nb::module_::import_("torch");
    nb::object type = torch.attr("Tensor"), storage_type = torch.attr("UntypedStorage");
    const auto lasting = [](nb::object object) { return object.release().ptr(); };
    version = lasting(type.attr("_version"));
    storage_use_count = lasting(torch.attr("_C").attr("_storage_Use_Count"));
    storage_address = lasting(storage_type.attr("_cdata"));
    marks = {{lasting(type.attr("requires_grad")), Py_False}, {lasting(type.attr("grad")), Py_None}};
    if (nb::hasattr(type, "has_names")) has_names = lasting(type.attr("has_names"));
    tensor = reinterpret_cast<PyTypeObject*>(lasting(type));
    storage = reinterpret_cast<PyTypeObject*>(lasting(storage_type));
  }
};

inline const TensorClass& tensor_class() {
  static const TensorClass found;
  return found;
}

// An attribute by its descriptor: no name is looked up.
inline nb::object read_attribute(PyObject* descriptor, PyObject* object) {
  const descrgetfunc get = Py_TYPE(descriptor)->tp_descr_get;
  PyObject* value = get ? get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object))) : nullptr;
  if (!value && !PyErr_Occurred()) throw nb::type_error("torch's tensors have changed");
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

inline nb::object call_with(PyObject* function, PyObject* argument) {
  PyObject* result = PyObject_CallOneArg(function, argument);
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

// How many Python objects a tensor refers to: its class, its attributes, its hooks.
inline int64_t count_references(PyObject* tensor) {
  int64_t count = 0;
  const auto add = [](PyObject*, void* sum) { return ++*static_cast<int64_t*>(sum), 0; };
  if (const traverseproc visit = Py_TYPE(tensor)->tp_traverse) visit(tensor, add, &count);
  return count;
}

// True for a plain tensor that nobody else holds and that neither has a gradient nor asks for one. Python's count is
// enough: torch adds one to it for as long as a graph or another holder in C++ has the tensor.
inline bool is_unheld(const TensorClass& known, PyObject* tensor) {
  if (Py_TYPE(tensor) != known.tensor || Py_REFCNT(tensor) != 1) return false;
  for (const auto& [attribute, unset] : known.marks)
    if (read_attribute(attribute, tensor).ptr() != unset) return false;
  return !known.has_names || call_with(known.has_names, tensor).ptr() == Py_False;
}

inline void append_tensor(const TensorClass& known, PyObject* tensor, std::vector<int64_t>& state) {
  DLTensor view;
  if (exchange->describe(tensor, &view)) throw nb::python_error();
  const int64_t dtype = view.dtype.code << 24 | view.dtype.bits << 16 | view.dtype.lanes;
  state.insert(state.end(), {nb::cast<int64_t>(read_attribute(known.version, tensor)), count_references(tensor), dtype, view.ndim,
                             reinterpret_cast<int64_t>(address(view))});
  state.insert(state.end(), view.shape, view.shape + view.ndim);
  if (view.strides) state.insert(state.end(), view.strides, view.strides + view.ndim);
}

// Everything that would tell that somebody came to hold one of the tensors, or its memory, or changed it, or left
// something on it, as bytes to compare with what they were before; None if somebody holds one.
//
// The tensors are to be held by their tuple alone. The storages are those of their memory.
inline nb::object unheld_state(nb::tuple tensors, nb::tuple storages) {
  const TensorClass& known = tensor_class();
  std::vector<int64_t> state;
  state.reserve(16 * (tensors.size() + storages.size()));
  try {
    for (nb::handle tensor : tensors) {
      if (!is_unheld(known, tensor.ptr())) return nb::none();
      append_tensor(known, tensor.ptr(), state);
    }
  } catch (nb::python_error&) {
    return nb::none();  // somebody has made it a tensor that is not asked for such things
  }
  for (nb::handle storage : storages) {
    if (Py_TYPE(storage.ptr()) != known.storage) throw nb::type_error("unheld_state: no storage");
    nb::object uses = call_with(known.storage_use_count, read_attribute(known.storage_address, storage.ptr()).ptr());
    state.insert(state.end(), {nb::cast<int64_t>(uses), static_cast<int64_t>(Py_REFCNT(storage.ptr()))});
  }
  return nb::bytes(reinterpret_cast<const char*>(state.data()), state.size() * sizeof(int64_t));
}

}  // namespace rlstore
