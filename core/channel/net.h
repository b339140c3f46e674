// The ranks of a group on other hosts: connected sockets and heartbeats.
//
// Three kinds of connections exist, so that each stream carries one kind of data:
// clang-format off
//   collective  between two ranks: the bytes of collectives, without headers, because calls are matched by order. Both
//               ranks need it in the same call, and the higher rank requests it.
//   message     between two ranks: messages (point_to_point.h). A rank that has a message to send requests it.
//   heartbeat   between the first ranks of two hosts, their leaders (heartbeat.h). It exists from the beginning.
// clang-format on
// A request does not block. native/tcp.py connects and passes the socket to the core on both sides (adopt). Until then
// the bytes wait as they do for a slow rank, with the same deadlines, verdicts and signals (docs/decisions/043).
//
// A thread of the leader reports for all ranks of its host. It reads their state from their shared memory. It writes
// the received state of other ranks into a table in its segment (Far). All ranks of its host read this table. If a
// failure on another host arrives, the thread writes it into the verdict of its host. It also sends its host's verdict
// to the other hosts. It distinguishes three states of a rank:
//   - its process has terminated: its sockets are closed
//   - unreachable: the kernel of its host has acknowledged nothing for 15 s
//   - alive, but not in this call. A rank that is stopped is not dead, because its kernel still responds.
// If a leader leaves before other ranks of its host, no rank reports for those. Their end is then detected only by
// ranks that are connected with them.
//
// A rank that is not a leader starts a thread when it first sleeps for messages. The thread rings its bell.
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
  // Requests a connection with a rank. adopt() or give_up() follows later on both sides, unless the group is closed
  // before. Called from any thread; does not block.
  using Opener = std::function<void(int rank, Connection kind)>;

  // heartbeats: on a leader, the sockets to other leaders, by rank of the group; empty on other ranks.
  // fabric: the network of the group, without a provider for TCP.
  Net(int rank, Hosts hosts, std::vector<sys::Fd> heartbeats, Opener opener, Shm& shm, FabricChoice fabric = {});
  ~Net() override;
  Net(const Net&) = delete;

  // Take over a connection with a rank. Called from any thread. Sends the greeting before any other data. Throws Error
  // if the connection cannot use the group's fabric.
  void adopt(int rank, Connection kind, sys::Fd fd, const std::string& greeting = {});
  // Report that no connection with the rank is possible, which ends the group.
  void give_up(int rank);
  // Return the error of the fabric in the connections with a rank; "": none.
  std::string fabric_error(int rank);

  // Return whether large operands are lent to the kernel. The same on all ranks. A fabric copies them instead.
  bool lends() const { return fabric_choice_.provider.empty(); }

  const Hosts& hosts() const { return hosts_; }
  int rank() const { return rank_; }

  // --- collective streams: used by one thread at a time ---

  // Queue bytes for a rank. They must stay valid and unchanged until flush().
  void send(int to, const void* data, size_t nbytes);
  // Queue the destination of the next bytes from a rank. Return the position to pass to wait_received.
  uint64_t receive(int from, void* data, size_t nbytes);
  // Like send and receive, for operands that may be large. Their bytes are lent to the kernel (stream.h). One side
  // lends the bytes that the other side borrows, in the same pieces. Both call settle at the end of the call. Before
  // that, lent bytes may change only if the other side has provably read them: it has sent a result that depends on
  // them.
  void lend(int to, const void* data, size_t nbytes);
  uint64_t borrow(int from, void* data, size_t nbytes);
  // Transfer all bytes that can be transferred without waiting.
  void advance() {
    while (move()) {
    }
  }
  // Return the number of bytes queued for a rank since the beginning: the position to pass to wait_sent.
  uint64_t queued(int to) { return peer(to).queued; }
  // Each wait transfers bytes of all streams until its condition is met. Throws Error.
  // Wait until the kernel has accepted the bytes up to this position.
  void wait_sent(Patience& patience, const Failure& about, int to, uint64_t until);
  // Wait until the bytes up to this position have arrived.
  void wait_received(Patience& patience, const Failure& about, int from, uint64_t until);
  bool has_come(int from, uint64_t until) { return peer(from).come >= until; }
  // Wait until the bytes of either have arrived.
  struct Awaited {
    int from;  // -1: nothing is awaited
    uint64_t until;
  };
  void wait_received(Patience& patience, const Failure& about, const Awaited& one, const Awaited& other);
  // Wait until nothing is queued.
  void flush(Patience& patience, const Failure& about);
  // Wait until nothing is queued and the other sides have read all lent bytes.
  void settle(Patience& patience, const Failure& about);
  // Discard the queues of a failed call.
  void clear();

  // --- message streams ---

  Stream& message_stream(int rank) { return peer(rank).message_stream; }
  void need_message_stream(int rank);  // with the lock of PointToPoint held
  bool wait_for_messages(int timeout_ms) override;
  // Have the thread ring this rank's bell once, when a message stream becomes readable, or a full one writable.
  void watch_message_streams() override;

  // --- heartbeats ---

  // Return the clock offset of another host. Known on leaders, for their neighbors.
  ClockOffset::Estimate clock_of(int host, int64_t now_ns) const {
    return clocks_[static_cast<size_t>(host)].load().at(now_ns);
  }

  // Publish the collective that this rank begins.
  void publish_call(uint32_t call, const Fingerprint& fingerprint);
  // Return the last collective that a rank has published.
  std::pair<uint32_t, Fingerprint> last_call(int rank);
  // Return the ranks of all hosts that are not known to have begun this call.
  std::vector<int> behind(uint32_t call);
  // Exchange call sites after a mismatch that every rank has found. here: the call sites of this host's ranks, by
  // place. Return the call sites of the ranks on other hosts, by rank; "" if none arrived in time.
  std::vector<std::string> exchange_notes(const Failure& about, Caller& caller, const std::vector<std::string>& here);

  Presence presence(int rank) override;
  void announce() override { wake(); }
  int blame(int awaited, uint32_t call) override;

  void close();  // announces the end to the other hosts, and waits up to 2 s until the kernel has sent all data

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
    // Bytes since the beginning:
    uint64_t queued = 0;  // to send
    uint64_t taken = 0;   // of these, accepted by the stream
    uint64_t asked = 0;   // to receive
    uint64_t come = 0;    // of these, received
    bool busy = false;
    bool lends = false;    // has lent bytes since the last settle
    bool borrows = false;  // has borrowed bytes since the last settle
  };

  Peer& peer(int rank) { return *peers_[static_cast<size_t>(rank)]; }
  // Transfer up to a burst in each direction of every busy stream. Return whether any byte was transferred.
  bool move();
  void take_up(int rank);  // marks the collective stream as busy
  bool hand_over(Peer& p);
  template <class Done>
  void wait(Patience& patience, const Failure& about, Done&& done);

  Fabric* fabric(Connection kind) const {
    return used_fabrics_[static_cast<size_t>(kind)].load(std::memory_order_acquire);
  }

  void need_collective_stream(int rank);
  void start_thread();
  void wake();

  // Called by the thread, and by close() after the thread has terminated.
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
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; those of ranks on this host are never connected
  std::vector<int> others_;                   // the ranks on other hosts
  std::vector<int> busy_;                     // of these, the ranks with a queue on their collective stream
  std::byte heard_{};                         // destination of the receipts for lent bytes

  // Used by the thread:
  std::unique_ptr<Heartbeat> heartbeat_;        // on a leader
  std::vector<std::unique_ptr<Stream>> links_;  // heartbeat connections with the neighbors, by host
  std::vector<SeqLocked<ClockOffset>> clocks_;  // by host; the thread that makes calls reads them
  std::vector<bool> local_gone_;                // by place
  uint32_t noted_ = 0;
  bool announced_ = false;

  std::atomic<bool> watching_ = false;
  std::atomic<uint64_t> seen_completions_ = 0;  // of the fabric of the message streams, by wait_for_messages
  std::atomic<bool> closing_ = false;
  sys::Fd wake_;     // event that wakes the thread from poll
  sys::Fd opened_;   // event that wakes a thread in wait() from poll: a collective stream has been opened
  std::mutex lock_;  // protects the members below, and the opening of streams against close()
  bool closed_ = false;
  std::thread thread_;
  FabricChoice fabric_choice_;
  // One for collective and one for message streams, which different threads use. Created with their first connection.
  std::array<std::unique_ptr<Fabric>, 2> fabrics_;
  std::array<std::atomic<Fabric*>, 2> used_fabrics_{};  // the same, for threads without the lock
};

}  // namespace allranks
