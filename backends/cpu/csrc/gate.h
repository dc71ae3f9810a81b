// What lies between the products of a gated layer. A variant includes a simd_*.h before this file.
#pragma once
#include <cstring>

#include "exponent.h"
#include "panel.h"
#include "repeat.h"

namespace {
using namespace qc;

// x / (1 + e^-y): silu where y is x. Smooth towards both ends; a NaN stays one.
inline Lanes gated_by(const Lanes& x, const Lanes& y) {
  const Lanes e = power_of_e(sub(zeros(), larger(spread(-88.f), y)));
  return div(x, add(spread(1.f), e));
}

template <Curve C>
inline Lanes curve(const Lanes& x) {
  if (C == SILU) return gated_by(x, x);
  // (1 + tanh(z)) / 2 = 1 / (1 + e^-2z), z = sqrt(2 / pi) (x + 0.044715 x^3).
  const Lanes cubic = fma(mul(x, x), spread(0.044715f), spread(1.f));
  return gated_by(x, mul(mul(x, spread(1.5957691216057308f)), cubic));
}

// Fewer numbers than lanes are copied to places of their own.
template <Curve C, Number T>
void gate_of(const Gate& g) {
  constexpr int64_t SIZE = bytes_of(T);
  const int64_t whole = g.columns / ROWS * ROWS;
  const auto one = [](const uint8_t* first, const uint8_t* second, uint8_t* to) QC_INLINE {
    store_numbers(to, T, mul(curve<C>(load_numbers(first, T)), load_numbers(second, T)));
  };
  const auto *first = static_cast<const uint8_t*>(g.first),
             *second = static_cast<const uint8_t*>(g.second);
  auto* to = static_cast<uint8_t*>(g.to);
  for (int64_t r = 0; r < g.rows; r++) {
    for (int64_t c = 0; c < whole * SIZE; c += ROWS * SIZE) one(first + c, second + c, to + c);
    if (whole != g.columns) {
      uint8_t some[3][ROWS * SIZE] = {};
      const auto rest = static_cast<size_t>((g.columns - whole) * SIZE);
      std::memcpy(some[0], first + whole * SIZE, rest);
      std::memcpy(some[1], second + whole * SIZE, rest);
      one(some[0], some[1], some[2]);
      std::memcpy(to + whole * SIZE, some[2], rest);
    }
    first += g.step * SIZE;
    second += g.step * SIZE;
    to += g.to_step * SIZE;
  }
}

template <Curve C>
void gate_as(const Gate& g) {
  if (g.type == F32) return gate_of<C, F32>(g);
  if (g.type == F16) return gate_of<C, F16>(g);
  gate_of<C, BF16>(g);
}

void gate(const Gate& g) { g.curve == SILU ? gate_as<SILU>(g) : gate_as<GELU_TANH>(g); }

}  // namespace
