// The collectives of one host as functions of their operands: groups that span hosts use them within each host.
//
// There is one file per verb. Its head describes how it works, what it costs and where it comes from. An algorithm sees
// a LocalComm and raw bytes, nothing else. What a group on one host runs is in table.h.
#pragma once

#include <vector>

#include "collective/local_comm.h"

namespace allranks::algorithms {

using Pieces = std::vector<std::byte*>;  // by rank; empty where this rank has none

void all_reduce(LocalComm& comm, LocalComm::Call& call, Buffer buffer, ReduceOp op);
void reduce(LocalComm& comm, LocalComm::Call& call, Buffer buffer, ReduceOp op, int root);
void broadcast(LocalComm& comm, LocalComm::Call& call, Buffer buffer, int root);
void all_gather(LocalComm& comm, LocalComm::Call& call, Buffer in, const Pieces& outs);
void gather(LocalComm& comm, LocalComm::Call& call, Buffer in, const Pieces& outs, int root);
void scatter(LocalComm& comm, LocalComm::Call& call, const Pieces& ins, Buffer out, int root);
void reduce_scatter(LocalComm& comm, LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op);
void all_to_all(LocalComm& comm, LocalComm::Call& call, const Pieces& ins, const std::vector<size_t>& in_bytes,
                const Pieces& outs, const std::vector<size_t>& out_bytes);

}  // namespace allranks::algorithms
