// What Python gives to the core for the life of the module. These are all mutable globals of the core, but for what a
// fork needs (base/forks.cc): a fork is one of the whole process.
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
  PyObject* where = nullptr;            // function(): where in the program a call stands
  const Tensors* ordinary = nullptr;    // the classes of tensors that are read without Python code
  PyObject* reduce_op_class = nullptr;  // Python's ReduceOp
  PyObject* while_waiting = nullptr;    // function(seconds), called while a master waits for room; nullptr: none
  PyTypeObject* ref_type = nullptr;     // of the handles of an outbox
  const Handles* handles = nullptr;     // of tensors on workers
  Operators* operators = nullptr;       // that are queued without Python code
  Completions* completions = nullptr;   // never deleted: threads may end after static objects
};

inline constinit State state;

// Of the calls that this thread starts.
inline constinit thread_local Purpose purpose = Purpose::none;

}  // namespace allranks
