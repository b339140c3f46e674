#include "group/comm.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <new>

#include "collective/algorithms/table.h"

namespace allranks {

namespace {

constexpr auto kWaitSlice = std::chrono::milliseconds(50);  // interval of the checks for signals and the timeout
constexpr size_t kLargeBytes = 1 << 20;  // for such a call, the cost of a wake-up is relatively small

size_t bytes_of(const Operation& operation) {
  size_t nbytes = operation.buffer.nbytes();
  for (const size_t part : operation.in_bytes) nbytes += part;
  return nbytes;
}

}  // namespace

// Scope of one call: records it, and counts it if it succeeds.
class Comm::Recording {
 public:
  Recording(Comm& comm, const Fingerprint& fingerprint, uint32_t number, int peer, Begin begin, bool async = false)
      : comm_(comm), verb_(static_cast<size_t>(fingerprint.verb)), entered_ns_(begin.entered_ns) {
    if (!comm_.recorder_) return;
    call_ = comm_.recorder_->begin({.group = comm_.group_,
                                    .number = number,
                                    .fingerprint = fingerprint,
                                    .peer = peer,
                                    .site = begin.site,
                                    .async = async,
                                    .entered_ns = entered_ns_});
  }
  Recording(const Recording&) = delete;
  ~Recording() {
    if (call_.record != nullptr) comm_.recorder_->end(call_, sys::now_ns(), met_ns_, last_, outcome_);
  }

  const trace::Recorder::Call& call() const { return call_; }
  void hand_over() { call_ = {}; }  // the message owns the record from now on, and ends it
  // Note that the program waits for this call at `site`, and has waited for some time.
  void waited_for(const std::string& site) {
    if (call_.record == nullptr || site.empty()) return;
    trace::Recorder::set_awaited(*call_.record);
    if (call_.record->site == 0) comm_.recorder_->set_site(call_, comm_.recorder_->site(site));
  }
  // Note the arrival times of a collective.
  void met(const LocalComm::Call& call) {
    // A time from another host's clock has an error. The last arrival cannot precede the arrival of this rank.
    met_ns_ = call.arrival.met_ns == 0 ? 0 : std::max(call.arrival.met_ns, entered_ns_);
    last_ = call.arrival.last;
    late_ns_ = call.arrival.late_ns;
  }
  void fail(Kind kind) { outcome_ = static_cast<uint8_t>(kind); }
  // Count the call. Only one thread at a time counts collectives, so they need no atomic addition; several threads
  // count messages. relaxed: the counters order no other data.
  void succeed(size_t nbytes) {
    const int64_t now = sys::now_ns();
    met_ns_ = std::min(met_ns_, now);
    trace::Totals& totals = comm_.counts_->totals[verb_];
    const auto add = [](std::atomic<uint64_t>& counter, int64_t n) {
      counter.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
    };
    const auto add_alone = [](std::atomic<uint64_t>& counter, int64_t n) {
      counter.store(counter.load(std::memory_order_relaxed) + static_cast<uint64_t>(n), std::memory_order_relaxed);
    };
    const bool alone = verb_ < static_cast<size_t>(Verb::send);
    const std::array<std::pair<std::atomic<uint64_t>*, int64_t>, 4> counters = {
        {{&totals.calls, 1},
         {&totals.bytes, static_cast<int64_t>(nbytes)},
         {&totals.ns, now - entered_ns_},
         {&totals.waited_ns, met_ns_ == 0 ? 0 : met_ns_ - entered_ns_}}};
    for (const auto& [counter, n] : counters) alone ? add_alone(*counter, n) : add(*counter, n);
    if (call_.record == nullptr) return;
    if (last_ >= 0 && comm_.size_ > 1) comm_.recorder_->count_last(comm_.group_, last_, late_ns_);
    comm_.recorder_->end(call_, now, met_ns_, last_, 0);
    call_.record = nullptr;
  }

 private:
  Comm& comm_;
  size_t verb_;
  int64_t entered_ns_;
  int64_t met_ns_ = 0;
  int64_t late_ns_ = 0;
  int last_ = -1;
  uint8_t outcome_ = trace::kFailed;
  trace::Recorder::Call call_;
};

// Caller that records its call site when the call has taken long, that is when it first checks for signals.
class Comm::LongWait final : public Caller {
 public:
  LongWait(Caller& caller, Recording& recording) : caller_(caller), recording_(recording) {}
  void release() override { caller_.release(); }
  std::string where() override { return caller_.where(); }
  bool interrupted() override {
    if (caller_.interrupted()) return true;
    if (!asked_) {
      asked_ = true;
      recording_.waited_for(caller_.where());
      caller_.release();
    }
    return false;
  }

 private:
  Caller& caller_;
  Recording& recording_;
  bool asked_ = false;
};

Comm::Comm(std::unique_ptr<Shm> shm, Settings settings)
    : local_comm_(std::move(shm), settings.tuning, settings.place),
      rank_(local_comm_.rank()),
      size_(local_comm_.size()),
      settings_(settings),
      timeout_ns_(static_cast<int64_t>(settings.timeout_s * 1e9)),
      p2p_(local_comm_.shm(), nullptr, timeout_ns_, settings.polling, settings.progress_polling, settings.eager) {}

Comm::Comm(std::unique_ptr<Shm> shm, int rank, Hosts hosts, std::vector<sys::Fd> heartbeats, Net::Opener opener,
           Settings settings)
    : local_comm_(std::move(shm), settings.tuning, settings.place),
      net_(std::make_unique<Net>(rank, std::move(hosts), std::move(heartbeats), std::move(opener), local_comm_.shm(),
                                 settings.fabric)),
      inter_host_comm_(std::make_unique<InterHostComm>(local_comm_, *net_)),
      rank_(rank),
      size_(net_->hosts().ranks()),
      settings_(settings),
      timeout_ns_(static_cast<int64_t>(settings.timeout_s * 1e9)),
      p2p_(local_comm_.shm(), net_.get(), timeout_ns_, settings.polling, settings.progress_polling, settings.eager) {}

void Comm::set_timeout(double timeout_s) {
  timeout_ns_.store(static_cast<int64_t>(timeout_s * 1e9), std::memory_order_relaxed);
  p2p_.set_timeout(static_cast<int64_t>(timeout_s * 1e9));
}

void Comm::check_process() const {
  if (forked()) throw Error(Failure{.kind = Kind::forked, .peer = rank(), .reporter = rank()});
}

void Comm::close() {
  if (forked()) return;
  {
    std::lock_guard lock(queue_lock_);
    if (stopping_) return;
    stopping_ = true;
    local_comm_.shm().leave();
    ended_.notify_all();
    due_.notify_one();
  }
  p2p_.close();
  if (progress_.joinable()) progress_.join();
  std::unique_lock lock(queue_lock_);
  // If a signal handler in a collective of this thread calls close, waiting for the collective would deadlock.
  ended_.wait(lock, [this] { return !running_ || runner_ == std::this_thread::get_id(); });
  for (auto& request : queue_) {
    Failure failure{.kind = Kind::closed, .peer = rank(), .reporter = rank()};
    try {
      local_comm_.shm().check_verdict();
    } catch (const Error& error) {  // queued calls report the failure of the group, not the close
      failure = error.failure;
    }
    failure.fingerprint = request->operation.fingerprint;
    request->finish(std::make_exception_ptr(Error(failure)));
  }
  queue_.clear();
  lock.unlock();
  if (net_) net_->close();
  local_comm_.shm().gone();
  ended_.notify_all();
}

Liveness Comm::liveness(const std::vector<int>& ranks) {
  check_process();
  const std::lock_guard lock(queue_lock_);
  if (stopping_) return {};
  Liveness sockets;
  for (const int r : ranks) {
    if (r < 0 || r >= size()) throw Error("liveness: no rank " + std::to_string(r));
    const int local = local_comm_.shm().local(r);
    if (local < 0) return {};
    sockets.push_back(local_comm_.shm().liveness(local));
  }
  return sockets;
}

void Comm::abort() {
  check_process();
  local_comm_.shm().condemn({.kind = Kind::aborted, .peer = rank(), .reporter = rank()});
}

std::vector<int> Comm::lost() {
  check_process();
  const std::lock_guard lock(queue_lock_);
  if (stopping_) return {};
  return local_comm_.shm().lost();
}

void Comm::adopt(int rank, Connection kind, sys::Fd fd, const std::string& greeting) {
  check_process();
  net_->adopt(rank, kind, std::move(fd), greeting);
}

void Comm::give_up(int rank) {
  check_process();
  net_->give_up(rank);
}

std::string Comm::fabric_error(int rank) {
  check_process();
  return net_ ? net_->fabric_error(rank) : std::string();
}

void Comm::record_in(std::shared_ptr<trace::Recorder> recorder, size_t group) {
  check_process();
  const std::lock_guard lock(queue_lock_);
  recorder_ = std::move(recorder);
  group_ = group;
  counts_ = &recorder_->group(group);
  p2p_.record_in(recorder_.get());
}

Stats Comm::stats() const {
  if (forked()) return {};
  Stats stats{.shared = local_comm_.shared_calls()};
  int64_t ns = 0;
  for (const trace::Totals& totals : counts_->totals) {
    stats.calls += totals.calls.load(std::memory_order_relaxed);
    stats.bytes += totals.bytes.load(std::memory_order_relaxed);
    ns += static_cast<int64_t>(totals.ns.load(std::memory_order_relaxed));
  }
  stats.seconds = static_cast<double>(ns) * 1e-9;
  return stats;
}

// --- collectives, in order ---

Comm::Begin Comm::begin_now(Caller& caller) {
  const int64_t now = sys::now_ns();
  return {now, recorder_ ? recorder_->site_of(caller, now) : uint16_t{0}};
}

void Comm::run(const Operation& operation, Caller& caller) {
  check_process();
  {
    const Begin begin = begin_now(caller);  // before the lock: may run Python code, which may call this group
    auto lock = lock_releasing(queue_lock_, caller);
    if (!running_ && queue_.empty() && !stopping_) {
      running_ = true;
      runner_ = std::this_thread::get_id();
      lock.unlock();
      try {
        execute(operation, caller, settings_.polling, begin);
      } catch (const sys::Forked&) {
        throw;
      } catch (...) {
        lock = lock_releasing(queue_lock_, caller);
        finish();
        throw;
      }
      lock = lock_releasing(queue_lock_, caller);
      finish();
      return;
    }
    if (running_ && runner_ == std::this_thread::get_id()) {
      throw Error(
          "a signal handler called a collective of this group while it interrupted another collective of the group");
    }
  }
  wait(start(operation), caller, -1);
}

void Comm::finish() {
  running_ = false;
  ended_.notify_all();
  if (sleeps_in_vain()) due_.notify_one();
}

bool Comm::sleeps_in_vain() {
  if (!asleep_ || running_ || queue_.empty()) return false;
  asleep_ = false;
  return true;
}

std::shared_ptr<Request> Comm::start(Operation operation) {
  check_process();
  auto request = std::make_shared<Queued>(std::move(operation));
  const bool large = bytes_of(request->operation) >= kLargeBytes;
  std::unique_lock lock(queue_lock_);
  if (stopping_) {
    Failure failure{.kind = Kind::closed, .peer = rank(), .reporter = rank()};
    failure.fingerprint = request->operation.fingerprint;
    throw Error(failure);
  }
  if (!progress_.joinable()) progress_ = std::thread([this] { progress(); });
  queue_.push_back(request);
  started_++;
  const bool wakes = sleeps_in_vain() || (large && !running_);
  lock.unlock();  // before the notification, otherwise the woken thread would wait for the lock
  if (wakes) due_.notify_one();
  return request;
}

void Comm::run_head(std::unique_lock<std::mutex>& lock, Caller& caller, Polling polling) {
  running_ = true;
  runner_ = std::this_thread::get_id();
  hurried_ = false;
  const std::shared_ptr<Queued> request = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  std::exception_ptr error;
  std::exception_ptr signal;  // a signal of this caller, which may have interrupted another thread's request
  try {
    const uint16_t site = recorder_ ? recorder_->site(request->operation.site) : uint16_t{0};
    execute(request->operation, caller, polling, {sys::now_ns(), site});
  } catch (const Error& e) {
    error = std::current_exception();
    if (e.signalled) {
      signal = error;
      error = std::make_exception_ptr(Error(e.failure));
    }
  } catch (const sys::Forked&) {
    throw;
  } catch (...) {
    error = std::current_exception();
  }
  running_record_.store(nullptr);
  request->finish(error);
  lock = lock_releasing(queue_lock_, caller);
  finish();
  if (signal) std::rethrow_exception(signal);
}

void Comm::progress() {
  sys::leave_signals();
  Caller no_caller;
  sys::wake_on_time();
  std::unique_lock lock(queue_lock_);
  while (look(lock)) run_head(lock, no_caller, settings_.progress_polling);
}

bool Comm::look(std::unique_lock<std::mutex>& lock) {
  const auto rang_within = [&](int64_t ns) {
    return due_.wait_for(lock, std::chrono::nanoseconds(ns)) == std::cv_status::no_timeout;
  };
  uint64_t seen = started_;
  bool woken = false;
  for (int in_vain = 0; !stopping_;) {
    const bool ready = !running_ && !queue_.empty();
    const int64_t head_start = ready ? queue_.front()->queued_ns + kHeadStartNs - sys::now_ns() : 0;
    if (ready && (hurried_ || head_start <= 0)) {
      look_ns_ = kLookNs;
      return true;
    }
    if (seen == started_) {
      in_vain++;
    } else if (!woken) {  // there were new calls, and other threads have run them
      in_vain = 0;
      look_ns_ = std::min(2 * look_ns_, kMostLookNs);
    }
    seen = started_;
    if (ready && woken) {
      woken = rang_within(head_start);
    } else if (ready || in_vain <= kLooks) {
      woken = rang_within(look_ns_);
    } else {
      asleep_ = true;
      due_.wait(lock, [this] { return stopping_ || !asleep_; });
      asleep_ = false;
      woken = true;
    }
  }
  return false;
}

void Comm::wait(const std::shared_ptr<Request>& request, Caller& caller, int64_t timeout_ns) {
  check_process();
  if (const auto message = std::dynamic_pointer_cast<Message>(request)) {
    p2p_.wait(message, caller, timeout_ns);
  } else {
    wait_queued(static_cast<const Queued&>(*request), caller, timeout_ns);
  }
}

void Comm::wait_queued(const Queued& request, Caller& caller, int64_t timeout_ns) {
  const int64_t began = sys::now_ns();
  // acquire: pairs with the store in Request::finish, so that `error` is visible.
  const auto done = [&request] { return request.done.load(std::memory_order_acquire); };
  if (!done()) {
    auto lock = lock_releasing(queue_lock_, caller);
    while (!done()) {
      // A caller with its own timeout must not run calls, because it could not return from a call at its timeout.
      if (!running_ && !queue_.empty() && !stopping_ && timeout_ns < 0) {
        run_head(lock, caller, settings_.polling);
        continue;
      }
      caller.release();
      if (!running_ && !queue_.empty()) {
        hurried_ = true;
        asleep_ = false;
        due_.notify_one();
      }
      ended_.wait_for(lock, kWaitSlice);
      if (done()) break;
      // The running call is this request or precedes it, so the program waits for it.
      if (trace::Record* const record = running_record_.load()) trace::Recorder::set_awaited(*record);
      lock.unlock();
      Failure failure{.peer = rank(), .reporter = rank()};
      failure.fingerprint = request.operation.fingerprint;
      failure.seconds = static_cast<double>(sys::now_ns() - began) * 1e-9;
      if (caller.interrupted()) {
        // The caller may free its tensor when this returns, so the request must have ended. The only way to end it on
        // all ranks is to end the group.
        failure.kind = Kind::interrupted;
        local_comm_.shm().condemn(failure);
        caller.release();  // the thread that runs the request may need the GIL to notice the end of the group
        lock.lock();
        ended_.wait(lock, done);
        Error error(failure);
        error.signalled = true;
        throw error;
      }
      if (timeout_ns >= 0 && sys::now_ns() - began >= timeout_ns) {
        if (trace::Record* const record = running_record_.load()) trace::Recorder::clear_awaited(*record);
        failure.kind = Kind::timeout;
        failure.peer = -1;
        throw Error(failure);
      }
      lock.lock();
    }
  }
  if (request.error) std::rethrow_exception(request.error);
}

void Comm::execute(const Operation& operation, Caller& caller, Polling polling, Begin begin) {
  const size_t nbytes = bytes_of(operation);
  const size_t pieces = std::max({size_t{1}, operation.ins.size(), operation.outs.size()});
  const uint32_t number = ++calls_;
  counts_->number.store(number, std::memory_order_relaxed);
  Recording recording(*this, operation.fingerprint, number, operation.fingerprint.root, begin, !operation.site.empty());
  if (!operation.site.empty()) running_record_.store(recording.call().record);
  LongWait long_wait(caller, recording);
  LocalComm::Call call{.number = number,
                       .patience = {.caller = recorder_ ? static_cast<Caller&>(long_wait) : caller,
                                    .timeout_ns = timeout_ns_.load(std::memory_order_relaxed),
                                    .polling = polling},
                       .about = {.reporter = rank(), .call = number, .fingerprint = operation.fingerprint},
                       .site = operation.site,
                       .entered_ns = begin.entered_ns};
  try {
    local_comm_.shm()
        .check_verdict();  // before this rank writes a chunk that a slow rank still reads, or reads the operand
    const sys::DefaultFloatMode same_rounding_on_all_ranks;
    if (nbytes * pieces >= kReleaseBytes) caller.release();
    if (inter_host_comm_) {
      inter_host_comm_->run(call, operation);
    } else {
      run_here(call, operation);
    }
  } catch (const std::bad_alloc&) {
    // The other ranks wait for this rank, which cannot continue the call. End the group.
    recording.fail(Kind::memory);
    Failure failure = call.about;
    failure.kind = Kind::memory;
    failure.peer = rank();
    local_comm_.shm().condemn(failure);
    local_comm_.shm().check_verdict();
    throw;
  } catch (const Error& error) {
    recording.met(call);
    recording.fail(error.failure.kind);
    throw;
  }
  recording.met(call);
  recording.succeed(nbytes);
}

void Comm::run_here(LocalComm::Call& call, const Operation& operation) {
  call.number = local_comm_.next();
  algorithms::run_first<algorithms::kAlgorithms>(local_comm_, call, operation);
}

std::vector<std::pair<uint32_t, Fingerprint>> Comm::last_calls() {
  if (forked()) return {};
  if (!net_) return local_comm_.last_calls();
  std::vector<std::pair<uint32_t, Fingerprint>> calls;
  for (int r = 0; r < size(); r++) calls.push_back(net_->last_call(r));
  return calls;
}

// --- messages ---

namespace {

Fingerprint message(Verb verb, const Buffer& buffer) {
  return {.verb = verb, .dtype = buffer.dtype, .count = buffer.count};
}

}  // namespace

std::shared_ptr<Request> Comm::start_send(Buffer buffer, int to, int32_t tag, Caller& caller) {
  check_process();
  reserve_pipe(to);
  Recording recording(*this, message(Verb::send, buffer), static_cast<uint32_t>(tag), to, begin_now(caller), true);
  auto message = p2p_.post_send(buffer, to, tag, caller, recording.call());
  recording.hand_over();
  if (!message->done.load(std::memory_order_acquire)) p2p_.in_background(caller);
  return message;
}

std::shared_ptr<Request> Comm::start_recv(Buffer buffer, int from, int32_t tag, Caller& caller) {
  check_process();
  Recording recording(*this, message(Verb::recv, buffer), static_cast<uint32_t>(tag), from, begin_now(caller), true);
  auto message = p2p_.post_recv(buffer, from, tag, caller, recording.call());
  recording.hand_over();
  if (!message->done.load(std::memory_order_acquire)) p2p_.in_background(caller);
  return message;
}

void Comm::send(Buffer buffer, int to, int32_t tag, Caller& caller) {
  check_process();
  reserve_pipe(to);
  Recording recording(*this, message(Verb::send, buffer), static_cast<uint32_t>(tag), to, begin_now(caller));
  if (!p2p_.send_at_once(buffer, to, tag)) {
    if (buffer.nbytes() >= kReleaseBytes) caller.release();
    const auto message = p2p_.post_send(buffer, to, tag, caller, recording.call());
    recording.hand_over();
    p2p_.wait(message, caller, -1);
  }
  recording.succeed(buffer.nbytes());
}

int Comm::recv(Buffer buffer, int from, int32_t tag, Caller& caller) {
  check_process();
  Recording recording(*this, message(Verb::recv, buffer), static_cast<uint32_t>(tag), from, begin_now(caller));
  if (from < 0 || !p2p_.recv_at_once(buffer, from, tag)) {
    if (buffer.nbytes() >= kReleaseBytes) caller.release();
    const auto message = p2p_.post_recv(buffer, from, tag, caller, recording.call());
    recording.hand_over();
    p2p_.wait(message, caller, -1);
    from = message->peer;
  }
  recording.succeed(buffer.nbytes());
  return from;
}

}  // namespace allranks
