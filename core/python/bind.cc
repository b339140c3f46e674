// The module allranks._core: the core's interface to Python. Python passes addresses of memory. Errors leave the core
// as exceptions that contain facts (errors.h).
//
// C++ reads ordinary tensors through DLPack's exchange table (tensors.h). Python reads all other tensors
// (allranks/_engines/native/engine.py). So this module does not link against torch, and one build works with every
// version of torch (docs/decisions/007).
#include <nanobind/nanobind.h>

#include "python/binding.h"

NB_MODULE(_core, m) {
  nanobind::set_leak_warnings(false);  // a rank that exits with a live traceback still references its group
  m.doc() = "The C++ core of allranks: one rank of one group, over shared memory and TCP.";
  allranks::bind_errors(m);
  allranks::bind_types(m);
  allranks::bind_trace(m);
  allranks::bind_fabric(m);  // before its use as the default of an argument
  allranks::bind_comm(m);
  allranks::bind_now(m);
  allranks::bind_sites(m);
  allranks::bind_torch_call(m);
  allranks::bind_calls(m);
  allranks::bind_outbox(m);
  allranks::bind_watch(m);
  allranks::bind_window(m);
}
