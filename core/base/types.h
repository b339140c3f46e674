// What every room of the core shares: element types, reduce ops, verbs, a buffer, a call's fingerprint.
//
// The numbers of the enums travel between processes in the fingerprint, and Python passes them. It gets them from
// core/python/bind_types.cc.
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
  f4_e2m1fn_x2,  // the last six are only moved
};
constexpr int kDTypes = 22;

// premul_sum: of operands that their ranks have multiplied already.
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

// The call of the program that a collective is a part of, where it is not the collective itself.
enum class Purpose : uint8_t {
  none,
  new_group,
  split_group,
  all_gather_object,
  gather_object,
  broadcast_object_list,
  scatter_object_list,
  empty_shared,
};

constexpr size_t size_of(DType dtype) {
  constexpr size_t sizes[kDTypes] = {1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 1, 4, 8, 16, 1, 1, 1, 1, 1, 1};
  return sizes[static_cast<int>(dtype)];
}

// A user's memory: contiguous, `count` elements.
struct Buffer {
  void* data = nullptr;
  size_t count = 0;
  DType dtype = DType::u8;

  size_t nbytes() const { return count * size_of(dtype); }
  std::byte* bytes() const { return static_cast<std::byte*>(data); }
};

// What ranks compare of a tensor's shape beside the count: nothing of usual tensors, as torch.tensor(3) may meet
// torch.empty(1). A list of tensors is passed as a tensor of more dimensions than torch computes with (multigpu.py).
// `every`: in debug mode, whatever has not one dimension.
constexpr size_t kMostDimensions = 64;
inline uint32_t shape_hash(const int64_t* shape, size_t ndim, bool every = false) {
  if (ndim == 1 || (!every && ndim <= kMostDimensions)) return 0;
  uint64_t h = 0xcbf29ce484222325 ^ ndim;  // FNV-1a, by sizes
  for (size_t d = 0; d < ndim; d++) h = (h ^ static_cast<uint64_t>(shape[d])) * 0x100000001b3;
  return static_cast<uint32_t>(h ^ (h >> 32)) | 1U;
}

// What a rank is calling. It travels beside the data of every call, so that ranks
// that call different things get an error instead of a wrong number.
struct Fingerprint {
  Verb verb = Verb::none;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  Purpose purpose = Purpose::none;
  int32_t root = -1;
  uint64_t count = 0;
  uint32_t shape = 0;  // shape_hash
  uint32_t site = 0;   // debug mode: a hash of where in the program the call stands; else 0

  // Whether two ranks call the same thing. Ranks may do so from different lines.
  bool agrees(const Fingerprint& other) const {
    return verb == other.verb && dtype == other.dtype && op == other.op && purpose == other.purpose &&
           root == other.root && count == other.count && shape == other.shape;
  }
};
static_assert(sizeof(Fingerprint) == 24);

}  // namespace allranks
