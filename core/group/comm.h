// One rank of one group: runs its calls in order.
//
// Collectives run one at a time, in the order in which they were issued, because ranks match calls by number. A
// blocking collective runs in the thread of its caller if the queue is empty. An asynchronous collective is queued for
// the progress thread. The first one starts this thread. A thread that waits for a request runs the head of the queue
// itself, because the progress thread may not be scheduled soon.
//
// Many programs wait for an asynchronous call immediately. Waking a thread for such a call would cost more than the
// call (docs/decisions/104). The progress thread therefore leaves each call to its caller for kHeadStartNs, and runs it
// only if no other thread has started it. While asynchronous calls arrive, the progress thread polls the queue, so no
// thread has to wake it. It polls every kLookNs. The interval grows up to kMostLookNs while other threads run all
// calls. After kLooks polls without a new call, it sleeps until it is woken. It never spins. A large call wakes it, and
// so does a waiting thread that cannot run calls itself.
//
// Messages (send, recv) are not numbered and do not use the queue: see point_to_point.h.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/types.h"
#include "base/waiting.h"
#include "channel/net.h"
#include "channel/shm.h"
#include "collective/inter_host_comm.h"
#include "collective/local_comm.h"
#include "collective/operation.h"
#include "p2p/point_to_point.h"
#include "trace/recorder.h"

namespace allranks {

constexpr int64_t kHeadStartNs = 20'000;  // waking the progress thread costs 20 to 60 us
constexpr int64_t kLookNs = 100'000;      // maximum delay of a call that no thread waits for
constexpr int64_t kMostLookNs = 800'000;  // the same, after calls that other threads have run
constexpr int kLooks = 5;                 // polls without a new call before the progress thread sleeps

// Request of an asynchronous collective.
struct Queued : Request {
  explicit Queued(Operation operation) : operation(std::move(operation)) {}
  Operation operation;
  const int64_t queued_ns = sys::now_ns();
};

struct Stats {
  uint64_t calls = 0;
  uint64_t bytes = 0;
  double seconds = 0;   // time in calls: moving, reducing and waiting
  uint64_t shared = 0;  // calls that used the shared blocks of all ranks
};

struct Settings {
  Tuning tuning;
  Place place = this_place();
  double timeout_s = 1800;
  Polling polling;           // for the caller's thread
  Polling progress_polling;  // for the progress threads, which compete with computation
  size_t eager = 8 << 20;    // credit: bytes of messages that a rank may send to another without a recv
  FabricChoice fabric = {};  // the network between the hosts, without a provider for TCP
};

// Created by sys::make_owned. In a forked child every call throws Kind::forked, except close, which does nothing.
class Comm {
 public:
  // A group of ranks that share this host.
  Comm(std::unique_ptr<Shm> shm, Settings settings);
  // A group that spans hosts. shm: the shared memory of the ranks of this host.
  Comm(std::unique_ptr<Shm> shm, int rank, Hosts hosts, std::vector<sys::Fd> heartbeats, Net::Opener opener,
       Settings settings);
  ~Comm() { close(); }
  Comm(const Comm&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Run a collective, and wait for its end. Throws Error.
  void run(const Operation& operation, Caller& caller);

  // Start an asynchronous collective.
  std::shared_ptr<Request> start(Operation operation);

  void send(Buffer buffer, int to, int32_t tag, Caller& caller);
  // Receive a message. from < 0: from any rank. Returns the rank of the sender.
  int recv(Buffer buffer, int from, int32_t tag, Caller& caller);
  std::shared_ptr<Request> start_send(Buffer buffer, int to, int32_t tag, Caller& caller);
  std::shared_ptr<Request> start_recv(Buffer buffer, int from, int32_t tag, Caller& caller);

  // Wait until the request is done. Throws its error, or a timeout after timeout_ns; after this timeout the request
  // continues. timeout_ns < 0: the timeout of the group applies. An interrupted wait ends the group, as an interrupted
  // blocking call does.
  void wait(const std::shared_ptr<Request>& request, Caller& caller, int64_t timeout_ns);

  // Change the timeout of calls that begin later. Thread-safe.
  void set_timeout(double timeout_s);

  // Create a block from the memory of all ranks. Calls access tensors in it without the rings.
  std::unique_ptr<SharedBlock> share(uint64_t number, size_t bytes, const std::vector<sys::Fd>& parts) {
    check_process();
    return local_comm_.share(number, bytes, parts);
  }

  // Return the liveness sockets of these ranks, for a group that consists of them. Empty if a rank is on another host
  // or if this group is closed.
  Liveness liveness(const std::vector<int>& ranks);

  // End all calls of the group on every rank, pending and later ones, with an error.
  void abort();
  // Return the ranks that this rank knows to be dead, unreachable, or no longer in the group. Empty after close.
  std::vector<int> lost();

  // Leave the group. Pending and later calls of other ranks that need this rank fail. Always returns.
  void close();

  // Only for a group that spans hosts. See Net.
  void adopt(int rank, Connection kind, sys::Fd fd, const std::string& greeting = {});
  void give_up(int rank);
  std::string fabric_error(int rank);  // as in Net

  LocalComm& local_comm() { return local_comm_; }  // the ranks of this host

  // Record all calls in `recorder`. Must be called before the first call.
  void record_in(std::shared_ptr<trace::Recorder> recorder, size_t group);
  Stats stats() const;
  // Return the last collective that each rank has begun, as far as this rank knows. Empty in a forked child.
  std::vector<std::pair<uint32_t, Fingerprint>> last_calls();

 private:
  bool forked() const { return forks_ != sys::forks(); }
  void check_process() const;
  void reserve_pipe(int to) {
    if (const int local = local_comm_.shm().local(to); local >= 0) local_comm_.shm().reserve_pipe(local);
  }
  void wait_queued(const Queued& request, Caller& caller, int64_t timeout_ns);
  class Recording;

  class LongWait;
  // The start time of a call, and the number of its call site if that is known.
  struct Begin {
    int64_t entered_ns;
    uint16_t site;
  };
  Begin begin_now(Caller& caller);
  void execute(const Operation& operation, Caller& caller, Polling polling, Begin begin);
  // All functions of this block require queue_lock_.
  void finish();
  bool sleeps_in_vain();  // whether the progress thread must be woken, because it sleeps and a call can run
  void run_head(std::unique_lock<std::mutex>& lock, Caller& caller, Polling polling);
  void progress();
  bool look(std::unique_lock<std::mutex>& lock);  // for the progress thread: wait for a call; false: this rank leaves
  void run_here(LocalComm::Call& call, const Operation& operation);

  LocalComm local_comm_;
  std::unique_ptr<Net> net_;                        // nullptr: all ranks are on this host
  std::unique_ptr<InterHostComm> inter_host_comm_;  // nullptr: all ranks are on this host
  int rank_;
  int size_;
  Settings settings_;
  std::atomic<int64_t> timeout_ns_;  // atomic, because the progress thread reads it during set_timeout
  PointToPoint p2p_;
  const uint32_t forks_ = sys::forks();

  std::mutex queue_lock_;
  std::condition_variable ended_;  // a collective has ended, or this rank leaves
  std::condition_variable due_;    // only for the progress thread
  std::deque<std::shared_ptr<Queued>> queue_;
  uint64_t started_ = 0;  // number of asynchronous collectives started
  int64_t look_ns_ = kLookNs;
  bool asleep_ = false;     // the progress thread sleeps and has not been woken
  bool hurried_ = false;    // a waiting thread cannot run calls itself: no head start
  bool running_ = false;    // a thread runs a collective
  std::thread::id runner_;  // this thread, while running_
  bool stopping_ = false;
  std::thread progress_;

  uint32_t calls_ = 0;

  std::shared_ptr<trace::Recorder> recorder_;
  size_t group_ = 0;                                 // number of this group in the recorder
  std::atomic<trace::Record*> running_record_ = {};  // record of the running asynchronous collective
  trace::Group uncounted_{};
  trace::Group* counts_ = &uncounted_;  // counters of the recorder, or uncounted_ if there is no recorder
};

}  // namespace allranks
