// Types that all modules of the core share: element types, reduce ops, verbs, buffers and fingerprints of calls.
//
// The values of the enums are part of the fingerprint that processes exchange. Python also passes them to the core, and
// reads them from core/python/bind_types.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allranks {

enum class DType : uint8_t {
  u8,
  i8,
  i16,
  i32,
  i64,
  u16,
  u32,
  u64,
  f16,
  bf16,
  f32,
  f64,
  boolean,
  c32,
  c64,
  c128,
  f8_e4m3fn,
  f8_e5m2,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  f8_e8m0fnu,
  f4_e2m1fn_x2,  // the last six types are only moved, never reduced
};
constexpr int kDTypes = 22;

// premul_sum: the sum of operands that each rank has already multiplied by its factor.
enum class ReduceOp : uint8_t { sum, avg, prod, min, max, band, bor, bxor, premul_sum };
constexpr int kReduceOps = 9;

enum class Verb : uint8_t {
  none,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  barrier,
  send,
  recv,
};

// The call of the program that a collective is a part of, if that call is not the collective itself.
enum class Purpose : uint8_t {
  none,
  new_group,
  split_group,
  all_gather_object,
  gather_object,
  broadcast_object_list,
  scatter_object_list,
  empty_shared,
  all_gather_v,
  reduce_scatter_v,
  gather_v,
  scatter_v,
  all_to_all_w,
  new_window,
  tensor_register,
  tensor_deregister,
};

constexpr size_t size_of(DType dtype) {
  constexpr size_t sizes[kDTypes] = {1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 1, 4, 8, 16, 1, 1, 1, 1, 1, 1};
  return sizes[static_cast<int>(dtype)];
}

// Contiguous memory of the user with `count` elements. Does not own it.
struct Buffer {
  void* data = nullptr;
  size_t count = 0;
  DType dtype = DType::u8;

  size_t nbytes() const { return count * size_of(dtype); }
  std::byte* bytes() const { return static_cast<std::byte*>(data); }
};

// Return a hash of the part of a tensor's shape that ranks compare in addition to the count. It is 0 for ordinary
// tensors, because torch.tensor(3) on one rank may match torch.empty(1) on another. A list of tensors is passed as a
// tensor with more dimensions than torch supports for arithmetic (multigpu.py).
// every: debug mode, which compares all shapes except those with one dimension.
constexpr size_t kMostDimensions = 64;
inline uint32_t shape_hash(const int64_t* shape, size_t ndim, bool every = false) {
  if (ndim == 1 || (!every && ndim <= kMostDimensions)) return 0;
  uint64_t h = 0xcbf29ce484222325 ^ ndim;  // FNV-1a, by sizes
  for (size_t d = 0; d < ndim; d++) h = (h ^ static_cast<uint64_t>(shape[d])) * 0x100000001b3;
  return static_cast<uint32_t>(h ^ (h >> 32)) | 1U;  // never 0, the value of shapes that are not compared
}

// Description of a call that ranks compare. It is sent with the data of every call. If the calls of ranks differ, they
// raise an error instead of returning a wrong result.
struct Fingerprint {
  Verb verb = Verb::none;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  Purpose purpose = Purpose::none;
  int32_t root = -1;
  uint64_t count = 0;
  uint32_t shape = 0;  // shape_hash
  uint32_t site = 0;   // debug mode: a hash of the call site; otherwise 0

  // Return whether two calls match. The call site is not compared, because ranks may call from different lines.
  bool agrees(const Fingerprint& other) const {
    return verb == other.verb && dtype == other.dtype && op == other.op && purpose == other.purpose &&
           root == other.root && count == other.count && shape == other.shape;
  }
};
static_assert(sizeof(Fingerprint) == 24);  // stored in shared memory and sent between hosts

}  // namespace allranks
