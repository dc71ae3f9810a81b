// Attention's rows: where they lie, and which keys they see. Included by attend.cpp alone.
#pragma once
#include "attend.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "simd.h"
//
#include "exponent.h"
#include "repeat.h"

namespace {

using qc::Attention;

constexpr int64_t LANES = 16;
constexpr float LOWEST = -std::numeric_limits<float>::max();

// One row of a task: which query of which head.
struct Row {
  int64_t head, query;
};

Row row_at(const Attention& a, int64_t group, int64_t row) {
  return {group * (a.heads / a.groups) + row / a.queries, row % a.queries};
}

const uint8_t* place(const uint8_t* data, const qc::Steps& at, int64_t b, int64_t head,
                     int64_t row, qc::Number type) {
  return data + (b * at.batch + head * at.head + row * at.row) * qc::bytes_of(type);
}

// What is added to the score of a row and a key: minus infinity where the key is not seen.
float added(const Attention& a, int64_t b, const Row& row, int64_t key) {
  if (a.causal && key > row.query) return -std::numeric_limits<float>::infinity();
  if (a.mask.kind == qc::NO_MASK) return 0;
  const int64_t at = b * a.mask.batch + row.head * a.mask.head + row.query * a.mask.query +
                     key * a.mask.key;
  if (a.mask.kind == qc::ADDED) return qc::to_float(a.mask.data, at, a.mask.type);
  return a.mask.data[at] ? 0 : -std::numeric_limits<float>::infinity();
}

// Where a row's flags of keys begin.
const uint8_t* mask_row(const Attention& a, int64_t b, const Row& row) {
  return a.mask.data + b * a.mask.batch + row.head * a.mask.head + row.query * a.mask.query;
}

enum Sight { NONE, SOME, ALL };

// Whether a row sees the keys from `begin` to `end`.
Sight sight(const Attention& a, int64_t b, const Row& row, int64_t begin, int64_t end) {
  if (a.causal && begin > row.query) return NONE;
  if (a.mask.kind == qc::NO_MASK) return a.causal && end - 1 > row.query ? SOME : ALL;
  if (a.mask.kind == qc::ADDED) return SOME;
  const uint8_t* seen = mask_row(a, b, row);
  bool any = false, all = !(a.causal && end - 1 > row.query);
  if (a.mask.key == 1) {
    constexpr uint64_t ONES = 0x0101010101010101u;
    for (uint64_t eight; begin + 8 <= end; begin += 8) {
      std::memcpy(&eight, seen + begin, 8);
      any |= eight != 0;
      all &= eight == ONES;
    }
  }
  for (; begin < end; begin++) {
    any |= seen[begin * a.mask.key] != 0;
    all &= seen[begin * a.mask.key] != 0;
  }
  return !any ? NONE : all ? ALL : SOME;
}

// Rows of numbers as floats, one after the other.
template <qc::Number T>
void widen_rows(const uint8_t* from, int64_t step, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; r++, from += step * qc::bytes_of(T)) {
    for (int64_t c = 0; c < columns; c += LANES, to += LANES) {
      store_lanes(to, load_numbers(from + c * qc::bytes_of(T), T));
    }
  }
}

// Scratch of a thread, reused from call to call.
struct Scratch {
  std::vector<float> q, sums, scores, k, v;
};

Scratch& scratch() {
  static thread_local Scratch mine;
  return mine;
}

}  // namespace
