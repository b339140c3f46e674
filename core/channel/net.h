// The ranks of a group on other hosts: connected sockets, and signs of life.
//
// There are connections of three kinds, so that each stream carries one thing:
// clang-format off
//   collective  between two ranks: the bytes of collectives, without headers, as calls are matched by order. Both sides
//               find at the same time that they need it, and the higher rank asks for it.
//   message     between two ranks: messages (point_to_point.h). A rank that has one to send asks for it.
//   heartbeat   between the first ranks of two hosts, their leaders (heartbeat.h). It exists from the beginning.
// clang-format on
// To ask does not block. native/tcp.py connects and hands the socket over on both sides (adopt). Until then the bytes
// wait as they do for a slow rank, with the same deadlines, verdicts and signals.
//
// A thread of the leader reports for all ranks of its host, whose state it reads in their shared memory. What it
// receives about other ranks it writes into a table in its own segment (Far), where all ranks of its host read it. It
// makes a failure on another host a verdict in the shared memory of its own, and sends its host's verdicts to the other
// hosts. Three states are distinguished: a rank whose process has ended (its sockets are closed), one that cannot be
// reached (the kernel of its host acknowledges nothing for 15 s), and one that is alive but not in this call. A rank
// that is stopped is not dead, because its kernel still answers. When a leader has left and other ranks of its host
// have not, nobody reports for those: their end is seen by the ranks that are connected with them.
//
// Other ranks start a thread when they first sleep for messages: it rings their bell.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "channel/heartbeat.h"
#include "channel/hosts.h"
#include "channel/shm.h"
#include "channel/stream.h"

namespace allranks {

enum class Connection : uint32_t { collective, message, heartbeat };

class Net final : public RemoteRanks, public Heartbeat::Listener {
 public:
  // Has a connection made with a rank, some time: adopt() or give_up() follows on both sides, unless the group is
  // closed before. From any thread; does not block.
  using Opener = std::function<void(int rank, Connection kind)>;

  // heartbeats: of a leader, by rank of the group, those with other leaders; else empty.
  Net(int rank, Hosts hosts, std::vector<sys::Fd> heartbeats, Opener opener, Shm& shm);
  ~Net() override;
  Net(const Net&) = delete;

  // A connection with a rank, from any thread. Sends the greeting before anything else can be sent on it.
  void adopt(int rank, Connection kind, sys::Fd fd, const std::string& greeting = {});
  // There will be none.
  void give_up(int rank);

  const Hosts& hosts() const { return hosts_; }
  int rank() const { return rank_; }

  // --- collective streams: used by one thread at a time ---

  // Queues bytes for a rank. They must stay until all is flushed.
  void send(int to, const void* data, size_t nbytes);
  // Queues the place of the next bytes from a rank. Returns what wait_received takes.
  uint64_t receive(int from, void* data, size_t nbytes);
  // The same for operands that may be large, whose bytes are lent to the kernel (stream.h): one side lends what the
  // other borrows, in the same pieces, and both settle at the end of the call. Until then the bytes must not change,
  // but where the other side has provably read them: where something made of them has come back.
  void lend(int to, const void* data, size_t nbytes);
  uint64_t borrow(int from, void* data, size_t nbytes);
  // Moves what can be moved, without waiting.
  void advance() {
    while (move()) {
    }
  }
  // How much has been queued for a rank since the beginning: what wait_sent takes.
  uint64_t queued(int to) { return peer(to).queued; }
  // Moves what can be moved until the kernel has this much of it. Throws Error.
  void wait_sent(Patience& patience, const Failure& about, int to, uint64_t until);
  // Moves what can be moved until these bytes are there. Throws Error.
  void wait_received(Patience& patience, const Failure& about, int from, uint64_t until);
  bool has_come(int from, uint64_t until) { return peer(from).come >= until; }
  // The same until either has.
  struct Awaited {
    int from;  // -1: nothing is awaited
    uint64_t until;
  };
  void wait_received(Patience& patience, const Failure& about, const Awaited& one, const Awaited& other);
  // The same until nothing is queued.
  void flush(Patience& patience, const Failure& about);
  // The same until the other sides have read all that was lent, too.
  void settle(Patience& patience, const Failure& about);
  // Forgets what a failed call has queued.
  void clear();

  // --- message streams ---

  Stream& message_stream(int rank) { return peer(rank).message_stream; }
  void need_message_stream(int rank);  // with the lock of PointToPoint held
  bool wait_for_messages(int timeout_ms) override;
  // The thread rings this rank's bell, once, when one of them has something, or can take something again.
  void watch_message_streams() override;

  // --- signs of life ---

  // How far the clock of another host is ahead of this one's. Of a leader: of its neighbours.
  ClockOffset::Estimate clock_of(int host, int64_t now_ns) const {
    return clocks_[static_cast<size_t>(host)].load().at(now_ns);
  }

  // What this rank does.
  void publish_call(uint32_t call, const Fingerprint& fingerprint);
  // What another rank has sent.
  std::pair<uint32_t, Fingerprint> last_call(int rank);
  // The ranks, of any host, that have not begun that call, as far as is known here.
  std::vector<int> behind(uint32_t call);
  // After a mismatch that every rank has found: where each rank's call stands, as `here` returns it, by place, of this
  // host's.
  // "" where nothing came in time.
  std::vector<std::string> exchange_notes(const Failure& about, Caller& caller, const std::vector<std::string>& here);

  Presence presence(int rank) override;
  void announce() override { wake(); }
  int blame(int awaited, uint32_t call) override;

  void close();  // notifies the others, and waits a little until the kernel has sent what it holds

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
    Stream collective_stream;
    Stream message_stream;
    bool collective_asked = false;
    bool message_asked = false;
    std::deque<Out> out;
    std::deque<In> in;
    uint64_t queued = 0;  // bytes, since the beginning
    uint64_t taken = 0;
    uint64_t asked = 0;
    uint64_t come = 0;
    bool busy = false;
    bool lends = false;    // since all was settled
    bool borrows = false;  // the same
  };

  Peer& peer(int rank) { return *peers_[static_cast<size_t>(rank)]; }
  bool move();
  void take_up(int rank);
  bool hand_over(Peer& p);
  template <class Done>
  void wait(Patience& patience, const Failure& about, Done&& done);

  void need_collective_stream(int rank);
  void start_thread();
  void wake();

  // Of the thread; in the end of who closes.
  void run();
  void turn();
  void watch_local_ranks();
  void publish();
  void flush_heartbeats();
  void read_heartbeats(int host);
  std::vector<Heartbeat::Status> statuses() const;
  void finish();

  void on_status(int rank, const Heartbeat::Status& status) override;
  void on_note(int rank, uint32_t call, const std::string& text) override;
  void on_close(int host) override;
  void on_end(int host, Kind how) override;
  void on_verdict(const Failure& failure) override;
  void on_clock(int host, const ClockOffset& offset) override;

  bool leads() const { return hosts_.place(rank_) == 0; }
  int here() const { return hosts_.of(rank_); }

  int rank_;
  Hosts hosts_;
  Opener opener_;
  Shm& shm_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; of those on this host never connected
  std::vector<int> others_;                   // the ranks on other hosts
  std::vector<int> busy_;                     // of these, those with something queued on their collective stream
  std::byte heard_{};                         // that others have read what was lent

  // The thread's.
  std::unique_ptr<Heartbeat> heartbeat_;        // of a leader
  std::vector<std::unique_ptr<Stream>> links_;  // by host: the neighbours' heartbeats
  std::vector<SeqLocked<ClockOffset>> clocks_;  // by host; the leader's other thread reads them
  std::vector<bool> local_gone_;                // by place
  uint32_t noted_ = 0;
  bool announced_ = false;

  std::atomic<bool> watching_ = false;
  std::atomic<bool> closing_ = false;
  sys::Fd wake_;     // the thread, from poll
  sys::Fd opened_;   // who waits on collective streams, from poll
  std::mutex lock_;  // of what follows, and of streams that are opened while others close all
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace allranks
