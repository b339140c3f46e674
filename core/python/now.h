// The fast path of a blocking call: tensors as the user gave them, read without Python code.
//
// Whatever is out of the ordinary, or wrong, is left to Python before anything is done.
#pragma once

#include <nanobind/nanobind.h>

#include "group/comm.h"
#include "python/sites.h"

namespace allranks {

class Now;

// The Now that is a group's short way; nullptr: that is another function.
const Now* now_of(nanobind::handle function);
// A blocking collective. False: nothing was done.
bool run_now(const Now& now, nanobind::handle verb, nanobind::handle tensor, nanobind::handle pieces,
             nanobind::handle op, nanobind::handle root);
// An asynchronous one: a Started. None: nothing was done.
nanobind::object start_now(const Now& now, nanobind::handle verb, nanobind::handle tensor, nanobind::handle pieces,
                           nanobind::handle op, nanobind::handle root, const Sites& sites, int depth);

// False: nothing was done.
bool send_now(Comm& comm, nanobind::handle tensor, int to, int tag);
// The sender, or -1 if nothing was done.
int recv_now(Comm& comm, nanobind::handle tensor, int from, int tag);

}  // namespace allranks
