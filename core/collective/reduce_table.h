// What the instruction sets' kernel files give to reduce.cc.
#pragma once

#include <array>

#include "collective/reduce.h"

namespace allranks {

using KernelTable = std::array<std::array<Kernel, kReduceOps>, kDTypes>;

namespace baseline {
KernelTable kernels();
}
namespace avx2 {
KernelTable kernels();
}
namespace avx512 {
KernelTable kernels();
}

}  // namespace allranks
