// Activations as whole numbers. A variant includes a simd_*.h before this file.
//
// Each group of a row becomes step * v, v a whole number written as P signed bytes in base 256:
//
//   P = 3   |v| < 2^23: the precision of a float32, counted from the largest of the group;
//   P = 2   |v| < 2^15: enough for a bfloat16, which has 8 significant bits;
//   P = 1   |v| <= 127: the `fast` numerics, as llama.cpp rounds.
//
// The step of P = 2 and 3 is a power of two, so that numbers of 8 bits less than 2^7 (2^15) below
// the largest of their group lose nothing. A group that holds an infinity or a NaN gets a NaN for
// its step: the whole row comes out as NaN. Groups below 2^-103 are rounded to multiples of 2^-126.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>

#include "panel.h"

namespace {
using namespace qc;

// What a group is multiplied with to become whole numbers, and the step of those numbers.
struct Grid {
  float factor, step;
};

Grid grid_of(uint32_t largest_bits, int64_t digits) {
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  if (largest_bits >= 0x7f800000u) return {0.f, std::numeric_limits<float>::quiet_NaN()};
  if (largest_bits == 0) return {0.f, 0.f};
  if (digits == 1) {
    if (largest < 0x1p-100f) return {0.f, 0.f};
    return {127.f / largest, largest / 127.f};
  }
  // The largest whole number whose highest digit is at most 127.
  const float limit = digits == 2 ? 32639.f : 8355711.f;
  int exponent = static_cast<int>(largest_bits >> 23) - 127;
  exponent = (digits == 2 ? 14 : 22) - exponent;
  if (exponent > 126) exponent = 126;  // the step stays a normal number
  if (std::ldexp(largest, exponent) > limit) exponent--;
  return {std::ldexp(1.f, exponent), std::ldexp(1.f, -exponent)};
}

Words largest_bits(const float* x, int64_t columns) {
  Words largest = spread_word(0);
  for (int64_t c = 0; c < columns; c += 16) {
    largest = larger(largest, mask(bits_of(load_lanes(x + c)), 0x7fffffffu));
  }
  return largest;
}

template <int P>
void quantize_row(const Weight& w, const float* x, const Rows& to, int64_t row) {
  const int64_t groups = to.groups;
  auto* codes = const_cast<int8_t*>(to.codes) + row * P * to.padded;
  auto* totals = const_cast<int32_t*>(to.totals) + row * P * groups;
  auto* step = const_cast<float*>(to.step) + row * groups;
  auto* sums = const_cast<float*>(to.sums) + row * groups;
  for (int64_t g = 0, at = 0; g < groups; g++) {
    const int64_t columns = w.units(g) * UNIT;  // padding is zero
    const Grid grid = grid_of(static_cast<uint32_t>(largest_of(largest_bits(x + at, columns))), P);
    const Lanes factor = spread(grid.factor);
    Words total[P];
    for (auto& t : total) t = spread_word(0);
    for (int64_t c = 0; c < columns; c += 16, at += 16) {
      Words v = grid.step == grid.step ? rounded(mul(load_lanes(x + at), factor)) : spread_word(0);
#pragma GCC unroll 3
      for (int p = P - 1; p > 0; p--) {
        Words rest = shift_right_signed(plus(v, spread_word(128)), 8);
        v = plus(v, shift_left(plus(flip(rest, ~0u), spread_word(1)), 8));  // the lowest digit
        total[p] = plus(total[p], v);
        store_low_bytes(codes + p * to.padded + at, v);
        v = rest;
      }
      total[0] = plus(total[0], v);
      store_low_bytes(codes + at, v);
    }
    double all = 0;
    for (int p = 0; p < P; p++) {
      const int32_t sum = total_of(total[p]);
      totals[p * groups + g] = sum;
      all = all * 256 + sum;
    }
    step[g] = grid.step;
    sums[g] = static_cast<float>(all * static_cast<double>(grid.step));
  }
}

void quantize(const Weight& w, const float* x, const Rows& to, int64_t row) {
  if (to.digits == 1) return quantize_row<1>(w, x, to, row);
  if (to.digits == 2) return quantize_row<2>(w, x, to, row);
  quantize_row<3>(w, x, to, row);
}

}  // namespace
