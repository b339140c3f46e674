// One rank of one group: its calls, in order.
//
// Collectives run one at a time, in the order in which they were issued, because ranks are matched
// by call number. A blocking collective runs in its caller's thread when nothing is queued. An
// asynchronous one is queued for the progress thread, which is started by the first; whoever waits
// for a request runs the head of the queue itself instead of waiting for that thread to be
// scheduled. Messages (send, recv) are not numbered and go past the queue: see mail.h.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "channel/shm.h"
#include "copier.h"
#include "mail.h"
#include "shared.h"
#include "swaps.h"
#include "types.h"
#include "waiting.h"

namespace allranks {

struct Operation {
  Fingerprint fingerprint;
  Buffer buffer;  // the operand; of reduce_scatter and scatter: the result
  // Pieces by rank, of verbs that have them: what goes to each, what comes from each.
  std::vector<std::byte*> ins = {};
  std::vector<std::byte*> outs = {};
  // all_to_all: their sizes in bytes, which may all differ.
  std::vector<size_t> in_bytes = {};
  std::vector<size_t> out_bytes = {};
  std::string site = {};  // where in the program an asynchronous call stands; of a blocking one the caller tells
};

// An asynchronous collective.
struct Queued : Request {
  explicit Queued(Operation operation) : operation(std::move(operation)) {}
  Operation operation;
};

struct Stats {
  uint64_t calls = 0;
  uint64_t bytes = 0;
  double seconds = 0;   // inside calls: moving, reducing and waiting
  uint64_t shared = 0;  // calls that worked in everybody's shared blocks
};

struct Settings {
  double timeout_s = 1800;
  int64_t spin_ns = 0;           // in the caller's thread
  int64_t spin_progress_ns = 0;  // in the progress thread, which competes with computation
};

class Comm {
 public:
  Comm(std::unique_ptr<Shm> shm, Settings settings);
  ~Comm();
  Comm(const Comm&) = delete;

  int rank() const { return shm_->rank(); }
  int size() const { return shm_->size(); }

  // Blocking collectives. Throws Error.
  void run(const Operation& operation, Caller& caller);

  std::shared_ptr<Request> start(Operation operation);

  void send(Buffer buffer, int to, int32_t tag, Caller& caller);
  // from < 0: any rank. Returns the sender.
  int recv(Buffer buffer, int from, int32_t tag, Caller& caller);
  std::shared_ptr<Request> start_send(Buffer buffer, int to, int32_t tag, Caller& caller);
  std::shared_ptr<Request> start_recv(Buffer buffer, int from, int32_t tag, Caller& caller);

  // Throws the request's error, or a timeout after timeout_ns (< 0: the group's own deadlines
  // decide), in which case the request goes on. An interrupted wait ends the group, as an interrupted
  // blocking call does.
  void wait(const std::shared_ptr<Request>& request, Caller& caller, int64_t timeout_ns);

  // This rank's part, and the others', of memory that calls may work in.
  std::unique_ptr<SharedBlock> share(uint64_t number, size_t bytes, const std::vector<sys::Fd>& parts) {
    return std::make_unique<SharedBlock>(blocks_, number, rank(), bytes, parts);
  }

  // Leaves the group: the others' pending and later calls that need this rank fail. Returns always.
  void close();
  // In a forked child, where the parent's group does not exist: lets go of its sockets.
  void abandon();

  Stats stats() const;
  // The last collective that each rank has begun, as far as can be seen from here.
  std::vector<std::pair<uint32_t, Fingerprint>> last_calls();

  // --- for the algorithms (core/algorithms) ---

  // One collective under way.
  struct Call {
    uint32_t number;
    Patience patience;
    Failure about;
    const std::string& site;
  };

  // Posts this rank's fingerprint, with up to CallLine::kInline bytes of payload, and waits for
  // everybody's. Throws a mismatch, on every rank, unless all are equal.
  void arrive(Call& call, const void* payload = nullptr, size_t nbytes = 0);

  // The next pieces of every rank's ring. Every rank of a call takes the same.
  struct Pieces {
    Shm& shm;
    uint64_t begin;
    size_t room;  // bytes of each

    std::byte* at(int rank, size_t piece = 0) const { return shm.ring_at(rank, begin + piece * room); }
  };
  Pieces take(size_t bytes, size_t pieces = 1);

  // After a mismatch that every rank has found: where each rank's call stands.
  std::vector<std::string> exchange_notes(Call& call);

  // As arrive, for an operand of which this rank's part is `data`. If every rank's lies in the same
  // shared block: the address of each rank's, by rank, as seen from here. Else empty.
  std::vector<std::byte*> arrive_at(Call& call, const void* data, size_t nbytes);
  // The end of a call whose ranks have worked in each other's memory.
  void depart(Call& call);

  // The pipeline of a large call. Between arrive and the end of the call all ranks do the same
  // number of steps; `base_step` is the count before the first.
  void post_step(uint32_t done, bool wake_always);
  void wait_step_of_all(Call& call, uint32_t done);
  void wait_step_of(Call& call, int rank, uint32_t done);

  Shm& shm() { return *shm_; }
  Copier& copier() { return copier_; }
  uint32_t base_step = 0;

 private:
  void wait_queued(const Queued& request, Caller& caller, int64_t timeout_ns);
  void execute(const Operation& operation, Caller& caller, int64_t spin_ns);
  void finish();  // with queue_lock_ held
  void run_head(std::unique_lock<std::mutex>& lock, Caller& caller, int64_t spin_ns);
  void progress();
  void count(size_t nbytes, int64_t began_ns);
  void compare(Call& call);
  bool all_at_step(uint32_t done);

  std::unique_ptr<Shm> shm_;
  Settings settings_;
  Mail mail_;
  int owner_pid_;

  std::mutex queue_lock_;
  std::condition_variable queue_changed_;
  std::deque<std::shared_ptr<Queued>> queue_;
  bool running_ = false;    // somebody runs a collective
  std::thread::id runner_;  // who, while running_
  bool stopping_ = false;
  std::thread progress_;

  uint32_t calls_ = 0;
  uint64_t ring_position_ = 0;
  Swaps swaps_;
  std::shared_ptr<SharedBlocks> blocks_ = std::make_shared<SharedBlocks>();  // outlived by blocks
  Copier copier_;

  std::atomic<uint64_t> count_calls_ = 0;
  std::atomic<uint64_t> count_bytes_ = 0;
  std::atomic<int64_t> count_ns_ = 0;
  std::atomic<uint64_t> count_shared_ = 0;
};

}  // namespace allranks
