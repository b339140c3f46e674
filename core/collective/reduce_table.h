// Kernels of each instruction set, for reduce.cc.
#pragma once

#include <array>

#include "collective/reduce.h"

namespace allranks {

using KernelTable = std::array<std::array<Kernel, kReduceOps>, kDTypes>;

// Conversions of float16 and bfloat16, in this order.
using Conversions = std::array<Partials, 2>;

namespace baseline {
KernelTable kernels();
Conversions conversions();
}  // namespace baseline
namespace avx2 {
KernelTable kernels();
Conversions conversions();
}  // namespace avx2
namespace avx512 {
KernelTable kernels();
Conversions conversions();
}  // namespace avx512

}  // namespace allranks
