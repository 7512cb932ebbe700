// Converts Python tensors to raw pointers, through torch's DLPack exchange table (see dlpack.h), or what stands in for it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings_exchange.h"
#include "dlpack.h"

namespace rlstore {

namespace nb = nanobind;

inline const DLExchangeApi* exchange = nullptr;
inline const PyTypeObject* tensor_type = nullptr;  // torch.Tensor, which lives as long as the process

// No system maps the pages below; and the lowest address that was mapped when the module was loaded.
constexpr uintptr_t kNowhere = 1 << 16;
inline uintptr_t lowest_mapped = kNowhere;

inline void find_lowest_mapped() {
  unsigned long first = 0;
  if (std::FILE* maps = std::fopen("/proc/self/maps", "r")) {
    if (std::fscanf(maps, "%lx", &first) == 1 && first > kNowhere) lowest_mapped = first;
    std::fclose(maps);
  }
}

inline void load_exchange() {
  find_lowest_mapped();
  nb::module_ torch = nb::module_::import_("torch");
  nb::object tensor = torch.attr("Tensor");
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor.ptr());
  if (!nb::hasattr(tensor, "__dlpack_c_exchange_api__")) {
    exchange = make_exchange(torch);
    return;
  }
  nb::object capsule = tensor.attr("__dlpack_c_exchange_api__");
  exchange = static_cast<const DLExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!exchange) throw nb::python_error();
  if (exchange->header.version.major != 1) throw nb::import_error("rlstore needs a torch that speaks DLPack 1.x");
}

inline size_t element_bytes(const DLTensor& tensor) { return (tensor.dtype.bits * tensor.dtype.lanes + 7) / 8; }

inline size_t element_count(const DLTensor& tensor, int from = 0) {
  size_t count = 1;
  for (int i = from; i < tensor.ndim; i++) count *= static_cast<size_t>(tensor.shape[i]);
  return count;
}

inline bool is_contiguous(const DLTensor& tensor) {
  if (!tensor.strides || element_count(tensor) == 0) return true;
  int64_t expected = 1;
  for (int i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

inline char* address(const DLTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// False for a tensor that has elements but no memory: zeros that were never allocated, a tensor that represents other
// tensors (a FakeTensor, a DTensor), or one whose memory was freed. Torch describes them like any other tensor: its
// address is its offset in a storage at 0. Torch is asked about an address that is low but may be one; not about a tensor of
// a derived class, which may do anything when it is asked.
inline bool has_memory(nb::handle object, const DLTensor& tensor) {
  const uintptr_t place = reinterpret_cast<uintptr_t>(address(tensor));
  if (place >= lowest_mapped || element_count(tensor) == 0) return true;
  if (tensor.device.type != kCpu) return place >= kNowhere || tensor.device.type != kCuda;
  if (place < kNowhere || Py_TYPE(object.ptr()) != tensor_type) return false;
  return nb::cast<uintptr_t>(object.attr("untyped_storage")().attr("data_ptr")()) != 0;
}

// The same for any object.
inline bool is_in_memory(nb::handle object) {
  DLTensor tensor;
  if (exchange->describe(object.ptr(), &tensor)) {
    PyErr_Clear();
    return false;
  }
  return has_memory(object, tensor);
}

// Returns the description of a CPU tensor; throws for any other, and for one without memory.
inline DLTensor describe_strided(nb::handle object) {
  DLTensor tensor;
  if (exchange->describe(object.ptr(), &tensor)) throw nb::python_error();
  if (tensor.device.type != kCpu) throw nb::value_error("a CPU kernel was given a tensor on another device");
  if (!has_memory(object, tensor)) throw nb::value_error("a kernel was given a tensor that has no memory");
  return tensor;
}

// The same for a contiguous tensor.
inline DLTensor describe(nb::handle object) {
  const DLTensor tensor = describe_strided(object);
  if (!is_contiguous(tensor)) throw nb::value_error("a kernel was given a tensor that is not contiguous");
  return tensor;
}

// a * b, for the size of a tensor: a product that wrapped could be that of a smaller one.
inline size_t product(size_t a, size_t b) {
  size_t result;
  if (__builtin_mul_overflow(a, b, &result)) throw nb::value_error("a kernel was given sizes that no tensor has");
  return result;
}

template <typename T>
T* typed(nb::handle object, size_t count) {
  DLTensor tensor = describe(object);
  const bool is_float = tensor.dtype.code == kFloat;
  if (is_float != std::is_floating_point_v<T> || element_bytes(tensor) != sizeof(T) || element_count(tensor) != count)
    throw nb::value_error("a kernel was given a tensor of the wrong size or dtype");
  return reinterpret_cast<T*>(address(tensor));
}

template <typename T>
T* typed_or_null(nb::handle object, size_t count) {
  return object.is_none() ? nullptr : typed<T>(object, count);
}

// True if gather_as_float (or, for equal dtypes, a copy) converts one to the other.
inline bool convertible(const DLDataType& from, const DLDataType& to) {
  if (from == to) return true;
  if (!(to == DLDataType{kFloat, 32, 1}) || from.lanes != 1) return false;
  switch (from.code) {
    case kInt:
    case kUInt: return from.bits == 8 || from.bits == 16 || from.bits == 32 || from.bits == 64;
    case kFloat: return from.bits == 16 || from.bits == 64;
    case kBfloat: return from.bits == 16;
    default: return from.code == kBool && from.bits == 8;
  }
}

// A new, uninitialized CPU tensor of `bytes` bytes. Its memory is this module's, in one piece with its description, which
// torch returns with the last reference: that is less than half the work of torch's own allocator and its way here.
inline nb::object make_tensor(DLDataType dtype, const std::vector<int64_t>& shape, size_t bytes, char** memory) {
  constexpr size_t kAligned = 64;
  const size_t before = (sizeof(DLManagedTensor) + shape.size() * sizeof(int64_t) + kAligned - 1) / kAligned * kAligned;
  void* piece = nullptr;
  if (posix_memalign(&piece, kAligned, before + bytes)) throw std::bad_alloc();
  auto* managed = new (piece) DLManagedTensor{};
  auto* sizes = reinterpret_cast<int64_t*>(managed + 1);
  std::copy(shape.begin(), shape.end(), sizes);
  managed->version = exchange->header.version;
  managed->deleter = [](DLManagedTensor* self) { free(self); };
  *memory = static_cast<char*>(piece) + before;
  managed->tensor = {*memory, {kCpu, 0}, static_cast<int32_t>(shape.size()), dtype, sizes, nullptr, 0};
  void* object = nullptr;
  if (exchange->import_managed(managed, &object)) {
    free(piece);
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(object));
}

}  // namespace rlstore
