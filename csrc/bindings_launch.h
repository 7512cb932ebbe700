// Launches a compiled CUDA kernel. The driver functions are passed as addresses, so that this module builds without CUDA.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings_tensor.h"
#include "bindings_values.h"

namespace rlstore {

// As cuda.h declares them; 0 is success.
using CtxGetDevice = int (*)(int* device);
using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads_x, unsigned threads_y,
                             unsigned threads_z, unsigned shared_bytes, void* stream, void** parameters, void** extra);

// The length of a tensor, (n,) or (n, 1), that a kernel can read as it is where one like `like` is expected: of the same dtype
// and device, contiguous, in memory. -1 for anything else.
inline int64_t count_readable(nb::handle given, nb::handle like) {
  DLTensor tensor, expected;
  if (Py_TYPE(given.ptr()) != tensor_type) return -1;
  if (exchange->describe(like.ptr(), &expected)) throw nb::python_error();
  if (exchange->describe(given.ptr(), &tensor)) {
    PyErr_Clear();
    return -1;
  }
  const bool is_same = tensor.dtype == expected.dtype && tensor.device.type == expected.device.type && tensor.device.id == expected.device.id;
  const bool has_shape = tensor.ndim == 1 || (tensor.ndim == 2 && tensor.shape[1] == 1);
  if (!is_same || !has_shape || !is_contiguous(tensor) || !has_memory(given, tensor)) return -1;
  if (is_lazy(given.ptr())) return -1;
  return tensor.shape[0];
}

// The kind of some tensors: bytes that are equal for tensors of the same dtypes, shapes and devices, each contiguous and in
// memory. What was planned for tensors is found again by it. None may be among them. Returns None if a tensor is not so.
inline nb::object kind_of(nb::tuple tensors) {
  std::vector<int64_t> words;
  words.reserve(8 * tensors.size());
  for (nb::handle given : tensors) {
    DLTensor tensor;
    if (given.is_none()) {
      words.push_back(-1);
      continue;
    }
    if (exchange->describe(given.ptr(), &tensor)) {
      PyErr_Clear();
      return nb::none();
    }
    if (!is_contiguous(tensor) || !has_memory(given, tensor)) return nb::none();
    if (is_lazy(given.ptr())) return nb::none();
    words.push_back(static_cast<int64_t>(tensor.dtype.code) << 32 | tensor.dtype.bits << 16 | tensor.dtype.lanes);
    words.push_back(static_cast<int64_t>(tensor.device.type) << 32 | static_cast<uint32_t>(tensor.device.id));
    words.push_back(tensor.ndim);
    words.insert(words.end(), tensor.shape, tensor.shape + tensor.ndim);
  }
  return nb::bytes(words.data(), words.size() * sizeof(int64_t));
}

// Tensors that a kernel is given at every launch, whose memory nobody replaces: their addresses are looked up once.
class Fixed {
 public:
  // Arguments are tensors, and tuples of tensors.
  explicit Fixed(nb::tuple arguments) : arguments_(std::move(arguments)) { add_all(arguments_.ptr()); }

  const nb::tuple& arguments() const { return arguments_; }
  const std::vector<uint64_t>& addresses() const { return addresses_; }

  // True if a kernel of a device that was compiled for addresses that are multiples of 16 bytes can take them.
  bool fits(const DLDevice& device) const { return is_aligned_ && device.type == device_.type && device.id == device_.id; }

 private:
  void add_all(PyObject* arguments) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); i++) {
      PyObject* argument = PyTuple_GET_ITEM(arguments, i);
      if (PyTuple_Check(argument)) {
        add_all(argument);
        continue;
      }
      DLTensor tensor;
      if (exchange->describe(argument, &tensor)) throw nb::python_error();
      if (addresses_.empty()) device_ = tensor.device;
      addresses_.push_back(reinterpret_cast<uint64_t>(address(tensor)));
      is_aligned_ = is_aligned_ && addresses_.back() % 16 == 0 && tensor.device.type == device_.type && tensor.device.id == device_.id;
    }
  }

  nb::tuple arguments_;
  std::vector<uint64_t> addresses_;
  DLDevice device_{};
  bool is_aligned_ = true;  // and all on one device
};

inline const PyTypeObject* fixed_type = nullptr;  // Fixed, which lives as long as the module

// A kernel that Triton loaded for one device, with everything bound that does not change between launches.
class BoundKernel {
 public:
  // The last parameters of Triton's kernels are the addresses of two kinds of scratch memory, which bound kernels do not
  // use. All parameters together may take the 4 KiB that every device supports.
  static constexpr size_t kScratchAddresses = 2, kMostParameters = 4096 / 8 - kScratchAddresses;

  // Every parameter has 8 bytes and one of these kinds: 'p' the address of a tensor, 'i' an int64, 'f' a float64.
  BoundKernel(uintptr_t ctx_get_device, uintptr_t launch_kernel, uintptr_t function, unsigned threads, unsigned shared_bytes,
              std::string kinds, int32_t device, int32_t device_type)
      : ctx_get_device_(reinterpret_cast<CtxGetDevice>(ctx_get_device)),
        launch_kernel_(reinterpret_cast<LaunchKernel>(launch_kernel)),
        function_(reinterpret_cast<void*>(function)),
        threads_(threads),
        shared_bytes_(shared_bytes),
        kinds_(std::move(kinds)),
        device_{device_type, device} {
    if (kinds_.size() > kMostParameters) throw nb::value_error("a kernel with too many parameters to be bound");
    if (kinds_.find_first_not_of("pif") != std::string::npos) throw nb::value_error("a parameter is of kind p, i or f");
  }

  size_t parameters() const { return kinds_.size(); }
  const DLDevice& device() const { return device_; }

  // Launches on the current stream and returns true; a grid of no programs is no launch. Returns false if this kernel does not
  // support the arguments: the thread's current device is another one or none, a tensor is on another device, or the address of a tensor
  // is not a multiple of 16 bytes, for which the kernel was compiled.
  bool launch(std::array<unsigned, 3> grid, nb::tuple arguments) const {
    const auto [x, y, z] = grid;
    if (!x || !y || !z) return true;
    if (!is_current()) return false;
    Parameters parameters;
    if (!add_all(arguments.ptr(), &parameters)) return false;
    launch_with(x, y, z, &parameters);
    return true;
  }

  // True if the device of the kernel is the current one of the thread.
  bool is_current() const {
    int current = -1;
    return !ctx_get_device_(&current) && current == device_.id;
  }

  struct Parameters {
    uint64_t words[kMostParameters + kScratchAddresses];
    void* addresses[kMostParameters + kScratchAddresses];
    size_t count = 0;

    void add(uint64_t word) {
      words[count] = word;
      addresses[count] = &words[count];
      count++;
    }
  };

  // Launches with all parameters, on the current device.
  void launch_with(unsigned x, unsigned y, unsigned z, Parameters* parameters) const {
    if (parameters->count != kinds_.size()) throw nb::value_error("a kernel was given too few arguments");
    for (size_t i = 0; i < kScratchAddresses; i++) parameters->add(0);
    void* stream = nullptr;
    if (exchange->current_stream(device_.type, device_.id, &stream)) throw nb::python_error();
    int error;
    {
      nb::gil_scoped_release released;  // a full launch queue blocks the caller
      error = launch_kernel_(function_, x, y, z, threads_, 1, 1, shared_bytes_, stream, parameters->addresses, nullptr);
    }
    if (error) throw std::runtime_error("CUDA refused to launch a kernel: error " + std::to_string(error));
  }

 private:
  bool add_all(PyObject* arguments, Parameters* parameters) const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); i++) {
      PyObject* argument = PyTuple_GET_ITEM(arguments, i);
      if (Py_TYPE(argument) == fixed_type) {
        if (!add_fixed(*nb::inst_ptr<Fixed>(argument), parameters)) return false;
      } else if (!(PyTuple_Check(argument) ? add_all(argument, parameters) : add_one(argument, parameters))) {
        return false;
      }
    }
    return true;
  }

  bool add_fixed(const Fixed& fixed, Parameters* parameters) const {
    const size_t count = fixed.addresses().size();
    if (kinds_.size() - parameters->count < count) throw nb::value_error("a kernel was given too many arguments");
    if (kinds_.find_first_not_of('p', parameters->count) < parameters->count + count) throw nb::value_error("a tensor in the place of a number");
    for (uint64_t word : fixed.addresses()) parameters->add(word);
    return fixed.fits(device_);
  }

  bool add_one(PyObject* argument, Parameters* parameters) const {
    if (parameters->count == kinds_.size()) throw nb::value_error("a kernel was given too many arguments");
    uint64_t word = 0;
    switch (kinds_[parameters->count]) {
      case 'p': {
        DLTensor tensor;
        if (exchange->describe(argument, &tensor)) {
          PyErr_Clear();
          return false;
        }
        word = reinterpret_cast<uint64_t>(address(tensor));
        if (tensor.device.type != device_.type || tensor.device.id != device_.id || word % 16) return false;
        break;
      }
      case 'i': {
        const int64_t number = PyLong_AsLongLong(argument);
        if (number == -1 && PyErr_Occurred()) throw nb::python_error();
        word = static_cast<uint64_t>(number);
        break;
      }
      default: {
        const double number = PyFloat_AsDouble(argument);
        if (number == -1.0 && PyErr_Occurred()) throw nb::python_error();
        memcpy(&word, &number, sizeof word);
      }
    }
    parameters->add(word);
    return true;
  }

  CtxGetDevice ctx_get_device_;
  LaunchKernel launch_kernel_;
  void* function_;
  unsigned threads_, shared_bytes_;
  std::string kinds_;
  DLDevice device_;
};

}  // namespace rlstore
