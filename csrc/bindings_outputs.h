// Tensors in memory that serves again once no tensor, view, array or graph uses it.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "bindings_tensor.h"
#include "outputs.h"

namespace rlstore {

// What a tensor is made of: the structure that torch holds while it uses the memory.
struct HeldPiece {
  DLManagedTensor managed;
  Piece* piece;
  std::vector<int64_t> shape;
};

// A new tensor at `memory`, which is part of `piece`: one more user of it, with a version counter of its own.
inline nb::object tensor_in(Piece* piece, char* memory, DLDataType dtype, std::vector<int64_t> shape) {
  auto held = new HeldPiece{{}, piece, std::move(shape)};
  held->managed.version = {1, 0};
  held->managed.context = held;
  held->managed.deleter = [](DLManagedTensor* managed) {  // in any thread, with or without the GIL
    auto* own = static_cast<HeldPiece*>(managed->context);
    OutputMemory::release(own->piece);
    delete own;
  };
  held->managed.tensor = {memory, {kCpu, 0}, static_cast<int32_t>(held->shape.size()), dtype, held->shape.data(), nullptr, 0};
  OutputMemory::share(piece);
  void* object = nullptr;
  if (exchange->import_managed(&held->managed, &object)) {
    held->managed.deleter(&held->managed);
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(object));
}

inline size_t bytes_of(DLDataType dtype, const std::vector<int64_t>& shape) {
  size_t bytes = (dtype.bits * dtype.lanes + 7u) / 8u;
  for (int64_t size : shape) {
    if (size < 0) throw nb::value_error("a tensor of a negative size");
    bytes = product(bytes, static_cast<size_t>(size));
  }
  return bytes;
}

// The memory of the outputs of one storage.
class OutputPool {
 public:
  explicit OutputPool(size_t keep_bytes) : memory_(std::make_shared<OutputMemory>(keep_bytes)) {}
  ~OutputPool() { memory_->close(); }

  void begin() { memory_->begin(); }
  size_t idle_bytes() const { return memory_->idle_bytes(); }

  // A tensor in memory of its own, with whatever was there before; `memory` is set to its address.
  nb::object make(DLDataType dtype, const std::vector<int64_t>& shape, char** memory) const {
    Taken taken(memory_->take(bytes_of(dtype, shape)));
    *memory = taken.piece->memory;
    return tensor_in(taken.piece, *memory, dtype, shape);
  }

  nb::object empty(nb::tuple shape, uint8_t code, uint8_t bits) const {
    std::vector<int64_t> sizes;
    for (nb::handle size : shape) sizes.push_back(nb::cast<int64_t>(size));
    char* memory;
    return make(DLDataType{code, bits, 1}, sizes, &memory);
  }

 private:
  // A piece while tensors are made of it.
  struct Taken {
    explicit Taken(Piece* taken) : piece(taken) {}
    ~Taken() { OutputMemory::release(piece); }
    Taken(const Taken&) = delete;
    Piece* piece;
  };

  std::shared_ptr<OutputMemory> memory_;
};

}  // namespace rlstore
