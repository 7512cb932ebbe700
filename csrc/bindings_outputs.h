// Tensors in memory that serves again once no tensor, view, array or graph uses it.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "bindings_tensor.h"
#include "outputs.h"

namespace rlstore {

// The shape and dtype of a tensor to be made, and where it is.
struct Form {
  DLDataType dtype;
  std::vector<int64_t> shape;
  char* memory = nullptr;

  size_t bytes() const {
    size_t bytes = (dtype.bits * dtype.lanes + 7u) / 8u;
    for (int64_t size : shape) {
      if (size < 0) throw nb::value_error("a tensor of a negative size");
      bytes = product(bytes, static_cast<size_t>(size));
    }
    return bytes;
  }
};

// What torch holds while it uses the memory of a tensor.
struct HeldPiece {
  DLManagedTensor managed;
  Piece* piece;
};

// A new tensor in part of a piece: one more user of it, with a version counter of its own.
inline nb::object tensor_in(Piece* piece, const Form& form) {
  auto held = new HeldPiece{{}, piece};
  held->managed.version = {1, 0};
  held->managed.context = held;
  held->managed.deleter = [](DLManagedTensor* managed) {  // in any thread, with or without the GIL
    auto* own = static_cast<HeldPiece*>(managed->context);
    OutputMemory::release(own->piece);
    delete own;
  };
  held->managed.tensor = {form.memory, {kCpu, 0}, static_cast<int32_t>(form.shape.size()), form.dtype, const_cast<int64_t*>(form.shape.data()), nullptr, 0};
  OutputMemory::share(piece);
  void* object = nullptr;
  if (exchange->import_managed(&held->managed, &object)) {
    held->managed.deleter(&held->managed);
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(object));
}

// The memory of the outputs of one storage.
class OutputPool {
 public:
  explicit OutputPool(size_t keep_bytes) : memory_(std::make_shared<OutputMemory>(keep_bytes)) {}
  ~OutputPool() { memory_->close(); }

  void begin() { memory_->begin(); }
  size_t idle_bytes() const { return memory_->idle_bytes(); }

  // Tensors with whatever was in their memory before, whose addresses are set. Large ones have memory of their own, so that who
  // keeps one does not keep the others; small ones share some.
  nb::list make(std::vector<Form>* forms) const {
    size_t shared = 0;
    for (const Form& form : *forms)
      if (form.bytes() < kOwn) shared += padded(form.bytes());
    Taken common(shared ? memory_->take(shared) : nullptr);
    char* next = shared ? common.piece->memory : nullptr;
    nb::list made;
    for (Form& form : *forms) {
      const size_t bytes = form.bytes();
      Taken own(bytes < kOwn ? nullptr : memory_->take(bytes));
      form.memory = own.piece ? own.piece->memory : next;
      if (!own.piece) next += padded(bytes);
      made.append(tensor_in(own.piece ? own.piece : common.piece, form));
    }
    return made;
  }

  // The same for shapes and dtypes, each a code and a number of bits.
  nb::list empty(nb::sequence shapes, nb::sequence dtypes) const {
    std::vector<Form> forms;
    for (nb::handle dtype : dtypes) forms.push_back({{nb::cast<uint8_t>(dtype[0]), nb::cast<uint8_t>(dtype[1]), 1}, {}});
    size_t k = 0;
    for (nb::handle shape : shapes) {
      if (k == forms.size()) break;
      for (nb::handle size : shape) forms[k].shape.push_back(nb::cast<int64_t>(size));
      k++;
    }
    if (k != forms.size() || k != nb::len(shapes)) throw nb::value_error("as many dtypes as shapes");
    return make(&forms);
  }

 private:
  static constexpr size_t kOwn = 256 << 10, kLine = 64;  // bytes

  // The memory of a small tensor: even one without elements has an address.
  static size_t padded(size_t bytes) { return std::max((bytes + kLine - 1) / kLine, size_t{1}) * kLine; }

  // A piece while tensors are made of it.
  struct Taken {
    explicit Taken(Piece* taken) : piece(taken) {}
    ~Taken() {
      if (piece) OutputMemory::release(piece);
    }
    Taken(const Taken&) = delete;
    Piece* piece;
  };

  std::shared_ptr<OutputMemory> memory_;
};

}  // namespace rlstore
