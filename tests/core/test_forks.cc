// Forked children: they exit whatever the parent's threads were doing, and they do not affect the parent.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <thread>

#include "ranks.h"
#include "remote/outbox.h"

using namespace allranks;
using namespace allranks::test;

namespace {

constexpr unsigned kLimitS = 60;

// Run body in a forked child and return the child's wait status: 0 if body returned true. A child that hangs is killed
// by SIGALRM after kLimitS seconds.
int child_of(const std::function<bool()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(kLimitS);
    int code = 2;
    try {
      code = body() ? 0 : 1;
    } catch (...) {
    }
    _exit(code);
  }
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid);
  return status;
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; fd++) count += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

// Return whether the process maps segments. This must not allocate: another thread may have held the lock of the
// sanitizer's allocator when the child was forked.
bool has_segments() {
  // qemu-user ignores MADV_DONTFORK, so this can be tested only on a real kernel (make aarch64).
  static const bool emulated = std::getenv("ALLRANKS_TEST_EMULATED") != nullptr;
  if (emulated) return false;
  static std::array<char, 1 << 20> maps;
  const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  size_t size = 0;
  for (ssize_t n = 1; n > 0 && size < maps.size(); size += n > 0 ? static_cast<size_t>(n) : 0) {
    n = read(fd, maps.data() + size, maps.size() - size);
  }
  close(fd);
  return std::string_view(maps.data(), size).find("memfd:allranks") != std::string_view::npos;
}

bool refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.failure.kind == Kind::forked;
  }
  return false;
}

}  // namespace

TEST_PLACED(a_child_has_nothing_of_a_group_with_calls_under_way, 3) {
  const int before = open_descriptors();
  Ranks ranks(hosts);
  Caller nobody;
  ranks.each([&](Comm& comm) {  // so that all threads and connections exist
    std::vector<float> tensor(100'000, 1);
    auto request = comm.start(all_reduce(tensor));
    comm.wait(request, nobody, -1);
    int there = 0;
    const int next = (comm.rank() + 1) % comm.size();
    auto sending = comm.start_send({reinterpret_cast<std::byte*>(&there), 1, DType::i32}, next, 0, nobody);
    int got = 0;
    comm.recv({reinterpret_cast<std::byte*>(&got), 1, DType::i32}, -1, 0, nobody);
    comm.wait(sending, nobody, -1);
  });
  Comm& comm = *ranks.comms[0];
  std::vector<float> tensor(100'000, 1);
  std::vector<float> other(100'000);
  const Buffer buffer{reinterpret_cast<std::byte*>(other.data()), other.size(), DType::f32};
  auto reducing = comm.start(all_reduce(tensor));
  auto receiving = comm.start_recv(buffer, 1, 7, nobody);
  for (int i = 0; i < 20; i++) {
    CHECK(child_of([&] {
            if (open_descriptors() != before || has_segments()) return false;
            std::vector<float> mine(4, 1);
            const Buffer small{reinterpret_cast<std::byte*>(mine.data()), mine.size(), DType::f32};
            const bool all =
                refused([&] { comm.run(all_reduce(mine), nobody); }) &&
                refused([&] { comm.start(all_reduce(mine)); }) && refused([&] { comm.wait(reducing, nobody, -1); }) &&
                refused([&] { comm.wait(receiving, nobody, -1); }) &&
                refused([&] { comm.send(small, 1, 0, nobody); }) && refused([&] { comm.recv(small, 1, 0, nobody); }) &&
                refused([&] { comm.start_send(small, 1, 0, nobody); }) &&
                refused([&] { comm.start_recv(small, 1, 0, nobody); }) && refused([&] { comm.share(1, 4096, {}); }) &&
                comm.last_calls().empty();
            comm.close();
            reducing.reset();
            receiving.reset();
            ranks.comms.clear();
            return all;
          }) == 0);
  }
  ranks.each([&](Comm& c) {
    std::vector<float> mine(100'000, 1);
    if (c.rank() == 0) {
      c.wait(reducing, nobody, -1);
    } else {
      c.run(all_reduce(mine), nobody);
    }
    if (c.rank() == 1) c.send({reinterpret_cast<std::byte*>(mine.data()), mine.size(), DType::f32}, 0, 7, nobody);
    if (c.rank() == 0) c.wait(receiving, nobody, -1);
  });
  CHECK(tensor[99'999] == 3 && other[99'999] == 3);
}

TEST(children_of_a_process_whose_threads_change_everything) {
  Ranks ranks({0, 0, 1});
  std::atomic<bool> stop = false;
  std::thread forking([&] {
    for (int i = 0; i < 50; i++) {
      CHECK(child_of([&] {
              ranks.comms.clear();
              return !has_segments();
            }) == 0);
    }
    stop = true;
  });
  ranks.each([&](Comm& comm) {
    Caller nobody;
    for (bool last = false; !last;) {
      int ended = comm.rank() == 0 && stop ? 1 : 0;
      std::vector<int32_t> tensor{ended};
      auto request = comm.start(all_reduce(tensor));
      const int next = (comm.rank() + 1) % comm.size();
      auto sending = comm.start_send({reinterpret_cast<std::byte*>(&ended), 1, DType::i32}, next, 0, nobody);
      int got = -1;
      comm.recv({reinterpret_cast<std::byte*>(&got), 1, DType::i32}, -1, 0, nobody);
      comm.wait(sending, nobody, -1);
      comm.wait(request, nobody, -1);
      CHECK(got == 0 || got == 1);
      last = tensor[0] == 1;
    }
  });
  forking.join();
}

TEST(a_child_that_is_forked_within_a_call_leaves_it) {
  struct Forking : Caller {
    explicit Forking(std::atomic<int>& so_far) : forked(so_far) {}
    bool interrupted() override {
      if (child != 0) return false;
      child = fork();
      if (child == 0) {
        alarm(kLimitS);
        throw sys::Forked{false};
      }
      forked++;
      return false;
    }
    std::atomic<int>& forked;
    pid_t child = 0;
  };
  const auto ended_well = [](pid_t pid) {
    int status = 0;
    return waitpid(pid, &status, 0) == pid && status == 0;
  };
  for (const auto& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 1}}) {
    Ranks ranks(hosts);
    std::atomic<int> forked = 0;  // rank 1 joins a call only after rank 0 has forked in it
    ranks.each([&](Comm& comm) {
      Caller nobody;
      std::vector<int32_t> tensor{comm.rank()};
      const Buffer buffer{reinterpret_cast<std::byte*>(tensor.data()), 1, DType::i32};
      const auto in_child = [&](const std::function<void(Caller&)>& call) {
        Forking caller(forked);
        try {
          call(caller);
        } catch (const sys::Forked&) {
          comm.close();
          _exit(0);
        }
        CHECK(ended_well(caller.child));
      };
      if (comm.rank() == 0) {
        in_child([&](Caller& caller) { comm.run(all_reduce(tensor), caller); });
        in_child([&](Caller& caller) { comm.wait(comm.start(all_reduce(tensor)), caller, -1); });
        in_child([&](Caller& caller) { comm.recv(buffer, 1, 0, caller); });
        CHECK(tensor[0] == 2);
      } else {
        const auto come_after = [&](int forks) {
          for (unsigned ms = 0; forked < forks; ms++) {
            CHECK(ms < kLimitS * 1000);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        };
        come_after(1);
        comm.run(all_reduce(tensor), nobody);
        come_after(2);
        comm.run(all_reduce(tensor), nobody);
        come_after(3);
        comm.send(buffer, 0, 0, nobody);
      }
    });
  }
}

TEST(a_childs_own_descriptors_are_not_taken_for_the_parents) {
  sys::Fd held(dup(2));
  sys::Fd moved(std::move(held));
  CHECK(child_of([&] {
          const int mine = dup(2);
          if (mine != moved.get()) return false;
          {
            const sys::Fd gone(std::move(moved));
          }
          if (fcntl(mine, F_GETFD) < 0) return false;
          {
            const sys::Fd own(mine);
          }
          return fcntl(mine, F_GETFD) < 0;
        }) == 0);
  const int number = moved.release();
  CHECK(child_of([&] { return fcntl(number, F_GETFD) >= 0; }) == 0);
  close(number);
}

TEST(blocks_of_memory_stay_where_a_child_may_read_them) {
  Ranks ranks(1);
  const sys::Fd fd = sys::sealed_memory("allranks", 4096);
  std::vector<sys::Fd> parts;
  parts.emplace_back(dup(fd.get()));
  auto block = ranks.comms[0]->share(1, 4096, parts);
  block->mine()[7] = std::byte{42};
  CHECK(child_of([&] {
          const bool there = block->mine()[7] == std::byte{42};
          block.reset();
          return there && !has_segments();
        }) == 0);
  CHECK(block->mine()[7] == std::byte{42});
}

TEST(an_outbox_in_a_child) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
  const sys::Fd here(pair[0]);
  const sys::Fd there(pair[1]);
  auto outbox = sys::make_owned<Outbox>(1'000, 1 << 14, 1 << 20);
  outbox->add(here.get());
  const int target = outbox->target({0});
  Caller nobody;
  for (int i = 0; i < 20; i++) {
    outbox->put(target, {}, {}, false, nobody);
    CHECK(child_of([&] {
            try {
              outbox->flush(nobody);
              return false;
            } catch (const std::runtime_error&) {
            }
            outbox->free(target, 0);
            outbox->close();
            outbox.reset();
            return true;
          }) == 0);
  }
}
