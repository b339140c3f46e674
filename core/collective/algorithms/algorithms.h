// The collectives within one host, as functions of their operands. Groups that span hosts use them within each host.
//
// Each verb has one file. The header comment of the file describes the method, its cost and its source. An algorithm
// accesses only a LocalComm and raw bytes. For a group on a single host, table.h selects the algorithm.
#pragma once

#include <vector>

#include "collective/local_comm.h"

namespace allranks::algorithms {

using Pieces = std::vector<std::byte*>;  // indexed by rank; empty if this rank has no such argument

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
