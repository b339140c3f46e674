// The collectives. One file per verb, whose head says how it works, what it costs and where it
// comes from. They see a Comm and raw bytes, nothing else.
#pragma once

#include <vector>

#include "../comm.h"

namespace allranks::algorithms {

using Pieces = std::vector<std::byte*>;  // by rank; empty where this rank has none

void all_reduce(Comm& comm, Comm::Call& call, Buffer buffer, ReduceOp op);
void reduce(Comm& comm, Comm::Call& call, Buffer buffer, ReduceOp op, int root);
void broadcast(Comm& comm, Comm::Call& call, Buffer buffer, int root);
void all_gather(Comm& comm, Comm::Call& call, Buffer in, const Pieces& outs);
void gather(Comm& comm, Comm::Call& call, Buffer in, const Pieces& outs);
void scatter(Comm& comm, Comm::Call& call, const Pieces& ins, Buffer out, int root);
void reduce_scatter(Comm& comm, Comm::Call& call, const Pieces& ins, Buffer out, ReduceOp op);
void all_to_all(Comm& comm, Comm::Call& call, const Pieces& ins, const std::vector<size_t>& in_bytes,
                const Pieces& outs, const std::vector<size_t>& out_bytes);
void barrier(Comm& comm, Comm::Call& call);

}  // namespace allranks::algorithms
