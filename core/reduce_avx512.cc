// Compiled with the flags of this instruction set: see CMakeLists.txt.
#define ALLRANKS_ISA avx512
#include "reduce_kernels.h"
