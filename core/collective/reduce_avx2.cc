// Compiled with the flags of this instruction set: see CMakeLists.txt.
#define ALLRANKS_ISA avx2
#include "collective/reduce_kernels.h"
