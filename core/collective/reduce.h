// Element-wise reduction of the ranks' operands.
//
// One kernel per (dtype, op), compiled for several instruction sets and chosen once at run
// time. Every kernel takes all operands at once and combines them in the order given, 0..n-1,
// whichever rank runs it and whatever piece of the tensor it is handed: this is what makes
// results bit-identical on all ranks and in every run. float16 and bfloat16 are accumulated in
// float32 and rounded once, to nearest even. MIN and MAX propagate NaN, as torch's do.
// AVG of integers is the wrapped sum, divided towards zero, as nccl's.
// bool: SUM and MAX are "or", PROD and MIN are "and"; any byte but 0 is true.
#pragma once

#include "base/types.h"

namespace allranks {

// dst may be one of srcs; otherwise nothing overlaps. parts: of how many ranks' operands srcs are made; AVG
// divides by it.
using Kernel = void (*)(void* dst, const void* const* srcs, int nsrcs, size_t count, int parts);

// nullptr: this pair does not exist (AVG of bool, MAX of complex, dtypes that are only moved).
Kernel kernel_for(DType dtype, ReduceOp op);

// Of a part of the operands: AVG divides when all have been added.
inline ReduceOp partial_op(ReduceOp op) { return op == ReduceOp::avg ? ReduceOp::sum : op; }

// Partial results that go from host to host have the type in which a dtype is accumulated, so that they are rounded
// once, as where one kernel takes all operands.
struct Partials {
  using Convert = void (*)(void* dst, const void* src, size_t count);
  DType dtype;
  Convert widen = nullptr;  // nullptr: the types are the same
  Convert narrow = nullptr;
};
Partials partials_of(DType dtype);

const char* kernel_isa();  // "baseline", "avx2" or "avx512": for doctor and bench

}  // namespace allranks
