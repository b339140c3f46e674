// The part of DLPack's binary interface that the binding uses. With it a framework describes a tensor's memory to C
// without creating Python objects. Layout: the DLPack specification, version 1 (dmlc/dlpack).
#pragma once

#include <cstdint>

namespace allranks::dlpack {

struct Device {
  int32_t type;  // 1: CPU
  int32_t id;
};
constexpr int32_t kCpu = 1;

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
enum Code : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8_e4m3fn = 10,
  kFloat8_e4m3fnuz = 11,
  kFloat8_e5m2 = 12,
  kFloat8_e5m2fnuz = 13,
  kFloat8_e8m0fnu = 14,
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; nullptr if contiguous
  uint64_t byte_offset;
};

constexpr uint32_t kMajor = 1;

struct ExchangeApi {
  struct {
    uint32_t major;
    uint32_t minor;
  } version;
  void* previous;
  void* unused[3];                                // functions that create and import tensors
  int (*show)(void* python_object, Tensor* out);  // nullptr: unsupported; returns -1 if a Python exception is set
  void* stream;
};

}  // namespace allranks::dlpack
