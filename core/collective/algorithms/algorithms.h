// The collectives. One file per verb, whose head says how it works, what it costs and where it
// comes from. They see a Team and raw bytes, nothing else.
#pragma once

#include <vector>

#include "collective/team.h"

namespace allranks::algorithms {

using Pieces = std::vector<std::byte*>;  // by rank; empty where this rank has none

void all_reduce(Team& team, Team::Call& call, Buffer buffer, ReduceOp op);
void reduce(Team& team, Team::Call& call, Buffer buffer, ReduceOp op, int root);
void broadcast(Team& team, Team::Call& call, Buffer buffer, int root);
void all_gather(Team& team, Team::Call& call, Buffer in, const Pieces& outs);
void gather(Team& team, Team::Call& call, Buffer in, const Pieces& outs, int root);
void scatter(Team& team, Team::Call& call, const Pieces& ins, Buffer out, int root);
void reduce_scatter(Team& team, Team::Call& call, const Pieces& ins, Buffer out, ReduceOp op);
void all_to_all(Team& team, Team::Call& call, const Pieces& ins, const std::vector<size_t>& in_bytes,
                const Pieces& outs, const std::vector<size_t>& out_bytes);
void barrier(Team& team, Team::Call& call);

}  // namespace allranks::algorithms
