#include "collective/reduce.h"

#include "collective/reduce_table.h"

namespace allranks {

namespace {

struct Choice {
  const char* isa;
  KernelTable table;
};

Choice choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return {"avx512", avx512::kernels()};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return {"avx2", avx2::kernels()};
#endif
  return {"baseline", baseline::kernels()};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

Kernel kernel_for(DType dtype, ReduceOp op) {
  return chosen().table[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
}

const char* kernel_isa() { return chosen().isa; }

}  // namespace allranks
