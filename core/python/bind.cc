// The module allranks._core. Addresses come in, and exceptions with facts go out.
//
// Ordinary tensors are read through DLPack's table (tensors.h), others in Python (allranks/_engines/native/engine.py).
// So this module does not link with torch, and one build works with every version of it.
#include <nanobind/nanobind.h>

#include "python/binding.h"

NB_MODULE(_core, m) {
  nanobind::set_leak_warnings(false);  // a rank that ends with a live traceback still holds its group
  m.doc() = "The C++ core of allranks: one rank of one group, over shared memory.";
  allranks::bind_errors(m);
  allranks::bind_types(m);
  allranks::bind_trace(m);
  allranks::bind_comm(m);
  allranks::bind_now(m);
  allranks::bind_sites(m);
  allranks::bind_torch_call(m);
  allranks::bind_calls(m);
  allranks::bind_outbox(m);
  allranks::bind_watch(m);
}
