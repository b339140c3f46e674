// Runs the core's tests, or those whose name contains an argument.
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
// libstdc++ counts the holders of an exception in code that is not instrumented: where two threads hold one, the
// sanitizer does not see that the last to let go comes after what the other has read.
extern "C" const char* __tsan_default_suppressions() { return "race:std::__exception_ptr::exception_ptr::_M_release"; }
#endif

int main(int argc, char** argv) {
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
