// Runs the core's tests. With an argument, it runs only the tests whose name contains the argument.
#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <exception>

#include "ranks.h"

namespace allranks::test {
std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
}  // namespace allranks::test

#ifdef __SANITIZE_THREAD__
// libstdc++ counts the references to an exception in code that is not instrumented. If two threads have references, the
// sanitizer does not see the order: the last release happens after all reads of the other thread.
extern "C" const char* __tsan_default_suppressions() { return "race:std::__exception_ptr::exception_ptr::_M_release"; }

// The sanitizer has two shadow pages for each page of the program, and reads them before it writes them. Each first
// write after a read interrupts all CPUs, which takes a third of the time of all tests. With huge pages there are few
// such writes.
extern "C" const char* __tsan_default_options() { return "no_huge_pages_for_shadow=0"; }

void use_huge_pages() {
  constexpr uint64_t kShadow = uint64_t{1} << 40;  // bytes; only the sanitizer's shadow memory has longer mappings
  std::FILE* maps = std::fopen("/proc/self/maps", "r");
  uint64_t from = 0;
  uint64_t to = 0;
  for (char line[512]; std::fgets(line, sizeof line, maps) != nullptr;) {
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64, &from, &to) == 2 && to - from > kShadow) {
      madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
    }
  }
  std::fclose(maps);
}
#else
void use_huge_pages() {}
#endif

int main(int argc, char** argv) {
  use_huge_pages();
  int failed = 0;
  int passed = 0;
  for (const auto& test : allranks::test::tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    try {
      test.body();
      std::printf("ok      %s\n", test.name);
      passed++;
    } catch (const std::exception& e) {
      std::printf("FAILED  %s: %s\n", test.name, e.what());
      failed++;
    }
    std::fflush(stdout);
  }
  std::printf("core: %d passed, %d failed\n", passed, failed);
  return failed != 0 || passed == 0;
}
