// Element-wise reduction of the ranks' operands.
//
// There is one kernel per (dtype, op), compiled for several instruction sets and selected once at run time. A kernel
// receives all operands and combines them in the given order, 0..n-1. The order does not depend on the rank that runs
// the kernel or on the part of the tensor. Results are therefore bit-identical on all ranks and in every run.
//
// float16 and bfloat16: accumulated in float32 and rounded once, to nearest even.
// MIN and MAX: propagate NaN, as in torch.
// AVG of integers: the wrapped sum, divided towards zero, as in nccl.
// bool: SUM and MAX are "or", PROD and MIN are "and". Every byte except 0 is true.
#pragma once

#include "base/types.h"

namespace allranks {

// Reduce srcs into dst. dst may be one of srcs; no other buffers may overlap. parts: the number of ranks whose operands
// srcs contain; AVG divides by it.
using Kernel = void (*)(void* dst, const void* const* srcs, int nsrcs, size_t count, int parts);

// Return the kernel for dtype and op. nullptr: this combination is not supported (AVG of bool, MAX of complex, dtypes
// that are only moved).
Kernel kernel_for(DType dtype, ReduceOp op);

// Return the op for a subset of the operands. AVG divides only after all operands have been added.
inline ReduceOp partial_op(ReduceOp op) { return op == ReduceOp::avg ? ReduceOp::sum : op; }

// Type of partial results that hosts send to each other: the type in which the dtype is accumulated. The result is then
// rounded only once, as if one kernel had combined all operands.
struct Partials {
  using Convert = void (*)(void* dst, const void* src, size_t count);
  DType dtype;
  Convert widen = nullptr;  // nullptr: the types are the same
  Convert narrow = nullptr;
};
Partials partials_of(DType dtype);

// Return the selected instruction set: "baseline", "avx2" or "avx512". For doctor and bench.
const char* kernel_isa();

}  // namespace allranks
