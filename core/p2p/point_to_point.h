// send and recv between the ranks of a group: messages, tags, and those that are under way.
//
// Each ordered pair of ranks of one host has a byte ring in shared memory (a pipe), each pair of ranks of
// different hosts a connection (a message stream): both carry frames (segment.h).
//
// A message goes as a whole as long as its sender has credit: bytes of messages that may be under way to that rank
// without a recv (Settings::eager). Its send is done when all of it has been copied into the stream, so that two ranks
// may both send first. Who gets it and has no recv for it yet keeps it in memory. The credit comes back when a recv
// is found. A send without enough credit is an offer: its payload stays with the sender until a recv has accepted it,
// or enough credit has come back.
//
//   Memory. A rank keeps at most the credit of each sender, and of each offer some bytes. An offer is a send that its
//   caller waits for, or holds: so the sender bounds their number.
//   Order. Messages and offers go into a stream in the order of the sends and are matched with recvs in this order,
//   tag by tag, whenever their payloads come.
//   Deadlock. Whatever stands first in a stream can be taken out of it: a payload has its recv's memory or that which
//   the credit stands for; all other frames need none. Whoever waits for any message takes everything out of all its
//   streams, so that every stream to a rank that waits moves. So a recv waits for nothing but its send, a send for
//   nothing but its recv or, if it fits, for recvs of those before it; and only programs can make a circle of these.
//
// Where there is no memory to keep a message it stays in the stream, and recvs that what lies behind it may be for
// raise OutOfMemory. It is read when memory, or its recv, is there.
//
// A large message to another host is lent (stream.h): its send is done when the other side has read it.
//
// No wait is for a single message: a rank that waits for any of them moves all of them (progress). Otherwise two ranks
// that each wait for their own send would hang. A thread moves messages that nobody waits for yet. The first of them
// starts it.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/completions.h"
#include "base/types.h"
#include "base/waiting.h"
#include "channel/copier.h"
#include "channel/net.h"
#include "channel/shm.h"
#include "trace/recorder.h"

namespace allranks {

// A call that may still be running. `done` is set once, after `error`.
struct Request {
  std::atomic<bool> done = false;
  std::exception_ptr error;

  virtual ~Request() = default;
  void finish(std::exception_ptr failure = nullptr) {
    error = std::move(failure);
    done.store(true);  // seq_cst: either this or watch() sees the other's store
    notify();
  }
  // Adds the ticket (not 0) to `completions` when the request has ended, once.
  void watch(uint64_t ticket, Completions& completions) {
    completions_ = &completions;  // published by the ticket
    ticket_.store(ticket);
    if (done.load()) notify();
  }

 private:
  void notify() {
    if (ticket_.load() == 0) return;
    if (const uint64_t ticket = ticket_.exchange(0)) completions_->add(ticket);
  }

  std::atomic<uint64_t> ticket_ = 0;
  Completions* completions_ = nullptr;
};

// One side of a message: a send or a recv.
struct Message : Request {
  Buffer buffer;
  std::atomic<int> peer = -1;  // recv: < 0 is any rank until one has sent; read by who waits, without the lock
  int32_t tag = 0;
  uint64_t number = 0;  // recv: in the order of posting; send: of its offer
  Fingerprint about;    // for failures
  trace::Recorder::Call record;
};

// There is no memory to keep a message that nobody has asked for.
class OutOfMemory final : public std::bad_alloc {
 public:
  OutOfMemory(int rank, const Frame& frame);
  const char* what() const noexcept override { return text_.data(); }

 private:
  std::array<char, 256> text_;
};

class PointToPoint {
 public:
  // net: of a group that spans hosts; else nullptr.
  PointToPoint(Shm& shm, Net* net, int64_t timeout_ns, Polling polling, Polling progress_polling, size_t eager);
  ~PointToPoint();

  // Where messages are recorded; their records end with them.
  void record_in(trace::Recorder* recorder) { recorder_ = recorder; }

  std::shared_ptr<Message> post_send(Buffer buffer, int to, int32_t tag, Caller& caller,
                                     const trace::Recorder::Call& record = {});
  std::shared_ptr<Message> post_recv(Buffer buffer, int from, int32_t tag, Caller& caller,
                                     const trace::Recorder::Call& record = {});

  // The short way of a message that fits where nothing is under way. False: nothing was done.
  bool send_at_once(Buffer buffer, int to, int32_t tag);
  bool recv_at_once(Buffer buffer, int from, int32_t tag);

  // Blocks until the message is done; throws its error. timeout_ns >= 0: a limit of this wait alone.
  void wait(const std::shared_ptr<Message>& message, Caller& caller, int64_t timeout_ns);

  // Lets the thread move what nobody waits for.
  void in_background(Caller& caller);

  void close();  // ends what is under way

 private:
  using Messages = std::list<std::shared_ptr<Message>>;

  // A message or an offer for which there is no recv yet.
  struct Kept {
    Frame frame;
    uint64_t arrival;  // in the order of arrival
    uint64_t offer;    // of an offer: its number
    std::unique_ptr<std::byte[]> payload;
  };
  using Keeping = std::list<Kept>;

  // What is being written into a stream.
  struct Outgoing {
    Frame frame;
    Messages message;   // one, of a message, an offer, a body
    size_t nbytes = 0;  // of frame and payload; 0: nothing is
    size_t moved = 0;
  };

  // What is coming out of a stream.
  struct Incoming {
    Frame frame;
    size_t header = 0;  // bytes of the frame that are there
    bool placed = false;
    size_t nbytes = 0;                 // of the payload
    size_t payload = 0;                // of these, those that are there
    std::byte* target = nullptr;       // nullptr: dropped
    bool dropped = false;              // and there is a payload to drop
    std::shared_ptr<Message> message;  // whose memory the target is
    Kept* kept = nullptr;              // the same
    std::list<Frame> receipt;          // to be given
  };

  struct Peer {
    std::list<Frame> answers;  // to be written before what follows
    Messages sends;            // messages or offers, as the credit allows when it is their turn
    Messages bodies;
    Outgoing out;
    std::unordered_map<uint64_t, std::shared_ptr<Message>> offered;  // by number
    std::set<uint64_t> small;                                        // of these, those that may have enough credit yet
    Messages lent;                                                   // sent, and not known to have been read
    uint64_t offers = 0;
    uint64_t used = 0;      // credit: bytes of messages
    uint64_t returned = 0;  // of these, between hosts

    Incoming in;
    std::unordered_map<uint64_t, std::shared_ptr<Message>> accepted;  // recvs, by number of the offer
    std::unordered_map<uint64_t, Kept*> open;                         // offers without a recv, by number
    uint64_t heard_offers = 0;
    uint64_t owed = 0;  // credit to return, between hosts
    size_t kept = 0;
    size_t wanted = 0;  // recvs from this rank that have found no message
  };

  // How much one turn has moved: the caller's locks are released before it becomes much.
  struct Turn {
    Caller& caller;
    size_t moved = 0;
    void moves(size_t nbytes) {
      moved += nbytes;
      if (moved >= kReleaseBytes) caller.release();
    }
  };

  // The caller of a wait, which it publishes when it looks around for the first time: when it has become long.
  class Waiter;

  void move(Caller& caller, const std::atomic<bool>& enough);
  std::unique_lock<std::mutex> move_rest(Caller& caller, const std::atomic<bool>& enough);
  void explain(Error& error, const Message& message, Caller& caller);

  // All with lock_ held.
  bool progress(Caller& caller);  // true: there was more than one turn moves
  void check_send(int to);
  static bool busy(const Peer& peer);
  bool may_follow(int peer);
  bool next(int peer);
  void written(int peer);
  bool push(int peer, Turn& turn);
  bool push_near(int peer, Turn& turn);
  bool push_far(int peer, Turn& turn);
  bool pull(int peer, Turn& turn);
  bool pull_near(int peer, Turn& turn);
  bool pull_far(int peer, Turn& turn);
  bool place(int peer);
  void arrive(int peer);
  void arrive_late(int peer);
  void complete(int peer);
  void drop(int peer);
  std::shared_ptr<Message> wanted(int peer, int32_t tag);
  void take(Message& message);
  void out_of_memory(int peer);
  void give(int peer, Kept& kept, const std::shared_ptr<Message>& message, Turn& turn);
  void answer(int peer, uint64_t offer, const std::shared_ptr<Message>& message);
  void release(int peer, const Frame& frame);
  uint64_t credit(int peer);
  void finish(Message& message, std::exception_ptr error = nullptr);
  void fail_all(const std::exception_ptr& error);
  void rouse();  // the thread
  bool idle() const { return messages_ == 0 && answers_ == 0 && drops_ == 0; }
  int awaited() const;

  void run();

  bool far(int peer) const { return shm_.local(peer) < 0; }  // on another host
  Bell& bell_of(int peer) { return shm_.bell(shm_.local(peer)); }
  Peer& at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  // Of messages with a rank, or any, and a tag.
  static uint64_t key(int peer, int32_t tag) {
    return uint64_t{static_cast<uint32_t>(peer)} << 32 | static_cast<uint32_t>(tag);
  }

  Shm& shm_;
  Net* net_;
  int rank_;  // of the group, as all ranks here
  int size_;
  int64_t timeout_ns_;
  Polling polling_;
  Polling progress_polling_;
  size_t eager_;

  std::mutex lock_;
  std::vector<Peer> peers_;
  std::unordered_map<uint64_t, Messages> recvs_;  // recvs that no message has come for; each in the order of posting
  std::unordered_map<uint64_t, Keeping> kept_;    // each in the order of arrival
  uint64_t posted_recvs_ = 0;
  uint64_t arrivals_ = 0;
  size_t waiting_ = 0;   // recvs in recvs_
  size_t messages_ = 0;  // sends and recvs that are not done
  size_t answers_ = 0;   // that are not written
  size_t drops_ = 0;     // payloads that come and nobody wants
  Copier copier_;
  trace::Recorder* recorder_ = nullptr;
  std::mutex waits_lock_;  // of what this rank publishes that it waits for

  std::condition_variable posted_;
  std::thread thread_;
  std::atomic<bool> stopping_ = false;
};

}  // namespace allranks
