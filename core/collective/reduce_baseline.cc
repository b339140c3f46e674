// Compiled with the flags of this instruction set: see CMakeLists.txt.
#define ALLRANKS_ISA baseline
#include "collective/reduce_kernels.h"
