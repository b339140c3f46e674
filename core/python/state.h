// The objects that Python passes to the core for the lifetime of the module. The core has no other mutable global
// variables, except those for forks (base/forks.cc): a fork copies the whole process.
#pragma once

#include <nanobind/nanobind.h>

#include "base/completions.h"
#include "base/types.h"
#include "python/tensors.h"

namespace allranks {

struct Handles;  // bind_calls.cc
struct Operators;

struct State {
  PyObject* failure_type = nullptr;     // allranks._core.Failure
  PyObject* where = nullptr;            // function(): the call site of the current call
  const Tensors* ordinary = nullptr;    // reads the tensors that need no Python code
  PyObject* reduce_op_class = nullptr;  // Python's ReduceOp
  PyObject* while_waiting = nullptr;    // function(seconds), called while a master waits for room; nullptr: none
  PyTypeObject* ref_type = nullptr;     // allranks._core.Ref
  const Handles* handles = nullptr;     // the objects for creating handles of tensors on workers
  Operators* operators = nullptr;       // the operators whose calls need no Python code
  Completions* completions = nullptr;   // never deleted: threads may outlive static objects
};

inline constinit State state;

// The purpose of the calls that this thread starts.
inline constinit thread_local Purpose purpose = Purpose::none;

}  // namespace allranks
