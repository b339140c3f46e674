#include "channel/net.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string_view>

namespace allranks {

namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kSliceNs = 50 * kMs;      // interval of the checks for failures (shm.h)
constexpr int64_t kBrokenNs = 1'000 * kMs;  // after the end of a stream: time for the cause (death, leaving) to arrive
constexpr int64_t kTickNs = 50 * kMs;       // interval at which the leader reads the state of its host's ranks
constexpr int64_t kNotesNs = 1'000 * kMs;   // limit of the exchange of call sites
constexpr int64_t kFinishNs = 2'000 * kMs;  // limit of close()
constexpr uint32_t kNearUs = 2'000;         // round-trip time up to which BBR is not used
constexpr uint8_t kClosed = 7;              // TCP_CLOSE of netinet/tcp.h, whose older tcp_info conflicts
// TCP doubles the time between its retransmissions. After a network outage of 7 s, the next retransmission may be as
// late as 14.2 s after the last packet that arrived. A limit of 15 s therefore survives every outage of up to 7 s. A
// limit of 7 s would lose a host after an outage of 4 s. docs/decisions/028
constexpr int kUnreachableMs = 15'000;
constexpr size_t kBurst = 256 << 10;  // bytes transferred in one direction before the other direction has its turn
constexpr size_t kLent = 64 << 10;    // minimum bytes for lending: smaller operands are not worth a pipe
// If an endpoint of libfabric is blind, a rank that has received data polls longer before it sleeps, because it then
// sleeps for whole milliseconds.
constexpr int64_t kBlindNs = 10 * kMs;
constexpr size_t kParts = 16;  // maximum queued parts of one system call

void set(int fd, int level, int option, int value) {
  if (setsockopt(fd, level, option, &value, sizeof value) != 0) {
    throw Error(std::string("setsockopt of a connection to another host: ") + std::strerror(errno));
  }
}

// Restore BBR for long paths, if it is the system's default. BBR paces the packets with a timer for every few of them.
// On short paths this costs more than it gains. The sockets are therefore created without it (_engines/native/tcp.py).
// It cannot be the other way round: a connection that has used BBR stays paced (docs/decisions/042).
void pace_on_long_ways(int fd) {
  tcp_info info{};
  socklen_t info_size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &info_size) != 0 || info.tcpi_min_rtt <= kNearUs) return;
  const sys::Fd fresh(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::array<char, 16> name{};
  socklen_t size = name.size();
  if (getsockopt(fresh.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return;
  // If this user may not choose BBR, the call fails and the socket stays unchanged.
  if (std::string_view(name.data()) == "bbr") setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), size);
}

void set_up(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    throw Error(std::string("fcntl of a connection to another host: ") + std::strerror(errno));
  }
  pace_on_long_ways(fd);
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 2);  // 2 + 13 * 1 s is kUnreachableMs
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 13);
}

void signal(const sys::Fd& event) {
  const uint64_t one = 1;
  // It fails only if the counter is full. Then no thread can sleep on it.
  if (write(event.get(), &one, sizeof one) < 0) return;
}

void drain(const sys::Fd& event) {
  uint64_t count;
  if (read(event.get(), &count, sizeof count) < 0) return;  // another thread has reset it
}

void send_greeting(int fd, const std::string& greeting) {
  if (::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL) < 0) return;  // the connection has ended
}

// Return whether no more data will arrive on a stream. The kernel may still hold data that arrived before.
bool over(const Stream& stream) {
  pollfd polled{.fd = stream.fd(), .events = POLLRDHUP, .revents = 0};
  return !stream || (poll(&polled, 1, 0) > 0 && (polled.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0);
}

// Return the number of bytes that the other side's kernel has not acknowledged yet.
int unsent(int fd) {
  if (fd < 0) return 0;
  tcp_info info{};
  socklen_t size = sizeof info;
  int nbytes = 0;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_state == kClosed) return 0;
  return ioctl(fd, SIOCOUTQ, &nbytes) == 0 ? nbytes : 0;
}

}  // namespace

Net::Net(int rank, Hosts hosts, std::vector<sys::Fd> heartbeats, Opener opener, Shm& shm, FabricChoice fabric)
    : rank_(rank),
      hosts_(std::move(hosts)),
      opener_(std::move(opener)),
      shm_(shm),
      clocks_(static_cast<size_t>(hosts_.count())),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      opened_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      fabric_choice_(std::move(fabric)) {
  if (wake_.get() < 0 || opened_.get() < 0) throw Error(std::string("eventfd: ") + std::strerror(errno));
  for (int r = 0; r < hosts_.ranks(); r++) {
    peers_.push_back(std::make_unique<Peer>());
    if (hosts_.of(r) != here()) others_.push_back(r);
  }
  if (!heartbeats.empty()) {
    heartbeat_ = std::make_unique<Heartbeat>(here(), hosts_, *this);
    links_.resize(static_cast<size_t>(hosts_.count()));
    local_gone_.resize(hosts_.on(here()).size());
    for (const int host : Heartbeat::neighbours(here(), hosts_.count())) {
      sys::Fd& fd = heartbeats[static_cast<size_t>(hosts_.leader(host))];
      set_up(fd.get());
      // Only on heartbeats: a rank that computes and does not read its other streams must not count as lost.
      set(fd.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, kUnreachableMs);
      links_[static_cast<size_t>(host)] = std::make_unique<Stream>();
      links_[static_cast<size_t>(host)]->open(std::move(fd));
    }
  }
  shm_.set_remote_ranks(this, hosts_.ranks());
  if (heartbeat_) start_thread();
}

Net::~Net() {
  if (!closed_) close();
}

void Net::start_thread() {
  const std::lock_guard lock(lock_);
  if (!thread_.joinable() && !closing_.load()) thread_ = std::thread([this] { run(); });
}

// --- connections ---

void Net::adopt(int rank, Connection kind, sys::Fd fd, const std::string& greeting) {
  try {
    set_up(fd.get());
  } catch (const Error&) {
    return give_up(rank);  // no call waits for this function, so the group fails instead
  }
  {
    const std::lock_guard lock(lock_);
    Stream& stream = kind == Connection::collective ? peer(rank).collective_stream : peer(rank).message_stream;
    // close() sets closing_ before it locks: either this check finds it, or close() drops the stream.
    if (closing_.load(std::memory_order_acquire) || stream) return;
    // The other side may continue, and even leave, as soon as it has received the greeting. If it has terminated, the
    // first use of the connection detects this.
    if (!greeting.empty()) send_greeting(fd.get(), greeting);
    FabricLink* link = nullptr;
    if (!fabric_choice_.provider.empty()) {
      auto& fabric = fabrics_.at(static_cast<size_t>(kind));
      try {
        if (!fabric) fabric = std::make_unique<Fabric>(fabric_choice_);
        link = &fabric->connect(fd.get());
      } catch (const Error&) {
        throw;
      } catch (const std::exception& error) {  // of the standard library: no memory, or no further thread
        throw Error(std::string("no memory or thread for an endpoint: ") + error.what());
      }
      used_fabrics_.at(static_cast<size_t>(kind)).store(fabric.get(), std::memory_order_release);
    }
    stream.open(std::move(fd), link);
  }
  if (kind == Connection::collective) {
    signal(opened_);
  } else {
    wake();
    Shm::ring(shm_.bell(shm_.rank()));
  }
}

void Net::give_up(int rank) {
  const auto [call, fingerprint] = shm_.step_line(shm_.rank()).begun.load();
  shm_.condemn({.kind = Kind::unreachable, .peer = rank, .reporter = rank_, .call = call, .fingerprint = fingerprint});
}

std::string Net::fabric_error(int rank) {
  const std::lock_guard lock(lock_);  // close() removes the links
  for (const Stream* stream : {&peer(rank).collective_stream, &peer(rank).message_stream}) {
    if (stream->link() == nullptr) continue;
    if (std::string error = stream->link()->error(); !error.empty()) return fabric_choice_.provider + ": " + error;
  }
  return {};
}

void Net::need_collective_stream(int rank) {
  Peer& p = peer(rank);
  if (p.collective_asked || p.collective_stream || rank > rank_) return;  // the higher rank requests it for both
  p.collective_asked = true;
  opener_(rank, Connection::collective);
}

void Net::need_message_stream(int rank) {
  Peer& p = peer(rank);
  if (p.message_asked || p.message_stream || closing_.load(std::memory_order_acquire)) return;
  p.message_asked = true;
  opener_(rank, Connection::message);
}

// --- collective streams ---

void Net::take_up(int rank) {
  Peer& p = peer(rank);
  if (!p.busy) busy_.push_back(rank);
  p.busy = true;
}

void Net::send(int to, const void* data, size_t nbytes) {
  if (nbytes == 0) return;
  need_collective_stream(to);
  peer(to).out.push_back({static_cast<const std::byte*>(data), nbytes});
  peer(to).queued += nbytes;
  take_up(to);
}

uint64_t Net::receive(int from, void* data, size_t nbytes) {
  Peer& p = peer(from);
  if (nbytes == 0) return p.asked;
  need_collective_stream(from);
  p.in.push_back({static_cast<std::byte*>(data), nbytes});
  take_up(from);
  return p.asked += nbytes;
}

void Net::lend(int to, const void* data, size_t nbytes) {
  if (nbytes == 0) return;
  need_collective_stream(to);
  Peer& p = peer(to);
  const bool lent = lends() && nbytes >= kLent;
  p.out.push_back({static_cast<const std::byte*>(data), nbytes, lent});
  p.queued += nbytes;
  p.lends = p.lends || lent;
  take_up(to);
}

uint64_t Net::borrow(int from, void* data, size_t nbytes) {
  if (lends() && nbytes >= kLent) peer(from).borrows = true;
  return receive(from, data, nbytes);
}

// Send queued bytes until the kernel accepts no more, or a burst has been sent. Return whether any were sent.
bool Net::hand_over(Peer& p) {
  size_t total = 0;
  while (!p.out.empty() && total < kBurst) {
    size_t taken = 0;
    size_t tried = 0;
    if (p.out.front().lent) {
      tried = std::min(p.out.front().nbytes, kBurst - total);
      taken = p.collective_stream.lend(p.out.front().data, tried);
    } else {
      std::array<iovec, kParts> parts;
      size_t n = 0;
      for (; n < p.out.size() && n < kParts && total + tried < kBurst && !p.out[n].lent; n++) {
        const size_t nbytes = std::min(p.out[n].nbytes, kBurst - total - tried);
        parts[n] = {const_cast<std::byte*>(p.out[n].data), nbytes};
        tried += nbytes;
      }
      taken = p.collective_stream.put(parts.data(), n);
    }
    if (taken == 0) break;
    total += taken;
    p.taken += taken;
    while (taken > 0) {
      Out& first = p.out.front();
      const size_t part = std::min(taken, first.nbytes);
      first.data += part;
      first.nbytes -= part;
      taken -= part;
      if (first.nbytes == 0) p.out.pop_front();
    }
  }
  return total > 0;
}

bool Net::move() {
  bool moved = false;
  for (size_t b = 0; b < busy_.size();) {
    Peer& p = peer(busy_[b]);
    if (!p.out.empty()) {
      moved = hand_over(p) || moved;
    } else {
      p.collective_stream.drain();
    }
    for (size_t burst = 0; !p.in.empty() && burst < kBurst;) {
      In& first = p.in.front();
      const size_t n = p.collective_stream.get(first.data, std::min(first.nbytes, kBurst));
      if (n == 0) break;
      moved = true;
      burst += n;
      p.come += n;
      first = {first.data + n, first.nbytes - n};
      if (first.nbytes == 0) p.in.pop_front();
    }
    if (p.out.empty() && p.in.empty() && p.collective_stream.drained()) {
      p.busy = false;
      busy_[b] = busy_.back();
      busy_.pop_back();
    } else {
      b++;
    }
  }
  return moved;
}

template <class Done>
void Net::wait(Patience& patience, const Failure& about, Done&& done) {
  move();
  if (done() < 0) return;
  const int64_t began = sys::now_ns();
  while (patience.polling.spin_ns > 0 && sys::now_ns() - began < patience.polling.spin_ns) {
    move();
    if (done() < 0) return;
  }
  patience.caller.release();
  if (patience.deadline_ns == 0) patience.deadline_ns = began + patience.timeout_ns;
  int64_t stirred = began;
  int64_t looked = began;
  int64_t broken = 0;
  std::vector<pollfd> polled;
  for (;;) {
    const bool moved = move();
    const int awaited = done();
    if (awaited < 0) return;
    const int64_t now = sys::now_ns();
    if (moved) {
      stirred = now;
      // A call is late only if no byte has been transferred for the whole timeout (docs/decisions/078).
      patience.deadline_ns = std::max(patience.deadline_ns, now + patience.timeout_ns);
    }
    const bool ended = peer(awaited).collective_stream.ended();
    if (ended && broken == 0) broken = now;
    if (ended || now - looked >= kSliceNs) {
      looked = now;
      shm_.look_around(
          patience, about,
          [&] {
            move();
            return done();
          },
          began);
      if (done() < 0) return;
    }
    if (ended && now - broken > kBrokenNs) {
      Failure failure = about;
      failure.kind = Kind::unreachable;
      failure.peer = awaited;
      shm_.condemn(failure);
      shm_.check_verdict();
    }
    // Waking a sleeping receiver can cost the sender more than the packet: it may need an inter-processor interrupt,
    // which is expensive in a virtual machine. A rank that receives continuously therefore yields instead of sleeping.
    Fabric* fabric = this->fabric(Connection::collective);
    if (now - stirred < (fabric != nullptr && fabric->blind() ? kBlindNs : kStirredNs)) {
      sys::yield();
      continue;
    }
    polled.assign({{.fd = opened_.get(), .events = POLLIN, .revents = 0}});
    for (const int r : busy_) {
      const Peer& p = peer(r);
      if (p.collective_stream.ended()) continue;
      polled.push_back(p.collective_stream.polled(!p.in.empty(), !p.out.empty() || !p.collective_stream.drained()));
    }
    int timeout_ms = ended ? 1 : static_cast<int>(kSliceNs / kMs);
    if (fabric != nullptr) {
      polled.push_back({.fd = fabric->wait_fd(), .events = POLLIN, .revents = 0});
      timeout_ms = fabric->sleep_ms(timeout_ms);
    }
    // A stream that has ended is not polled, so the cause of its end is checked every millisecond.
    poll(polled.data(), polled.size(), timeout_ms);
    if (polled.front().revents != 0) drain(opened_);
  }
}

void Net::wait_sent(Patience& patience, const Failure& about, int to, uint64_t until) {
  const Peer& p = peer(to);
  wait(patience, about, [&] { return p.taken - p.collective_stream.in_pipe() >= until ? -1 : to; });
}

void Net::wait_received(Patience& patience, const Failure& about, int from, uint64_t until) {
  const Peer& p = peer(from);
  wait(patience, about, [&] { return p.come >= until ? -1 : from; });
}

void Net::wait_received(Patience& patience, const Failure& about, const Awaited& one, const Awaited& other) {
  const auto missing = [&](const Awaited& a) { return a.from >= 0 && !has_come(a.from, a.until) ? a.from : -1; };
  wait(patience, about, [&] {
    if (one.from < 0) return missing(other);
    if (other.from < 0) return missing(one);
    return missing(one) < 0 ? -1 : missing(other) < 0 ? -1 : one.from;
  });
}

void Net::flush(Patience& patience, const Failure& about) {
  wait(patience, about, [&] { return busy_.empty() ? -1 : busy_.front(); });
}

void Net::settle(Patience& patience, const Failure& about) {
  flush(patience, about);
  static const std::byte read{1};
  for (const int r : others_) {
    Peer& p = peer(r);
    if (std::exchange(p.borrows, false)) send(r, &read, 1);
    if (std::exchange(p.lends, false)) receive(r, &heard_, 1);
  }
  flush(patience, about);
  // A rank whose call has failed may already have changed the bytes that it had lent.
  shm_.check_verdict();
}

void Net::clear() {
  for (const int r : others_) peer(r).lends = peer(r).borrows = false;
  for (const int r : busy_) {
    peer(r).out.clear();
    peer(r).taken = peer(r).queued;
    peer(r).in.clear();
    peer(r).busy = false;
  }
  busy_.clear();
}

// --- message streams ---

bool Net::wait_for_messages(int timeout_ms) {
  std::vector<pollfd> polled;
  for (const int r : others_) {
    const Stream& stream = peer(r).message_stream;
    if (stream && !stream.ended()) polled.push_back(stream.polled(true, stream.full()));
  }
  if (Fabric* fabric = this->fabric(Connection::message)) {
    // The caller has processed messages since the last call, so the descriptor may not show that they arrive.
    const uint64_t completions = fabric->completions();
    if (seen_completions_.exchange(completions, std::memory_order_relaxed) != completions) return true;
    if (timeout_ms > 0 && (timeout_ms = fabric->sleep_ms(timeout_ms)) == 0) return true;
    polled.push_back({.fd = fabric->wait_fd(), .events = POLLIN, .revents = 0});
  }
  return poll(polled.data(), polled.size(), timeout_ms) > 0;
}

void Net::watch_message_streams() {
  Fabric* fabric = this->fabric(Connection::message);
  if (fabric != nullptr && fabric->sleep_ms(1) == 0) Shm::ring(shm_.bell(shm_.rank()));
  // If it was set already, the thread polls the streams and will ring. It does not wait for space in a stream that has
  // become full since, so it must choose the events again.
  const bool full = std::any_of(others_.begin(), others_.end(), [&](int r) { return peer(r).message_stream.full(); });
  if (watching_.exchange(true, std::memory_order_seq_cst) && !full) return;
  start_thread();
  wake();
}

// --- heartbeats: functions for calls ---

void Net::wake() { signal(wake_); }

void Net::publish_call(uint32_t call, const Fingerprint& fingerprint) {
  shm_.step_line(shm_.rank()).begun.store(call, fingerprint);
}

std::pair<uint32_t, Fingerprint> Net::last_call(int rank) {
  const int local = shm_.local(rank);
  return local < 0 ? shm_.far(rank).begun.load() : shm_.step_line(local).begun.load();
}

std::vector<int> Net::behind(uint32_t call) {
  std::vector<int> ranks;
  for (int r = 0; r < hosts_.ranks(); r++) {
    const int local = shm_.local(r);
    const uint32_t begun = local < 0 ? shm_.far(r).begun.call() : shm_.step_line(local).begun.call();
    if (r != rank_ && static_cast<int32_t>(call - begun) > 0) ranks.push_back(r);
  }
  return ranks;
}

int Net::blame(int awaited, uint32_t call) {
  if (call == 0) return awaited;  // a message
  // If the awaited rank has begun the call, it waits for a rank that has not.
  const auto late = behind(call);
  return late.empty() || std::find(late.begin(), late.end(), awaited) != late.end() ? awaited : late.front();
}

Presence Net::presence(int rank) {
  // Acquire pairs with on_status(): the last call and wait of a rank that has left are in the table.
  const auto presence = static_cast<Presence>(shm_.far(rank).presence.load(std::memory_order_acquire));
  if (presence != Presence::left && presence != Presence::unreported) return presence;
  // Everything that the rank has sent has arrived only when its connections have ended, too. If no leader reports for
  // it, the end of its connections is the only sign.
  const Peer& p = peer(rank);
  const bool known = presence == Presence::left || p.collective_stream || p.message_stream;
  return known && over(p.collective_stream) && over(p.message_stream) ? Presence::left : Presence::here;
}

std::vector<std::string> Net::exchange_notes(const Failure& about, Caller& caller,
                                             const std::vector<std::string>& here) {
  if (leads()) {
    const auto& local_ranks = hosts_.on(this->here());
    for (size_t p = local_ranks.size(); p-- > 0;) {  // the leader's note last: its number triggers the thread
      Far& far = shm_.far(local_ranks[p]);
      const size_t n = std::min(here[p].size(), far.note.size() - 1);
      std::copy_n(here[p].begin(), n, far.note.begin());
      far.note[n] = '\0';
      far.note_call.store(about.call, std::memory_order_release);  // publishes the text
    }
    wake();
  }
  const auto noted = [&](int r) { return shm_.far(r).note_call.load(std::memory_order_seq_cst) == about.call; };
  Patience patience{.caller = caller, .timeout_ns = kNotesNs, .polling = {}, .final = false};
  try {
    shm_.wait(shm_.gate(), patience, about, [&] {
      const auto silent = std::find_if_not(others_.begin(), others_.end(), noted);
      return silent == others_.end() ? -1 : *silent;
    });
  } catch (const Error& error) {
    if (!is_missing(error.failure.kind)) throw;  // the mismatch is known without the notes
  }
  std::vector<std::string> texts(peers_.size());
  for (const int r : others_) {
    if (noted(r)) texts[static_cast<size_t>(r)] = shm_.far(r).note.data();
  }
  return texts;
}

void Net::close() {
  closing_.store(true, std::memory_order_release);
  wake();
  {
    const std::lock_guard lock(lock_);  // from here on, no stream is opened and no thread is started
    closed_ = true;
  }
  if (thread_.joinable()) thread_.join();
  finish();
  const std::lock_guard lock(lock_);  // fabric_error() reads the links
  for (auto& used : used_fabrics_) used.store(nullptr, std::memory_order_release);
  for (auto& fabric : fabrics_) fabric.reset();
  for (const int r : others_) {
    peer(r).collective_stream.drop();
    peer(r).message_stream.drop();
  }
  for (auto& link : links_) {
    if (link) link->drop();
  }
}

// --- heartbeats: the thread ---

void Net::run() {
  sys::leave_signals();
  // Before the first tick, because the clocks of other hosts are unknown until the first round trips.
  if (heartbeat_) {
    publish();
    flush_heartbeats();
  }
  while (!closing_.load(std::memory_order_acquire)) turn();
}

void Net::turn() {
  const bool watching = watching_.load(std::memory_order_seq_cst);
  std::vector<pollfd> polled{{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
  const auto watch = [&](int fd, int events) {
    polled.push_back({.fd = fd, .events = static_cast<short>(events), .revents = 0});
  };
  int timeout_ms = heartbeat_ ? static_cast<int>(kTickNs / kMs) : -1;
  std::vector<int> watched;
  if (heartbeat_) {
    for (int host = 0; host < hosts_.count(); host++) {
      const auto& link = links_[static_cast<size_t>(host)];
      if (!link || link->ended()) continue;
      watch(link->fd(), POLLIN | (heartbeat_->outbox(host).empty() ? 0 : POLLOUT));
      watched.push_back(host);
    }
    for (int local = 0; local < shm_.size(); local++) {
      if (local != shm_.rank() && !local_gone_[static_cast<size_t>(local)])
        watch(shm_.liveness(local)->get(), POLLRDHUP);
    }
  }
  const size_t before_messages = polled.size();
  bool blind = false;  // the rank itself checks regularly for messages
  if (watching) {
    for (const int r : others_) {
      const Stream& stream = peer(r).message_stream;
      if (stream && !stream.ended()) polled.push_back(stream.polled(true, stream.full()));
    }
    if (const Fabric* fabric = this->fabric(Connection::message)) {
      watch(fabric->wait_fd(), POLLIN);
      blind = fabric->blind();
      if (blind) timeout_ms = 1;
    }
  }
  poll(polled.data(), polled.size(), timeout_ms);
  if (polled.front().revents != 0) drain(wake_);
  const auto stirred = [](const pollfd& p) { return p.revents != 0; };
  if (blind || std::any_of(polled.begin() + static_cast<std::ptrdiff_t>(before_messages), polled.end(), stirred)) {
    // Cleared before the bell rings: a woken rank that sleeps again sets it again.
    watching_.store(false, std::memory_order_seq_cst);
    Shm::ring(shm_.bell(shm_.rank()));
  }
  if (!heartbeat_) return;
  for (size_t i = 0; i < watched.size(); i++) {
    if ((polled[i + 1].revents & ~POLLOUT) != 0) read_heartbeats(watched[i]);
    if (links_[static_cast<size_t>(watched[i])]->ended()) watched[i] = -1;
  }
  watch_local_ranks();
  publish();
  flush_heartbeats();
  for (const int host : watched) {
    if (host >= 0 && links_[static_cast<size_t>(host)]->ended()) read_heartbeats(host);  // a write has found the end
  }
}

void Net::read_heartbeats(int host) {
  Stream& link = *links_[static_cast<size_t>(host)];
  std::array<std::byte, 4096> some;
  while (const size_t n = link.get(some.data(), some.size())) heartbeat_->receive(host, some.data(), n, sys::now_ns());
  if (link.ended()) heartbeat_->ended(host, link.error());
}

// Detect deaths of the ranks that this leader reports for. If no rank of the host waits for them, only the leader can
// notice their death.
void Net::watch_local_ranks() {
  for (int local = 0; local < shm_.size(); local++) {
    const auto i = static_cast<size_t>(local);
    if (local == shm_.rank() || local_gone_[i] || !sys::hung_up(shm_.liveness(local)->get())) continue;
    local_gone_[i] = true;
    if (shm_.has_left(local)) continue;
    const auto [call, fingerprint] = last_call(rank_);
    shm_.condemn(
        {.kind = Kind::died, .peer = shm_.number(local), .reporter = rank_, .call = call, .fingerprint = fingerprint});
  }
}

std::vector<Heartbeat::Status> Net::statuses() const {
  std::vector<Heartbeat::Status> all;
  for (int local = 0; local < shm_.size(); local++) {
    const auto [call, fingerprint] = shm_.step_line(local).begun.load();
    all.push_back({.call = call,
                   .left = shm_.has_left(local) ? 1U : 0U,
                   .fingerprint = fingerprint,
                   .waits = shm_.waits(local).load()});
  }
  return all;
}

void Net::publish() {
  if (!announced_ && shm_.condemned()) {
    announced_ = true;
    try {
      shm_.check_verdict();
    } catch (const Error& error) {
      heartbeat_->condemn(error.failure);
    }
  }
  heartbeat_->publish(sys::now_ns(), statuses());
  const uint32_t noted = shm_.far(rank_).note_call.load(std::memory_order_acquire);
  if (noted == noted_) return;
  noted_ = noted;
  std::vector<std::string> texts;
  for (const int r : hosts_.on(here())) texts.emplace_back(shm_.far(r).note.data());
  heartbeat_->publish_notes(noted, texts);
}

void Net::flush_heartbeats() {
  for (int host = 0; host < hosts_.count(); host++) {
    const auto& link = links_[static_cast<size_t>(host)];
    if (!link || link->ended()) continue;
    const auto& outbox = heartbeat_->outbox(host);
    if (!outbox.empty()) heartbeat_->sent(host, link->put(outbox.data(), outbox.size()));
  }
}

void Net::on_status(int rank, const Heartbeat::Status& status) {
  Far& far = shm_.far(rank);
  far.begun.store(status.call, status.fingerprint);
  if (far.waits.load() != status.waits) far.waits.store(status.waits);
  if (status.left != 0) far.presence.store(static_cast<uint32_t>(Presence::left), std::memory_order_release);
}

void Net::on_note(int rank, uint32_t call, const std::string& text) {
  Far& far = shm_.far(rank);
  const size_t n = std::min(text.size(), far.note.size() - 1);
  std::copy_n(text.begin(), n, far.note.begin());
  far.note[n] = '\0';
  far.note_call.store(call, std::memory_order_seq_cst);  // publishes the text; sequentially consistent for Shm::ring
  Shm::ring(shm_.gate());
}

void Net::on_close(int host) {
  for (const int r : hosts_.on(host)) {
    // Only ranks that are here: a rank that has left, died or become unreachable keeps this state.
    uint32_t here = static_cast<uint32_t>(Presence::here);
    shm_.far(r).presence.compare_exchange_strong(here, static_cast<uint32_t>(Presence::unreported));
  }
}

void Net::on_end(int host, Kind how) {
  for (const int r : hosts_.on(host)) {
    if (how == Kind::died && r != hosts_.leader(host)) continue;  // the other ranks may be alive
    const Presence presence = how == Kind::died ? Presence::died : Presence::unreachable;
    shm_.far(r).presence.store(static_cast<uint32_t>(presence), std::memory_order_release);
  }
}

void Net::on_verdict(const Failure& failure) { shm_.condemn(failure); }

void Net::on_clock(int host, const ClockOffset& offset) { clocks_[static_cast<size_t>(host)].store(offset); }

void Net::finish() {
  std::vector<Stream*> streams;
  for (const int r : others_) {
    const auto presence = static_cast<Presence>(shm_.far(r).presence.load(std::memory_order_acquire));
    if (presence == Presence::died || presence == Presence::unreachable) continue;
    for (Stream* stream : {&peer(r).collective_stream, &peer(r).message_stream}) {
      if (*stream) streams.push_back(stream);
    }
  }
  const int64_t until = sys::now_ns() + kFinishNs;
  if (heartbeat_) {
    publish();
    heartbeat_->leave(statuses());
    const auto owed = [&](int host) {
      const auto& link = links_[static_cast<size_t>(host)];
      return link && !link->ended() && !heartbeat_->outbox(host).empty();
    };
    const auto neighbours = Heartbeat::neighbours(here(), hosts_.count());
    for (flush_heartbeats(); std::any_of(neighbours.begin(), neighbours.end(), owed) && sys::now_ns() < until;) {
      poll(nullptr, 0, 1);
      flush_heartbeats();
    }
    for (const int host : neighbours) streams.push_back(links_[static_cast<size_t>(host)].get());
  }
  for (const Stream* stream : streams) {
    if (stream->link() == nullptr) shutdown(stream->fd(), SHUT_WR);
  }
  // Closing a socket with unread input sends RST and discards queued output, so drain the input first.
  std::vector<std::byte> dropped(64 << 10);
  for (;;) {
    int held = 0;
    for (Stream* stream : streams) {
      // Limited, so that a peer that sends continuously does not prevent the check of the time.
      for (int i = 0; i < 64 && stream->get(dropped.data(), dropped.size()) > 0; i++) {
      }
      held += stream->link() == nullptr ? unsent(stream->fd()) : stream->link()->finish() ? 0 : 1;
    }
    if (held == 0 || sys::now_ns() >= until) return;
    poll(nullptr, 0, 1);
  }
}

}  // namespace allranks
