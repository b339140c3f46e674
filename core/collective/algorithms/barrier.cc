// barrier: no rank leaves before every rank has arrived.
//
// Every rank writes one line that all others read (dissemination is for networks: in shared memory
// one flag per rank costs a single one-way latency). Many ranks meet by groups (levels.h).
// Cost: one cache line per rank, one latency; by groups three.
#include "collective/algorithms/table.h"

namespace allranks::algorithms {

void barrier(LocalComm& comm, LocalComm::Call& call, const Operation&) { comm.arrive(call); }

}  // namespace allranks::algorithms
