// Queue of finished requests. One thread can wait on it for many requests.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace allranks {

class Completions {
 public:
  void add(uint64_t ticket);
  // Remove and return all tickets in the order of add(). Blocks until one exists, for at most timeout_ns (< 0: no
  // limit).
  std::vector<uint64_t> take(int64_t timeout_ns);

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<uint64_t> tickets_;
};

}  // namespace allranks
