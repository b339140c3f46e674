#include "comm.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

#include "algorithms/algorithms.h"

namespace allranks {

namespace {

// From this size on a call takes long enough that other threads should run meanwhile.
constexpr size_t kReleaseBytes = 32 << 10;
constexpr auto kWaitSlice = std::chrono::milliseconds(50);
constexpr int64_t kNotesNs = 1'000'000'000;  // for the ranks to say where a call stands

// Counters wrap: `a` has reached `b` when it is not behind it.
bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

}  // namespace

Comm::Comm(std::unique_ptr<Shm> shm, Settings settings)
    : shm_(std::move(shm)),
      settings_(settings),
      mail_(*shm_, static_cast<int64_t>(settings.timeout_s * 1e9), settings.spin_ns, settings.spin_progress_ns),
      owner_pid_(getpid()) {}

Comm::~Comm() {
  if (getpid() == owner_pid_) {
    close();
    return;
  }
  mail_.abandon();
  if (progress_.joinable()) progress_.detach();  // it runs in the parent only
  // A copy of the parent's: its destructor would wait for the parent's waiters, for ever.
  new (&queue_changed_) std::condition_variable;
}

void Comm::close() {
  {
    std::lock_guard lock(queue_lock_);
    if (stopping_) return;
    stopping_ = true;
    shm_->leave();
    queue_changed_.notify_all();
  }
  mail_.close();
  if (progress_.joinable()) progress_.join();
  std::unique_lock lock(queue_lock_);
  // A signal handler, called from within a collective of this thread, cannot wait for its end.
  queue_changed_.wait(lock, [this] { return !running_ || runner_ == std::this_thread::get_id(); });
  for (auto& request : queue_) {
    Failure failure{.kind = Kind::closed, .peer = rank(), .reporter = rank()};
    failure.fingerprint = request->operation.fingerprint;
    request->finish(std::make_exception_ptr(Error(failure)));
  }
  queue_.clear();
  shm_->drop_liveness();
  queue_changed_.notify_all();
}

void Comm::abandon() { shm_->drop_liveness(); }

Stats Comm::stats() const {
  return {count_calls_.load(std::memory_order_relaxed), count_bytes_.load(std::memory_order_relaxed),
          static_cast<double>(count_ns_.load(std::memory_order_relaxed)) * 1e-9,
          count_shared_.load(std::memory_order_relaxed)};
}

void Comm::count(size_t nbytes, int64_t began_ns) {
  count_calls_.fetch_add(1, std::memory_order_relaxed);
  count_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
  count_ns_.fetch_add(sys::now_ns() - began_ns, std::memory_order_relaxed);
}

std::vector<std::pair<uint32_t, Fingerprint>> Comm::last_calls() {
  std::vector<std::pair<uint32_t, Fingerprint>> calls;
  for (int r = 0; r < size(); r++) {
    const CallLine& even = shm_->call_line(r, 0);
    const CallLine& odd = shm_->call_line(r, 1);
    const uint32_t e = even.number.load(std::memory_order_acquire);
    const uint32_t o = odd.number.load(std::memory_order_acquire);
    const CallLine& last = reached(e, o) ? even : odd;
    calls.emplace_back(std::max(e, o, [](uint32_t a, uint32_t b) { return !reached(a, b); }), last.fingerprint);
  }
  return calls;
}

// --- order ---

void Comm::run(const Operation& operation, Caller& caller) {
  {
    auto lock = lock_politely(queue_lock_, caller);
    if (!running_ && queue_.empty() && !stopping_) {
      running_ = true;
      runner_ = std::this_thread::get_id();
      lock.unlock();
      try {
        execute(operation, caller, settings_.spin_ns);
      } catch (...) {
        lock = lock_politely(queue_lock_, caller);
        finish();
        throw;
      }
      lock = lock_politely(queue_lock_, caller);
      finish();
      return;
    }
    if (running_ && runner_ == std::this_thread::get_id()) {
      throw Error("a collective was called from a signal handler that has interrupted another one of this group");
    }
  }
  wait(start(operation), caller, -1);
}

void Comm::finish() {
  running_ = false;
  queue_changed_.notify_all();
}

std::shared_ptr<Request> Comm::start(Operation operation) {
  auto request = std::make_shared<Queued>(std::move(operation));
  std::lock_guard lock(queue_lock_);
  if (stopping_) {
    Failure failure{.kind = Kind::closed, .peer = rank(), .reporter = rank()};
    failure.fingerprint = request->operation.fingerprint;
    throw Error(failure);
  }
  if (!progress_.joinable()) progress_ = std::thread([this] { progress(); });
  queue_.push_back(request);
  queue_changed_.notify_all();
  return request;
}

void Comm::run_head(std::unique_lock<std::mutex>& lock, Caller& caller, int64_t spin_ns) {
  running_ = true;
  runner_ = std::this_thread::get_id();
  const std::shared_ptr<Queued> request = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  std::exception_ptr error;
  std::exception_ptr signal;  // the caller's, whosever request it hit
  try {
    execute(request->operation, caller, spin_ns);
  } catch (const Error& e) {
    error = std::current_exception();
    if (e.signalled) {
      signal = error;
      error = std::make_exception_ptr(Error(e.failure));
    }
  } catch (...) {
    error = std::current_exception();
  }
  request->finish(error);
  lock = lock_politely(queue_lock_, caller);
  finish();
  if (signal) std::rethrow_exception(signal);
}

void Comm::progress() {
  Caller nobody;
  std::unique_lock lock(queue_lock_);
  for (;;) {
    queue_changed_.wait(lock, [this] { return stopping_ || (!running_ && !queue_.empty()); });
    if (stopping_) return;
    run_head(lock, nobody, settings_.spin_progress_ns);
  }
}

void Comm::wait(const std::shared_ptr<Request>& request, Caller& caller, int64_t timeout_ns) {
  if (const auto parcel = std::dynamic_pointer_cast<Parcel>(request)) {
    mail_.wait(parcel, caller, timeout_ns);
  } else {
    wait_queued(static_cast<const Queued&>(*request), caller, timeout_ns);
  }
}

void Comm::wait_queued(const Queued& request, Caller& caller, int64_t timeout_ns) {
  const int64_t began = sys::now_ns();
  const auto done = [&request] { return request.done.load(std::memory_order_acquire); };
  if (!done()) {
    auto lock = lock_politely(queue_lock_, caller);
    while (!done()) {
      // With a deadline of its own the caller must not get stuck inside somebody else's call.
      if (!running_ && !queue_.empty() && !stopping_ && timeout_ns < 0) {
        run_head(lock, caller, settings_.spin_ns);
        continue;
      }
      caller.release();
      queue_changed_.wait_for(lock, kWaitSlice);
      if (done()) break;
      lock.unlock();
      Failure failure{.peer = rank(), .reporter = rank()};
      failure.fingerprint = request.operation.fingerprint;
      failure.seconds = static_cast<double>(sys::now_ns() - began) * 1e-9;
      if (caller.interrupted()) {
        // The caller's tensor may vanish as soon as this returns: the request must have ended, and
        // the only way to end it on all ranks is to end the group.
        failure.kind = Kind::interrupted;
        shm_->condemn(failure);
        caller.release();  // who runs the request may need the GIL to see that it has ended
        lock.lock();
        queue_changed_.wait(lock, done);
        Error error(failure);
        error.signalled = true;
        throw error;
      }
      if (timeout_ns >= 0 && sys::now_ns() - began >= timeout_ns) {
        failure.kind = Kind::timeout;
        failure.peer = -1;
        throw Error(failure);
      }
      lock.lock();
    }
  }
  if (request.error) std::rethrow_exception(request.error);
}

void Comm::execute(const Operation& operation, Caller& caller, int64_t spin_ns) {
  const int64_t began = sys::now_ns();
  size_t nbytes = operation.buffer.nbytes();
  for (const size_t part : operation.in_bytes) nbytes += part;
  const size_t pieces = std::max({size_t{1}, operation.ins.size(), operation.outs.size()});
  const uint32_t number = ++calls_;
  Call call{
      .number = number,
      .patience = {.caller = caller, .timeout_ns = static_cast<int64_t>(settings_.timeout_s * 1e9), .spin_ns = spin_ns},
      .about = {.reporter = rank(), .call = number, .fingerprint = operation.fingerprint},
      .site = operation.site};
  shm_->check_verdict();  // before a piece is written that a slow rank still reads, and before the operand is read
  const sys::DefaultFloatMode same_rounding_on_all_ranks;
  if (nbytes * pieces >= kReleaseBytes) caller.release();
  switch (operation.fingerprint.verb) {
    case Verb::all_reduce:
      algorithms::all_reduce(*this, call, operation.buffer, operation.fingerprint.op);
      break;
    case Verb::broadcast:
      algorithms::broadcast(*this, call, operation.buffer, operation.fingerprint.root);
      break;
    case Verb::barrier:
      algorithms::barrier(*this, call);
      break;
    case Verb::reduce:
      algorithms::reduce(*this, call, operation.buffer, operation.fingerprint.op, operation.fingerprint.root);
      break;
    case Verb::all_gather:
      algorithms::all_gather(*this, call, operation.buffer, operation.outs);
      break;
    case Verb::gather:
      algorithms::gather(*this, call, operation.buffer, operation.outs);
      break;
    case Verb::scatter:
      algorithms::scatter(*this, call, operation.ins, operation.buffer, operation.fingerprint.root);
      break;
    case Verb::reduce_scatter:
      algorithms::reduce_scatter(*this, call, operation.ins, operation.buffer, operation.fingerprint.op);
      break;
    case Verb::all_to_all:
      algorithms::all_to_all(*this, call, operation.ins, operation.in_bytes, operation.outs, operation.out_bytes);
      break;
    case Verb::none:
    case Verb::send:
    case Verb::recv:
      throw Error("not a collective");
  }
  count(nbytes, began);
}

// --- meeting the others in a collective ---

void Comm::arrive(Call& call, const void* payload, size_t nbytes) {
  shm_->check_verdict();
  CallLine& mine = shm_->call_line(rank(), call.number);
  mine.fingerprint = call.about.fingerprint;
  if (nbytes > 0) std::memcpy(mine.payload.data(), payload, nbytes);
  // Publishes the fingerprint, the payload and what stands in the ring; sequentially consistent for the bell.
  mine.number.store(call.number, std::memory_order_seq_cst);

  int r = 0;
  const auto missing = [&] {
    for (; r < size(); r++) {
      if (shm_->call_line(r, call.number).number.load(std::memory_order_seq_cst) != call.number) return r;
    }
    return -1;
  };
  if (missing() < 0) {
    Shm::ring(shm_->gate());  // the last to come wakes those that sleep
  } else {
    try {
      shm_->wait(shm_->gate(), call.patience, call.about, missing);
    } catch (Error& error) {
      for (int p = 0; p < size(); p++) {
        if (shm_->call_line(p, call.number).number.load(std::memory_order_acquire) != call.number) {
          error.waiting_for.push_back(p);
        }
      }
      throw;
    }
  }
  compare(call);
}

void Comm::compare(Call& call) {
  bool agree = true;
  uint32_t sites = 0;
  for (int p = 0; p < size(); p++) {
    const Fingerprint& theirs = shm_->call_line(p, call.number).fingerprint;
    agree = agree && theirs.agrees(call.about.fingerprint);
    sites |= theirs.site;
  }
  if (agree && sites == 0) return;
  std::vector<Fingerprint> calls;
  for (int p = 0; p < size(); p++) calls.push_back(shm_->call_line(p, call.number).fingerprint);
  Failure failure = call.about;
  failure.kind = Kind::mismatch;
  if (agree) {
    failure.peer = swaps_.see(calls).first;
    if (failure.peer < 0) return;
  }
  ring_position_ = 0;  // ranks that call different things have taken different pieces
  Error error(failure, std::move(calls));
  error.sites = exchange_notes(call);
  throw error;
}

Comm::Pieces Comm::take(size_t bytes, size_t pieces) {
  // Powers of two, aligned to themselves, do not run over the ring's end.
  const size_t room = std::bit_ceil(std::max<size_t>(bytes, 64));
  const uint64_t begin = (ring_position_ + room - 1) / room * room;
  ring_position_ = begin + room * pieces;
  return {*shm_, begin, room};
}

// All ranks have found the same mismatch and come here, unless one dies on the way.
std::vector<std::string> Comm::exchange_notes(Call& call) {
  const std::string site = call.site.empty() ? call.patience.caller.where() : call.site;
  Note& mine = shm_->note(rank());
  size_t n = std::min(site.size(), mine.text.size() - 1);
  // Not from the middle of a character of UTF-8.
  while (n > 0 && (static_cast<unsigned char>(site[site.size() - n]) & 0xc0) == 0x80) n--;
  mine.number.store(0, std::memory_order_seq_cst);
  std::copy_n(site.end() - static_cast<std::ptrdiff_t>(n), n, mine.text.begin());  // its end tells more
  mine.text[n] = '\0';
  mine.number.store(call.number, std::memory_order_seq_cst);
  Shm::ring(shm_->gate());

  std::vector<std::string> sites(static_cast<size_t>(size()));
  Patience patience{.caller = call.patience.caller, .timeout_ns = kNotesNs, .spin_ns = 0, .final = false};
  int r = 0;
  const auto silent = [&] {
    for (; r < size(); r++) {
      if (shm_->note(r).number.load(std::memory_order_seq_cst) != call.number) return r;
    }
    return -1;
  };
  try {
    shm_->wait(shm_->gate(), patience, call.about, silent);
  } catch (const Error& error) {
    if (error.failure.kind != Kind::timeout) throw;  // the mismatch is known without the notes
  }
  for (int p = 0; p < size(); p++) {
    const Note& note = shm_->note(p);
    if (note.number.load(std::memory_order_seq_cst) == call.number) sites[static_cast<size_t>(p)] = note.text.data();
  }
  return sites;
}

std::vector<std::byte*> Comm::arrive_at(Call& call, const void* data, size_t nbytes) {
  struct Place {
    uint64_t block;  // 0: private memory
    uint64_t offset;
  };
  const SharedBlock* block = blocks_->find(data, nbytes);
  Place mine{};
  if (block != nullptr) {
    mine = {block->number(), static_cast<uint64_t>(static_cast<const std::byte*>(data) - block->mine())};
  }
  arrive(call, &mine, sizeof mine);
  if (block == nullptr) return {};
  std::vector<std::byte*> addresses;
  for (int r = 0; r < size(); r++) {
    Place theirs;
    std::memcpy(&theirs, shm_->call_line(r, call.number).payload.data(), sizeof theirs);
    if (theirs.block != mine.block) return {};
    addresses.push_back(block->data(r) + theirs.offset);
  }
  count_shared_.fetch_add(1, std::memory_order_relaxed);
  return addresses;
}

void Comm::depart(Call& call) {
  post_step(++base_step, false);
  wait_step_of_all(call, base_step);
}

bool Comm::all_at_step(uint32_t done) {
  for (int r = 0; r < size(); r++) {
    if (!reached(shm_->step_line(r).done.load(std::memory_order_seq_cst), done)) return false;
  }
  return true;
}

void Comm::post_step(uint32_t done, bool wake_always) {
  shm_->step_line(rank()).done.store(done, std::memory_order_seq_cst);
  if (wake_always || all_at_step(done)) Shm::ring(shm_->gate());
}

void Comm::wait_step_of_all(Call& call, uint32_t done) {
  int r = 0;
  shm_->wait(shm_->gate(), call.patience, call.about, [&] {
    for (; r < size(); r++) {
      if (!reached(shm_->step_line(r).done.load(std::memory_order_seq_cst), done)) return r;
    }
    return -1;
  });
}

void Comm::wait_step_of(Call& call, int rank, uint32_t done) {
  shm_->wait(shm_->gate(), call.patience, call.about,
             [&] { return reached(shm_->step_line(rank).done.load(std::memory_order_seq_cst), done) ? -1 : rank; });
}

// --- messages ---

std::shared_ptr<Request> Comm::start_send(Buffer buffer, int to, int32_t tag, Caller& caller) {
  auto parcel = mail_.post_send(buffer, to, tag, caller);
  if (!parcel->done.load(std::memory_order_acquire)) mail_.in_background();
  return parcel;
}

std::shared_ptr<Request> Comm::start_recv(Buffer buffer, int from, int32_t tag, Caller& caller) {
  auto parcel = mail_.post_recv(buffer, from, tag, caller);
  if (!parcel->done.load(std::memory_order_acquire)) mail_.in_background();
  return parcel;
}

void Comm::send(Buffer buffer, int to, int32_t tag, Caller& caller) {
  const int64_t began = sys::now_ns();
  if (!mail_.send_at_once(buffer, to, tag)) {
    if (buffer.nbytes() >= kReleaseBytes) caller.release();
    mail_.wait(mail_.post_send(buffer, to, tag, caller), caller, -1);
  }
  count(buffer.nbytes(), began);
}

int Comm::recv(Buffer buffer, int from, int32_t tag, Caller& caller) {
  const int64_t began = sys::now_ns();
  if (from < 0 || !mail_.recv_at_once(buffer, from, tag)) {
    if (buffer.nbytes() >= kReleaseBytes) caller.release();
    const auto parcel = mail_.post_recv(buffer, from, tag, caller);
    mail_.wait(parcel, caller, -1);
    from = parcel->peer;
  }
  count(buffer.nbytes(), began);
  return from;
}

}  // namespace allranks
