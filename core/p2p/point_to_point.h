// send and recv between the ranks of a group: matching, tags, and pending messages.
//
// Each ordered pair of ranks of one host has a byte ring in shared memory (a pipe). Each pair of ranks of different
// hosts has a connection (a message stream). Both carry frames (segment.h). "Stream" below means either of them.
//
// Credit is the number of bytes that a sender may send to a rank before a recv exists for them (Settings::eager). With
// enough credit, a message is sent completely, and its send is done when all of it has been copied into the stream. Two
// ranks may therefore both send first. If the receiver has no matching recv yet, it keeps the message in memory. The
// credit returns when a recv matches the message. Without enough credit, a send becomes an offer: its payload stays
// with the sender until a recv accepts it or enough credit has returned.
//
//   Memory. A rank keeps at most the credit of each sender, plus some bytes per offer. The caller of each offered send
//   waits for it or holds its request, so the sender bounds the number of offers.
//   Order. Messages and offers enter a stream in the order of the sends. They are matched with recvs in this order, tag
//   by tag, independent of when their payloads arrive.
//   Deadlock. The first frame in a stream can always be removed. A payload goes into the memory of its recv or into
//   memory that its credit accounts for; other frames need no memory. A rank that waits for any message empties all its
//   streams, so every stream to a waiting rank makes progress. A recv therefore waits only for its send. A send waits
//   only for its recv or, if it fits into the credit, for the recvs of previous sends. Only a program can create a
//   cycle of these waits.
//
// If there is no memory to keep a message, the message stays in the stream. Recvs that may match later messages in this
// stream raise OutOfMemory. The message is read when memory or its recv is available.
//
// A large message to another host is lent to the kernel (stream.h): its send is done when the other side has read it.
//
// A waiting thread progresses all pending messages, not only its own (progress). Otherwise two ranks that each wait for
// their own send would hang. A progress thread moves messages that no thread waits for. The first such message starts
// the thread.
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
  // Add the ticket (not 0) to `completions`, once, when the request is done.
  void watch(uint64_t ticket, Completions& completions) {
    completions_ = &completions;  // published by the store of the ticket
    ticket_.store(ticket);
    if (done.load()) notify();
  }

 private:
  void notify() {
    if (ticket_.load() == 0) return;
    // finish() and watch() may both call this: the exchange lets only one of them add the ticket.
    if (const uint64_t ticket = ticket_.exchange(0)) completions_->add(ticket);
  }

  std::atomic<uint64_t> ticket_ = 0;
  Completions* completions_ = nullptr;
};

// One side of a message: a send or a recv.
struct Message : Request {
  Buffer buffer;
  std::atomic<int> peer = -1;  // recv: < 0 means any rank, until a message matches. Waiting threads read it unlocked.
  int32_t tag = 0;
  uint64_t number = 0;  // recv: order of posting; send: number of its offer
  Fingerprint about;    // for error messages
  trace::Recorder::Call record;
};

// Error: there is no memory to keep a message without a matching recv.
class OutOfMemory final : public std::bad_alloc {
 public:
  OutOfMemory(int rank, const Frame& frame);
  const char* what() const noexcept override { return text_.data(); }

 private:
  std::array<char, 256> text_;
};

class PointToPoint {
 public:
  // net: the network of a group that spans hosts, else nullptr. eager: the credit, in bytes, towards each rank.
  PointToPoint(Shm& shm, Net* net, int64_t timeout_ns, Polling polling, Polling progress_polling, size_t eager);
  ~PointToPoint();

  // Set the recorder of messages. The record of a message ends when the message is done.
  void record_in(trace::Recorder* recorder) { recorder_ = recorder; }

  std::shared_ptr<Message> post_send(Buffer buffer, int to, int32_t tag, Caller& caller,
                                     const trace::Recorder::Call& record = {});
  std::shared_ptr<Message> post_recv(Buffer buffer, int from, int32_t tag, Caller& caller,
                                     const trace::Recorder::Call& record = {});

  // Fast path for a small message while no other message is pending. Returns false if it does not apply; then nothing
  // has changed.
  bool send_at_once(Buffer buffer, int to, int32_t tag);
  bool recv_at_once(Buffer buffer, int from, int32_t tag);

  // Change the timeout of later waits. Thread-safe.
  void set_timeout(int64_t timeout_ns) { timeout_ns_.store(timeout_ns, std::memory_order_relaxed); }

  // Wait until the message is done. Throws its error. timeout_ns >= 0: a timeout of this wait only, which does not end
  // the group.
  void wait(const std::shared_ptr<Message>& message, Caller& caller, int64_t timeout_ns);

  // Let the progress thread move messages that no thread waits for.
  void in_background(Caller& caller);

  void close();  // end all pending messages with an error

 private:
  using Messages = std::list<std::shared_ptr<Message>>;

  // A message or an offer without a matching recv.
  struct Kept {
    Frame frame;
    uint64_t arrival;  // order of arrival, among all senders
    uint64_t offer;    // the number of the offer
    std::unique_ptr<std::byte[]> payload;
  };
  using Keeping = std::list<Kept>;

  // The frame that is being written into a stream.
  struct Outgoing {
    Frame frame;
    Messages message;   // the message of a message, offer or body frame; else empty
    size_t nbytes = 0;  // bytes of frame and payload; 0: no frame is being written
    size_t moved = 0;
  };

  // The frame that is being read from a stream.
  struct Incoming {
    Frame frame;
    size_t header = 0;                 // bytes of the frame that have been read
    bool placed = false;               // the destination of the payload has been chosen
    size_t nbytes = 0;                 // bytes of the payload
    size_t payload = 0;                // bytes of the payload that have been read
    std::byte* target = nullptr;       // destination of the payload; nullptr: the payload is dropped
    bool dropped = false;              // there is a payload, and it is dropped
    std::shared_ptr<Message> message;  // the recv that owns the target
    Kept* kept = nullptr;              // or the kept message that owns the target
    std::list<Frame> receipt;          // the receipt to send when the payload has been read
  };

  struct Peer {
    std::list<Frame> answers;  // frames that are written before bodies and sends
    Messages sends;            // become messages or offers, depending on the credit when they are written
    Messages bodies;           // offers whose payload can be sent: accepted, or covered by returned credit
    Outgoing out;
    std::unordered_map<uint64_t, std::shared_ptr<Message>> offered;  // by number of the offer
    std::set<uint64_t> small;  // offers that fit into the full credit, so they are sent when enough credit has returned
    Messages lent;             // sent messages without a receipt
    uint64_t offers = 0;       // number of offers sent
    uint64_t used = 0;         // credit used by messages, in bytes, since the start
    uint64_t returned = 0;     // credit returned, between hosts; within a host see PipeControl::released

    Incoming in;
    std::unordered_map<uint64_t, std::shared_ptr<Message>> accepted;  // recvs, by number of the accepted offer
    std::unordered_map<uint64_t, Kept*> open;                         // offers without a recv, by number
    uint64_t heard_offers = 0;                                        // number of offers received
    uint64_t owed = 0;                                                // credit to return, between hosts
    size_t kept = 0;                                                  // kept messages and offers from this rank
    size_t wanted = 0;                                                // recvs from this rank without a message
  };

  // Bytes moved in one turn. From kReleaseBytes on, the locks of the caller (the GIL) are released, so that other
  // threads can run.
  struct Turn {
    Caller& caller;
    size_t moved = 0;
    void moves(size_t nbytes) {
      moved += nbytes;
      if (moved >= kReleaseBytes) caller.release();
    }
  };

  // Caller of a wait. It publishes the wait when the wait has become long, that is when it first checks for signals.
  class Waiter;

  void move(Caller& caller, const std::atomic<bool>& enough);
  std::unique_lock<std::mutex> move_rest(Caller& caller, const std::atomic<bool>& enough);
  void explain(Error& error, const Message& message, Caller& caller);

  // All functions of this block require lock_.
  bool progress(Caller& caller);  // true: more data can be moved than one turn moves
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
  void rouse();  // start or wake the progress thread, if messages are pending
  bool idle() const { return messages_ == 0 && answers_ == 0 && drops_ == 0; }
  int awaited() const;

  void run();

  bool far(int peer) const { return shm_.local(peer) < 0; }  // whether the rank is on another host
  Bell& bell_of(int peer) { return shm_.bell(shm_.local(peer)); }
  Peer& at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  // Key of messages with a peer and a tag. peer -1: any rank.
  static uint64_t key(int peer, int32_t tag) {
    return uint64_t{static_cast<uint32_t>(peer)} << 32 | static_cast<uint32_t>(tag);
  }

  Shm& shm_;
  Net* net_;
  int rank_;  // rank in the group, as all ranks in this class
  int size_;
  std::atomic<int64_t> timeout_ns_;  // atomic, because the progress thread reads it during set_timeout
  Polling polling_;
  Polling progress_polling_;
  size_t eager_;

  std::mutex lock_;
  std::vector<Peer> peers_;
  std::unordered_map<uint64_t, Messages> recvs_;  // recvs without a message; each list in the order of posting
  std::unordered_map<uint64_t, Keeping> kept_;    // kept messages; each list in the order of arrival
  uint64_t posted_recvs_ = 0;
  uint64_t arrivals_ = 0;
  size_t waiting_ = 0;   // recvs in recvs_
  size_t messages_ = 0;  // sends and recvs that are not done
  size_t answers_ = 0;   // answers that have not been written
  size_t drops_ = 0;     // payloads that are being received and dropped
  Copier copier_;
  trace::Recorder* recorder_ = nullptr;
  std::mutex waits_lock_;  // serializes the writers of this rank's published wait (a sequence lock allows only one)

  std::condition_variable posted_;
  std::thread thread_;
  std::atomic<bool> stopping_ = false;
};

}  // namespace allranks
