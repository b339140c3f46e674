#include "net.h"

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
#include <chrono>
#include <cstring>
#include <new>
#include <string_view>

namespace allranks {

namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kSliceNs = 50 * kMs;
constexpr int64_t kAwakeNs = kMs / 10;      // without a byte, before a rank sleeps
constexpr int64_t kBrokenNs = 1'000 * kMs;  // between the end of a lane and that of its rank, if that is what it means
constexpr int64_t kTickNs = 200 * kMs;
constexpr int64_t kBeatNs = 1'000 * kMs;
constexpr int64_t kFarewellNs = 2'000 * kMs;
constexpr uint32_t kNearUs = 2'000;
constexpr uint8_t kClosed = 7;  // TCP_CLOSE of netinet/tcp.h, whose tcp_info is the older one
constexpr int kUnreachableMs = 7'000;
constexpr size_t kBurst = 256 << 10;  // bytes moved one way before the other has its turn
constexpr size_t kLent = 64 << 10;    // bytes from which lending is worth a pipe
constexpr size_t kParts = 16;
constexpr size_t kLongestWord = 4 << 10;
constexpr size_t kBacklog = 64 << 10;

struct WordHead {
  uint32_t word;
  uint32_t nbytes;
};
struct Status {
  uint32_t call;
  uint32_t unused = 0;
  Fingerprint fingerprint;
};

void set(int fd, int level, int option, int value) {
  if (setsockopt(fd, level, option, &value, sizeof value) != 0) {
    throw Error(std::string("setsockopt of a connection to another host: ") + std::strerror(errno));
  }
}

// BBR paces what it sends, with a timer for every few packets: between neighbours that costs more than it can bring.
// Any other choice of the system stays, and BBR does where the way is long.
void do_without_pacing(int fd) {
  std::array<char, 16> chosen{};
  socklen_t size = chosen.size() - 1;
  tcp_info info{};
  socklen_t info_size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, chosen.data(), &size) != 0 ||
      getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &info_size) != 0) {
    return;
  }
  if (std::string_view(chosen.data()) != "bbr" || info.tcpi_min_rtt == 0 || info.tcpi_min_rtt > kNearUs) return;
  for (const std::string_view name : {"cubic", "reno"}) {
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0) return;
  }
}

void set_up(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    throw Error(std::string("fcntl of a connection to another host: ") + std::strerror(errno));
  }
  do_without_pacing(fd);
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 2);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 5);
}

// Bytes that the kernel has not brought to the other side yet.
int unsent(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  int nbytes = 0;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_state == kClosed) return 0;
  return ioctl(fd, SIOCOUTQ, &nbytes) == 0 ? nbytes : 0;
}

}  // namespace

Net::Net(int rank, Hosts hosts, Sockets sockets, Shm& shm)
    : rank_(rank), hosts_(std::move(hosts)), shm_(shm), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_.get() < 0) throw Error(std::string("eventfd: ") + std::strerror(errno));
  for (int r = 0; r < hosts_.ranks(); r++) {
    const auto i = static_cast<size_t>(r);
    if (hosts_.of(r) == hosts_.of(rank)) {
      peers_.push_back(std::make_unique<Peer>());
      continue;
    }
    for (const sys::Fd* fd : {&sockets.lanes[i], &sockets.posts[i], &sockets.pulses[i]}) set_up(fd->get());
    // Only here: a rank that computes, and does not take what others send, is not to be given up.
    set(sockets.pulses[i].get(), IPPROTO_TCP, TCP_USER_TIMEOUT, kUnreachableMs);
    peers_.push_back(
        std::make_unique<Peer>(std::move(sockets.lanes[i]), std::move(sockets.posts[i]), std::move(sockets.pulses[i])));
    others_.push_back(r);
  }
  shm_.set_elsewhere(this, hosts_.ranks());
  thread_ = std::thread([this] { run(); });
}

Net::~Net() {
  if (thread_.joinable()) close();
}

// --- lanes ---

void Net::take_up(int rank) {
  Peer& p = peer(rank);
  if (!p.busy) busy_.push_back(rank);
  p.busy = true;
}

void Net::send(int to, const void* data, size_t nbytes) {
  if (nbytes == 0) return;
  peer(to).out.push_back({static_cast<const std::byte*>(data), nbytes});
  take_up(to);
}

uint64_t Net::receive(int from, void* data, size_t nbytes) {
  Peer& p = peer(from);
  if (nbytes == 0) return p.asked;
  p.in.push_back({static_cast<std::byte*>(data), nbytes});
  take_up(from);
  return p.asked += nbytes;
}

void Net::lend(int to, const void* data, size_t nbytes) {
  if (nbytes == 0) return;
  Peer& p = peer(to);
  p.out.push_back({static_cast<const std::byte*>(data), nbytes, nbytes >= kLent});
  p.lends = true;
  take_up(to);
}

uint64_t Net::borrow(int from, void* data, size_t nbytes) {
  if (nbytes > 0) peer(from).borrows = true;
  return receive(from, data, nbytes);
}

// Gives the kernel what it takes, up to a burst.
bool Net::hand_over(Peer& p) {
  size_t total = 0;
  while (!p.out.empty() && total < kBurst) {
    size_t taken = 0;
    size_t tried = 0;
    if (p.out.front().lent) {
      tried = std::min(p.out.front().nbytes, kBurst - total);
      taken = p.lane.lend(p.out.front().data, tried);
    } else {
      std::array<iovec, kParts> parts;
      size_t n = 0;
      for (; n < p.out.size() && n < kParts && total + tried < kBurst && !p.out[n].lent; n++) {
        const size_t nbytes = std::min(p.out[n].nbytes, kBurst - total - tried);
        parts[n] = {const_cast<std::byte*>(p.out[n].data), nbytes};
        tried += nbytes;
      }
      taken = p.lane.put(parts.data(), n);
    }
    if (taken == 0) break;
    total += taken;
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
      p.lane.drain();
    }
    for (size_t burst = 0; !p.in.empty() && burst < kBurst;) {
      In& first = p.in.front();
      const size_t n = p.lane.get(first.data, std::min(first.nbytes, kBurst));
      if (n == 0) break;
      moved = true;
      burst += n;
      p.come += n;
      first = {first.data + n, first.nbytes - n};
      if (first.nbytes == 0) p.in.pop_front();
    }
    if (p.out.empty() && p.in.empty() && p.lane.drained()) {
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
  while (patience.spin_ns > 0 && sys::now_ns() - began < patience.spin_ns) {
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
      patience.deadline_ns = std::max(patience.deadline_ns, now + patience.timeout_ns);
    }
    const bool ended = peer(awaited).lane.ended();
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
    // To wake a sleeper costs the sender more than the packet, where it must ask another CPU to (of a virtual machine
    // above all): who gets something all the time does not sleep.
    if (now - stirred < kAwakeNs) {
      sys::yield();
      continue;
    }
    polled.clear();
    for (const int r : busy_) {
      const Peer& p = peer(r);
      if (p.lane.ended()) continue;
      const auto events = (p.in.empty() ? 0 : POLLIN) | (p.out.empty() && p.lane.drained() ? 0 : POLLOUT);
      polled.push_back({.fd = p.lane.fd(), .events = static_cast<short>(events), .revents = 0});
    }
    poll(polled.data(), polled.size(), ended ? 1 : static_cast<int>(kSliceNs / kMs));
  }
}

void Net::wait_received(Patience& patience, const Failure& about, int from, uint64_t until) {
  const Peer& p = peer(from);
  wait(patience, about, [&] { return p.come >= until ? -1 : from; });
}

void Net::flush(Patience& patience, const Failure& about) {
  wait(patience, about, [&] { return busy_.empty() ? -1 : busy_.front(); });
}

void Net::settle(Patience& patience, const Failure& about) {
  flush(patience, about);
  static const std::byte read{1};
  static std::byte heard;
  for (const int r : others_) {
    Peer& p = peer(r);
    if (std::exchange(p.borrows, false)) send(r, &read, 1);
    if (std::exchange(p.lends, false)) receive(r, &heard, 1);
  }
  flush(patience, about);
}

void Net::clear() {
  for (const int r : others_) peer(r).lends = peer(r).borrows = false;
  for (const int r : busy_) {
    peer(r).out.clear();
    peer(r).in.clear();
    peer(r).busy = false;
  }
  busy_.clear();
}

// --- pulses: what other threads ask of the thread ---

void Net::wake() {
  const uint64_t one = 1;
  // It fails only if the counter is full, and then the thread is awake.
  if (write(wake_.get(), &one, sizeof one) < 0) return;
}

bool Net::doze(int timeout_ms) {
  std::vector<pollfd> polled;
  for (const int r : others_) {
    const Stream& post = peer(r).post;
    if (post.ended()) continue;
    const auto events = static_cast<short>(POLLIN | (post.full() ? POLLOUT : 0));
    polled.push_back({.fd = post.fd(), .events = events, .revents = 0});
  }
  return poll(polled.data(), polled.size(), timeout_ms) > 0;
}

void Net::watch_posts() {
  if (!watching_.exchange(true, std::memory_order_seq_cst)) wake();
}

void Net::announce() { wake(); }

void Net::say(uint32_t call, const Fingerprint& fingerprint) {
  shm_.step_line(shm_.rank()).begun.store(call, std::memory_order_release);
  const std::lock_guard lock(pulse_lock_);
  call_ = call;
  fingerprint_ = fingerprint;
  call_said_ = false;
}

std::pair<uint32_t, Fingerprint> Net::last_call(int rank) {
  const std::lock_guard lock(pulse_lock_);
  if (rank == rank_) return {call_, fingerprint_};
  return {peer(rank).call, peer(rank).fingerprint};
}

std::vector<int> Net::behind(uint32_t call) {
  std::vector<int> ranks;
  for (int r = 0; r < hosts_.ranks(); r++) {
    const int local = shm_.local(r);
    uint32_t begun = 0;
    if (r == rank_) {
      begun = call;
    } else if (local < 0) {
      begun = last_call(r).first;
    } else {
      begun = shm_.step_line(local).begun.load(std::memory_order_acquire);
    }
    if (static_cast<int32_t>(call - begun) > 0) ranks.push_back(r);
  }
  return ranks;
}

int Net::blame(int awaited, uint32_t call) {
  if (call == 0) return awaited;  // a message
  const auto late = behind(call);
  return late.empty() || std::find(late.begin(), late.end(), awaited) != late.end() ? awaited : late.front();
}

void Net::say_note(uint32_t call, const std::string& text) {
  std::vector<std::byte> body(sizeof call + std::min(text.size(), kLongestWord / 2));
  std::memcpy(body.data(), &call, sizeof call);
  std::memcpy(body.data() + sizeof call, text.data(), body.size() - sizeof call);
  const std::lock_guard lock(pulse_lock_);
  tell_all(Word::note, body.data(), body.size());
}

std::vector<std::string> Net::notes(uint32_t call, int64_t timeout_ns) {
  std::unique_lock lock(pulse_lock_);
  noted_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] {
    return std::all_of(others_.begin(), others_.end(), [&](int r) { return peer(r).note_call == call; });
  });
  std::vector<std::string> texts(peers_.size());
  for (const int r : others_) {
    if (peer(r).note_call == call) texts[static_cast<size_t>(r)] = peer(r).note;
  }
  return texts;
}

void Net::close() {
  closing_.store(true, std::memory_order_release);
  wake();
  if (thread_.joinable()) thread_.join();
  abandon();
}

void Net::abandon() {
  for (const int r : others_) {
    peer(r).lane.drop();
    peer(r).post.drop();
    peer(r).pulse.drop();
  }
  if (thread_.joinable()) {
    thread_.detach();  // it runs in the parent only
    new (&noted_) std::condition_variable;
  }
}

// --- pulses: the thread ---

void Net::run() {
  while (!closing_.load(std::memory_order_acquire)) turn();
  farewell();
}

void Net::turn() {
  const bool watching = watching_.load(std::memory_order_seq_cst);
  std::vector<pollfd> polled{{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
  std::vector<int> whose{-1};
  const auto watch = [&](int rank, const Stream& stream, int events) {
    polled.push_back({.fd = stream.fd(), .events = static_cast<short>(events), .revents = 0});
    whose.push_back(rank);
  };
  for (const int r : others_) {
    Peer& p = peer(r);
    if (!p.pulse.ended()) {
      const std::lock_guard lock(pulse_lock_);
      watch(r, p.pulse, POLLIN | (p.outbox.empty() ? 0 : POLLOUT));
    }
    if (watching && !p.post.ended()) watch(r, p.post, POLLIN | (p.post.full() ? POLLOUT : 0));
    if (p.leaving && presence(r) == Presence::here) {
      // Everything that it has sent is here when its other connections have ended, too.
      std::array<pollfd, 2> rest{{{.fd = p.lane.fd(), .events = POLLRDHUP, .revents = 0},
                                  {.fd = p.post.fd(), .events = POLLRDHUP, .revents = 0}}};
      poll(rest.data(), rest.size(), 0);
      const auto over = [](const pollfd& x) { return (x.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0; };
      if (over(rest[0]) && over(rest[1])) {
        p.presence.store(Presence::left, std::memory_order_release);
      } else {
        watch(r, p.lane, over(rest[0]) ? 0 : POLLRDHUP);
        watch(r, p.post, over(rest[1]) ? 0 : POLLRDHUP);
      }
    }
  }
  poll(polled.data(), polled.size(), static_cast<int>(kTickNs / kMs));
  bool posts = false;
  for (size_t i = 0; i < polled.size(); i++) {
    if (polled[i].revents == 0) continue;
    if (whose[i] < 0) {
      uint64_t count;
      if (read(wake_.get(), &count, sizeof count) < 0) continue;
    } else if (Peer& p = peer(whose[i]); polled[i].fd == p.pulse.fd()) {
      if ((polled[i].revents & POLLOUT) != 0) {
        const std::lock_guard lock(pulse_lock_);
        flush_pulse(p);
      }
      listen_to(whose[i]);
    } else {
      posts = posts || polled[i].fd == p.post.fd();
    }
  }
  if (posts && watching) {
    watching_.store(false, std::memory_order_seq_cst);
    Shm::ring(shm_.bell(shm_.rank()));
  }
  beat(sys::now_ns());
}

void Net::beat(int64_t now) {
  if (!announced_ && shm_.condemned()) {
    announced_ = true;
    try {
      shm_.check_verdict();
    } catch (const Error& error) {
      const std::lock_guard lock(pulse_lock_);
      tell_all(Word::verdict, &error.failure, sizeof error.failure);
    }
  }
  const std::lock_guard lock(pulse_lock_);
  if (now - beaten_ns_ < (call_said_ ? kBeatNs : kTickNs)) return;
  beaten_ns_ = now;
  call_said_ = true;
  const Status status{.call = call_, .fingerprint = fingerprint_};
  tell_all(Word::status, &status, sizeof status);
}

void Net::tell_all(Word word, const void* body, size_t nbytes) {
  const WordHead head{static_cast<uint32_t>(word), static_cast<uint32_t>(nbytes)};
  for (const int r : others_) {
    Peer& p = peer(r);
    if (p.outbox.size() > kBacklog) continue;  // it has not listened for minutes
    const auto add = [&p](const void* data, size_t n) {
      const auto* bytes = static_cast<const std::byte*>(data);
      p.outbox.insert(p.outbox.end(), bytes, bytes + n);
    };
    add(&head, sizeof head);
    if (nbytes > 0) add(body, nbytes);
    flush_pulse(p);
  }
}

void Net::flush_pulse(Peer& to) {
  if (to.outbox.empty()) return;
  const size_t taken = to.pulse.put(to.outbox.data(), to.outbox.size());
  to.outbox.erase(to.outbox.begin(), to.outbox.begin() + static_cast<std::ptrdiff_t>(taken));
}

void Net::listen_to(int rank) {
  Peer& p = peer(rank);
  std::array<std::byte, kLongestWord> some;
  while (const size_t n = p.pulse.get(some.data(), some.size())) {
    p.inbox.insert(p.inbox.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(n));
    size_t at = 0;
    WordHead head;
    while (p.inbox.size() - at >= sizeof head) {
      std::memcpy(&head, p.inbox.data() + at, sizeof head);
      if (head.nbytes > kLongestWord) return lost(rank, Presence::unreachable);
      if (p.inbox.size() - at < sizeof head + head.nbytes) break;
      hear(rank, static_cast<Word>(head.word), p.inbox.data() + at + sizeof head, head.nbytes);
      at += sizeof head + head.nbytes;
    }
    p.inbox.erase(p.inbox.begin(), p.inbox.begin() + static_cast<std::ptrdiff_t>(at));
  }
  if (p.pulse.ended() && !p.leaving) {
    const int error = p.pulse.error();
    const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
    lost(rank, silent ? Presence::unreachable : Presence::died);
  }
}

void Net::hear(int rank, Word word, const std::byte* body, size_t nbytes) {
  Peer& p = peer(rank);
  if (word == Word::status && nbytes == sizeof(Status)) {
    Status status;
    std::memcpy(&status, body, sizeof status);
    const std::lock_guard lock(pulse_lock_);
    p.call = status.call;
    p.fingerprint = status.fingerprint;
  } else if (word == Word::verdict && nbytes == sizeof(Failure)) {
    Failure failure;
    std::memcpy(static_cast<void*>(&failure), body, sizeof failure);
    shm_.condemn(failure);
  } else if (word == Word::note && nbytes >= sizeof(uint32_t)) {
    const std::lock_guard lock(pulse_lock_);
    std::memcpy(&p.note_call, body, sizeof p.note_call);
    p.note.assign(reinterpret_cast<const char*>(body) + sizeof p.note_call, nbytes - sizeof p.note_call);
    noted_.notify_all();
  } else if (word == Word::bye) {
    p.leaving = true;
  }
}

void Net::lost(int rank, Presence how) {
  peer(rank).presence.store(how, std::memory_order_release);
  Failure failure{.kind = how == Presence::died ? Kind::died : Kind::unreachable, .peer = rank, .reporter = rank_};
  {
    const std::lock_guard lock(pulse_lock_);
    failure.call = call_;
    failure.fingerprint = fingerprint_;
  }
  shm_.condemn(failure);
}

void Net::farewell() {
  beat(sys::now_ns());
  {
    const std::lock_guard lock(pulse_lock_);
    tell_all(Word::bye, nullptr, 0);
  }
  const auto each = [&](auto&& body) {
    for (const int r : others_) {
      if (presence(r) == Presence::died || presence(r) == Presence::unreachable) continue;
      for (Stream* stream : {&peer(r).lane, &peer(r).post, &peer(r).pulse}) body(*stream);
    }
  };
  each([](Stream& stream) { shutdown(stream.fd(), SHUT_WR); });
  // A socket that is closed while something unread lies in it forgets what it has still to send.
  const int64_t until = sys::now_ns() + kFarewellNs;
  for (;;) {
    int held = 0;
    std::vector<std::byte> dropped(64 << 10);
    each([&](Stream& stream) {
      for (int i = 0; i < 64 && stream.get(dropped.data(), dropped.size()) > 0; i++) {
      }
      held += unsent(stream.fd());
    });
    if (held == 0 || sys::now_ns() >= until) return;
    poll(nullptr, 0, 1);
  }
}

}  // namespace allranks
