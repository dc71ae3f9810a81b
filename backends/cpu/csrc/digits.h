// Activations as whole numbers. A variant includes a simd_*.h before this file.
//
// Each group of a row becomes step * v, v a whole number written as P signed bytes in base 256:
//
//   P = 3   |v| < 2^23: the precision of a float32, counted from the largest of the group;
//   P = 2   |v| < 2^15: enough for a bfloat16, which has 8 significant bits;
//   P = 1   |v| <= 127: the `fast` numerics, as llama.cpp rounds.
//
// The step of P = 2 and 3 is a power of two, so that numbers of 8 bits less than 2^7 (2^15) below
// the largest of their group lose nothing. That of P = 1 is the chunk's, the largest of 256 columns
// divided by 127, and a group whose numbers are smaller is finer by a power of two, 2^LIFT at most:
// its largest v is 64 or more. So sums of a chunk are scaled once, after a shift.
//
// A group that holds an infinity or a NaN gets a NaN for its step: the whole row comes out as NaN.
// Groups below 2^-103 are rounded to multiples of 2^-126, or to zero by P = 1.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>

#include "panel.h"
#include "repeat.h"

namespace {
using namespace qc;

constexpr int LIFT = 7;  // sums of 256 columns, bytes times bytes, leave as many bits

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t fraction(uint32_t bits) { return bits & 0x7fffffu; }
inline float power_of_two(int exponent) {  // of a normal number
  return float_of(static_cast<uint32_t>(exponent + 127) << 23);
}

constexpr uint32_t INFINITE = 0x7f800000u;  // bits of infinity; those of a NaN are larger

// What a group is multiplied with to become whole numbers, and the step of those numbers.
struct Grid {
  float factor, step;
};

template <int P>
inline Grid grid_of(uint32_t largest) {
  if (largest >= INFINITE) return {0.f, std::numeric_limits<float>::quiet_NaN()};
  if (largest == 0) return {0.f, 0.f};
  if (P == 1) {
    const float x = float_of(largest);
    if (x < 0x1p-100f) return {0.f, 0.f};
    return {127.f / x, x / 127.f};
  }
  // The largest whole number whose highest digit is at most 127.
  const uint32_t limit = fraction(bits_of(P == 2 ? 32639.f : 8355711.f));
  int exponent = (P == 2 ? 14 : 22) + 127 - static_cast<int>(largest >> 23);
  exponent -= fraction(largest) > limit;
  if (exponent > 126) exponent = 126;  // the step stays a normal number
  return {power_of_two(exponent), power_of_two(-exponent)};
}

constexpr int64_t UNITS = CHUNK / UNIT;

// The units of a chunk, and how many a group has.
struct Units {
  int64_t count, group;
  uint32_t largest[UNITS];
  float factor[UNITS];

  int64_t end(int64_t g) const { return std::min((g + 1) * group, count); }
};

// Steps of a chunk's groups, and the factors of its units; false where one is not finite. For more
// digits than one.
template <int P>
bool choose_steps(Units& units, int64_t groups, float* step) {
  uint32_t largest[UNITS], all = 0;
  for (int64_t g = 0, u = 0; g < groups; g++) {
    largest[g] = 0;
    for (; u < units.end(g); u++) largest[g] = std::max(largest[g], units.largest[u]);
    all = std::max(all, largest[g]);
  }
  for (int64_t g = 0, u = 0; g < groups; g++) {
    const Grid grid = grid_of<P>(largest[g]);
    step[g] = grid.step;
    for (; u < units.end(g); u++) units.factor[u] = grid.factor;
  }
  return all < INFINITE;
}

// The digits of a unit: to memory, and to registers that will be added up.
template <int P>
inline QC_INLINE void split(Words v, int8_t* codes, int64_t width, Words (&digits)[P][UNITS],
                            int64_t u) {
#pragma GCC unroll 3
  for (int p = P - 1; p > 0; p--) {
    const Words rest = shift_right_signed(plus(v, spread_word(128)), 8);
    digits[p][u] = plus(v, shift_left(plus(flip(rest, ~0u), spread_word(1)), 8));  // the lowest
    store_low_bytes(codes + p * width, digits[p][u]);
    v = rest;
  }
  digits[0][u] = v;
  store_low_bytes(codes, v);
}

// A chunk of a row: `groups` groups of `group` units but for the last. FULL says that it has all
// UNITS that a chunk can have.
template <int P, bool FULL>
void quantize_chunk(int64_t groups, int64_t group, int64_t all_units, const float* x,
                    const Rows& to) {
  auto* codes = const_cast<int8_t*>(to.codes);
  auto* totals = const_cast<int32_t*>(to.totals);
  auto* step = const_cast<float*>(to.step);
  auto* sums = const_cast<float*>(to.sums);
  const int64_t count = FULL ? UNITS : all_units;
  Units units;
  units.group = group;
  units.count = count;
  Words largest[UNITS], digits[P][UNITS];
  for (int64_t u = FULL ? UNITS : 0; u < UNITS; u++) {
    largest[u] = spread_word(0);
    for (int p = 0; p < P; p++) digits[p][u] = spread_word(0);
  }
  for (int64_t u = 0; u < count; u++) {
    largest[u] = mask(bits_of(load_lanes(x + u * UNIT)), 0x7fffffffu);
  }
  store_words(units.largest, largest_of_each(largest));
  const bool finite = choose_steps<P>(units, groups, step);
  for (int64_t u = 0; u < count; u++) {
    Words v = rounded(mul(load_lanes(x + u * UNIT), spread(units.factor[u])));
    if (!finite) v = spread_word(0);
    split<P>(v, codes + u * UNIT, to.width, digits, u);
  }
  int32_t total[P][UNITS];
  for (int p = 0; p < P; p++) store_words(total[p], total_of_each(digits[p]));
  for (int64_t g = 0, u = 0, end; g < groups; g++, u = end) {
    end = units.end(g);
    int64_t all = 0;
    for (int p = 0; p < P; p++) {
      int32_t sum = 0;
      for (int64_t i = u; i < end; i++) sum += total[p][i];
      totals[p * to.groups + g] = -sum;
      all = all * 256 + sum;
    }
    sums[g] = static_cast<float>(static_cast<double>(all) * step[g]);
  }
}

// x - y.
inline Words less(int32_t x, const Words& y) { return plus(spread_word(x + 1), flip(y, ~0u)); }

#ifndef QC_DIRECT
inline int32_t largest_lane(const Words& x) {
  int32_t lanes[UNITS];
  store_words(lanes, x);
  return *std::max_element(lanes, lanes + UNITS);
}
inline void store_some(int32_t* p, const Words& x, int64_t count) {
  int32_t lanes[UNITS];
  store_words(lanes, x);
  std::memcpy(p, lanes, static_cast<size_t>(count) * 4);
}
inline void store_low_bytes(int8_t* p, const Words& a, const Words& b, const Words& c,
                            const Words& d) {
  store_low_bytes(p, a);
  store_low_bytes(p + UNIT, b);
  store_low_bytes(p + 2 * UNIT, c);
  store_low_bytes(p + 3 * UNIT, d);
}
#endif

#ifdef QC_PAIRS
constexpr bool PAIRED = true;
constexpr int SUM_SHIFT = 3;  // of sums of x in the steps of a chunk, so that they fit halves

// What pairs of groups need: see pairs.h. Lanes are groups; those of `above` are sums of what is
// positive in a group.
inline void put_pairs(const Rows& to, const Words& total, const Words& lift, const Words& above) {
  if (!to.pairs) return;
  auto* pairs = const_cast<int32_t*>(to.pairs);
  const Words half = spread_word(1 << (SUM_SHIFT - 1));
  store_pairs(pairs, shift_right_signed(plus(shift_left_each(total, lift), half), SUM_SHIFT));
  store_pairs(pairs + UNITS / 4, lift);
  const Words below = plus(above, less(0, total));
  *const_cast<int32_t*>(to.reach) = largest_lane(larger(above, below));
}
#else
constexpr bool PAIRED = false;
#endif

// One digit. Lanes are groups, from the largest numbers on to the sums. U says that the chunk has
// all UNITS and how many of them are a group; 0 says nothing.
template <int U>
void quantize_bytes(int64_t some_groups, int64_t some, int64_t count, const float* x,
                    const Rows& to) {
  static const float nothing[CHUNK] = {};
  constexpr int ABOVE = PAIRED && U == 2 ? UNITS / 2 : 0;  // where sums of what is positive are
  const int64_t groups = U ? UNITS / U : some_groups, group = U ? U : some;
  const auto each_unit = [&](const auto& body) QC_INLINE {
    if constexpr (U > 0) {
      repeat<UNITS>(body);
    } else {
      for (int64_t u = 0; u < count; u++) body(u);
    }
  };
  Words sets[UNITS];  // of each group what its units make together
  const auto clear = [&]() QC_INLINE {
    repeat<UNITS>([&](auto g) QC_INLINE { sets[g] = spread_word(0); });
  };
  clear();
  each_unit([&](auto u) QC_INLINE {
    const Words size = mask(bits_of(load_lanes(x + u * UNIT)), 0x7fffffffu);
    sets[u / group] = larger(sets[u / group], size);
  });
  const Words largest = largest_of_each(sets);
  const auto all = static_cast<uint32_t>(largest_lane(largest));
  const Grid chunk = grid_of<1>(all);
  if (all >= INFINITE) x = nothing;
  // How many times a group's largest can be doubled within the chunk's: the difference of their
  // exponents, less one where the fraction borrows.
  const Words times = shift_right(less(static_cast<int32_t>(all), largest), 23);
  const Words lift = larger(less(LIFT, times), spread_word(0));
  alignas(64) float factor[UNITS];
  store_lanes(factor, mul(spread(chunk.factor), lanes_of(shift_left(less(LIFT + 127, lift), 23))));
  auto* codes = const_cast<int8_t*>(to.codes);
  Words last[4];
  clear();
  each_unit([&](auto u) QC_INLINE {
    const Words v = rounded(mul(load_lanes(x + u * UNIT), spread(factor[u / group])));
    sets[u / group] = plus(sets[u / group], v);
    if constexpr (ABOVE > 0) {
      sets[ABOVE + u / 2] = plus(sets[ABOVE + u / 2], larger(v, spread_word(0)));
    }
    if constexpr (U > 0) {
      last[u % 4] = v;
      if (u % 4 == 3) store_low_bytes(codes + (u - 3) * UNIT, last[0], last[1], last[2], last[3]);
    } else {
      store_low_bytes(codes + u * UNIT, v);
    }
  });
  const Words total = total_of_each(sets);
  const auto put = [&](const void* place, const Words& x) QC_INLINE {
    store_some(static_cast<int32_t*>(const_cast<void*>(place)), x, groups);
  };
  put(to.totals, less(0, total));
  put(to.lift, lift);
  *const_cast<float*>(to.step) = chunk.step * (1.f / (1 << LIFT));
  put(to.sums, bits_of(to_lanes(shift_left_each(total, lift))));
#ifdef QC_PAIRS
  if constexpr (ABOVE > 0) put_pairs(to, total, lift, upper_half(total));
#endif
}

// The instance for a chunk whose units number `count`, `group` of them a group.
inline void quantize_bytes(int64_t groups, int64_t group, int64_t count, const float* x,
                           const Rows& to) {
  const bool full = count == UNITS;
  if (full && group == 1) return quantize_bytes<1>(groups, group, count, x, to);
  if (full && group == 2) return quantize_bytes<2>(groups, group, count, x, to);
  if (full && group == 8) return quantize_bytes<8>(groups, group, count, x, to);
  quantize_bytes<0>(groups, group, count, x, to);
}

template <int P>
void quantize_part(const Weight& w, const Chunk& at, const float* x, const Rows& to) {
  const int64_t group = w.padded_group() / UNIT;
  const int64_t count = (at.groups - 1) * group + w.units(at.group + at.groups - 1);
  if constexpr (P == 1) quantize_bytes(at.groups, group, count, x, to);
  else if (count == UNITS) quantize_chunk<P, true>(at.groups, group, count, x, to);
  else quantize_chunk<P, false>(at.groups, group, count, x, to);
}

template <int P>
void quantize_row(const Weight& w, const float* x, const Rows& to, int64_t row) {
  for (int64_t c = 0; c < w.chunks(); c++, x += to.width) {
    quantize_part<P>(w, w.chunk(c), x, to.at(c, row));
  }
}

void quantize(const Weight& w, const float* x, const Rows& to, int64_t row) {
  if (to.digits == 1) return quantize_row<1>(w, x, to, row);
  if (to.digits == 2) return quantize_row<2>(w, x, to, row);
  quantize_row<3>(w, x, to, row);
}

}  // namespace
