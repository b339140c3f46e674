#include "remote/outbox.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "base/error.h"

namespace allranks {

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint16_t kFree = 0;
constexpr uint16_t kMessage = 1;
constexpr uint16_t kLine = 2;
constexpr uint16_t kEcho = 3;
constexpr size_t kMostFreed = std::numeric_limits<uint16_t>::max();
constexpr size_t kLongestMessage = std::numeric_limits<uint32_t>::max();
// Limits of one system call, so that each worker gets its turn. The number of bytes is approximate: a piece is not
// divided.
constexpr size_t kMostPieces = 64;
constexpr size_t kMostBytes = 1 << 20;
// The largest piece that is copied if the worker's socket is full. If this worker does not read, an uncopied piece
// would keep the whole chunk in memory. The frames for other workers in it may be a hundred times as long.
constexpr size_t kShort = 1 << 10;
constexpr size_t kOwn = 1 << 14;                                 // memory for such copies
constexpr auto kInterruptible = std::chrono::milliseconds(100);  // interval at which a waiting caller checks signals

template <class T>
std::byte* write(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
  return to + sizeof value;
}

template <class T>
std::byte* write(std::byte* to, std::span<const T> values) {
  if (!values.empty()) std::memcpy(to, values.data(), values.size_bytes());
  return to + values.size_bytes();
}

std::byte* write_message(std::byte* to, std::span<const std::byte> head, std::span<const std::byte> payload) {
  to = write(to, kMessage);
  to = write(to, static_cast<uint32_t>(head.size() + payload.size()));
  return write(write(to, head), payload);
}

}  // namespace

// Holds the lock. If the thread must wake, it writes to the bell after it has released the lock, so that the thread
// does not wake only to wait for the lock.
class Outbox::Hold {
 public:
  explicit Hold(Outbox& outbox) : outbox_(outbox) {
    outbox.check();
    lock = std::unique_lock(outbox.lock_);
    if (outbox.closed_) throw std::runtime_error("the outbox is closed");
  }
  Hold(const Hold&) = delete;
  ~Hold() { let_go(); }

  void let_go() {
    if (!lock.owns_lock()) return;  // a child that was forked while the caller waited for room
    const Sleep sleep = outbox_.sleep_;
    const bool ring = sleep != Sleep::none && (outbox_.urgent_ || (outbox_.queued_ && sleep == Sleep::idle));
    if (ring) outbox_.sleep_ = Sleep::none;
    lock.unlock();
    if (ring) eventfd_write(outbox_.bell_.get(), 1);
  }

  std::unique_lock<std::mutex> lock;

 private:
  Outbox& outbox_;
};

Outbox::Outbox(int64_t delay_ns, size_t chunk_bytes, size_t limit_bytes)
    : delay_ns_(delay_ns),
      chunk_bytes_(chunk_bytes),
      limit_bytes_(limit_bytes),
      bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (delay_ns < 0) throw std::invalid_argument("the delay of an outbox cannot be negative");
  if (bell_.get() < 0) throw Error(std::string("eventfd: ") + std::strerror(errno));
  thread_ = std::thread([this] { run(); });
}

void Outbox::check() const {
  if (forks_ != sys::forks())
    throw std::runtime_error("the workers belong to the process from which this process was forked");
}

Outbox::Worker& Outbox::worker(int number) {
  if (number < 0 || static_cast<size_t>(number) >= workers_.size()) {
    throw std::invalid_argument("the outbox has no worker " + std::to_string(number));
  }
  return workers_[static_cast<size_t>(number)];
}

Outbox::Target& Outbox::existing(int number) {
  if (number < 0 || static_cast<size_t>(number) >= targets_.size()) {
    throw std::invalid_argument("the outbox has no target " + std::to_string(number));
  }
  return targets_[static_cast<size_t>(number)];
}

int Outbox::add(int fd) {
  const Hold hold(*this);
  workers_.emplace_back().fd = fd;
  return static_cast<int>(workers_.size()) - 1;
}

void Outbox::replace(int number, int fd) {
  Hold hold(*this);
  Worker& w = worker(number);
  seal();
  open_ = -1;  // so that the next call checks which call site each worker knows: the new process knows none
  drop(w, hold.lock);
  w.fd = fd;
  w.line = -1;
  w.failure = 0;
  w.lost = false;
}

void Outbox::lose(int number) {
  Hold hold(*this);
  Worker& w = worker(number);
  seal();
  drop(w, hold.lock);
}

// Drop a worker's pending bytes. After this function no thread uses its descriptor. So its owner may close it, and the
// kernel may reuse the number for another file.
void Outbox::drop(Worker& w, std::unique_lock<std::mutex>& lock) {
  w.lost = true;
  waiters_++;
  while (w.sending) changed_.wait(lock);
  waiters_--;
  w.queue.clear();
  w.pending = w.bulk = 0;
  w.full = false;
  urgent_ = true;  // wake the thread: it may be polling the descriptor
  changed_.notify_all();
}

int Outbox::target(std::vector<int> workers) {
  const Hold hold(*this);
  if (workers.empty()) throw std::invalid_argument("a target needs at least one worker");
  for (const int number : workers) worker(number);
  std::sort(workers.begin(), workers.end());
  const auto twice = std::adjacent_find(workers.begin(), workers.end());
  if (twice != workers.end()) throw std::invalid_argument("worker " + std::to_string(*twice) + " is listed twice");
  targets_.push_back({.workers = std::move(workers)});
  return static_cast<int>(targets_.size()) - 1;
}

bool Outbox::within(int part, int whole) {
  const Hold hold(*this);
  const auto& inner = existing(part).workers;
  const auto& outer = existing(whole).workers;
  return std::includes(outer.begin(), outer.end(), inner.begin(), inner.end());
}

void Outbox::call(int target, uint32_t line, uint16_t code, std::span<const uint32_t> inputs,
                  std::span<uint32_t> outputs, std::span<const std::byte> values, Caller& caller) {
  if (code < kFirstTemplate) throw std::invalid_argument("no template has the number " + std::to_string(code));
  Hold hold(*this);
  existing(target);
  if (open_ != target || !has_room_) wait_for_room(target, false, hold, caller);
  const bool has_line = open_ == target && line_ == line;
  tell_frees(target);  // before take_id(), so that the call can reuse these ids
  if (!has_line) tell_line(target, line);
  for (uint32_t& id : outputs) id = take_id();
  std::byte* to = extend(target, sizeof code + inputs.size_bytes() + outputs.size_bytes() + values.size());
  to = write(to, code);
  to = write(to, inputs);
  to = write(to, std::span<const uint32_t>(outputs));
  write(to, values);
  calls_++;
}

void Outbox::reserve(int target, std::span<uint32_t> ids) {
  const Hold hold(*this);
  existing(target);
  for (uint32_t& id : ids) id = take_id();
}

void Outbox::free(int target, uint32_t id) noexcept {
  if (forks_ != sys::forks()) return;  // the id belongs to the parent
  // Not a Hold, which throws if the outbox is closed: the program may still delete tensors then.
  bool ring;
  {
    const std::lock_guard lock(lock_);
    live_--;
    auto& frees = targets_[static_cast<size_t>(target)].frees;
    if (frees.empty()) freeing_.push_back(target);
    frees.push_back(id);
    queued_ = true;
    ring = sleep_ == Sleep::idle;
    if (ring) sleep_ = Sleep::none;
  }
  if (ring) eventfd_write(bell_.get(), 1);
}

void Outbox::put(int target, std::span<const std::byte> head, std::span<const std::byte> payload, bool bulk,
                 Caller& caller) {
  const size_t length = head.size() + payload.size();
  if (length > kLongestMessage) {
    throw std::invalid_argument("a message of " + std::to_string(length) + " bytes exceeds the limit of " +
                                std::to_string(kLongestMessage) + " bytes");
  }
  const size_t bytes = sizeof kMessage + sizeof(uint32_t) + length;
  Memory large;  // copied before the lock is taken, so that no other caller waits for the copy
  if (bytes > chunk_bytes_) {
    check();
    if (bytes > kMostBytes) caller.release();
    large.reset(new std::byte[bytes]);
    write_message(large.get(), head, payload);
  }
  Hold hold(*this);
  existing(target);
  bulk = bulk && large;
  wait_for_room(target, bulk, hold, caller);
  tell_frees(target);
  if (!large) {
    write_message(extend(target, bytes), head, payload);
    return;
  }
  seal();
  enqueue(target, {.memory = std::move(large), .begin = 0, .end = bytes, .bulk = bulk});
  urgent_ = true;
}

// Wait until all workers of a target have room. The caller has queued nothing of its call yet, so this may throw.
void Outbox::wait_for_room(int target, bool bulk, Hold& hold, Caller& caller) {
  const auto over = [&](size_t limit) {
    const auto& numbers = targets_[static_cast<size_t>(target)].workers;
    return std::any_of(numbers.begin(), numbers.end(), [&](int number) {
      const Worker& w = workers_[static_cast<size_t>(number)];
      return (bulk ? w.bulk : w.pending - w.bulk) > limit;
    });
  };
  const size_t most = bulk ? kMostBulk : limit_bytes_;
  if (!over(most)) {
    has_room_ = !bulk;
    return;
  }
  sweep();  // frames of other targets must not wait for this call
  urgent_ = true;
  hold.let_go();  // wakes the thread
  caller.release();
  hold.lock.lock();
  // Half of the limit: otherwise the caller would wait again after each frame.
  const auto ready = [&] { return closed_ || !over(most / 2); };
  bool interrupted = false;
  while (!interrupted && !ready()) {
    waiters_++;
    const bool in_time = changed_.wait_for(hold.lock, kInterruptible, ready);
    waiters_--;
    if (in_time) break;
    hold.lock.unlock();
    interrupted = caller.interrupted();  // without the lock: it may acquire the GIL, whose holder may need the lock
    hold.lock.lock();
  }
  if (closed_) throw std::runtime_error("the outbox is closed");
  if (interrupted) {
    Error error(Failure{.kind = Kind::interrupted});
    error.signalled = true;
    throw error;
  }
}

std::byte* Outbox::extend(int target, size_t bytes) {
  if (open_ != target) {
    seal();
    open_ = target;
    line_ = -1;
  }
  if (memory_bytes_ - end_ < bytes) {
    seal();
    urgent_ = urgent_ || memory_ != nullptr;  // the thread sends a full chunk without waiting for the delay
    memory_bytes_ = std::max(bytes, chunk_bytes_);
    memory_.reset(new std::byte[memory_bytes_]);
    begin_ = end_ = 0;
  }
  queued_ = true;
  return memory_.get() + std::exchange(end_, end_ + bytes);
}

void Outbox::seal() {
  if (begin_ == end_) return;
  enqueue(open_, {memory_, begin_, end_});
  begin_ = end_;
}

void Outbox::enqueue(int target, const Piece& piece) {
  has_room_ = false;
  for (const int number : targets_[static_cast<size_t>(target)].workers) {
    Worker& w = workers_[static_cast<size_t>(number)];
    if (w.gone()) continue;
    w.pending += piece.end - piece.begin;
    if (piece.bulk) w.bulk += piece.end - piece.begin;
    w.append(w.full && piece.end - piece.begin <= kShort ? w.copy(piece) : piece);
  }
}

Outbox::Piece Outbox::Worker::copy(const Piece& piece) {
  const size_t bytes = piece.end - piece.begin;
  if (memory == nullptr || kOwn - end < bytes) {
    memory.reset(new std::byte[kOwn]);
    end = 0;
  }
  std::memcpy(memory.get() + end, piece.memory.get() + piece.begin, bytes);
  end += bytes;
  return {memory, end - bytes, end};
}

void Outbox::Worker::append(Piece piece) {
  if (!queue.empty() && queue.back().memory == piece.memory && queue.back().end == piece.begin) {
    queue.back().end = piece.end;
  } else {
    queue.push_back(std::move(piece));
  }
}

// Queue a call site, unless all workers of the target know it. A worker may have received another one since, in calls
// to another target.
void Outbox::tell_line(int target, uint32_t line) {
  bool known = true;
  for (const int number : targets_[static_cast<size_t>(target)].workers) {
    known = std::exchange(workers_[static_cast<size_t>(number)].line, line) == line && known;
  }
  if (!known) write(write(extend(target, sizeof kLine + sizeof line), kLine), line);
  line_ = line;
}

void Outbox::tell_frees(int target) {
  auto& frees = targets_[static_cast<size_t>(target)].frees;
  if (frees.empty()) return;
  for (std::span<const uint32_t> rest = frees; !rest.empty();) {
    const auto now = rest.first(std::min(rest.size(), kMostFreed));
    std::byte* to = extend(target, sizeof kFree + sizeof(uint16_t) + now.size_bytes());
    write(write(write(to, kFree), static_cast<uint16_t>(now.size())), now);
    rest = rest.subspan(now.size());
  }
  spare_ids_.insert(spare_ids_.end(), frees.begin(), frees.end());
  frees.clear();
  std::erase(freeing_, target);
}

void Outbox::sweep() {
  while (!freeing_.empty()) tell_frees(freeing_.back());
  seal();
  queued_ = false;
}

uint32_t Outbox::take_id() {
  live_++;
  if (spare_ids_.empty()) return ids_++;
  const uint32_t id = spare_ids_.back();
  spare_ids_.pop_back();
  return id;
}

void Outbox::echo(int target, uint32_t number, Caller& caller) {
  Hold hold(*this);
  existing(target);
  wait_for_room(target, false, hold, caller);
  tell_frees(target);
  write(write(extend(target, sizeof kEcho + sizeof number), kEcho), number);
  sweep();
  send(hold.lock);
}

void Outbox::flush(Caller& caller) {
  Hold hold(*this);
  sweep();
  size_t bytes = 0;
  for (const Worker& w : workers_) bytes += w.pending;
  // For fewer bytes, acquiring the GIL again may take longer than the system calls.
  if (bytes > kMostBytes) caller.release();
  send(hold.lock);
}

// Write from the workers' queues in turn. Otherwise a worker that reads as fast as this thread writes would delay the
// others.
void Outbox::send(std::unique_lock<std::mutex>& lock) {
  for (bool again = true; again;) {
    again = false;
    for (size_t i = 0; i < workers_.size() && !closed_; i++) {
      Worker& w = workers_[i];
      if (w.queue.empty() || w.full || w.sending || w.gone()) continue;
      send_some(w, lock);
      again = true;
    }
  }
}

void Outbox::send_some(Worker& w, std::unique_lock<std::mutex>& lock) {
  std::array<iovec, kMostPieces> parts;
  size_t count = 0;
  size_t bytes = 0;
  for (const Piece& piece : w.queue) {
    if (count == kMostPieces || bytes >= kMostBytes) break;
    parts[count++] = {piece.memory.get() + piece.begin, piece.end - piece.begin};
    bytes += piece.end - piece.begin;
  }
  msghdr message{.msg_iov = parts.data(), .msg_iovlen = count};
  w.sending = true;  // while this is set, no other thread removes pieces from the queue or replaces the descriptor
  lock.unlock();
  const ssize_t n = sendmsg(w.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  const int error = errno;
  lock.lock();
  w.sending = false;
  if (waiters_ > 0) changed_.notify_all();
  if (n < 0) {
    if (error == EINTR) return;
    if (error == EAGAIN || error == EWOULDBLOCK) {
      w.full = true;
      urgent_ = true;  // if a caller has found this, the thread must wake to poll the socket
      return;
    }
    w.failure = error;
    w.queue.clear();
    w.pending = w.bulk = 0;
    return;
  }
  w.sent += static_cast<uint64_t>(n);
  w.pending -= static_cast<size_t>(n);
  for (auto rest = static_cast<size_t>(n); rest > 0;) {
    Piece& piece = w.queue.front();
    const size_t part = std::min(rest, piece.end - piece.begin);
    piece.begin += part;
    rest -= part;
    if (piece.bulk) w.bulk -= part;
    if (piece.begin == piece.end) w.queue.pop_front();
  }
}

size_t Outbox::pending(int number) {
  const Hold hold(*this);
  const Worker& w = worker(number);
  if (w.gone() || begin_ == end_) return w.pending;
  const auto& open = targets_[static_cast<size_t>(open_)].workers;
  return w.pending + (std::binary_search(open.begin(), open.end(), number) ? end_ - begin_ : 0);
}

uint64_t Outbox::sent(int number) {
  const Hold hold(*this);
  return worker(number).sent;
}

int Outbox::failure(int number) {
  const Hold hold(*this);
  return worker(number).failure;
}

size_t Outbox::live() {
  check();
  const std::lock_guard lock(lock_);
  return live_;
}

uint64_t Outbox::calls() {
  check();
  const std::lock_guard lock(lock_);
  return calls_;
}

void Outbox::close() noexcept {
  if (forks_ != sys::forks()) return;
  std::thread ended;
  {
    const std::lock_guard lock(lock_);
    closed_ = true;
    ended.swap(thread_);
    changed_.notify_all();
  }
  if (!ended.joinable()) return;
  eventfd_write(bell_.get(), 1);
  ended.join();
}

void Outbox::run() {
  sys::leave_signals();
  std::unique_lock lock(lock_);
  std::vector<pollfd> polled;
  std::vector<size_t> full;
  // The time of the next sweep; 0: no frame has been queued for a whole delay. While it is not 0 the thread wakes
  // without a bell, so callers save the system call.
  int64_t due = 0;
  while (!closed_) {
    const int64_t now = sys::now_ns();
    if (due == 0) {
      if (queued_) due = now + delay_ns_;
    } else if (now >= due) {
      due = queued_ ? now + delay_ns_ : 0;
      sweep();
    }
    send(lock);
    if (closed_ || (due == 0 && queued_)) continue;
    polled.assign(1, {.fd = bell_.get(), .events = POLLIN, .revents = 0});
    full.clear();
    for (size_t i = 0; i < workers_.size(); i++) {
      if (!workers_[i].full) continue;
      polled.push_back({.fd = workers_[i].fd, .events = POLLOUT, .revents = 0});
      full.push_back(i);
    }
    const int64_t left = std::max<int64_t>(due - sys::now_ns(), 0);
    const timespec timeout{.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000};
    urgent_ = false;
    sleep_ = due == 0 ? Sleep::idle : Sleep::timed;
    lock.unlock();
    ppoll(polled.data(), polled.size(), due == 0 ? nullptr : &timeout, nullptr);
    eventfd_t rings;
    if (polled[0].revents != 0) eventfd_read(bell_.get(), &rings);
    lock.lock();
    sleep_ = Sleep::none;
    for (size_t i = 0; i < full.size(); i++) {
      if (polled[i + 1].revents != 0) workers_[full[i]].full = false;
    }
  }
}

}  // namespace allranks
