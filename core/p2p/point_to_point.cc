#include "p2p/point_to_point.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

namespace allranks {

namespace {

// Return the bytes that are copied before they are published. Bursts are so small that the other side copies one burst
// out while this side copies the next one in.
size_t burst_bytes(size_t pipe) { return std::min<size_t>(pipe / 4, 64 << 10); }

constexpr size_t kFarBurst = 1 << 20;     // burst between hosts
constexpr size_t kLent = 512 << 10;       // bytes from which a message is lent; below, a copy is faster (decisions/042)
constexpr size_t kTurn = 1 << 20;         // bytes moved for one peer before the other peers have their turn
constexpr size_t kCredit = 256 << 10;     // maximum bytes of credit that are withheld in order to save frames
constexpr size_t kQueues = 64;            // up to this number of queues, empty queues of recvs are kept
constexpr int64_t kSliceNs = 50'000'000;  // time after which a moving thread lets its caller check for signals

size_t payload_of(const Frame& frame) { return frame.count * size_of(frame.dtype); }

// Return the credit that a message uses: approximately the memory that it occupies if the receiver keeps it.
size_t cost(const Frame& frame) { return payload_of(frame) + 128; }

bool fits(const Frame& frame, const Buffer& buffer) {
  return frame.dtype == buffer.dtype && frame.count == buffer.count;
}

std::exception_ptr refused(int rank, int sender, const Frame& frame, const Fingerprint& wanted) {
  const Failure failure{.kind = Kind::mismatch, .peer = sender, .reporter = rank, .fingerprint = wanted};
  const Fingerprint sent{.verb = Verb::send, .dtype = frame.dtype, .count = frame.count};
  return std::make_exception_ptr(Error(failure, {sent, wanted}));
}

}  // namespace

OutOfMemory::OutOfMemory(int rank, const Frame& frame) {
  std::snprintf(
      text_.data(), text_.size(),
      "out of memory: cannot buffer a message of %zu bytes with tag %d from rank %d. The message is not lost. "
      "Later messages may be queued after it: receive it first, or free memory and call again",
      payload_of(frame), frame.tag, rank);
}

PointToPoint::PointToPoint(Shm& shm, Net* net, int64_t timeout_ns, Polling polling, Polling progress_polling,
                           size_t eager)
    : shm_(shm),
      net_(net),
      rank_(shm.number(shm.rank())),
      size_(shm.ranks()),
      timeout_ns_(timeout_ns),
      polling_(polling),
      progress_polling_(progress_polling),
      eager_(eager),
      peers_(static_cast<size_t>(size_)) {}

PointToPoint::~PointToPoint() {
  if (thread_.joinable()) thread_.join();
}

void PointToPoint::check_send(int to) {
  shm_.check_verdict();
  if (far(to) ? net_->presence(to) == Presence::left : shm_.has_left(shm_.local(to))) {
    throw Error(Failure{.kind = Kind::left, .peer = to, .reporter = rank_, .fingerprint = {.verb = Verb::send}});
  }
}

bool PointToPoint::send_at_once(Buffer buffer, int to, int32_t tag) {
  if (far(to)) return false;
  // try_to_lock: another thread may hold the lock for a long time while it moves messages.
  const std::unique_lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock() || busy(at(to))) return false;
  check_send(to);
  PipeControl& control = shm_.pipe_control(shm_.rank(), shm_.local(to));
  const size_t capacity = shm_.sizes().pipe;
  const uint64_t written = control.written.load(std::memory_order_relaxed);  // only this rank writes it, with lock_
  const size_t space = capacity - (written - control.read.load(std::memory_order_seq_cst));
  const size_t n = buffer.nbytes();
  const Frame frame{.count = buffer.count, .tag = tag, .dtype = buffer.dtype};
  if (sizeof(Frame) + n > std::min(space, burst_bytes(capacity)) || cost(frame) > credit(to)) return false;
  std::byte* pipe = shm_.pipe(shm_.rank(), shm_.local(to));
  const auto put = [&](uint64_t at, const void* from, size_t bytes) {
    const size_t first = std::min(bytes, capacity - static_cast<size_t>(at % capacity));
    if (bytes == 0) return;
    copier_.copy(pipe + at % capacity, static_cast<const std::byte*>(from), first);
    copier_.copy(pipe, static_cast<const std::byte*>(from) + first, bytes - first);
  };
  put(written, &frame, sizeof frame);
  put(written + sizeof frame, buffer.data, n);
  at(to).used += cost(frame);
  // Publishes the frame and the payload. seq_cst: pairs with Shm::ring, so that a sleeping receiver is not missed.
  control.written.store(written + sizeof frame + n, std::memory_order_seq_cst);
  Shm::ring(bell_of(to));
  return true;
}

bool PointToPoint::recv_at_once(Buffer buffer, int from, int32_t tag) {
  if (far(from)) return false;
  PipeControl& control = shm_.pipe_control(shm_.local(from), shm_.rank());
  const size_t n = buffer.nbytes();
  // Without lock_ this is only a hint, because another thread may read from the pipe. It is checked again below.
  const auto there = [&] {
    return control.written.load(std::memory_order_seq_cst) - control.read.load(std::memory_order_relaxed) >=
           sizeof(Frame) + n;
  };
  if (sizeof(Frame) + n > shm_.sizes().pipe / 4) return false;
  // Spin without the lock, so that other threads of this process can move messages.
  if (polling_.spin_ns > 0 && !there()) {
    const int64_t began = sys::now_ns();
    do {
      for (int i = 0; i < 8 && !there(); i++) sys::pause();
    } while (!there() && sys::now_ns() - began < polling_.spin_ns);
  }
  const std::unique_lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock() || !there() || waiting_ > 0 || at(from).kept > 0 || at(from).in.header > 0) return false;
  shm_.check_verdict();
  const size_t capacity = shm_.sizes().pipe;
  const uint64_t read = control.read.load(std::memory_order_relaxed);
  const std::byte* pipe = shm_.pipe(shm_.local(from), shm_.rank());
  const auto get = [&](uint64_t at, void* to, size_t bytes) {
    const size_t first = std::min(bytes, capacity - static_cast<size_t>(at % capacity));
    if (bytes == 0) return;
    std::memcpy(to, pipe + at % capacity, first);
    std::memcpy(static_cast<std::byte*>(to) + first, pipe, bytes - first);
  };
  Frame frame;
  get(read, &frame, sizeof frame);
  if (frame.kind != Frame::Kind::message || frame.tag != tag || !fits(frame, buffer)) return false;
  get(read + sizeof frame, buffer.data, n);
  // relaxed: only this rank writes `released`, with lock_. The store of `read` below publishes it.
  control.released.store(control.released.load(std::memory_order_relaxed) + cost(frame), std::memory_order_relaxed);
  control.read.store(read + sizeof frame + n, std::memory_order_seq_cst);
  Shm::ring(bell_of(from));
  return true;
}

std::shared_ptr<Message> PointToPoint::post_send(Buffer buffer, int to, int32_t tag, Caller& caller,
                                                 const trace::Recorder::Call& record) {
  const auto lock = lock_releasing(lock_, caller);
  check_send(to);
  auto message = std::make_shared<Message>();
  message->buffer = buffer;
  message->peer = to;
  message->tag = tag;
  message->about = {.verb = Verb::send, .dtype = buffer.dtype, .count = buffer.count};
  message->record = record;
  at(to).sends.push_back(message);
  messages_++;
  try {
    Turn turn{caller};
    push(to, turn);
  } catch (const std::exception&) {
    fail_all(std::current_exception());  // otherwise a later turn would read the tensor after its owner has freed it
    throw;
  }
  return message;
}

std::shared_ptr<Message> PointToPoint::post_recv(Buffer buffer, int from, int32_t tag, Caller& caller,
                                                 const trace::Recorder::Call& record) {
  const auto lock = lock_releasing(lock_, caller);
  shm_.check_verdict();
  auto message = std::make_shared<Message>();
  message->buffer = buffer;
  message->peer = from;
  message->tag = tag;
  message->number = posted_recvs_++;
  message->about = {.verb = Verb::recv, .dtype = buffer.dtype, .count = buffer.count};
  message->record = record;
  auto found = kept_.end();
  int sender = -1;
  for (int r = std::max(from, 0); r <= (from < 0 ? size_ - 1 : from); r++) {
    if (at(r).kept == 0) continue;
    const auto it = kept_.find(key(r, tag));
    if (it == kept_.end()) continue;
    if (found != kept_.end() && found->second.front().arrival < it->second.front().arrival) continue;
    found = it;
    sender = r;
  }
  Turn turn{caller};
  if (found != kept_.end()) {
    give(sender, found->second.front(), message, turn);
    found->second.pop_front();
    if (found->second.empty()) kept_.erase(found);
    at(sender).kept--;
  } else {
    Messages one{message};
    Messages& queue = recvs_[key(from, tag)];
    queue.splice(queue.end(), one);
    messages_++;
    waiting_++;
    if (from >= 0) at(from).wanted++;
  }
  try {
    if (sender >= 0) {
      push(sender, turn);
    } else {
      progress(caller);
    }
  } catch (const std::exception&) {
    fail_all(std::current_exception());  // otherwise a later turn would write to the freed tensor
    throw;
  }
  return message;
}

class PointToPoint::Waiter final : public Caller {
 public:
  Waiter(PointToPoint& p2p, const Message& message, Caller& caller) : p2p_(p2p), message_(message), caller_(caller) {}
  void release() override { caller_.release(); }
  bool interrupted() override {
    publish();
    return caller_.interrupted();
  }
  std::string where() override { return caller_.where(); }

  void publish() {
    if (published_.verb != Verb::none) return;
    const std::string site = where();
    if (message_.record.record != nullptr) {
      p2p_.recorder_->set_site(message_.record, p2p_.recorder_->site(site));
      trace::Recorder::set_awaited(*message_.record.record);
    }
    const size_t n = std::min(site.size(), published_.site.size() - 1);
    std::copy_n(site.end() - static_cast<std::ptrdiff_t>(n), n,
                published_.site.begin());  // the end of a path is more specific
    published_.peer = message_.peer;
    published_.tag = message_.tag;
    published_.verb = message_.about.verb;
    publish(published_);
  }
  // Do not call this if the wait has ended the group: the other ranks still read the published wait for their errors.
  void withdraw() {
    if (published_.verb != Verb::none) publish({});
  }

 private:
  void publish(const Waits& waits) {
    const std::lock_guard lock(p2p_.waits_lock_);
    p2p_.shm_.waits(p2p_.shm_.rank()).store(waits);
  }

  PointToPoint& p2p_;
  const Message& message_;
  Caller& caller_;
  Waits published_;
};

// Add the facts about a timeout to an error: which rank waits for which, and the messages that no recv has matched.
void PointToPoint::explain(Error& error, const Message& message, Caller& caller) {
  std::vector<bool> seen(static_cast<size_t>(size_));
  for (int r = rank_; r >= 0 && !seen[static_cast<size_t>(r)];) {
    const Waits waits = far(r) ? shm_.far(r).waits.load() : shm_.waits(shm_.local(r)).load();
    if (waits.verb == Verb::none) break;
    error.waits.push_back({r, waits.peer, waits.verb, waits.tag, waits.site.data()});
    seen[static_cast<size_t>(r)] = true;
    r = waits.peer;
  }
  if (message.about.verb != Verb::recv) return;
  const auto lock = lock_releasing(lock_, caller);
  for (const auto& [key, keeping] : kept_) {
    const int from = static_cast<int>(key >> 32);
    const Frame& first = keeping.front().frame;
    if (message.peer >= 0 && message.peer != from) continue;
    const Fingerprint about{.verb = Verb::send, .dtype = first.dtype, .count = first.count};
    error.unasked.push_back({from, first.tag, about, keeping.size()});
  }
}

void PointToPoint::wait(const std::shared_ptr<Message>& message, Caller& caller, int64_t timeout_ns) {
  if (!message->done.load(std::memory_order_acquire)) {  // pairs with the store in finish: `error` is visible below
    Waiter waiter(*this, *message, caller);
    Patience patience{.caller = waiter,
                      .timeout_ns = timeout_ns >= 0 ? timeout_ns : timeout_ns_.load(std::memory_order_relaxed),
                      .polling = polling_,
                      .final = timeout_ns < 0};
    const Failure about{.reporter = rank_, .fingerprint = message->about};
    try {
      // seq_cst: pairs with Request::finish and Shm::ring. A thread that sleeps here has counted itself before.
      const auto missing = [&] {
        if (message->done.load()) return -1;
        const int from = message->peer;
        return from < 0 ? Shm::kAnyRank : from;
      };
      shm_.wait(
          shm_.bell(shm_.rank()), patience, about,
          [&] {
            move(caller, message->done);
            return missing();
          },
          [&] {
            move_rest(caller, message->done);
            return missing();
          });
    } catch (Error& error) {
      if (error.failure.kind == Kind::timeout) {
        waiter.publish();
        explain(error, *message, caller);
        if (!shm_.condemned()) waiter.withdraw();
        if (!patience.final) {
          if (message->record.record != nullptr) trace::Recorder::clear_awaited(*message->record.record);
          throw;
        }
      }
      // The group has ended. Owners may free their tensors when this throws, so no message may use them afterwards.
      const auto lock = lock_releasing(lock_, caller);
      fail_all(error.signalled ? std::make_exception_ptr(Error(error.failure)) : std::current_exception());
      throw;
    } catch (const std::exception&) {
      const auto lock = lock_releasing(lock_, caller);
      fail_all(std::current_exception());
      throw;
    }
    waiter.withdraw();
    Shm::ring(shm_.bell(shm_.rank()));  // another waiting thread must now move the remaining messages
  }
  if (message->error == nullptr) return;
  try {
    std::rethrow_exception(message->error);
  } catch (const Error& error) {
    // If another thread detected the timeout, its error has no facts about this message yet.
    if (error.failure.kind != Kind::timeout || !error.waits.empty()) throw;
    Error explained = error;
    Waiter(*this, *message, caller).publish();
    explain(explained, *message, caller);
    throw explained;
  }
}

// Move all pending messages until `enough` is set or no data can be moved. Returns after kSliceNs at the latest, so
// that the caller can check for failures and signals.
void PointToPoint::move(Caller& caller, const std::atomic<bool>& enough) {
  for (int64_t began = 0; !enough.load(std::memory_order_acquire);) {
    {
      const std::unique_lock lock(lock_, std::try_to_lock);
      // Another thread holds the lock. It moves all messages, and rings the bell when one is done.
      if (!lock.owns_lock() || !progress(caller)) return;
    }
    sys::yield();  // lets a thread that waits for the lock take it
    const int64_t now = sys::now_ns();
    if (began == 0) began = now;
    if (now - began > kSliceNs) return Shm::ring(shm_.bell(shm_.rank()));  // data remains: prevent the caller's sleep
  }
}

// Move all pending messages, after waiting for any other moving thread. A rank that has written its last message and
// has left the group is not lost. A thread that finds the rank gone must therefore first read this message, even if
// another thread is reading it. Returns the lock.
std::unique_lock<std::mutex> PointToPoint::move_rest(Caller& caller, const std::atomic<bool>& enough) {
  auto lock = lock_releasing(lock_, caller);
  while (!enough.load(std::memory_order_acquire) && progress(caller)) {
  }
  return lock;
}

void PointToPoint::in_background(Caller& caller) {
  const auto lock = lock_releasing(lock_, caller);
  rouse();
}

void PointToPoint::rouse() {
  if (stopping_ || idle()) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  posted_.notify_one();
}

void PointToPoint::run() {
  sys::leave_signals();
  Caller no_caller;
  for (;;) {
    {
      std::unique_lock lock(lock_);
      posted_.wait(lock, [this] { return stopping_ || !idle(); });
      if (stopping_) return;
    }
    Patience patience{.caller = no_caller,
                      .timeout_ns = timeout_ns_.load(std::memory_order_relaxed),
                      .polling = progress_polling_,
                      .final = false};
    try {
      shm_.wait(
          shm_.bell(shm_.rank()), patience, Failure{.reporter = rank_},
          [&] {
            move(no_caller, stopping_);
            if (stopping_) return -1;
            const std::unique_lock lock(lock_, std::try_to_lock);
            if (!lock.owns_lock()) return Shm::kAnyRank;
            return idle() ? -1 : awaited();
          },
          [&] {
            const auto lock = move_rest(no_caller, stopping_);
            return stopping_ || idle() ? -1 : awaited();
          });
    } catch (const Error& error) {
      // Each waiting thread checks its own deadline, so a timeout of the progress thread has no effect.
      if (error.failure.kind == Kind::timeout && !shm_.condemned()) continue;
      const std::lock_guard lock(lock_);
      fail_all(std::current_exception());
    } catch (...) {
      const std::lock_guard lock(lock_);
      fail_all(std::current_exception());
    }
  }
}

void PointToPoint::close() {
  {
    const std::lock_guard lock(lock_);
    stopping_ = true;
    posted_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(lock_);
  try {
    shm_.check_verdict();
  } catch (const Error&) {  // pending messages report the failure of the group, not the close
    return fail_all(std::current_exception());
  }
  const Failure failure{.kind = Kind::closed, .peer = rank_, .reporter = rank_};
  fail_all(std::make_exception_ptr(Error(failure)));
}

int PointToPoint::awaited() const {
  for (int r = 0; r < size_; r++) {
    const Peer& p = peers_[static_cast<size_t>(r)];
    if (busy(p) || !p.offered.empty() || !p.accepted.empty() || p.in.message != nullptr || p.wanted > 0) return r;
  }
  return Shm::kAnyRank;
}

void PointToPoint::finish(Message& message, std::exception_ptr error) {
  messages_--;
  if (message.record.record != nullptr) {
    recorder_->end(message.record, sys::now_ns(), 0, -1, error ? trace::kFailed : uint8_t{0});
  }
  message.finish(std::move(error));
  Shm::ring(shm_.bell(shm_.rank()));  // another thread of this process may wait for the message
}

void PointToPoint::fail_all(const std::exception_ptr& error) {
  const auto fail = [&](Messages& messages) {
    for (const auto& message : messages) finish(*message, error);
    messages.clear();
  };
  for (Peer& p : peers_) {
    for (Messages* messages : {&p.sends, &p.bodies, &p.lent, &p.out.message}) {
      // The message of an offer that is being written is also in `offered`, and must not be finished twice.
      if (messages != &p.out.message || p.out.frame.kind != Frame::Kind::offer) fail(*messages);
    }
    for (const auto& [number, message] : p.offered) finish(*message, error);
    p.offered.clear();
    p.small.clear();
    p.out = {};
    p.answers.clear();
    for (const auto& [number, message] : p.accepted) finish(*message, error);
    p.accepted.clear();
    if (p.in.message != nullptr) {
      finish(*p.in.message, error);
      p.in.message = nullptr;
      p.in.target = nullptr;
    }
    p.in.dropped = false;
    p.wanted = 0;
  }
  for (auto& [key, messages] : recvs_) fail(messages);
  recvs_.clear();
  waiting_ = 0;
  answers_ = 0;
  drops_ = 0;
}

bool PointToPoint::progress(Caller& caller) {
  Turn turn{caller};
  bool more = false;
  for (int r = 0; r < size_; r++) {
    if (r == rank_) continue;
    more = pull(r, turn) || more;
    more = push(r, turn) || more;
  }
  return more;
}

// --- sending ---

bool PointToPoint::busy(const Peer& peer) {
  return peer.out.nbytes > 0 || !peer.answers.empty() || !peer.bodies.empty() || !peer.sends.empty();
}

// Return the remaining credit towards a rank, in bytes.
uint64_t PointToPoint::credit(int peer) {
  // seq_cst: pairs with release() and Shm::ring. A rank that finds no credit and sleeps is woken when credit returns.
  const uint64_t returned =
      far(peer) ? at(peer).returned
                : shm_.pipe_control(shm_.rank(), shm_.local(peer)).released.load(std::memory_order_seq_cst);
  return eager_ - (at(peer).used - returned);
}

// Return whether there is enough credit for the first waiting offer.
bool PointToPoint::may_follow(int peer) {
  const Peer& p = at(peer);
  if (p.small.empty()) return false;
  const Buffer& buffer = p.offered.at(*p.small.begin())->buffer;
  return cost({.count = buffer.count, .dtype = buffer.dtype}) <= credit(peer);
}

// Fill `out` with the next frame if it is empty. Returns whether there is a frame to write. Answers precede bodies, and
// bodies precede sends.
bool PointToPoint::next(int peer) {
  Peer& p = at(peer);
  if (p.out.nbytes > 0) return true;
  if (!p.answers.empty()) {
    p.out.frame = p.answers.front();
    p.out.nbytes = sizeof(Frame);
    p.answers.pop_front();
    return true;
  }
  const bool late = p.bodies.empty() && may_follow(peer);
  if (late) {
    const auto it = p.offered.find(*p.small.begin());
    it->second->number = it->first;
    p.bodies.push_back(it->second);
    p.offered.erase(it);
    p.small.erase(p.small.begin());
  }
  const bool body = !p.bodies.empty();
  Messages& queue = body ? p.bodies : p.sends;
  if (queue.empty()) return false;
  const Message& message = *queue.front();
  const size_t payload = message.buffer.nbytes();
  Frame frame{.count = message.buffer.count,
              .number = message.number,
              .tag = message.tag,
              .dtype = message.buffer.dtype,
              .kind = late   ? Frame::Kind::late
                      : body ? Frame::Kind::body
                             : Frame::Kind::message,
              .lent = static_cast<uint8_t>(far(peer) && net_->lends() && payload >= kLent ? 1 : 0)};
  if (!body && cost(frame) > credit(peer)) {
    frame.kind = Frame::Kind::offer;
    frame.lent = 0;
    p.offered.emplace(p.offers, queue.front());
    if (cost(frame) <= eager_) p.small.insert(p.offers);
    p.offers++;
  } else if (!body || late) {
    p.used += cost(frame);
  }
  p.out.frame = frame;
  p.out.nbytes = sizeof(Frame) + (frame.kind == Frame::Kind::offer ? 0 : payload);
  p.out.message.splice(p.out.message.end(), queue, queue.begin());
  return true;
}

// Handle the end of `out`: the whole frame is in the stream.
void PointToPoint::written(int peer) {
  Peer& p = at(peer);
  Outgoing out = std::exchange(p.out, Outgoing{});
  if (out.message.empty()) {
    answers_--;
  } else if (out.frame.lent != 0) {
    p.lent.splice(p.lent.end(), out.message);
  } else if (out.frame.kind != Frame::Kind::offer) {
    finish(*out.message.front());
  }
}

// Write to a peer. Returns true if more data can be moved than one turn moves.
bool PointToPoint::push(int peer, Turn& turn) {
  Peer& p = at(peer);
  if (!busy(p) && p.lent.empty() && p.small.empty()) return false;
  bool more = false;
  try {
    more = far(peer) ? push_far(peer, turn) : push_near(peer, turn);
  } catch (const std::bad_alloc&) {
    return false;  // no memory for the entry of an offer: a later turn tries again
  }
  // A rank that has received its message may make no further call. The progress thread must then write the answers.
  if (!p.answers.empty() || (p.out.nbytes > 0 && p.out.message.empty())) rouse();
  return more;
}

bool PointToPoint::push_near(int peer, Turn& turn) {
  Outgoing& out = at(peer).out;
  PipeControl& control = shm_.pipe_control(shm_.rank(), shm_.local(peer));
  std::byte* pipe = shm_.pipe(shm_.rank(), shm_.local(peer));
  const size_t capacity = shm_.sizes().pipe;
  uint64_t written = control.written.load(std::memory_order_relaxed);  // only this rank writes it, with lock_
  for (size_t moved = 0; next(peer);) {
    if (moved >= kTurn) return true;
    size_t burst = 0;
    while (out.moved < out.nbytes && burst < burst_bytes(capacity)) {
      const size_t space = capacity - (written - control.read.load(std::memory_order_seq_cst));
      const bool header = out.moved < sizeof(Frame);
      const auto* from = header ? reinterpret_cast<const std::byte*>(&out.frame) + out.moved
                                : out.message.front()->buffer.bytes() + (out.moved - sizeof(Frame));
      const size_t left = (header ? sizeof(Frame) : out.nbytes) - out.moved;
      const size_t n = std::min({left, space, capacity - written % capacity, burst_bytes(capacity)});
      if (n == 0) break;
      turn.moves(n);
      copier_.copy(pipe + written % capacity, from, n);
      out.moved += n;
      written += n;
      burst += n;
    }
    if (burst == 0) return false;  // the pipe is full
    moved += burst;
    // Publishes the burst. seq_cst, as the load of `read` above: pairs with Shm::ring, so that no sleeper is missed.
    control.written.store(written, std::memory_order_seq_cst);
    Shm::ring(bell_of(peer));
    if (out.moved == out.nbytes) this->written(peer);
  }
  return false;
}

bool PointToPoint::push_far(int peer, Turn& turn) {
  Stream& stream = net_->message_stream(peer);
  if (!stream) {
    net_->need_message_stream(peer);  // a later turn continues when the stream is connected
    return false;
  }
  Outgoing& out = at(peer).out;
  for (size_t moved = 0; next(peer);) {
    if (moved >= kTurn) return true;
    const size_t header = std::min(out.moved, sizeof(Frame));
    const size_t payload = out.moved - header;
    const size_t burst = std::min(out.nbytes - sizeof(Frame) - payload, kFarBurst);
    const std::byte* from = burst > 0 ? out.message.front()->buffer.bytes() + payload : nullptr;
    const bool lent = out.frame.lent != 0;
    size_t taken = 0;
    turn.moves(burst);
    if (lent && header == sizeof(Frame)) {
      taken = stream.lend(from, burst);
    } else {
      std::array<iovec, 2> parts{{{reinterpret_cast<std::byte*>(&out.frame) + header, sizeof(Frame) - header},
                                  {const_cast<std::byte*>(from), lent ? 0 : burst}}};
      taken = stream.put(parts.data(), parts.size());
    }
    out.moved += taken;
    moved += taken;
    if (out.moved == out.nbytes) {
      written(peer);
    } else if (taken == 0 || stream.full()) {
      return false;
    }
  }
  stream.drain();
  return false;
}

// --- receiving ---

// Read from a peer. Returns true if more data can be moved than one turn moves.
bool PointToPoint::pull(int peer, Turn& turn) { return far(peer) ? pull_far(peer, turn) : pull_near(peer, turn); }

bool PointToPoint::pull_near(int peer, Turn& turn) {
  PipeControl& control = shm_.pipe_control(shm_.local(peer), shm_.rank());
  const std::byte* pipe = shm_.pipe(shm_.local(peer), shm_.rank());
  const size_t capacity = shm_.sizes().pipe;
  Incoming& in = at(peer).in;
  uint64_t read = control.read.load(std::memory_order_relaxed);  // only this rank writes it, with lock_
  for (size_t moved = 0;;) {
    if (in.header == sizeof(Frame)) {
      if (!in.placed && !place(peer)) return false;
      if (in.payload == in.nbytes) complete(peer);
    }
    const auto there = static_cast<size_t>(control.written.load(std::memory_order_seq_cst) - read);
    if (there == 0) return false;
    if (moved >= kTurn) return true;
    const bool header = in.header < sizeof(Frame);
    const size_t left = header ? sizeof(Frame) - in.header : in.nbytes - in.payload;
    const size_t n = std::min({left, there, capacity - static_cast<size_t>(read % capacity), burst_bytes(capacity)});
    const std::byte* from = pipe + read % capacity;
    turn.moves(n);
    if (header) {
      std::memcpy(reinterpret_cast<std::byte*>(&in.frame) + in.header, from, n);
      in.header += n;
    } else {
      if (in.target != nullptr) std::memcpy(in.target + in.payload, from, n);
      in.payload += n;
    }
    moved += n;
    read += n;
    // The sender may overwrite these bytes. seq_cst, as the load of `written` above: pairs with Shm::ring.
    control.read.store(read, std::memory_order_seq_cst);
    Shm::ring(bell_of(peer));
  }
}

bool PointToPoint::pull_far(int peer, Turn& turn) {
  Stream& stream = net_->message_stream(peer);
  Incoming& in = at(peer).in;
  std::array<std::byte, 16 << 10> dropped;
  for (size_t moved = 0;;) {
    if (in.header < sizeof(Frame)) {
      const size_t n = stream.get(reinterpret_cast<std::byte*>(&in.frame) + in.header, sizeof(Frame) - in.header);
      if (n == 0) return false;
      in.header += n;
      if (in.header < sizeof(Frame)) continue;
    }
    if (!in.placed && !place(peer)) return false;
    if (const size_t left = in.nbytes - in.payload; left > 0) {
      if (moved >= kTurn) return true;
      const size_t most = std::min(left, in.target != nullptr ? kFarBurst : dropped.size());
      turn.moves(most);
      const size_t n = stream.get(in.target != nullptr ? in.target + in.payload : dropped.data(), most);
      if (n == 0) return false;
      in.payload += n;
      moved += n;
    }
    if (in.payload == in.nbytes) complete(peer);
  }
}

// Process a complete frame, and choose the destination of its payload. Returns false if there is no memory for it.
bool PointToPoint::place(int peer) {
  Peer& p = at(peer);
  Incoming& in = p.in;
  try {
    if (in.frame.lent != 0 && in.receipt.empty()) in.receipt.push_back({.kind = Frame::Kind::receipt});
    switch (in.frame.kind) {
      case Frame::Kind::message:
      case Frame::Kind::offer:
        arrive(peer);
        break;
      case Frame::Kind::accept:
      case Frame::Kind::refuse:
        if (const auto it = p.offered.find(in.frame.number);
            it != p.offered.end()) {  // otherwise it has been sent on returned credit, or has failed
          if (in.frame.kind == Frame::Kind::accept) {
            it->second->number = it->first;
            p.bodies.push_back(it->second);
          } else {
            finish(*it->second);
          }
          p.small.erase(it->first);
          p.offered.erase(it);
        }
        break;
      case Frame::Kind::body:
      case Frame::Kind::late:
        arrive_late(peer);
        break;
      case Frame::Kind::credit:
        p.returned += in.frame.number;
        break;
      case Frame::Kind::receipt:
        if (p.lent.empty()) break;  // fail_all has removed the messages
        finish(*p.lent.front());
        p.lent.pop_front();
        break;
    }
  } catch (const std::bad_alloc&) {
    out_of_memory(peer);
    return false;
  }
  in.placed = true;
  if (in.nbytes > 0 && in.target == nullptr) drop(peer);
  return true;
}

// Drop the payload of the current frame. Its sender waits until all of it has been read, and this rank may make no
// further call. The progress thread must therefore read it.
void PointToPoint::drop(int peer) {
  at(peer).in.target = nullptr;
  at(peer).in.dropped = true;
  drops_++;
  rouse();
}

// Handle the end of a frame: its whole payload has been read.
void PointToPoint::complete(int peer) {
  Peer& p = at(peer);
  Incoming in = std::exchange(p.in, Incoming{});
  answers_ += in.receipt.size();
  p.answers.splice(p.answers.end(), in.receipt);
  if (in.dropped) drops_--;
  if (in.message != nullptr) finish(*in.message);
}

// Match a message or an offer with its recv, or keep it. If this throws, nothing has changed.
void PointToPoint::arrive(int peer) {
  Peer& p = at(peer);
  Incoming& in = p.in;
  const bool offer = in.frame.kind == Frame::Kind::offer;
  const size_t nbytes = offer ? 0 : payload_of(in.frame);
  const auto message = wanted(peer, in.frame.tag);
  if (message == nullptr) {
    std::unique_ptr<std::byte[]> memory(nbytes > 0 ? new std::byte[nbytes] : nullptr);
    Keeping one;
    one.push_back({.frame = in.frame, .arrival = arrivals_, .offer = p.heard_offers, .payload = std::move(memory)});
    const auto [keeping, made] = kept_.try_emplace(key(peer, in.frame.tag));
    try {
      if (offer) p.open.emplace(p.heard_offers, &one.back());
    } catch (...) {
      if (made) kept_.erase(keeping);
      throw;
    }
    in.kept = offer ? nullptr : &one.back();
    in.target = one.back().payload.get();
    keeping->second.splice(keeping->second.end(), one);
    arrivals_++;
    p.kept++;
  } else {
    if (offer) {
      answer(peer, p.heard_offers, fits(in.frame, message->buffer) ? message : nullptr);
    } else {
      release(peer, in.frame);
    }
    take(*message);
    message->peer = peer;
    if (!fits(in.frame, message->buffer)) {
      // The payload is dropped, so that the next message can be read.
      finish(*message, refused(rank_, peer, in.frame, message->about));
    } else if (!offer) {
      in.message = message;
      in.target = message->buffer.bytes();
    }
  }
  in.nbytes = nbytes;
  if (offer) p.heard_offers++;
}

// Choose the destination of the payload of an offer. If this throws, nothing has changed.
void PointToPoint::arrive_late(int peer) {
  Peer& p = at(peer);
  Incoming& in = p.in;
  const bool on_credit = in.frame.kind == Frame::Kind::late;
  const size_t nbytes = payload_of(in.frame);
  if (const auto it = p.open.find(in.frame.number); it != p.open.end()) {
    Kept& kept = *it->second;
    if (nbytes > 0) kept.payload.reset(new std::byte[nbytes]);
    kept.frame.kind = Frame::Kind::message;
    p.open.erase(it);
    in.kept = &kept;
    in.target = kept.payload.get();
  } else {
    if (on_credit) release(peer, in.frame);
    // If there is no accepted recv, the offer was refused or its recv has failed: the payload is dropped.
    if (const auto recv = p.accepted.find(in.frame.number); recv != p.accepted.end()) {
      in.message = std::move(recv->second);
      in.target = in.message->buffer.bytes();
      p.accepted.erase(recv);
    }
  }
  in.nbytes = nbytes;
}

// Return the recv that matches a message with this tag, the one posted first; nullptr: none.
std::shared_ptr<Message> PointToPoint::wanted(int peer, int32_t tag) {
  if (waiting_ == 0) return nullptr;
  std::shared_ptr<Message> found;
  for (const int from : {peer, -1}) {
    const auto it = recvs_.find(key(from, tag));
    if (it == recvs_.end() || it->second.empty()) continue;
    const auto& first = it->second.front();
    if (found == nullptr || first->number < found->number) found = first;
  }
  return found;
}

// Remove a recv from the recvs without a message. It must be the first with its rank and tag.
void PointToPoint::take(Message& message) {
  const int from = message.peer;
  const auto it = recvs_.find(key(from, message.tag));
  it->second.pop_front();
  if (it->second.empty() && recvs_.size() > kQueues) recvs_.erase(it);
  waiting_--;
  if (from >= 0) at(from).wanted--;
}

// Pass a kept message or offer to its recv. If this throws, nothing has changed.
void PointToPoint::give(int peer, Kept& kept, const std::shared_ptr<Message>& message, Turn& turn) {
  Peer& p = at(peer);
  const bool offer = kept.frame.kind == Frame::Kind::offer;
  const bool suits = fits(kept.frame, message->buffer);
  const size_t nbytes = payload_of(kept.frame);
  if (offer) {
    answer(peer, kept.offer, suits ? message : nullptr);
    p.open.erase(kept.offer);
  } else {
    release(peer, kept.frame);
  }
  messages_++;
  message->peer = peer;
  const bool coming = p.in.kept == &kept;
  if (coming) p.in.kept = nullptr;
  if (coming && !suits) drop(peer);
  if (!suits) {
    finish(*message, refused(rank_, peer, kept.frame, message->about));
  } else if (!offer) {
    const size_t there = coming ? p.in.payload : nbytes;
    turn.moves(there);
    if (there > 0) std::memcpy(message->buffer.data, kept.payload.get(), there);
    if (coming) {
      p.in.message = message;
      p.in.target = message->buffer.bytes();
    } else {
      finish(*message);
    }
  }
}

// Accept an offer for a recv, or refuse it (nullptr). If this throws, nothing has changed.
void PointToPoint::answer(int peer, uint64_t offer, const std::shared_ptr<Message>& message) {
  Peer& p = at(peer);
  std::list<Frame> frame{{.number = offer, .kind = message != nullptr ? Frame::Kind::accept : Frame::Kind::refuse}};
  if (message != nullptr) p.accepted.emplace(offer, message);
  p.answers.splice(p.answers.end(), frame);
  answers_++;
}

// Return the credit of a message that has been matched with its recv. If this throws, nothing has changed.
void PointToPoint::release(int peer, const Frame& frame) {
  if (!far(peer)) {
    std::atomic<uint64_t>& released = shm_.pipe_control(shm_.local(peer), shm_.rank()).released;
    // relaxed load: only this rank writes it, with lock_. seq_cst store: pairs with credit() and Shm::ring.
    released.store(released.load(std::memory_order_relaxed) + cost(frame), std::memory_order_seq_cst);
    return Shm::ring(bell_of(peer));
  }
  Peer& p = at(peer);
  // Credit is returned in batches, in order to save frames. A quarter of the credit is the limit, so that a sender with
  // little credit does not wait for a batch.
  const size_t owed = p.owed + cost(frame);
  if (owed < std::min(kCredit, eager_ / 4)) {
    p.owed = owed;
    return;
  }
  p.answers.push_back({.number = owed, .kind = Frame::Kind::credit});
  answers_++;
  p.owed = 0;
}

// Fail the recvs that later messages in this stream may match. They cannot complete while there is no memory for the
// current message.
void PointToPoint::out_of_memory(int peer) {
  const auto error = std::make_exception_ptr(OutOfMemory(peer, at(peer).in.frame));
  for (auto it = recvs_.begin(); it != recvs_.end();) {
    const int from = it->second.empty() ? peer : it->second.front()->peer.load();
    if (from >= 0 && from != peer) {
      it++;
      continue;
    }
    for (const auto& message : it->second) finish(*message, error);
    waiting_ -= it->second.size();
    if (from >= 0) at(from).wanted -= it->second.size();
    it = recvs_.erase(it);
  }
}

}  // namespace allranks
