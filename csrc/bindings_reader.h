// Takes the values of a row from the attributes of an object.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "bindings_tensor.h"
#include "bindings_values.h"

namespace rlstore {

// Reads an object with the attributes that a row consists of, some of which hold several values: in a dict, or in a tuple.
class RowReader {
 public:
  // parts: (name of an attribute, keys) in the order of the row; the keys of a dict, the number of values of a tuple or list,
  // or None for a tensor or an array. blanks: (name, count) of what has to be absent: None, or a tuple of so many. nest: a class
  // like a dict, and the attribute in which it has the dict.
  RowReader(nb::tuple parts, nb::tuple blanks, nb::tuple nest) : parts_(parts), nest_(nest) {
    if (nest.size() != 2 || !PyType_Check(nest[0].ptr())) throw nb::type_error("a nest is a class and the name of an attribute");
    nest_type_ = reinterpret_cast<PyTypeObject*>(nest[0].ptr()), inner_ = intern(nest[1]);
    for (nb::handle item : parts) {
      nb::tuple pair = nb::cast<nb::tuple>(item);
      Part part{intern(pair[0])};
      if (nb::isinstance<nb::tuple>(pair[1])) {
        for (nb::handle key : nb::cast<nb::tuple>(pair[1])) part.keys.push_back(key.ptr());
        part.kind = Part::kDict, part.count = part.keys.size();
      } else if (!pair[1].is_none()) {
        part.kind = Part::kTuple, part.count = nb::cast<size_t>(pair[1]);
      }
      size_ += part.count;
      required_.push_back(part);
    }
    for (nb::handle item : blanks) {
      nb::tuple pair = nb::cast<nb::tuple>(item);
      Part part{intern(pair[0])};
      part.count = nb::cast<size_t>(pair[1]);
      absent_.push_back(part);
    }
  }

  // Returns the values as a tuple; or None if the object is anything else than described, which may still be right.
  nb::object read(nb::handle object) const {
    nb::object row = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(size_)));
    size_t place = 0;
    for (const Part& part : required_) {
      nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), part.name));
      if (!value.is_valid()) PyErr_Clear();
      if (!value.is_valid() || !take(part, value.ptr(), row.ptr(), place)) return nb::none();
      place += part.count;
    }
    for (const Part& part : absent_) {
      nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), part.name));
      if (!value.is_valid()) PyErr_Clear();
      if (value.is_valid() && !is_blank(value.ptr(), part.count)) return nb::none();
    }
    return row;
  }

 private:
  struct Part {
    PyObject* name;  // interned, which lasts as long as the process
    enum { kValue, kDict, kTuple } kind = kValue;
    size_t count = 1;
    std::vector<PyObject*> keys = {};
  };

  static PyObject* intern(nb::handle name) {
    if (!PyUnicode_CheckExact(name.ptr())) throw nb::type_error("the name of an attribute is a str");
    PyObject* interned = name.inc_ref().ptr();
    PyUnicode_InternInPlace(&interned);
    return interned;
  }

  static void put(PyObject* row, size_t place, PyObject* value) {
    Py_INCREF(value);
    PyTuple_SET_ITEM(row, static_cast<Py_ssize_t>(place), value);
  }

  static bool is_blank(PyObject* value, size_t count) {
    if (count == 0) return value == Py_None;
    if (!PyTuple_CheckExact(value) || static_cast<size_t>(PyTuple_GET_SIZE(value)) != count) return false;
    for (size_t i = 0; i < count; i++)
      if (PyTuple_GET_ITEM(value, i) != Py_None) return false;
    return true;
  }

  bool take(const Part& part, PyObject* value, PyObject* row, size_t place) const {
    if (part.kind == Part::kDict) return take_dict(part, value, row, place);
    if (part.kind == Part::kTuple) return take_tuple(part, value, row, place);
    if (Py_TYPE(value) != tensor_type && Py_TYPE(value) != numpy.array) return false;
    put(row, place, value);
    return true;
  }

  static bool take_tuple(const Part& part, PyObject* value, PyObject* row, size_t place) {
    const bool is_tuple = PyTuple_CheckExact(value);
    if (!is_tuple && !PyList_CheckExact(value)) return false;
    if (static_cast<size_t>(Py_SIZE(value)) != part.count) return false;
    for (size_t i = 0; i < part.count; i++) put(row, place + i, is_tuple ? PyTuple_GET_ITEM(value, i) : PyList_GET_ITEM(value, i));
    return true;
  }

  bool take_dict(const Part& part, PyObject* value, PyObject* row, size_t place) const {
    if (Py_TYPE(value) == nest_type_) {
      nb::object inner = nb::steal(PyObject_GetAttr(value, inner_));
      if (!inner.is_valid()) PyErr_Clear();
      return inner.is_valid() && PyDict_CheckExact(inner.ptr()) && take_dict(part, inner.ptr(), row, place);
    }
    if (!PyDict_CheckExact(value) || static_cast<size_t>(PyDict_GET_SIZE(value)) != part.count) return false;
    for (size_t i = 0; i < part.count; i++) {
      PyObject* found = PyDict_GetItemWithError(value, part.keys[i]);
      if (!found) {
        PyErr_Clear();
        return false;
      }
      put(row, place + i, found);
    }
    return true;
  }

  nb::object parts_, nest_;  // the owners of keys and of the class
  const PyTypeObject* nest_type_;
  PyObject* inner_;
  std::vector<Part> required_, absent_;
  size_t size_ = 0;
};

}  // namespace rlstore
