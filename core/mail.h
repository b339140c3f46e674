// send and recv between the ranks of a group: messages, tags, and those that are under way.
//
// Each ordered pair of ranks of one host has a byte ring in shared memory (a pipe), each pair of ranks of
// different hosts a connection (a post). A send copies what fits and is done when all of it has been copied, so
// that small messages are buffered and two ranks may both send first. A message that arrives before it is asked for, or
// behind one that is, is kept aside.
//
// A large message to another host is lent (stream.h): its send is done when the other side has read it.
//
// Nothing here blocks for a single message: whoever waits for any of them moves all of them
// (`progress`), or else a rank that waits for its send while its peer does the same would hang. For
// messages that nobody waits for yet there is a thread, started by the first of them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "channel/net.h"
#include "channel/shm.h"
#include "copier.h"
#include "types.h"
#include "waiting.h"

namespace allranks {

// A call that may still be running. `done` is set once, after `error`.
struct Request {
  std::atomic<bool> done = false;
  std::exception_ptr error;

  virtual ~Request() = default;
  void finish(std::exception_ptr failure = nullptr) {
    error = std::move(failure);
    done.store(true, std::memory_order_release);
  }
};

// A send or a recv.
struct Parcel : Request {
  Buffer buffer;
  std::atomic<int> peer = -1;  // recv: < 0 is any rank until one has sent; read by who waits, without the lock
  int32_t tag = 0;
  Frame frame;        // send
  size_t moved = 0;   // send: bytes of frame and payload in the pipe
  Fingerprint about;  // for failures
};

class Mail {
 public:
  // net: of a group that spans hosts; else nullptr.
  Mail(Shm& shm, Net* net, int64_t timeout_ns, int64_t spin_ns, int64_t spin_progress_ns);
  ~Mail();

  std::shared_ptr<Parcel> post_send(Buffer buffer, int to, int32_t tag, Caller& caller);
  std::shared_ptr<Parcel> post_recv(Buffer buffer, int from, int32_t tag, Caller& caller);

  // The short way of a message that fits where nothing is under way. False: nothing was done.
  bool send_at_once(Buffer buffer, int to, int32_t tag);
  bool recv_at_once(Buffer buffer, int from, int32_t tag);

  // Blocks until the parcel is done; throws its error. timeout_ns >= 0: a limit of this wait alone.
  void wait(const std::shared_ptr<Parcel>& parcel, Caller& caller, int64_t timeout_ns);

  // Lets the thread move what nobody waits for.
  void in_background();

  void close();    // ends what is under way
  void abandon();  // in a forked child

 private:
  struct Unexpected {
    Frame frame;
    std::vector<std::byte> payload;
    bool complete = false;
    std::shared_ptr<Parcel> claimed;  // asked for before all of it was there
  };
  // The message that is coming out of a peer's pipe.
  struct Incoming {
    Frame frame;
    size_t header = 0;            // bytes of the frame that are there
    size_t payload = 0;           // bytes of the payload that are there
    std::byte* target = nullptr;  // nullptr: dropped
    std::shared_ptr<Parcel> parcel;
    Unexpected* unexpected = nullptr;
  };

  // All with lock_ held.
  void progress();
  void check_send(int to);
  void push(int peer);
  void pull(int peer);
  void push_far(int peer);
  void acknowledge(int peer);
  void pull_far(int peer);
  void dispatch(int peer);
  void complete(int peer);
  void finish(Parcel& parcel, std::exception_ptr error = nullptr);
  void fail_all(const std::exception_ptr& error);
  void rouse();  // the thread
  bool idle() const;
  int awaited() const;

  void run();

  bool far(int peer) const { return shm_.local(peer) < 0; }  // on another host
  Bell& bell_of(int peer) { return shm_.bell(shm_.local(peer)); }

  Shm& shm_;
  Net* net_;
  int rank_;  // of the group, as all ranks here
  int size_;
  int64_t timeout_ns_;
  int64_t spin_ns_;
  int64_t spin_progress_ns_;

  std::mutex lock_;
  std::vector<std::deque<std::shared_ptr<Parcel>>> sends_;  // by peer
  std::vector<std::deque<std::shared_ptr<Parcel>>> lent_;   // by peer: sent, and not known to have been read
  std::list<std::shared_ptr<Parcel>> recvs_;                // in the order of posting
  std::vector<Incoming> incoming_;                          // by peer
  std::vector<std::list<Unexpected>> unexpected_;           // by peer, in the order of arrival
  Copier copier_;
  size_t claimed_ = 0;  // parcels that wait for the rest of an unexpected message or of the incoming one

  std::condition_variable posted_;
  std::thread thread_;
  std::atomic<bool> stopping_ = false;
};

}  // namespace allranks
