// The fast path: executes calls of ordinary tensors with the user's arguments, without Python code.
//
// If an argument is unusual or wrong, these functions do nothing. Python then executes the call or raises the error.
#pragma once

#include <nanobind/nanobind.h>

#include "group/comm.h"
#include "python/sites.h"

namespace allranks {

class Now;

// Return the object behind a group's fast-path function, or nullptr if `function` is another function.
const Now* now_of(nanobind::handle function);
// Execute a blocking collective. Return false if nothing was done.
bool run_now(const Now& now, nanobind::handle verb, nanobind::handle tensor, nanobind::handle pieces,
             nanobind::handle op, nanobind::handle root);
// Start an asynchronous collective and return a Started. Return None if nothing was done. depth: see Sites::behind.
nanobind::object start_now(const Now& now, nanobind::handle verb, nanobind::handle tensor, nanobind::handle pieces,
                           nanobind::handle op, nanobind::handle root, const Sites& sites, int depth);

// Send a message. Return false if nothing was done.
bool send_now(Comm& comm, nanobind::handle tensor, int to, int tag);
// Receive a message. Return the sender, or -1 if nothing was done.
int recv_now(Comm& comm, nanobind::handle tensor, int from, int tag);

}  // namespace allranks
