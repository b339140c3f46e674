// The outbox on real sockets: the order of frames across targets, ids, a worker that does not read, a lost worker,
// closing.
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <set>

#include "ranks.h"
#include "remote/outbox.h"

using namespace allranks;
using namespace allranks::test;

namespace {

constexpr int64_t kNever = 3'600'000'000'000;  // ns; so only flush() or a full chunk sends frames
constexpr int64_t kSoon = 50'000;
constexpr size_t kRoomy = 1 << 20;
constexpr uint32_t kSequenced = 16;  // the only template: one input, one output, one number as its value

Caller nobody;

std::pair<sys::Fd, sys::Fd> unix_pair() {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
  return {sys::Fd(pair[0]), sys::Fd(pair[1])};
}

// The worker's end of a socket: parses the frames of outbox.h.
class Reader {
 public:
  explicit Reader(sys::Fd fd) : fd_(std::move(fd)) {
    const timeval limit{.tv_sec = 60, .tv_usec = 0};
    CHECK(setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
  }

  struct Frame {
    uint16_t kind;
    std::vector<uint32_t> words;  // FREE: the ids; LINE: the call site; call: its input, output and value
    std::string payload;          // MESSAGE: the payload
  };

  // Return the next frame, or nullopt at the end of the stream.
  std::optional<Frame> next() {
    uint16_t kind;
    if (!read(&kind, sizeof kind)) return std::nullopt;
    Frame frame{.kind = kind, .words = {}, .payload = {}};
    size_t words = kind == 2 ? 1 : 3;
    if (kind == 0) {
      uint16_t count;
      CHECK(read(&count, sizeof count));
      words = count;
    } else if (kind == 1) {
      uint32_t length;
      CHECK(read(&length, sizeof length));
      frame.payload.resize(length);
      CHECK(read(frame.payload.data(), length));
      return frame;
    } else {
      CHECK(kind == 2 || kind == kSequenced);
    }
    frame.words.resize(words);
    CHECK(read(frame.words.data(), words * sizeof(uint32_t)));
    return frame;
  }

  Frame expect(uint16_t kind) {
    auto frame = next();
    CHECK(frame && frame->kind == kind);
    return *frame;
  }

  bool nothing() const {
    char byte;
    return recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == -1 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }

 private:
  bool read(void* to, size_t bytes) {
    const ssize_t n = recv(fd_.get(), to, bytes, MSG_WAITALL);
    CHECK(n == 0 || n == static_cast<ssize_t>(bytes));
    return bytes == 0 || n > 0;
  }

  sys::Fd fd_;
};

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

uint32_t call(Outbox& outbox, int target, uint32_t line, uint32_t input, uint32_t value) {
  uint32_t output;
  outbox.call(target, line, kSequenced, {&input, 1}, {&output, 1}, std::as_bytes(std::span(&value, 1)), nobody);
  return output;
}

// The outbox's sockets and the readers at their other ends. The outbox must be closed before the sockets, because its
// thread may be writing.
struct Workers {
  Workers(Outbox& outbox, int n, bool tcp = false) : outbox(outbox) {
    for (int i = 0; i < n; i++) {
      auto [here, there] = tcp ? tcp_pair() : unix_pair();
      CHECK(outbox.add(here.get()) == i);
      sockets.push_back(std::move(here));
      readers.emplace_back(std::move(there));
    }
  }
  ~Workers() { outbox.close(); }
  Outbox& outbox;
  std::vector<sys::Fd> sockets;
  std::vector<Reader> readers;
};

// A thread whose calls may block. If the test fails while it blocks, the destructor closes the outbox, which ends the
// call.
class Background {
 public:
  Background(Outbox& outbox, std::function<void()> body)
      : outbox_(outbox), thread_([this, body = std::move(body)] {
          try {
            body();
          } catch (...) {
            error_ = std::current_exception();
          }
        }) {}
  ~Background() {
    if (!thread_.joinable()) return;
    outbox_.close();
    thread_.join();
  }
  void join() {
    thread_.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  Outbox& outbox_;
  std::exception_ptr error_;
  std::thread thread_;
};

template <class Condition>
void until(Condition condition) {
  for (int i = 0; !condition(); i++) {
    CHECK(i < 60'000);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

TEST(each_worker_gets_its_frames_in_the_programs_order) {
  for (const bool tcp : {false, true}) {
    Outbox outbox(kSoon, 256, 4096);
    Workers workers(outbox, 3, tcp);
    const std::vector<std::vector<int>> groups = {{0}, {1}, {2, 0}, {0, 1, 2}};
    std::vector<int> targets;
    for (const auto& group : groups) targets.push_back(outbox.target(group));
    using Call = std::pair<uint32_t, uint32_t>;  // line, value
    std::vector<std::vector<Call>> heard(3);
    std::vector<std::unique_ptr<Background>> threads;
    for (size_t i = 0; i < 3; i++) {
      threads.push_back(std::make_unique<Background>(outbox, [&, i] {
        Reader& reader = workers.readers[i];
        uint32_t line = 0;
        std::set<uint32_t> there;  // ids of tensors on this worker
        for (;;) {
          const auto frame = reader.next();
          if (!frame || frame->kind == 1) break;
          if (frame->kind == 0) {
            for (const uint32_t id : frame->words) CHECK(there.erase(id) == 1);
          } else if (frame->kind == 2) {
            line = frame->words[0];
          } else {
            CHECK(there.insert(frame->words[1]).second);  // an id is reused only after its FREE
            heard[i].push_back({line, frame->words[2]});
          }
        }
        CHECK(there.empty());
      }));
    }
    std::mt19937 random(5);
    std::vector<std::vector<Call>> said(3);
    std::vector<std::pair<int, uint32_t>> alive;
    for (uint32_t i = 0; i < 5000; i++) {
      const size_t g = random() % groups.size();
      const uint32_t line = random() % 3;
      alive.emplace_back(targets[g], call(outbox, targets[g], line, 0, i));
      for (const int w : groups[g]) said[static_cast<size_t>(w)].push_back({line, i});
      while (alive.size() > random() % 20) {
        const size_t which = random() % alive.size();
        outbox.free(alive[which].first, alive[which].second);
        alive.erase(alive.begin() + static_cast<ptrdiff_t>(which));
      }
      if (random() % 500 == 0) outbox.flush(nobody);
    }
    for (const auto& [target, id] : alive) outbox.free(target, id);
    CHECK(outbox.live() == 0 && outbox.calls() == 5000);
    outbox.flush(nobody);
    outbox.put(targets[3], bytes_of("end"), {}, false, nobody);
    for (auto& thread : threads) thread->join();
    for (size_t i = 0; i < 3; i++) {
      CHECK(heard[i] == said[i]);
    }
  }
}

TEST(frees_ride_along_and_ids_come_again) {
  Outbox outbox(kNever, kRoomy, kRoomy);
  Workers workers(outbox, 2);
  const int one = outbox.target({0});
  const int other = outbox.target({1});
  const uint32_t id = call(outbox, one, 1, 0, 0);
  outbox.free(one, id);
  CHECK(call(outbox, other, 1, 0, 0) != id);  // worker 0 has not received the FREE, so the id is in use
  CHECK(call(outbox, one, 1, 0, 0) == id);
  outbox.flush(nobody);
  Reader& reader = workers.readers[0];
  reader.expect(2);
  CHECK(reader.expect(kSequenced).words[1] == id);
  CHECK(reader.expect(0).words == std::vector{id});
  CHECK(reader.expect(kSequenced).words[1] == id);
  CHECK(reader.nothing());                        // no LINE frame: the call site has not changed
  until([&] { return outbox.pending(0) == 0; });  // the thread updates the count only after sending
  outbox.free(one, id);
  CHECK(outbox.pending(0) == 0);
  outbox.flush(nobody);
  CHECK(reader.expect(0).words == std::vector{id});

  std::vector<uint32_t> many(70'000);
  outbox.reserve(one, many);
  CHECK(outbox.live() == many.size() + 1);
  for (const uint32_t each : many) outbox.free(one, each);
  Background flusher(outbox, [&] { outbox.flush(nobody); });
  CHECK(reader.expect(0).words.size() == 65'535);
  CHECK(reader.expect(0).words.size() == many.size() - 65'535);
  flusher.join();
}

TEST(the_thread_sends_what_is_old_and_what_is_much) {
  {
    Outbox outbox(kSoon, kRoomy, kRoomy);
    Workers workers(outbox, 1);
    const int target = outbox.target({0});
    outbox.put(target, bytes_of("a"), {}, false, nobody);
    CHECK(workers.readers[0].expect(1).payload == "a");
    std::vector<uint32_t> ids(1);
    outbox.reserve(target, ids);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // so that the thread is usually asleep
    outbox.free(target, ids[0]);
    CHECK(workers.readers[0].expect(0).words == ids);
  }
  Outbox outbox(kNever, 1024, kRoomy);
  Workers workers(outbox, 1);
  const int target = outbox.target({0});
  outbox.put(target, bytes_of("small"), {}, false, nobody);
  CHECK(outbox.pending(0) == 11 && workers.readers[0].nothing());  // bytes: u16 kind, u32 length, 5 of payload
  const std::string large(1 << 18, 'x');  // more than a socket buffer holds; the test does not flush it
  outbox.put(target, bytes_of("head"), bytes_of(large), false, nobody);
  CHECK(workers.readers[0].expect(1).payload == "small");
  CHECK(workers.readers[0].expect(1).payload == "head" + large);
  for (uint32_t i = 0; i < 100; i++) call(outbox, target, 1, 0, i);
  CHECK(workers.readers[0].expect(2).words[0] == 1);
  CHECK(workers.readers[0].expect(kSequenced).words[2] == 0);
}

TEST(a_worker_that_does_not_read_holds_up_no_other) {
  for (const bool tcp : {false, true}) {
    Outbox outbox(kSoon, 1024, 1 << 16);
    Workers workers(outbox, 2, tcp);
    const int slow = outbox.target({0});
    const int both = outbox.target({0, 1});
    const int quick = outbox.target({1});
    const std::string text(500, 'x');
    constexpr int kMany = 40'000;  // 20 MB, which is more than a socket buffer holds
    std::atomic<int> put = 0;
    Background caller(outbox, [&] {
      for (int i = 0; i < kMany; i++, put++) outbox.put(slow, bytes_of(text), {}, false, nobody);
    });
    until([&] { return outbox.pending(0) > 1 << 15; });
    int before = -1;
    until([&] { return std::exchange(before, put.load()) == put.load() && put.load() > 0; });
    outbox.put(quick, bytes_of("quick"), {}, false, nobody);
    CHECK(workers.readers[1].expect(1).payload == "quick");
    // A flush must not block either if the socket is full.
    outbox.flush(nobody);
    Background group(outbox, [&] { outbox.put(both, bytes_of("both"), {}, false, nobody); });
    outbox.put(quick, bytes_of("again"), {}, false, nobody);
    const bool early = workers.readers[1].expect(1).payload == "both";  // the put was just under the limit
    if (early) CHECK(workers.readers[1].expect(1).payload == "again");
    CHECK(put < kMany);
    int payloads = 0;
    bool grouped = false;
    while (payloads < kMany || !grouped) {
      const bool plain = workers.readers[0].expect(1).payload == text;
      payloads += plain ? 1 : 0;
      grouped = grouped || !plain;
    }
    caller.join();
    group.join();
    outbox.put(quick, bytes_of("last"), {}, false, nobody);
    CHECK(workers.readers[1].expect(1).payload == (early ? "last" : "both"));
    until([&] { return outbox.pending(0) == 0; });
    CHECK(outbox.sent(0) == kMany * (6 + text.size()) + 6 + 4);
  }
}

TEST(bulk_messages_let_calls_pass_the_limit) {
  constexpr size_t kLimit = 1 << 16;
  Outbox outbox(kSoon, 1024, kLimit);
  Workers workers(outbox, 1);
  const int target = outbox.target({0});
  const std::string large(4 << 20, 'x');
  // The worker does not read, and this thread calls the outbox itself. If a call blocked, the test would hang.
  for (int i = 0; i < 3; i++) outbox.put(target, bytes_of("head"), bytes_of(large), true, nobody);
  for (uint32_t i = 0; i < 100; i++) call(outbox, target, 1, 0, i);
  outbox.put(target, bytes_of("small"), {}, true, nobody);
  CHECK(outbox.pending(0) > large.size() * 2);
  std::atomic<bool> passed = false;
  const std::string text(kLimit / 2, 'y');
  Background caller(outbox, [&] {
    for (int i = 0; i < 4; i++) outbox.put(target, bytes_of(text), {}, false, nobody);
    passed = true;
  });
  for (int i = 0; i < 3; i++) CHECK(workers.readers[0].expect(1).payload == "head" + large);
  CHECK(workers.readers[0].expect(2).words[0] == 1);
  for (uint32_t i = 0; i < 100; i++) workers.readers[0].expect(kSequenced);
  CHECK(workers.readers[0].expect(1).payload == "small");
  for (int i = 0; i < 4; i++) CHECK(workers.readers[0].expect(1).payload == text);
  caller.join();
  CHECK(passed);
  until([&] { return outbox.pending(0) == 0; });
}

TEST(a_lost_worker_blocks_nobody) {
  Outbox outbox(kSoon, 1024, 1 << 16);
  Workers workers(outbox, 2);
  const int both = outbox.target({0, 1});
  const std::string text(1 << 20, 'x');
  Background caller(outbox, [&] {
    for (uint32_t i = 0; i < 3; i++) outbox.put(both, bytes_of(text), {}, false, nobody);
    call(outbox, both, 7, 0, 0);
  });
  CHECK(workers.readers[1].expect(1).payload == text);
  outbox.lose(0);
  for (int i = 0; i < 2; i++) CHECK(workers.readers[1].expect(1).payload == text);
  caller.join();
  CHECK(workers.readers[1].expect(2).words[0] == 7);
  workers.readers[1].expect(kSequenced);
  CHECK(outbox.pending(0) == 0);

  auto [here, there] = unix_pair();
  Reader again(std::move(there));
  outbox.replace(0, here.get());
  call(outbox, both, 7, 0, 1);
  CHECK(again.expect(2).words[0] == 7);  // the new process does not know the call site
  CHECK(again.expect(kSequenced).words[2] == 1);
  outbox.lose(0);
}

TEST(a_broken_socket_is_a_failure) {
  Outbox outbox(kSoon, 1024, 1 << 16);
  Workers workers(outbox, 2);
  const int both = outbox.target({0, 1});
  workers.readers.erase(workers.readers.begin());
  for (uint32_t i = 0; i < 1000; i++) {  // in total more than limit_bytes
    outbox.put(both, bytes_of(std::string(100, 'x')), {}, false, nobody);
    CHECK(workers.readers[0].expect(1).payload.size() == 100);
  }
  CHECK(outbox.failure(0) == EPIPE && outbox.failure(1) == 0 && outbox.pending(0) == 0);
}

TEST(an_outbox_closes_with_what_is_pending) {
  Outbox outbox(kSoon, 1024, 1 << 12);
  Workers workers(outbox, 1);
  const int target = outbox.target({0});
  const uint32_t id = call(outbox, target, 1, 0, 0);
  Background caller(outbox, [&] {
    for (;;) outbox.put(target, bytes_of(std::string(1000, 'x')), {}, false, nobody);
  });
  until([&] { return outbox.pending(0) > 1 << 11; });
  outbox.close();
  std::string refused;
  try {
    caller.join();
  } catch (const std::runtime_error& error) {
    refused = error.what();
  }
  CHECK(refused == "the outbox is closed");
  outbox.free(target, id);
  CHECK(outbox.live() == 0);
  outbox.close();
}
