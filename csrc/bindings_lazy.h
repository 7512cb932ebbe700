// Whether the memory of a tensor differs from its values: it may be negated or conjugated when it is read.
#pragma once

#include <nanobind/nanobind.h>
#ifdef __APPLE__
#include <malloc/malloc.h>
#else
#include <malloc.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rlstore {

namespace nb = nanobind;

// Where torch keeps that: two bits of a word of the C++ tensor, to which a word of the Python object points. DLPack does not
// describe it, and to ask by Tensor.is_neg() takes longer than to write the value. So the place is found when the module is
// loaded, by comparing tensors that differ in nothing else. If it is not found (`bits` is 0), tensors are asked.
struct LazyPlace {
  size_t pointer = 0, word = 0;
  uint64_t bits = 0;
  PyObject *is_neg = nullptr, *is_conj = nullptr, *no_overrides = nullptr;  // of torch; they live as long as the process
};
inline LazyPlace lazy_place{};

inline size_t allocated_bytes(const void* memory) {
#ifdef __APPLE__
  return malloc_size(memory);
#else
  return malloc_usable_size(const_cast<void*>(memory));
#endif
}

inline uint64_t word_at(const void* memory, size_t index) {
  uint64_t word;
  memcpy(&word, static_cast<const char*>(memory) + index * sizeof word, sizeof word);
  return word;
}

inline bool says_yes(PyObject* method, PyObject* tensor) {
  const nb::object answer = nb::steal(PyObject_CallOneArg(method, tensor));
  if (!answer.is_valid()) throw nb::python_error();
  return answer.ptr() == Py_True;
}

// Asks torch's own methods: no code of the tensor's class runs.
inline bool asked_is_lazy(PyObject* tensor) {
  const nb::object context = nb::steal<nb::object>(PyObject_CallNoArgs(lazy_place.no_overrides));
  if (!context.is_valid()) throw nb::python_error();
  context.attr("__enter__")();
  const bool answer = says_yes(lazy_place.is_neg, tensor) || says_yes(lazy_place.is_conj, tensor);
  context.attr("__exit__")(nb::none(), nb::none(), nb::none());
  return answer;
}

// For a tensor that torch has described.
inline bool is_lazy(PyObject* tensor) {
  const LazyPlace& place = lazy_place;
  if (!place.bits) return asked_is_lazy(tensor);
  return word_at(reinterpret_cast<const void*>(word_at(tensor, place.pointer)), place.word) & place.bits;
}

// The only bit that a word of a lazy tensor has and that of its plain twin has not; 0 if there are others that differ.
inline uint64_t only_new_bit(uint64_t plain, uint64_t lazy) {
  const uint64_t differing = plain ^ lazy;
  return __builtin_popcountll(differing) == 1 ? differing & lazy : 0;
}

// Finds the place of the bits; pairs are (plain, negated, of complex numbers, conjugated).
inline void find_lazy_place(nb::list pairs, size_t pointer) {
  constexpr size_t kMostWords = 64;
  size_t words = kMostWords;
  for (nb::handle pair : pairs)
    for (nb::handle tensor : nb::cast<nb::tuple>(pair)) {
      const uint64_t target = word_at(tensor.ptr(), pointer);
      if (target < (1 << 16) || target % alignof(std::max_align_t)) return;  // not the address of an object
      words = std::min(words, allocated_bytes(reinterpret_cast<void*>(target)) / sizeof(uint64_t));
    }
  for (size_t word = 0; word < words; word++) {
    uint64_t negated = ~uint64_t{0}, conjugated = ~uint64_t{0};
    for (nb::handle pair : pairs) {
      uint64_t found[4];
      for (size_t i = 0; i < 4; i++)
        found[i] = word_at(reinterpret_cast<const void*>(word_at(nb::object(pair[i]).ptr(), pointer)), word);
      negated &= only_new_bit(found[0], found[1]), conjugated &= only_new_bit(found[2], found[3]);
    }
    if (negated && conjugated && negated != conjugated) lazy_place.pointer = pointer, lazy_place.word = word, lazy_place.bits = negated | conjugated;
  }
}

inline void load_lazy_place(nb::handle torch) {
  const nb::object base = torch.attr("_C").attr("TensorBase");
  lazy_place.is_neg = nb::object(base.attr("is_neg")).release().ptr(), lazy_place.is_conj = nb::object(base.attr("is_conj")).release().ptr();
  lazy_place.no_overrides = nb::object(torch.attr("_C").attr("DisableTorchFunction")).release().ptr();
  nb::list pairs;
  for (const char* dtype : {"complex64", "complex128"})
    for (int size : {1, 2, 3}) {
      const nb::object numbers = torch.attr("zeros")(nb::make_tuple(size, 2), nb::arg("dtype") = torch.attr(dtype), nb::arg("device") = "cpu");
      const nb::object conjugate = numbers.attr("conj")();
      pairs.append(nb::make_tuple(numbers.attr("imag"), conjugate.attr("imag"), numbers, conjugate));
    }
  // After the head of a Python object comes torch's reference to the tensor, in one word or in two.
  for (size_t pointer = sizeof(PyObject) / 8; pointer < sizeof(PyObject) / 8 + 2 && !lazy_place.bits; pointer++) find_lazy_place(pairs, pointer);
}

}  // namespace rlstore
