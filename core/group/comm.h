// One rank of one group: its calls, in order.
//
// Collectives run one at a time, in the order in which they were issued, because ranks are matched by call number. A
// blocking collective runs in its caller's thread when nothing is queued. An asynchronous one is queued for the
// progress thread, which the first of them starts. A thread that waits for a request runs the head of the queue itself,
// instead of waiting until the progress thread is scheduled.
//
// Many a call is waited for at once, and to wake a thread for it would cost more than the call. So the progress thread
// leaves a call to its caller for kHeadStartNs, and begins with it when nobody has. While asynchronous calls come it
// looks for them by itself, and nobody has to wake it: every kLookNs, and more seldom, up to kMostLookNs, as long as
// others run all of them. After kLooks looks without a new one it sleeps until the next. It never spins. A large call,
// and a thread that waits but cannot help, wake it.
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

constexpr int64_t kHeadStartNs = 20'000;
constexpr int64_t kLookNs = 100'000;
constexpr int64_t kMostLookNs = 800'000;
constexpr int kLooks = 5;

// An asynchronous collective.
struct Queued : Request {
  explicit Queued(Operation operation) : operation(std::move(operation)) {}
  Operation operation;
  const int64_t queued_ns = sys::now_ns();
};

struct Stats {
  uint64_t calls = 0;
  uint64_t bytes = 0;
  double seconds = 0;   // inside calls: moving, reducing and waiting
  uint64_t shared = 0;  // calls that worked in everybody's shared blocks
};

struct Settings {
  Tuning tuning;
  Place place = this_place();
  double timeout_s = 1800;
  Polling polling;           // in the caller's thread
  Polling progress_polling;  // in the progress threads, which compete with computation
  size_t eager = 8 << 20;    // bytes of messages to one rank that may be under way without a recv (point_to_point.h)
};

// Made by sys::make_owned. In a forked child every call throws Kind::forked, but for close, which does nothing.
class Comm {
 public:
  // A group of ranks that share this host.
  Comm(std::unique_ptr<Shm> shm, Settings settings);
  // A group that spans hosts: `shm` is of the ranks of this one.
  Comm(std::unique_ptr<Shm> shm, int rank, Hosts hosts, std::vector<sys::Fd> heartbeats, Net::Opener opener,
       Settings settings);
  ~Comm() { close(); }
  Comm(const Comm&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

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
    check_process();
    return local_comm_.share(number, bytes, parts);
  }

  // The sockets of these ranks, for a group made of them. Empty where one is on another host, and where this group is
  // closed.
  Liveness liveness(const std::vector<int>& ranks);

  // Ends all calls of the group, on every rank: those that are pending, now, and all later ones.
  void abort();
  // The ranks that are known here to be gone: dead, unreachable, or no longer in the group. Empty once it is closed.
  std::vector<int> lost();

  // Leaves the group: the others' pending and later calls that need this rank fail. Returns always.
  void close();

  // Where the group spans hosts. See Net.
  void adopt(int rank, Connection kind, sys::Fd fd, const std::string& greeting = {});
  void give_up(int rank);

  LocalComm& local_comm() { return local_comm_; }  // the ranks of this host

  // Records calls there from now on. Before the first call.
  void record_in(std::shared_ptr<trace::Recorder> recorder, size_t group);
  Stats stats() const;
  // The last collective that each rank has begun, as far as can be seen from here. Empty in a forked child.
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
  // When a call begins, and the number of its site if that is known.
  struct Begin {
    int64_t entered_ns;
    uint16_t site;
  };
  Begin begin_now(Caller& caller);
  void execute(const Operation& operation, Caller& caller, Polling polling, Begin begin);
  // All with queue_lock_ held.
  void finish();
  bool sleeps_in_vain();  // whether the progress thread is to be woken, as there is something for it to do
  void run_head(std::unique_lock<std::mutex>& lock, Caller& caller, Polling polling);
  void progress();
  bool look(std::unique_lock<std::mutex>& lock);  // by the progress thread; false: this rank leaves
  void run_here(LocalComm::Call& call, const Operation& operation);

  LocalComm local_comm_;
  std::unique_ptr<Net> net_;                        // nullptr: all ranks share this host
  std::unique_ptr<InterHostComm> inter_host_comm_;  // the same
  int rank_;
  int size_;
  Settings settings_;
  PointToPoint p2p_;
  const uint32_t forks_ = sys::forks();

  std::mutex queue_lock_;
  std::condition_variable ended_;  // a collective has; or this rank leaves
  std::condition_variable due_;    // for the progress thread alone
  std::deque<std::shared_ptr<Queued>> queue_;
  uint64_t started_ = 0;  // asynchronous collectives
  int64_t look_ns_ = kLookNs;
  bool asleep_ = false;     // the progress thread, until it is woken
  bool hurried_ = false;    // somebody waits who cannot help: no head start
  bool running_ = false;    // some thread runs a collective
  std::thread::id runner_;  // who, while running_
  bool stopping_ = false;
  std::thread progress_;

  uint32_t calls_ = 0;

  std::shared_ptr<trace::Recorder> recorder_;
  size_t group_ = 0;                                 // of the recorder
  std::atomic<trace::Record*> running_record_ = {};  // of the collective that runs
  trace::Group uncounted_{};
  trace::Group* counts_ = &uncounted_;  // the recorder's, or that
};

}  // namespace allranks
