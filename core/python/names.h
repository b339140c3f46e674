// The names in Python of the core's enumerators. The position in each array is the enumerator's number.
#pragma once

#include <array>

#include "base/error.h"
#include "base/types.h"

namespace allranks {

inline constexpr std::array kVerbs = {"none",    "all_reduce",     "reduce",     "broadcast", "all_gather", "gather",
                                      "scatter", "reduce_scatter", "all_to_all", "barrier",   "send",       "recv"};
inline constexpr std::array kDTypeNames = {"uint8",
                                           "int8",
                                           "int16",
                                           "int32",
                                           "int64",
                                           "uint16",
                                           "uint32",
                                           "uint64",
                                           "float16",
                                           "bfloat16",
                                           "float32",
                                           "float64",
                                           "bool",
                                           "complex32",
                                           "complex64",
                                           "complex128",
                                           "float8_e4m3fn",
                                           "float8_e5m2",
                                           "float8_e4m3fnuz",
                                           "float8_e5m2fnuz",
                                           "float8_e8m0fnu",
                                           "float4_e2m1fn_x2"};
static_assert(kDTypeNames.size() == kDTypes);
inline constexpr std::array kReduceOpNames = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                              "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
static_assert(kReduceOpNames.size() == kReduceOps);
inline constexpr std::array kKinds = {"",       "timeout", "died",        "left",   "interrupted", "mismatch",
                                      "closed", "system",  "unreachable", "memory", "forked",      "aborted"};

inline constexpr std::array kPurposes = {"",
                                         "new_group",
                                         "split_group",
                                         "all_gather_object",
                                         "gather_object",
                                         "broadcast_object_list",
                                         "scatter_object_list",
                                         "empty_shared",
                                         "all_gather_v",
                                         "reduce_scatter_v",
                                         "gather_v",
                                         "scatter_v",
                                         "all_to_all_w",
                                         "new_window",
                                         "tensor_register",
                                         "tensor_deregister"};

}  // namespace allranks
