// Cuts tensors from few pieces of memory, by functions of torch.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

namespace rlstore {

namespace nb = nanobind;

// How tensors are arranged in pieces, for two functions that torch's compiler calls in the code that it generates:
// empty(sizes, strides, dtype), and cut(piece, sizes, strides, offset), which makes a tensor that is no view.
class Cutter {
 public:
  // Each piece is the arguments of `empty`; each part is (the number of its piece, sizes, strides, offset).
  Cutter(nb::object empty, nb::object cut, nb::sequence pieces, nb::sequence parts) : empty_(std::move(empty)), cut_(std::move(cut)) {
    for (nb::handle piece : pieces) pieces_.push_back(nb::cast<nb::tuple>(piece));
    for (nb::handle item : parts) {
      nb::tuple part = nb::cast<nb::tuple>(item);
      if (part.size() != 4) throw nb::value_error("a part is (piece, sizes, strides, offset)");
      parts_.push_back({nb::cast<size_t>(part[0]), nb::borrow(part[1]), nb::borrow(part[2]), nb::borrow(part[3])});
      if (parts_.back().piece >= pieces_.size()) throw nb::value_error("a part of a piece that there is not");
    }
  }

  // New pieces.
  nb::tuple empty() const {
    nb::tuple made = nb::steal<nb::tuple>(checked(PyTuple_New(static_cast<Py_ssize_t>(pieces_.size()))));
    for (size_t i = 0; i < pieces_.size(); i++)
      PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), checked(PyObject_Call(empty_.ptr(), pieces_[i].ptr(), nullptr)));
    return made;
  }

  // The pieces of several.
  nb::list empties(size_t count) const {
    nb::list made;
    for (size_t i = 0; i < count; i++) made.append(empty());
    return made;
  }

  // The tensors of some pieces.
  nb::tuple cut(nb::tuple pieces) const {
    if (pieces.size() != pieces_.size()) throw nb::value_error("another number of pieces");
    nb::tuple made = nb::steal<nb::tuple>(checked(PyTuple_New(static_cast<Py_ssize_t>(parts_.size()))));
    for (size_t i = 0; i < parts_.size(); i++) {
      const Part& part = parts_[i];
      PyObject* piece = PyTuple_GET_ITEM(pieces.ptr(), static_cast<Py_ssize_t>(part.piece));
      nb::object arguments = nb::steal(checked(PyTuple_Pack(4, piece, part.sizes.ptr(), part.strides.ptr(), part.offset.ptr())));
      PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), checked(PyObject_Call(cut_.ptr(), arguments.ptr(), nullptr)));
    }
    return made;
  }

  // New tensors.
  nb::tuple tensors() const { return cut(empty()); }

 private:
  struct Part {
    size_t piece;
    nb::object sizes, strides, offset;
  };

  static PyObject* checked(PyObject* made) {
    if (!made) throw nb::python_error();
    return made;
  }

  nb::object empty_, cut_;
  std::vector<nb::tuple> pieces_;
  std::vector<Part> parts_;
};

}  // namespace rlstore
