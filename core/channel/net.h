// The ranks of a group on other hosts: connected sockets, and signs of life.
//
// With each of them a rank has three TCP connections, so that nothing has to be told apart in a stream:
//   lane    the bytes of collectives. Both sides know which bytes come when: calls are matched by order.
//   post    messages (mail.h).
//   pulse   a thread's: what a rank does at present, that it leaves, that the group has failed.
//
// The thread makes a failure on another host a verdict in the shared memory of this one, where whoever
// waits finds it, and tells the other hosts of verdicts made here. Three states are told apart: a rank whose
// process has ended (its sockets are closed), one that cannot be reached (the kernel of its host acknowledges
// nothing for 7 s), and one that is alive but not in this call (its pulse says in which it is). A rank that is stopped
// is not dead, because its kernel still answers.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../hosts.h"
#include "shm.h"
#include "stream.h"

namespace allranks {

class Net final : public Elsewhere {
 public:
  // By rank of the group; of ranks on this host none is open.
  struct Sockets {
    std::vector<sys::Fd> lanes;
    std::vector<sys::Fd> posts;
    std::vector<sys::Fd> pulses;
  };

  Net(int rank, Hosts hosts, Sockets sockets, Shm& shm);
  ~Net() override;
  Net(const Net&) = delete;

  const Hosts& hosts() const { return hosts_; }
  int rank() const { return rank_; }

  // --- lanes: of one thread at a time ---

  // Queues bytes for a rank. They must stay until all is flushed.
  void send(int to, const void* data, size_t nbytes);
  // Queues the place of the next bytes from a rank. Returns what wait_received takes.
  uint64_t receive(int from, void* data, size_t nbytes);
  // The same for large operands, whose bytes are lent to the kernel (stream.h): one side lends what the other borrows,
  // and both settle at the end of the call. Until then the bytes must not change, but where the other side has
  // provably read them: where something made of them has come back.
  void lend(int to, const void* data, size_t nbytes);
  uint64_t borrow(int from, void* data, size_t nbytes);
  // Moves what can be moved until these bytes are there. Throws Error.
  void wait_received(Patience& patience, const Failure& about, int from, uint64_t until);
  // The same until nothing is queued.
  void flush(Patience& patience, const Failure& about);
  // The same until the other sides have read all that was lent, too.
  void settle(Patience& patience, const Failure& about);
  // Forgets what a failed call has queued.
  void clear();

  // --- posts ---

  Stream& post(int rank) { return peer(rank).post; }
  bool doze(int timeout_ms) override;
  // The thread rings this rank's bell, once, when one of them has something, or can take something again.
  void watch_posts() override;

  // --- pulses ---

  // What this rank does.
  void say(uint32_t call, const Fingerprint& fingerprint);
  // What the others have said.
  std::pair<uint32_t, Fingerprint> last_call(int rank);
  // The ranks, of any host, that have not begun that call, as far as is known here.
  std::vector<int> behind(uint32_t call);
  // Where this rank's call stands that does not match.
  void say_note(uint32_t call, const std::string& text);
  // Waits for everybody's notes of that call; "" where none came in time.
  std::vector<std::string> notes(uint32_t call, int64_t timeout_ns);

  Presence presence(int rank) override { return peer(rank).presence.load(std::memory_order_acquire); }
  void announce() override;
  int blame(int awaited, uint32_t call) override;

  void close();    // tells the others, and waits a little until the kernel has sent what it holds
  void abandon();  // in a forked child

 private:
  struct Out {
    const std::byte* data;
    size_t nbytes;
    bool lent = false;
  };
  struct In {
    std::byte* data;
    size_t nbytes;
  };
  struct Peer {
    Peer() = default;
    Peer(sys::Fd a, sys::Fd b, sys::Fd c) : lane(std::move(a)), post(std::move(b)), pulse(std::move(c)) {}

    Stream lane;
    Stream post;
    Stream pulse;
    std::deque<Out> out;
    std::deque<In> in;
    uint64_t asked = 0;  // bytes, since the beginning
    uint64_t come = 0;
    bool busy = false;
    bool lends = false;    // since all was settled
    bool borrows = false;  // the same

    // The thread's, but for `presence`, and for `outbox` and what follows, which pulse_lock_ guards.
    std::atomic<Presence> presence = Presence::here;
    bool leaving = false;
    std::vector<std::byte> inbox;
    std::vector<std::byte> outbox;
    uint32_t call = 0;
    Fingerprint fingerprint;
    uint32_t note_call = 0;
    std::string note;
  };
  enum class Word : uint32_t { status = 1, verdict, note, bye };

  Peer& peer(int rank) { return *peers_[static_cast<size_t>(rank)]; }
  bool move();
  void take_up(int rank);
  bool hand_over(Peer& p);
  template <class Done>
  void wait(Patience& patience, const Failure& about, Done&& done);

  void run();
  void turn();
  void beat(int64_t now);
  void tell_all(Word word, const void* body, size_t nbytes);  // with pulse_lock_ held
  void flush_pulse(Peer& to);                                 // with pulse_lock_ held
  void listen_to(int rank);
  void hear(int rank, Word word, const std::byte* body, size_t nbytes);
  void lost(int rank, Presence how);
  void wake();
  void farewell();

  int rank_;
  Hosts hosts_;
  Shm& shm_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; of ranks on this host without sockets
  std::vector<int> others_;                   // the ranks on other hosts
  std::vector<int> busy_;                     // of these, those with something queued on their lane

  std::mutex pulse_lock_;
  std::condition_variable noted_;
  uint32_t call_ = 0;
  Fingerprint fingerprint_;
  bool call_said_ = true;
  bool announced_ = false;
  int64_t beaten_ns_ = 0;
  std::atomic<bool> watching_ = false;
  std::atomic<bool> closing_ = false;
  sys::Fd wake_;
  std::thread thread_;
};

}  // namespace allranks
