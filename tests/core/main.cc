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
