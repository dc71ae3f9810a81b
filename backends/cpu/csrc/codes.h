// Codes and heads of a panel in registers, and results back to memory. A variant includes a
// simd_*.h before this file.
#pragma once
#include <algorithm>

#include "panel.h"
#include "repeat.h"

namespace {
using namespace qc;

// **** codes ****

// Where the runs of a chunk are read: the next unit of each.
struct Runs {
  const uint8_t *wide, *nibbles, *pairs, *bits;

  Runs() = default;
  Runs(const uint8_t* panel, const Chunk& at)
      : wide(panel + at.wide), nibbles(panel + at.nibbles), pairs(panel + at.pairs),
        bits(panel + at.bits) {}
  void next() {
    wide += 256;
    nibbles += 128;
    pairs += 64;
    bits += 32;
  }
};

// Two bits of a field of every byte, moved to position `to`.
template <int FROM, int TO>
inline Words pair_of(const Words& x) {
  Words moved = FROM > TO ? shift_right(x, FROM - TO) : FROM < TO ? shift_left(x, TO - FROM) : x;
  return mask(moved, 0x03030303u << TO);
}

// Codes that may exceed 127 where `dot` takes signed bytes: they come 128 too small, which is their
// middle, so that their sums begin at zero.
constexpr bool is_signed(int bits, bool table) { return WIDE_IS_SIGNED && (bits == 8 || table); }

// The four quads of a unit, as bytes that `dot` multiplies.
template <int BITS, bool TABLE>
inline QC_INLINE void load_unit(const Runs& at, const Table& table, Words (&quads)[QUADS]) {
  constexpr int P = BITS & 4, B = BITS & 6;  // where pairs and bits belong
  if (BITS == 8) {
    repeat<QUADS>([&](auto q) QC_INLINE {
      const Words codes = load_words(at.wide + q * LINE);
      quads[q] = is_signed(BITS, TABLE) ? flip(codes, 0x80808080u) : codes;
    });
    return;
  }
  if (BITS & 4) {
    const Words first = load_words(at.nibbles), second = load_words(at.nibbles + LINE);
    quads[0] = mask(first, 0x0f0f0f0fu);
    quads[1] = upper_nibbles(first);
    quads[2] = mask(second, 0x0f0f0f0fu);
    quads[3] = upper_nibbles(second);
  }
  if (BITS & 2) {
    const Words pairs = load_words(at.pairs);
    repeat<QUADS>([&](auto q) QC_INLINE {
      const Words moved = pair_of<2 * q, P>(pairs);
      quads[q] = P ? join(quads[q], moved) : moved;
    });
  }
  if (BITS & 1) {
    repeat<QUADS>([&](auto q) QC_INLINE {
      quads[q] = add_where(B ? quads[q] : spread_word(0), at.bits + q * 8, 1 << B);
    });
  }
  if (TABLE) {
    repeat<QUADS>([&](auto q) QC_INLINE {
      const Words values = look_up(table, quads[q]);
      quads[q] = is_signed(BITS, TABLE) ? values : flip(values, 0x80808080u);
    });
  }
}

// **** heads ****

// The scale of a group, and what a code stands for that sums leave out, the middle one or 0: it is
// multiplied with the sum of x.
struct Head {
  Lanes scale, middle;
};

inline QC_INLINE Head load_head(const Weight& w, const uint8_t* heads, int64_t group,
                      bool centred = true) {
  const uint8_t* head = heads + w.factor_bytes() + group * w.head_bytes();
  const Lanes half = spread(centred ? static_cast<float>(middle_code(w.bits, false)) : 0.f);
  if (w.scale == NESTED) {
    Lanes scale = mul(load_numbers(heads, F16), to_lanes(load_signed_bytes(head)));
    if (w.form != OFFSET) return {scale, zeros()};
    Lanes offset = mul(load_numbers(heads + 2 * ROWS, F16), to_lanes(load_signed_bytes(head + ROWS)));
    return {scale, fma(scale, half, offset)};
  }
  Lanes scale = load_numbers(head, w.scale == PLAIN_F16 ? F16 : F32);
  const uint8_t* extra = head + ROWS * w.step_bytes();
  if (w.form == OFFSET) {
    return {scale, fma(scale, half, load_lanes(reinterpret_cast<const float*>(extra)))};
  }
  if (w.form == ZERO) return {scale, mul(scale, sub(half, to_lanes(load_signed_halves(extra))))};
  return {scale, zeros()};
}

// **** sums ****

// Sums of codes times x begin at minus the middle code, a power of two, times the sum of x.
constexpr int middle_shift(int bits, bool is_lookup) { return is_lookup ? 7 : bits - 1; }

// The digits of a sum as one number: those from `at` on. Sums of a group of CHUNK columns leave room
// for two digits. One digit: in steps of its chunk.
template <int P, int N>
inline QC_INLINE Lanes joined(const Words (&sums)[N], int at, int apart, const int32_t* lift) {
  if (P == 1) return to_lanes(shift_left_each(sums[at], load_word(lift)));
  if (P == 2) return to_lanes(plus(shift_left(sums[at], 8), sums[at + apart]));
  const Words low = plus(shift_left(sums[at + apart], 8), sums[at + 2 * apart]);
  return fma(to_lanes(sums[at]), spread(65536.f), to_lanes(low));
}

// What sums of a group are multiplied with: one digit's step is that of the chunk, and comes later.
template <int P>
inline QC_INLINE Lanes scaled(const Lanes& scale, const float* step) {
  return P == 1 ? scale : mul(scale, spread(*step));
}

inline void write(const Output& out, const Weight& w, int64_t row, int64_t panel, Lanes value) {
  int64_t first = panel * ROWS, count = std::min<int64_t>(ROWS, w.n - first);
  int64_t at = row * (out.step ? out.step : w.n) + first - out.panel * ROWS;
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
