// Compiled with the flags of this instruction set: see CMakeLists.txt.
#define ALLRANKS_ISA baseline
#include "reduce_kernels.h"
