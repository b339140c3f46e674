#include "collective/reduce.h"

#include "collective/reduce_table.h"

namespace allranks {

namespace {

struct Choice {
  const char* isa;
  KernelTable table;
  Conversions conversions;
};

Choice choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return {"avx512", avx512::kernels(), avx512::conversions()};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    return {"avx2", avx2::kernels(), avx2::conversions()};
#endif
  return {"baseline", baseline::kernels(), baseline::conversions()};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

Kernel kernel_for(DType dtype, ReduceOp op) {
  return chosen().table[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
}

Partials partials_of(DType dtype) {
  const auto& [half, brain] = chosen().conversions;
  switch (dtype) {
    case DType::f16:
      return half;
    case DType::bf16:
      return brain;
    case DType::c32: {  // pairs of float16
      Partials pairs{.dtype = DType::c64};
      pairs.widen = [](void* dst, const void* src, size_t count) {
        chosen().conversions[0].widen(dst, src, 2 * count);
      };
      pairs.narrow = [](void* dst, const void* src, size_t count) {
        chosen().conversions[0].narrow(dst, src, 2 * count);
      };
      return pairs;
    }
    default:
      return {.dtype = dtype};
  }
}

const char* kernel_isa() { return chosen().isa; }

}  // namespace allranks
