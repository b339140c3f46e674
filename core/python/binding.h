// The parts of the module. Each function is in a separate file and adds its definitions to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace allranks {

void bind_errors(nanobind::module_& m);
void bind_types(nanobind::module_& m);
void bind_comm(nanobind::module_& m);
void bind_fabric(nanobind::module_& m);
void bind_now(nanobind::module_& m);
void bind_sites(nanobind::module_& m);
void bind_torch_call(nanobind::module_& m);
void bind_calls(nanobind::module_& m);
void bind_outbox(nanobind::module_& m);
void bind_trace(nanobind::module_& m);
void bind_watch(nanobind::module_& m);
void bind_window(nanobind::module_& m);

}  // namespace allranks
