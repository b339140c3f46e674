// The kernels compared with plain loops, for every instruction set that this machine supports.
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "collective/reduce.h"
#include "collective/reduce_table.h"
#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

std::vector<KernelTable> tables() {
  std::vector<KernelTable> all = {baseline::kernels()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) all.push_back(avx2::kernels());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) all.push_back(avx512::kernels());
#endif
  return all;
}

// Return a float16's value by arithmetic instead of bit operations, so that the check is independent of the kernels.
float half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

}  // namespace

TEST(every_kernel_set_gives_the_same_bits) {
  const size_t count = 5003;
  const int n = 11;
  for (int dtype = 0; dtype < kDTypes; dtype++) {
    const auto whole = static_cast<DType>(dtype);
    // Real and imaginary parts are compared separately.
    const DType part = whole == DType::c32    ? DType::f16
                       : whole == DType::c64  ? DType::f32
                       : whole == DType::c128 ? DType::f64
                                              : whole;
    const size_t size = size_of(part);
    const size_t parts = count * (size_of(whole) / size);
    std::vector<std::vector<uint8_t>> operands;
    uint32_t state = 1;
    for (int r = 0; r < n; r++) {
      std::vector<uint8_t> bytes(parts * size);
      for (auto& b : bytes) {
        state = state * 1664525u + 1013904223u;
        b = static_cast<DType>(dtype) == DType::boolean ? (state >> 24) & 1 : static_cast<uint8_t>(state >> 24);
      }
      operands.push_back(bytes);
    }
    std::array<const void*, n> srcs{};
    for (int r = 0; r < n; r++) srcs[r] = operands[r].data();
    for (int op = 0; op < kReduceOps; op++) {
      for (int used = 1; used <= n; used++) {
        std::vector<uint8_t> expected;
        for (const auto& table : tables()) {
          const Kernel kernel = table[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
          if (kernel == nullptr) continue;
          std::vector<uint8_t> out(parts * size);
          kernel(out.data(), srcs.data(), used, count, used);
          for (const int mine : {0, used - 1}) {  // the result overwrites an operand
            std::vector<uint8_t> place = operands[mine];
            auto in_place = srcs;
            in_place[mine] = place.data();
            kernel(place.data(), in_place.data(), used, count, used);
            CHECK(place == out);
          }
          if (expected.empty()) expected = out;
          if (out == expected) continue;
          // The payload of a NaN may differ, but all results must be NaN.
          for (size_t i = 0; i < parts; i++) {
            if (std::memcmp(&out[i * size], &expected[i * size], size) == 0) continue;
            const auto is_nan = [&](const std::vector<uint8_t>& v) {
              uint64_t bits = 0;
              std::memcpy(&bits, &v[i * size], size);
              switch (part) {
                case DType::f16:
                  return (bits & 0x7fff) > 0x7c00;
                case DType::bf16:
                  return (bits & 0x7fff) > 0x7f80;
                case DType::f32:
                  return (bits & 0x7fffffff) > 0x7f800000;
                case DType::f64:
                  return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000;
                default:
                  return false;
              }
            };
            CHECK(is_nan(out) && is_nan(expected));
          }
        }
      }
    }
  }
}

// Kernels process four operands at a time. The order of additions, and so the bits, must not depend on that.
TEST(operands_are_combined_one_after_the_other) {
  constexpr size_t count = 2500;
  std::vector<std::vector<float>> operands;
  for (int r = 0; r < 20; r++) {
    auto& values = operands.emplace_back(count);
    for (size_t i = 0; i < count; i++) {
      values[i] = std::sin(static_cast<float>(i * 31 + static_cast<size_t>(r) * 7919)) * std::pow(10.0f, r % 5);
    }
  }
  for (const auto& table : tables()) {
    std::vector<float> expected = operands[0];
    std::vector<const void*> srcs = {operands[0].data()};
    for (int r = 1; r < 20; r++) {
      srcs.push_back(operands[r].data());
      for (size_t i = 0; i < count; i++) expected[i] += operands[r][i];
      std::vector<float> out(count);
      const auto& row = table[static_cast<size_t>(DType::f32)];
      row[static_cast<size_t>(ReduceOp::sum)](out.data(), srcs.data(), r + 1, count, r + 1);
      CHECK(out == expected);
      row[static_cast<size_t>(ReduceOp::avg)](out.data(), srcs.data(), r + 1, count, r + 1);
      for (size_t i = 0; i < count; i++) CHECK(out[i] == expected[i] / static_cast<float>(r + 1));
    }
  }
}

TEST(float16_widens_and_narrows_exactly) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); i++) all[i] = static_cast<uint16_t>(i);
  for (const auto& table : tables()) {
    // One operand: out is narrow(widen(x)), which must be x.
    std::vector<uint16_t> out(all.size());
    const void* one[] = {all.data()};
    table[static_cast<size_t>(DType::f16)][static_cast<size_t>(ReduceOp::sum)](out.data(), one, 1, all.size(), 1);
    for (size_t i = 0; i < all.size(); i++) {
      if (std::isnan(half_value(all[i]))) {
        CHECK(std::isnan(half_value(out[i])));
      } else {
        CHECK(out[i] == all[i]);
      }
    }
  }
}

TEST(float16_rounds_to_nearest_even_once) {
  for (const auto& table : tables()) {
    const Kernel sum = table[static_cast<size_t>(DType::f16)][static_cast<size_t>(ReduceOp::sum)];
    const auto add = [&](std::vector<uint16_t> xs) {
      std::vector<const void*> srcs;
      for (const auto& x : xs) srcs.push_back(&x);
      uint16_t out = 0;
      sum(&out, srcs.data(), static_cast<int>(srcs.size()), 1, static_cast<int>(srcs.size()));
      return half_value(out);
    };
    CHECK(add({0x6800, 0x3c00}) == 2048.0f);          // 2048 + 1: a tie, to even
    CHECK(add({0x6800, 0x3c00, 0x3c00}) == 2050.0f);  // rounded once: twice would give 2048
    CHECK(add({0x7bff, 0x4c00}) == INFINITY);         // 65504 + 16 rounds up, out of range
    CHECK(add({0x7bff, 0x4b00}) == 65504.0f);
    CHECK(add({0x0001, 0x0001}) == std::ldexp(1.0f, -23));
    CHECK(add({0x7c00, 0x3c00}) == INFINITY);
    CHECK(std::isnan(add({0x7c00, 0xfc00})));
  }
}

TEST(averages_divide_by_the_ranks_behind_the_operands) {
  for (const auto& table : tables()) {
    const float a = 3;
    const float b = 7;
    const void* srcs[] = {&a, &b};
    float out = 0;
    table[static_cast<size_t>(DType::f32)][static_cast<size_t>(ReduceOp::avg)](&out, srcs, 2, 1, 4);
    CHECK(out == 2.5f);
  }
}

TEST(averages_of_integers_round_towards_zero) {
  const auto average = []<class T>(const KernelTable& table, DType dtype, std::vector<T> xs, int parts) {
    std::vector<const void*> srcs;
    for (const auto& x : xs) srcs.push_back(&x);
    T out = 0;
    table[static_cast<size_t>(dtype)][static_cast<size_t>(ReduceOp::avg)](&out, srcs.data(),
                                                                          static_cast<int>(srcs.size()), 1, parts);
    return out;
  };
  for (const auto& table : tables()) {
    CHECK(average(table, DType::i8, std::vector<int8_t>{-3, -4}, 2) == -3);
    CHECK(average(table, DType::i8, std::vector<int8_t>{127, 1}, 200) == 0);  // more ranks than an int8 can represent
    CHECK(average(table, DType::i8, std::vector<int8_t>{127, 1}, 2) == -64);  // the sum wraps
    CHECK(average(table, DType::u8, std::vector<uint8_t>{255}, 300) == 0);
    CHECK(average(table, DType::u32, std::vector<uint32_t>{0xffffffff, 0, 0}, 3) == 0x55555555);
    CHECK(average(table, DType::i32, std::vector<int32_t>{std::numeric_limits<int32_t>::min(), 1}, 1) == -2147483647);
    CHECK(average(table, DType::u64, std::vector<uint64_t>{~0ULL, 0}, 5) == ~0ULL / 5);
    CHECK(average(table, DType::i64, std::vector<int64_t>{std::numeric_limits<int64_t>::min() + 1, 0}, 2) ==
          -(std::numeric_limits<int64_t>::max() / 2));
  }
}

TEST(integers_wrap) {
  for (const auto& table : tables()) {
    const int64_t a = std::numeric_limits<int64_t>::max();
    const int64_t b = 2;
    const void* srcs[] = {&a, &b};
    int64_t out = 0;
    table[static_cast<size_t>(DType::i64)][static_cast<size_t>(ReduceOp::sum)](&out, srcs, 2, 1, 2);
    CHECK(out == std::numeric_limits<int64_t>::min() + 1);
    table[static_cast<size_t>(DType::i64)][static_cast<size_t>(ReduceOp::prod)](&out, srcs, 2, 1, 2);
    CHECK(out == -2);
  }
}
