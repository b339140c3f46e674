// barrier: no rank returns before every rank has arrived.
//
// Every rank writes one cache line that all other ranks read. In shared memory, one flag per rank costs a single
// one-way latency, so the dissemination algorithm used on networks is not needed. Many ranks synchronize in groups
// (levels.h).
//
// Cost: one cache line per rank, one latency (with groups: three).
#include "collective/algorithms/table.h"

namespace allranks::algorithms {

void barrier(LocalComm& comm, LocalComm::Call& call, const Operation&) { comm.arrive(call); }

}  // namespace allranks::algorithms
