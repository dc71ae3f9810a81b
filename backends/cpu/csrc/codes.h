// Codes of a panel as numbers in sixteen lanes, and results back to memory. A variant includes a
// simd_*.h before this file.
#pragma once
#include <algorithm>
#include <vector>

namespace {
using namespace qc;

// **** codes ****

// The numbers of sixteen rows: `low` the first 32 bits, `high` the rest. Four-bit lookups hold
// values instead: bytes of `low` are columns 0, 2, 4, 6, bytes of `high` are columns 1, 3, 5, 7.
struct Unit {
  Words low, high;
};

template <int BITS>
inline Words load_rest(const uint8_t* p) {
  if (BITS == 1) return load_bytes(p);
  Words halves = load_halves(p);
  return BITS == 2 ? halves : join(halves, shift_left(load_bytes(p + 2 * ROWS), 16));
}

template <int BITS, int FORM>
inline Unit load_unit(const uint8_t* p, const Table& table) {
  Unit unit{};
  if (BITS < 4) {
    unit.low = load_rest<BITS & 3>(p);
    return unit;
  }
  unit.low = load_words(p);
  if (BITS == 8) unit.high = load_words(p + 4 * ROWS);
  else if (BITS > 4) unit.high = load_rest<BITS & 3>(p + 4 * ROWS);
  if (BITS == 4 && FORM == LOOKUP) {
    unit.high = look_up(table, mask(shift_right(unit.low, 4), 0x0f0f0f0f));
    unit.low = look_up(table, mask(unit.low, 0x0f0f0f0f));
  }
  return unit;
}

inline Words signed_bits(const Words& x, int at, int bits) {
  int left = 32 - bits - at;
  return shift_right_signed(left ? shift_left(x, left) : x, 32 - bits);
}

inline Words unsigned_bits(const Words& x, int at, int bits) {
  Words low = at ? shift_right(x, at) : x;
  return at + bits == 32 ? low : mask(low, (1u << bits) - 1);
}

// The number of a column that is multiplied with the scale.
template <int BITS, int FORM>
inline __attribute__((always_inline)) Lanes number(const Unit& unit, int column, const Table& table) {
  if (BITS == 4 && FORM == LOOKUP) {
    return to_lanes(signed_bits(column % 2 ? unit.high : unit.low, column / 2 * 8, 8));
  }
  int at = BITS * column;
  Words word = at < 32 ? unit.low : unit.high;
  if (at < 32 && at + BITS > 32) {  // one code at most lies on both sides
    word = join(shift_right(unit.low, at), shift_left(unit.high, 32 - at));
    at = 0;
  }
  at %= 32;
  if (FORM == FLOAT8) {
    Words sign = shift_left(unsigned_bits(word, at + 7, 1), 15);
    return from_halves(join(sign, shift_left(unsigned_bits(word, at, 7), 7)));
  }
  if (FORM != LOOKUP) return to_lanes(signed_bits(word, at, BITS));
  return to_lanes(signed_bits(look_up(table, unsigned_bits(word, at, BITS)), 0, 8));
}

// The factor of a group's numbers.
template <int FORM>
inline Lanes scale_of(const Weight& w, const uint8_t* head) {
  Lanes scale = load_numbers(head, w.scale);
  return FORM == FLOAT8 ? mul(scale, spread(FLOAT8_STEP)) : scale;
}

// **** output ****

void write(const Output& out, const Weight& w, int64_t row, int64_t panel, Lanes value) {
  int64_t first = panel * ROWS, count = std::min<int64_t>(ROWS, w.n - first);
  int64_t at = row * w.n + first;
  if (count == ROWS) {
    if (out.bias) value = add(value, load_lanes(out.bias + first));
    store_numbers(static_cast<uint8_t*>(out.y) + at * bytes_of(out.type), out.type, value);
    return;
  }
  float lanes[ROWS];
  store_lanes(lanes, value);
  for (int64_t r = 0; r < count; r++) {
    from_float(out.y, at + r, out.type, lanes[r] + (out.bias ? out.bias[first + r] : 0.f));
  }
}

}  // namespace
