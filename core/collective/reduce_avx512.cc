// Compiled with the flags of this instruction set: see CMakeLists.txt.
#define ALLRANKS_ISA avx512
#include "collective/reduce_kernels.h"
