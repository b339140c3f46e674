// The collectives of a group that spans hosts.
//
// The ranks of one host work in their shared memory (local_comm.h). Ranks of different hosts use their collective
// streams (net.h). Every call begins with an exchange of what the ranks call:
//   1. The ranks of each host compare their fingerprints in shared memory.
//   2. The first rank of each host, its leader, sends a message to the other leaders (leader_exchange.h). It has the
//      fingerprint, and the operands of its host where these are small.
//   3. Each leader passes on to its host what it has received.
// So every rank knows whether all ranks call the same before any tensor is touched. A small call ends with that. Larger
// operands follow on every rank's own collective streams.
//
// Order of reduction: each host's operands by rank, then the hosts' results by the host's first rank. It is the same
// for every size and on every rank. float16 and bfloat16 are rounded once per level: on the host, and between hosts.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "channel/net.h"
#include "collective/leader_exchange.h"
#include "collective/local_comm.h"
#include "collective/operation.h"
#include "collective/reduce.h"
#include "collective/trial.h"

namespace allranks {

class InterHostComm {
 public:
  InterHostComm(LocalComm& local_comm, Net& net)
      : local_comm_(local_comm), net_(net), hosts_(net.hosts()), leaders_(hosts_, here()) {}

  void run(LocalComm::Call& call, const Operation& operation);

 private:
  using Bytes = std::vector<const std::byte*>;
  using Pieces = std::vector<std::byte*>;

  void dispatch(LocalComm::Call& call, const Operation& operation);

  // What the ranks of a host contribute to the exchange: their operands one after the other, or reduced.
  struct Contribution {
    std::function<size_t(int)> nbytes;  // of a rank's operand
    Kernel kernel = nullptr;            // reduces those of a host
    size_t count = 0;                   // elements of each
    // Where a rank that is alone on its host wants another host's contribution, once all agree; nullptr: anywhere.
    LeaderExchange::Into into = nullptr;
  };
  // Returns each host's contribution, by host. It lies there until the next call.
  Bytes exchange(LocalComm::Call& call, const void* mine, const Contribution& contribution);
  struct Exchange;
  void assemble(Exchange& e, size_t most);
  void exchange_between_leaders(Exchange& e);
  void distribute(Exchange& e);
  const std::byte* operand_of(const Exchange& e, int place) const;
  size_t bytes_of_host(const Contribution& contribution, int host) const;
  // What a leader sends: an Opening with fingerprints, and the contribution of its host.
  LeaderMessage write_message(const Exchange& e);

  // The sizes of an all_to_all, which every rank compares, so that a disagreement is an error on all of them. A rank
  // that sends little sends it along. Returns, by rank, where what it sends to this one lies; nullptr: it is still to
  // come.
  Bytes compare_sizes(LocalComm::Call& call, const Operation& operation);
  using Table = std::vector<std::vector<uint64_t>>;  // a row per rank of this host, or per host
  std::vector<uint64_t> transpose_sizes(LocalComm::Call& call, const std::vector<size_t>& sizes);
  Table transpose_between_leaders(LocalComm::Call& call, const Table& rows);
  void compare_sizes_of_many(LocalComm::Call& call, const Operation& operation);
  [[noreturn]] void refuse_sizes(LocalComm::Call& call, int from, int to, uint64_t sent, uint64_t expected);

  // Whether the ring can carry so many bytes from all hosts; and whether a call should take part of its data along.
  bool has_room(size_t total) const;
  bool fits(size_t total) const;

  void all_reduce(LocalComm::Call& call, Buffer buffer, ReduceOp op);
  // How a large all_reduce goes: by each rank its shard with its counterparts; so, with the levels overlapping; or by
  // the leaders alone, which is fewer messages.
  enum class Way { lanes, stages, leaders };
  size_t choose_way(LocalComm::Call& call, Trial& trial);
  void all_reduce_on_levels(LocalComm::Call& call, Buffer buffer, ReduceOp op, Way way);
  void all_reduce_in_stages(LocalComm::Call& call, Buffer buffer, ReduceOp op);
  void reduce(LocalComm::Call& call, Buffer buffer, ReduceOp op, int root);
  void broadcast(LocalComm::Call& call, Buffer buffer, int root);
  void reduce_over_lanes(LocalComm::Call& call, Buffer buffer, ReduceOp op, int root);
  void reduce_by_leaders(LocalComm::Call& call, Buffer buffer, ReduceOp op, int root);
  void broadcast_over_lanes(LocalComm::Call& call, Buffer buffer, int root);
  void broadcast_by_relays(LocalComm::Call& call, Buffer buffer, int root);
  std::pair<int, int> chain_from(int first) const;
  void all_gather(LocalComm::Call& call, Buffer in, const Pieces& outs);
  void spread(LocalComm::Call& call, const Pieces& outs, size_t n, size_t lanes);
  void gather(LocalComm::Call& call, Buffer in, const Pieces& outs, int root);
  void scatter(LocalComm::Call& call, const Pieces& ins, Buffer out, int root);
  void reduce_scatter(LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op);
  void all_to_all(LocalComm::Call& call, const Operation& operation);

  // Reduces between one rank of each host (peers, by host). root < 0: all get the result, in place of their
  // operand; else only that host's, and the others' operands stay as they are.
  void across(LocalComm::Call& call, const std::vector<int>& peers, Buffer operand, ReduceOp op, int root);

  // --- between so many hosts that not every rank speaks to one on each (inter_host_chains.cc) ---

  bool has_chains() const { return hosts_.count() > LeaderExchange::kDirectHosts; }
  void across_chain(LocalComm::Call& call, const std::vector<int>& peers, Buffer operand, ReduceOp op, int root);
  void reduce_scatter_over_chains(LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op);
  void reduce_scatter_by_leaders(LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op);
  // This host's place in a binomial tree of the hosts with the root's at its root.
  struct Branch {
    int relay;   // who speaks for this host
    int parent;  // for the host above it; -1: there is none
    struct Below {
      int rank;
      int by;  // the relay of the next host on the way to it
    };
    std::vector<Below> below;  // in the order in which their pieces are sent
  };
  Branch branch_of(int root) const;
  void gather_up_tree(LocalComm::Call& call, Buffer in, const Pieces& outs, int root);
  void scatter_down_tree(LocalComm::Call& call, const Pieces& ins, Buffer out, int root);
  void all_gather_around(LocalComm::Call& call, Buffer in, const Pieces& outs);
  void pass_around(LocalComm::Call& call, const Pieces& outs, size_t n, size_t lanes);

  LocalComm::Call& next(LocalComm::Call& call) {
    call.number = local_comm_.next();
    return call;
  }
  int me() const { return net_.rank(); }
  int here() const { return hosts_.of(me()); }
  int place() const { return local_comm_.rank(); }
  const std::vector<int>& local_ranks() const { return hosts_.on(here()); }
  size_t ranks() const { return static_cast<size_t>(hosts_.ranks()); }
  std::vector<int> leaders() const;
  // A lane: the ranks of all hosts that stand at the same place. With as many ranks on every host each is in one.
  bool has_lanes() const { return local_comm_.size() > 1 && hosts_.even(); }
  size_t ranks_of_host() const { return local_ranks().size(); }
  int counterpart(int host) const { return hosts_.on(host)[static_cast<size_t>(place())]; }
  std::vector<int> counterparts() const;
  Pieces of_local_ranks(const Pieces& all) const;
  std::byte* scratch(size_t index, size_t nbytes);
  std::vector<std::byte>& scratch_memory(size_t index);
  void flush(LocalComm::Call& call) { net_.flush(call.patience, call.about); }
  void settle(LocalComm::Call& call) { net_.settle(call.patience, call.about); }

  [[noreturn]] void disagree(LocalComm::Call& call, Error error);

  LocalComm& local_comm_;
  Net& net_;
  const Hosts& hosts_;
  LeaderExchange leaders_;
  std::vector<std::byte> outgoing_;  // the message of this host
  std::vector<std::vector<std::byte>> scratch_;
  std::array<Trial, 25> trials_;  // of large calls of all_reduce, by bits of the size; the last: of 8 MB and more
};

}  // namespace allranks
