// The part of the DLPack C interface that this module uses: the description of a tensor, and the table of functions
// through which torch describes a tensor in tens of nanoseconds, without linking to torch.
// Layouts are fixed by DLPack 1.x (https://dmlc.github.io/dlpack/latest/).
#pragma once

#include <cstdint>

namespace rlstore {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct DLDevice {
  int32_t type;
  int32_t id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  bool operator==(const DLDataType& other) const {
    return code == other.code && bits == other.bits && lanes == other.lanes;
  }
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLVersion {
  uint32_t major;
  uint32_t minor;
};

struct DLExchangeHeader {
  DLVersion version;
  DLExchangeHeader* previous;
};

struct DLManagedTensor {
  DLVersion version;
  void* context;
  void (*deleter)(DLManagedTensor* self);
  uint64_t flags;
  DLTensor tensor;
};

// Functions that are not called here are placeholders in the table.
struct DLExchangeApi {
  DLExchangeHeader header;
  void* allocate;
  void* export_managed;
  int (*import_managed)(DLManagedTensor* tensor, void** out_py_object);
  int (*describe)(void* py_object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out_stream);
};

}  // namespace rlstore
