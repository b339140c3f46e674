// The fast path of a blocking call: tensors as the user gave them, read without Python code.
//
// Whatever is out of the ordinary, or wrong, is left to Python before anything is done.
#pragma once

#include <nanobind/nanobind.h>

#include "group/comm.h"

namespace allranks {

// False: nothing was done.
bool send_now(Comm& comm, nanobind::handle tensor, int to, int tag);
// The sender, or -1 if nothing was done.
int recv_now(Comm& comm, nanobind::handle tensor, int from, int tag);

}  // namespace allranks
