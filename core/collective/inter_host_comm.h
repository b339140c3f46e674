// The collectives of a group that spans hosts.
//
// The ranks of one host use their shared memory (local_comm.h). Ranks of different hosts use their collective streams
// (net.h). Every call begins with an exchange of fingerprints:
//   1. The ranks of each host compare their fingerprints in shared memory.
//   2. The first rank of each host, its leader, sends a message to the other leaders (leader_exchange.h). The message
//      contains the fingerprint, and the operands of the host if these are small.
//   3. Each leader distributes the received messages within its host.
// Every rank therefore detects different calls before any tensor is changed. A small call is complete after this
// exchange. Larger operands follow on the collective streams of each rank.
//
// Order of reduction: the operands of each host by rank, then the results of the hosts in the order of their first
// ranks. It is the same for every size and on every rank. float16 and bfloat16 are rounded once per level: on the host,
// and between hosts.
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

  // What the ranks of a host contribute to the exchange: their operands, concatenated or reduced.
  struct Contribution {
    std::function<size_t(int)> nbytes;  // bytes of a rank's operand
    Kernel kernel = nullptr;            // reduces the operands of a host; nullptr: they are concatenated
    size_t count = 0;                   // elements per operand
    // Destination of another host's contribution, used after all fingerprints agree. Only for a rank that is alone on
    // its host. nullptr: no fixed destination.
    LeaderExchange::Into into = nullptr;
  };
  // Run the exchange. Returns the contributions, indexed by host. They stay valid until the next call.
  Bytes exchange(LocalComm::Call& call, const void* mine, const Contribution& contribution);
  struct Exchange;
  void assemble(Exchange& e, size_t most);
  void exchange_between_leaders(Exchange& e);
  void distribute(Exchange& e);
  const std::byte* operand_of(const Exchange& e, int place) const;
  size_t bytes_of_host(const Contribution& contribution, int host) const;
  // Write the message of a leader: an Opening with fingerprints, and the contribution of its host.
  LeaderMessage write_message(const Exchange& e);

  // Exchange and compare the sizes of an all_to_all. Every rank compares all sizes, so that a disagreement is an error
  // on all ranks. A rank that sends few bytes adds them to the exchange. Returns, indexed by rank, the address of the
  // data sent to this rank; nullptr: the data has not been sent yet.
  Bytes compare_sizes(LocalComm::Call& call, const Operation& operation);
  using Table = std::vector<std::vector<uint64_t>>;  // one row per rank of this host, or one per host
  std::vector<uint64_t> transpose_sizes(LocalComm::Call& call, const std::vector<size_t>& sizes);
  Table transpose_between_leaders(LocalComm::Call& call, const Table& rows);
  void compare_sizes_of_many(LocalComm::Call& call, const Operation& operation);
  [[noreturn]] void refuse_sizes(LocalComm::Call& call, int from, int to, uint64_t sent, uint64_t expected);

  // has_room: return whether the ring can hold the contributions of all hosts (total bytes). fits: return whether a
  // call should add its data to the exchange.
  bool has_room(size_t total) const;
  bool fits(size_t total) const;

  void all_reduce(LocalComm::Call& call, Buffer buffer, ReduceOp op);
  // Variants of a large all_reduce. lanes: each rank reduces its shard with its counterparts. stages: the same, with
  // overlapping levels. leaders: only the leaders communicate, which needs fewer messages.
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

  // Reduce between one rank of each host (peers, indexed by host). root: the host that receives the result, in place of
  // its operand; the operands of the other hosts stay unchanged. root < 0: all hosts receive the result.
  void across(LocalComm::Call& call, const std::vector<int>& peers, Buffer operand, ReduceOp op, int root);

  // --- more hosts than a rank can have connections to (inter_host_chains.cc) ---

  bool has_chains() const { return hosts_.count() > LeaderExchange::kDirectHosts; }
  void across_chain(LocalComm::Call& call, const std::vector<int>& peers, Buffer operand, ReduceOp op, int root);
  void reduce_scatter_over_chains(LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op);
  void reduce_scatter_by_leaders(LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op);
  // Position of this host in a binomial tree of the hosts. The host of the call's root is the root of the tree.
  struct Branch {
    int relay;   // the rank that communicates for this host
    int parent;  // the relay of the parent host; -1: this host is the root of the tree
    struct Below {
      int rank;
      int by;  // the relay of the next host on the path to `rank`
    };
    std::vector<Below> below;  // all ranks of the subtree, in the order in which their data is sent
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
  // A lane consists of the ranks with the same local rank, one per host. If every host has the same number of ranks,
  // each rank belongs to one lane.
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
  std::vector<std::byte> outgoing_;  // the message of this host; the streams read it until they are flushed
  std::vector<std::vector<std::byte>> scratch_;
  std::array<Trial, 25> trials_;  // variants of large all_reduce, by bit width of the size; the last: 8 MB and more
};

}  // namespace allranks
