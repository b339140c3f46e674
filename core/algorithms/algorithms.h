// The collectives. One file per verb, whose head says how it works, what it costs and where it
// comes from. They see a Comm and raw bytes, nothing else.
#pragma once

#include "../comm.h"

namespace allranks::algorithms {

void all_reduce(Comm& comm, Comm::Call& call, Buffer buffer, ReduceOp op);
void broadcast(Comm& comm, Comm::Call& call, Buffer buffer, int root);
void barrier(Comm& comm, Comm::Call& call);

}  // namespace allranks::algorithms
