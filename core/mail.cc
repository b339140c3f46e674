#include "mail.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace allranks {

namespace {

std::exception_ptr refused(int rank, int sender, const Fingerprint& sent, const Fingerprint& wanted) {
  const Failure failure{.kind = Kind::mismatch, .peer = sender, .reporter = rank, .fingerprint = wanted};
  return std::make_exception_ptr(Error(failure, {sent, wanted}));
}

bool fits(const Frame& frame, const Buffer& buffer) {
  return frame.fingerprint.dtype == buffer.dtype && frame.fingerprint.count == buffer.count;
}

// What is copied before the other side hears of it: so little that it copies out what this side has copied
// in, while this side goes on.
size_t burst_bytes(size_t pipe) { return std::min<size_t>(pipe / 4, 64 << 10); }

constexpr size_t kFarBurst = 1 << 20;  // the same, between hosts
constexpr size_t kLent = 512 << 10;    // bytes of a message that is worth a receipt

size_t payload_of(const Frame& frame) { return frame.fingerprint.count * size_of(frame.fingerprint.dtype); }

}  // namespace

Mail::Mail(Shm& shm, Net* net, int64_t timeout_ns, int64_t spin_ns, int64_t spin_progress_ns)
    : shm_(shm),
      net_(net),
      rank_(shm.number(shm.rank())),
      size_(shm.ranks()),
      timeout_ns_(timeout_ns),
      spin_ns_(spin_ns),
      spin_progress_ns_(spin_progress_ns),
      sends_(static_cast<size_t>(size_)),
      lent_(static_cast<size_t>(size_)),
      incoming_(static_cast<size_t>(size_)),
      unexpected_(static_cast<size_t>(size_)) {}

Mail::~Mail() {
  if (thread_.joinable()) thread_.join();
}

void Mail::check_send(int to) {
  shm_.check_verdict();
  if (far(to) ? net_->presence(to) == Presence::left : shm_.has_left(shm_.local(to))) {
    throw Error(Failure{.kind = Kind::left, .peer = to, .reporter = rank_, .fingerprint = {.verb = Verb::send}});
  }
}

bool Mail::send_at_once(Buffer buffer, int to, int32_t tag) {
  if (far(to)) return false;
  const std::unique_lock lock(lock_, std::try_to_lock);
  const auto peer = static_cast<size_t>(to);
  if (!lock.owns_lock() || !sends_[peer].empty()) return false;
  check_send(to);
  PipeControl& control = shm_.pipe_control(shm_.rank(), shm_.local(to));
  const size_t capacity = shm_.sizes().pipe;
  const uint64_t written = control.written.load(std::memory_order_relaxed);
  const size_t space = capacity - (written - control.read.load(std::memory_order_seq_cst));
  const size_t n = buffer.nbytes();
  if (sizeof(Frame) + n > std::min(space, burst_bytes(capacity))) return false;
  const Frame frame{.fingerprint = {.verb = Verb::send, .dtype = buffer.dtype, .count = buffer.count}, .tag = tag};
  std::byte* pipe = shm_.pipe(shm_.rank(), shm_.local(to));
  const auto put = [&](uint64_t at, const void* from, size_t bytes) {
    const size_t first = std::min(bytes, capacity - static_cast<size_t>(at % capacity));
    if (bytes == 0) return;
    copier_.copy(pipe + at % capacity, static_cast<const std::byte*>(from), first);
    copier_.copy(pipe, static_cast<const std::byte*>(from) + first, bytes - first);
  };
  put(written, &frame, sizeof frame);
  put(written + sizeof frame, buffer.data, n);
  control.written.store(written + sizeof frame + n, std::memory_order_seq_cst);
  Shm::ring(bell_of(to));
  return true;
}

bool Mail::recv_at_once(Buffer buffer, int from, int32_t tag) {
  if (far(from)) return false;
  PipeControl& control = shm_.pipe_control(shm_.local(from), shm_.rank());
  const size_t n = buffer.nbytes();
  const auto there = [&] {
    return control.written.load(std::memory_order_seq_cst) - control.read.load(std::memory_order_relaxed) >=
           sizeof(Frame) + n;
  };
  if (sizeof(Frame) + n > shm_.sizes().pipe / 4) return false;
  if (spin_ns_ > 0 && !there()) {
    const int64_t began = sys::now_ns();
    do {
      for (int i = 0; i < 8 && !there(); i++) sys::pause();
    } while (!there() && sys::now_ns() - began < spin_ns_);
  }
  const std::unique_lock lock(lock_, std::try_to_lock);
  const auto peer = static_cast<size_t>(from);
  if (!lock.owns_lock() || !there() || !recvs_.empty() || !unexpected_[peer].empty() || incoming_[peer].header > 0) {
    return false;
  }
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
  if (frame.tag != tag || !fits(frame, buffer)) return false;
  get(read + sizeof frame, buffer.data, n);
  control.read.store(read + sizeof frame + n, std::memory_order_seq_cst);
  Shm::ring(bell_of(from));
  return true;
}

std::shared_ptr<Parcel> Mail::post_send(Buffer buffer, int to, int32_t tag, Caller& caller) {
  const auto lock = lock_politely(lock_, caller);
  check_send(to);
  const auto peer = static_cast<size_t>(to);
  auto parcel = std::make_shared<Parcel>();
  parcel->buffer = buffer;
  parcel->peer = to;
  parcel->tag = tag;
  parcel->frame = {.fingerprint = {.verb = Verb::send, .dtype = buffer.dtype, .count = buffer.count}, .tag = tag};
  parcel->frame.lent = far(to) && buffer.nbytes() >= kLent ? 1 : 0;
  parcel->about = parcel->frame.fingerprint;
  sends_[peer].push_back(parcel);
  push(to);
  return parcel;
}

std::shared_ptr<Parcel> Mail::post_recv(Buffer buffer, int from, int32_t tag, Caller& caller) {
  const auto lock = lock_politely(lock_, caller);
  shm_.check_verdict();
  auto parcel = std::make_shared<Parcel>();
  parcel->buffer = buffer;
  parcel->peer = from;
  parcel->tag = tag;
  parcel->about = {.verb = Verb::recv, .dtype = buffer.dtype, .count = buffer.count};
  const int first = from < 0 ? 0 : from;
  const int last = from < 0 ? size_ - 1 : from;
  for (int r = first; r <= last; r++) {
    auto& kept = unexpected_[static_cast<size_t>(r)];
    const auto it = std::find_if(kept.begin(), kept.end(),
                                 [tag](const Unexpected& u) { return u.frame.tag == tag && u.claimed == nullptr; });
    if (it == kept.end()) continue;
    parcel->peer = r;
    if (!it->complete) {
      it->claimed = parcel;
      claimed_++;
    } else {
      if (!fits(it->frame, buffer)) {
        finish(*parcel, refused(rank_, r, it->frame.fingerprint, parcel->about));
      } else {
        if (!it->payload.empty()) std::memcpy(buffer.data, it->payload.data(), it->payload.size());
        finish(*parcel);
      }
      kept.erase(it);
    }
    return parcel;
  }
  recvs_.push_back(parcel);
  progress();
  return parcel;
}

void Mail::wait(const std::shared_ptr<Parcel>& parcel, Caller& caller, int64_t timeout_ns) {
  if (!parcel->done.load(std::memory_order_acquire)) {
    Patience patience{.caller = caller,
                      .timeout_ns = timeout_ns >= 0 ? timeout_ns : timeout_ns_,
                      .spin_ns = spin_ns_,
                      .final = timeout_ns < 0};
    const Failure about{.reporter = rank_, .fingerprint = parcel->about};
    try {
      shm_.wait(shm_.bell(shm_.rank()), patience, about, [&] {
        if (parcel->done.load(std::memory_order_acquire)) return -1;
        // Held by a thread that moves everything, this parcel too, and rings when it is done.
        if (std::unique_lock lock(lock_, std::try_to_lock); lock.owns_lock()) progress();
        if (parcel->done.load(std::memory_order_acquire)) return -1;
        const int from = parcel->peer;
        return from < 0 ? Shm::kAnyRank : from;
      });
    } catch (const Error& error) {
      if (error.failure.kind == Kind::timeout && !patience.final) throw;
      // The group has ended; tensors may vanish as soon as their owners hear of it.
      const auto lock = lock_politely(lock_, caller);
      fail_all(error.signalled ? std::make_exception_ptr(Error(error.failure)) : std::current_exception());
      throw;
    }
  }
  if (parcel->error) std::rethrow_exception(parcel->error);
}

void Mail::in_background() {
  const std::lock_guard lock(lock_);
  rouse();
}

void Mail::rouse() {
  if (stopping_ || idle()) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  posted_.notify_one();
}

void Mail::run() {
  sys::leave_signals();
  Caller nobody;
  for (;;) {
    {
      std::unique_lock lock(lock_);
      posted_.wait(lock, [this] { return stopping_ || !idle(); });
      if (stopping_) return;
    }
    Patience patience{.caller = nobody, .timeout_ns = timeout_ns_, .spin_ns = spin_progress_ns_, .final = false};
    try {
      shm_.wait(shm_.bell(shm_.rank()), patience, Failure{.reporter = rank_}, [&] {
        if (stopping_) return -1;
        const std::unique_lock lock(lock_, std::try_to_lock);
        if (!lock.owns_lock()) return Shm::kAnyRank;
        progress();
        return idle() ? -1 : awaited();
      });
    } catch (const Error& error) {
      // Whoever waits for a parcel minds its deadline.
      if (error.failure.kind == Kind::timeout && !shm_.condemned()) continue;
      const std::lock_guard lock(lock_);
      fail_all(std::current_exception());
    } catch (...) {
      const std::lock_guard lock(lock_);
      fail_all(std::current_exception());
    }
  }
}

void Mail::close() {
  {
    const std::lock_guard lock(lock_);
    stopping_ = true;
    posted_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(lock_);
  const Failure failure{.kind = Kind::closed, .peer = rank_, .reporter = rank_};
  fail_all(std::make_exception_ptr(Error(failure)));
}

void Mail::abandon() {
  if (thread_.joinable()) thread_.detach();  // it runs in the parent only
  new (&posted_) std::condition_variable;    // as Comm's
}

bool Mail::idle() const {
  const auto none = [](const auto& queues) {
    return std::all_of(queues.begin(), queues.end(), [](const auto& queue) { return queue.empty(); });
  };
  return recvs_.empty() && claimed_ == 0 && none(sends_) && none(lent_);
}

int Mail::awaited() const {
  for (size_t r = 0; r < sends_.size(); r++) {
    if (!sends_[r].empty() || !lent_[r].empty()) return static_cast<int>(r);
  }
  for (const auto& parcel : recvs_) {
    if (const int from = parcel->peer; from >= 0) return from;
  }
  return Shm::kAnyRank;
}

void Mail::finish(Parcel& parcel, std::exception_ptr error) {
  parcel.finish(std::move(error));
  Shm::ring(shm_.bell(shm_.rank()));  // another thread of this process may wait for it
}

void Mail::fail_all(const std::exception_ptr& error) {
  const auto fail = [&](const std::shared_ptr<Parcel>& parcel) {
    if (parcel != nullptr && !parcel->done.load(std::memory_order_relaxed)) finish(*parcel, error);
  };
  for (auto* queues : {&sends_, &lent_}) {
    for (auto& queue : *queues) {
      for (const auto& parcel : queue) fail(parcel);
      queue.clear();
    }
  }
  for (const auto& parcel : recvs_) fail(parcel);
  recvs_.clear();
  for (auto& in : incoming_) {
    fail(in.parcel);
    if (in.parcel != nullptr) in.target = nullptr;
    in.parcel = nullptr;
  }
  for (auto& kept : unexpected_) {
    for (auto& message : kept) {
      fail(message.claimed);
      message.claimed = nullptr;
    }
  }
  claimed_ = 0;
}

void Mail::progress() {
  for (int r = 0; r < size_; r++) {
    if (r == rank_) continue;
    if (!sends_[static_cast<size_t>(r)].empty() || !lent_[static_cast<size_t>(r)].empty()) push(r);
    far(r) ? pull_far(r) : pull(r);
  }
}

void Mail::push(int peer) {
  if (far(peer)) return push_far(peer);
  auto& queue = sends_[static_cast<size_t>(peer)];
  PipeControl& control = shm_.pipe_control(shm_.rank(), shm_.local(peer));
  std::byte* pipe = shm_.pipe(shm_.rank(), shm_.local(peer));
  const size_t capacity = shm_.sizes().pipe;
  uint64_t written = control.written.load(std::memory_order_relaxed);
  while (!queue.empty()) {
    Parcel& parcel = *queue.front();
    const size_t total = sizeof(Frame) + parcel.buffer.nbytes();
    for (size_t burst = 0; parcel.moved < total && burst < burst_bytes(capacity);) {
      const size_t space = capacity - (written - control.read.load(std::memory_order_seq_cst));
      const bool header = parcel.moved < sizeof(Frame);
      const auto* from = header ? reinterpret_cast<const std::byte*>(&parcel.frame) + parcel.moved
                                : parcel.buffer.bytes() + (parcel.moved - sizeof(Frame));
      const size_t left = (header ? sizeof(Frame) : total) - parcel.moved;
      const size_t n = std::min({left, space, capacity - written % capacity, burst_bytes(capacity)});
      if (n == 0) break;
      copier_.copy(pipe + written % capacity, from, n);
      parcel.moved += n;
      written += n;
      burst += n;
    }
    const bool all = parcel.moved == total;
    const bool some = written != control.written.load(std::memory_order_relaxed);
    if (some) {
      control.written.store(written, std::memory_order_seq_cst);
      Shm::ring(bell_of(peer));
    }
    if (all) {
      const auto done = std::move(queue.front());
      queue.pop_front();
      finish(*done);
    } else if (!some) {
      return;  // the pipe is full
    }
  }
}

void Mail::pull(int peer) {
  PipeControl& control = shm_.pipe_control(shm_.local(peer), shm_.rank());
  const std::byte* pipe = shm_.pipe(shm_.local(peer), shm_.rank());
  const size_t capacity = shm_.sizes().pipe;
  Incoming& in = incoming_[static_cast<size_t>(peer)];
  uint64_t read = control.read.load(std::memory_order_relaxed);
  for (;;) {
    const auto there = static_cast<size_t>(control.written.load(std::memory_order_seq_cst) - read);
    if (there == 0) return;
    const bool header = in.header < sizeof(Frame);
    const size_t left = header ? sizeof(Frame) - in.header : payload_of(in.frame) - in.payload;
    const size_t n = std::min({left, there, capacity - static_cast<size_t>(read % capacity), burst_bytes(capacity)});
    const std::byte* from = pipe + read % capacity;
    if (header) {
      std::memcpy(reinterpret_cast<std::byte*>(&in.frame) + in.header, from, n);
      in.header += n;
    } else {
      if (in.target != nullptr) std::memcpy(in.target + in.payload, from, n);
      in.payload += n;
    }
    read += n;
    control.read.store(read, std::memory_order_seq_cst);
    Shm::ring(bell_of(peer));
    if (header && in.header == sizeof(Frame)) dispatch(peer);
    if (in.header == sizeof(Frame) && in.payload == payload_of(in.frame)) complete(peer);
  }
}

void Mail::push_far(int peer) {
  auto& queue = sends_[static_cast<size_t>(peer)];
  Stream& post = net_->post(peer);
  if (!post) return net_->need_post(peer);  // and comes back when it is there
  while (!queue.empty()) {
    Parcel& parcel = *queue.front();
    const bool lent = parcel.frame.lent != 0;
    const size_t total = sizeof(Frame) + parcel.buffer.nbytes();
    const size_t header = std::min(parcel.moved, sizeof(Frame));
    const size_t payload = parcel.moved - header;
    const size_t burst = std::min(parcel.buffer.nbytes() - payload, kFarBurst);
    size_t taken = 0;
    if (lent && header == sizeof(Frame)) {
      taken = post.lend(parcel.buffer.bytes() + payload, burst);
    } else {
      std::array<iovec, 2> parts{{{reinterpret_cast<std::byte*>(&parcel.frame) + header, sizeof(Frame) - header},
                                  {parcel.buffer.bytes() + payload, lent ? 0 : burst}}};
      taken = post.put(parts.data(), parts.size());
    }
    parcel.moved += taken;
    if (parcel.moved == total) {
      const auto sent = std::move(queue.front());
      queue.pop_front();
      if (lent) {
        lent_[static_cast<size_t>(peer)].push_back(sent);
      } else {
        finish(*sent);
      }
    } else if (taken == 0 || post.full()) {
      return;
    }
  }
  post.drain();
}

// Tells the sender that what it has lent has been read.
void Mail::acknowledge(int peer) {
  auto& queue = sends_[static_cast<size_t>(peer)];
  auto receipt = std::make_shared<Parcel>();
  receipt->buffer = {nullptr, 0, DType::u8};
  receipt->peer = peer;
  receipt->frame.fingerprint.verb = Verb::recv;
  // Before what has not begun.
  const bool begun = !queue.empty() && queue.front()->moved > 0;
  queue.insert(queue.begin() + (begun ? 1 : 0), std::move(receipt));
  push(peer);
  if (!queue.empty()) rouse();  // who has received may make no other call
}

void Mail::pull_far(int peer) {
  Stream& post = net_->post(peer);
  Incoming& in = incoming_[static_cast<size_t>(peer)];
  std::vector<std::byte> dropped;
  for (;;) {
    if (in.header < sizeof(Frame)) {
      const size_t n = post.get(reinterpret_cast<std::byte*>(&in.frame) + in.header, sizeof(Frame) - in.header);
      if (n == 0) return;
      in.header += n;
      if (in.header < sizeof(Frame)) continue;
      if (in.frame.fingerprint.verb == Verb::recv) {
        auto& lent = lent_[static_cast<size_t>(peer)];
        in = {};
        if (lent.empty()) continue;  // the group has failed
        const auto read = std::move(lent.front());
        lent.pop_front();
        finish(*read);
        continue;
      }
      dispatch(peer);
    }
    if (const size_t left = payload_of(in.frame) - in.payload; left > 0) {
      const size_t most = std::min(left, kFarBurst);
      if (in.target == nullptr) dropped.resize(most);
      const size_t n = post.get(in.target != nullptr ? in.target + in.payload : dropped.data(), most);
      if (n == 0) return;
      in.payload += n;
    }
    if (in.payload == payload_of(in.frame)) complete(peer);
  }
}

// A frame is there: who has asked for it?
void Mail::dispatch(int peer) {
  Incoming& in = incoming_[static_cast<size_t>(peer)];
  const auto it = std::find_if(recvs_.begin(), recvs_.end(), [&](const std::shared_ptr<Parcel>& parcel) {
    return (parcel->peer < 0 || parcel->peer == peer) && parcel->tag == in.frame.tag;
  });
  if (it == recvs_.end()) {
    Unexpected& kept = unexpected_[static_cast<size_t>(peer)].emplace_back();
    kept.frame = in.frame;
    kept.payload.resize(payload_of(in.frame));
    in.unexpected = &kept;
    in.target = kept.payload.data();
    return;
  }
  const std::shared_ptr<Parcel> parcel = *it;
  recvs_.erase(it);
  parcel->peer = peer;
  if (!fits(in.frame, parcel->buffer)) {
    // Dropped, so that the next message is found.
    finish(*parcel, refused(rank_, peer, in.frame.fingerprint, parcel->about));
    return;
  }
  in.parcel = parcel;
  in.target = parcel->buffer.bytes();
  claimed_++;
}

// All of a message is there.
void Mail::complete(int peer) {
  Incoming in = std::exchange(incoming_[static_cast<size_t>(peer)], Incoming{});
  if (in.frame.lent != 0) acknowledge(peer);
  if (in.parcel != nullptr) {
    claimed_--;
    finish(*in.parcel);
  }
  if (in.unexpected == nullptr) return;
  in.unexpected->complete = true;
  const std::shared_ptr<Parcel> parcel = in.unexpected->claimed;
  if (parcel == nullptr) return;
  claimed_--;
  if (!fits(in.frame, parcel->buffer)) {
    finish(*parcel, refused(rank_, peer, in.frame.fingerprint, parcel->about));
  } else {
    const auto& payload = in.unexpected->payload;
    if (!payload.empty()) std::memcpy(parcel->buffer.data, payload.data(), payload.size());
    finish(*parcel);
  }
  unexpected_[static_cast<size_t>(peer)].remove_if([&](const Unexpected& u) { return &u == in.unexpected; });
}

}  // namespace allranks
