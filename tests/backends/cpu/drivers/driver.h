// What the drivers share: random numbers, exact buffers, numbers of sixteen bits, the count of
// wrong cases. A driver is `main`, compiled with the kernels' sources for any machine: it takes a
// seed and a number of cases, and prints what failed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "panel.h"

namespace {

std::mt19937 randoms;

int64_t below(int64_t end) { return static_cast<int64_t>(randoms() % static_cast<uint32_t>(end)); }
bool one_in(int64_t count) { return below(count) == 0; }
int64_t pick(std::initializer_list<int64_t> of) {
  return of.begin()[below(static_cast<int64_t>(of.size()))];
}
double between(double low, double high) {
  return low + (high - low) * std::ldexp(static_cast<double>(randoms()), -32);
}

// Memory of exactly so many elements, for a sanitizer to see what lies beyond; never zeroed.
template <class T>
std::unique_ptr<T[]> exactly(int64_t count) {
  std::unique_ptr<T[]> made(new T[static_cast<size_t>(count)]);
  if (count) std::memset(made.get(), 0xa5, static_cast<size_t>(count) * sizeof(T));
  return made;
}

// The value of a number with `exponent` bits and `fraction` bits below its sign. Not that of
// infinities and NaNs.
double narrow_value(uint32_t bits, int exponent, int fraction) {
  const int bias = (1 << (exponent - 1)) - 1;
  const int place = static_cast<int>(bits >> fraction & ((1u << exponent) - 1));
  const double low = std::ldexp(static_cast<double>(bits & ((1u << fraction) - 1)), -fraction);
  const double size = place ? std::ldexp(1 + low, place - bias) : std::ldexp(low, 1 - bias);
  return bits >> (exponent + fraction) & 1 ? -size : size;
}

// Element `at`, by the widths of the format.
double number(const void* from, int64_t at, qc::Number type) {
  if (type == qc::F32) {
    float x;
    std::memcpy(&x, static_cast<const uint8_t*>(from) + 4 * at, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const uint8_t*>(from) + 2 * at, 2);
  const int exponent = type == qc::F16 ? 5 : 8, fraction = 15 - exponent;
  if ((bits >> fraction & ((1 << exponent) - 1)) != (1 << exponent) - 1) {
    return narrow_value(bits, exponent, fraction);
  }
  if (bits & ((1 << fraction) - 1)) return std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  return bits & 0x8000 ? -infinity : infinity;
}

// The half that is nearest to a number of a half's range.
uint16_t nearest_half(double x) {
  const double size = std::fabs(x);
  uint16_t bits = 0;
  for (int bit = 14; bit >= 0; bit--) {
    const uint16_t more = static_cast<uint16_t>(bits | 1 << bit);
    if (more < 0x7c00 && narrow_value(more, 5, 10) <= size) bits = more;
  }
  const uint16_t next = static_cast<uint16_t>(bits + 1);
  if (next < 0x7c00 && narrow_value(next, 5, 10) - size < size - narrow_value(bits, 5, 10)) {
    bits = next;
  }
  return static_cast<uint16_t>(bits | (x < 0 ? 0x8000 : 0));
}

int64_t wrong = 0;

// Counts a wrong case, and says so of the first few.
template <class... Facts>
void fault(const char* what, const Facts&... facts) {
  if (wrong++ >= 20) return;
  std::printf(what, facts...);
  std::printf("\n");
}

// Seed, number of cases: `body` does one case.
template <class Body>
int run(int count, char** arguments, const Body& body) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s SEED CASES\n", arguments[0]);
    return 2;
  }
  randoms.seed(static_cast<uint32_t>(std::atoi(arguments[1])));
  const int64_t cases = std::atoll(arguments[2]);
  for (int64_t i = 0; i < cases; i++) body();
  std::printf("%lld cases, %lld wrong\n", static_cast<long long>(cases),
              static_cast<long long>(wrong));
  return wrong != 0;
}

}  // namespace
