// Ranks as threads of one process, on the real channel: what the sanitizers can see through.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm.h"

#define CHECK(condition)                                                                                \
  do {                                                                                                  \
    if (!(condition))                                                                                   \
      throw std::runtime_error(std::string(__FILE__ ":") + std::to_string(__LINE__) + ": " #condition); \
  } while (0)

namespace allranks::test {

struct Ranks {
  explicit Ranks(int n, Sizes sizes = {}, double timeout_s = 20, int64_t spin_ns = 0) {
    std::vector<sys::Fd> segments;
    for (int r = 0; r < n; r++) segments.push_back(Shm::create_segment(r, n, sizes));
    // ends[a][b]: the socket that rank a holds towards rank b.
    std::vector<std::vector<sys::Fd>> ends(static_cast<size_t>(n));
    for (auto& row : ends) row.resize(static_cast<size_t>(n));
    for (size_t a = 0; a < ends.size(); a++) {
      for (size_t b = 0; b < a; b++) {
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        ends[a][b] = sys::Fd(pair[0]);
        ends[b][a] = sys::Fd(pair[1]);
      }
    }
    const auto maps = Shm::map(sizes, segments);
    for (int r = 0; r < n; r++) {
      comms.push_back(
          std::make_unique<Comm>(std::make_unique<Shm>(r, sizes, maps, std::move(ends[static_cast<size_t>(r)])),
                                 Settings{.timeout_s = timeout_s, .spin_ns = spin_ns}));
    }
  }

  // Runs body(comm) on every rank; throws the first rank's failure.
  void each(const std::function<void(Comm&)>& body) {
    std::vector<std::exception_ptr> errors(comms.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < comms.size(); r++) {
      threads.emplace_back([&, r] {
        try {
          body(*comms[r]);
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    }
    for (auto& t : threads) t.join();
    for (auto& e : errors) {
      if (e) std::rethrow_exception(e);
    }
  }

  std::vector<std::unique_ptr<Comm>> comms;
};

// Small pieces, so that small tensors take every path.
inline Sizes small_sizes() { return {.piece = 512, .ring = 6 * 512, .pipe = 1024}; }

template <class T>
DType dtype_of();
template <>
inline DType dtype_of<float>() {
  return DType::f32;
}
template <>
inline DType dtype_of<double>() {
  return DType::f64;
}
template <>
inline DType dtype_of<int32_t>() {
  return DType::i32;
}

template <class T>
Operation all_reduce(std::vector<T>& v, ReduceOp op = ReduceOp::sum) {
  return {{.verb = Verb::all_reduce, .dtype = dtype_of<T>(), .op = op, .count = v.size()},
          {v.data(), v.size(), dtype_of<T>()}};
}
template <class T>
Operation broadcast(std::vector<T>& v, int root) {
  return {{.verb = Verb::broadcast, .dtype = dtype_of<T>(), .root = root, .count = v.size()},
          {v.data(), v.size(), dtype_of<T>()}};
}
inline Operation barrier() { return {{.verb = Verb::barrier}, {}}; }

struct Test {
  const char* name;
  void (*body)();
};
std::vector<Test>& tests();
struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};
#define TEST(name)                                                      \
  static void name();                                                   \
  static const ::allranks::test::Register register_##name(#name, name); \
  static void name()

}  // namespace allranks::test
