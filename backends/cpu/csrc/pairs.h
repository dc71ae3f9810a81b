// Many rows of one digit times weights of the kind of Q4_K, 4 bits in groups of 32 with scales and
// offsets that are whole steps times a factor: sums of two groups become halves of a word, which
// one instruction multiplies with the steps and adds to those of the chunk.
//
// Sums of a group fit a half where those of its digits, of either sign, do not exceed MOST_REACH:
// 15 * 2047 < 2^15. Sums of a chunk fit a word where steps do not exceed MOST_STEP:
// 8 * 15 * 2047 * 64 * 2^LIFT < 2^31. Other rows and panels, and chunks that are not full, are left
// to many.h. Sums are exact but for the sums of x that offsets are multiplied with, in multiples of
// eight of the finest steps that a chunk can have. That rounds those of groups whose numbers are at
// least 16 times smaller than the chunk's, by a 32nd of the chunk's step at most.
#pragma once
#include "tile.h"

#ifdef QC_PAIRS
namespace {

constexpr int64_t STRIDE = 34;  // words between what rows have besides codes
constexpr int32_t MOST_REACH = 2047, MOST_STEP = 64;

constexpr bool may_have_pairs(int bits, bool table, int digits, bool extra) {
  return bits == 4 && !table && digits == 1 && extra;
}
inline bool are_pairs(const Weight& w, const Chunk& at, const Rows& in) {
  return in.pairs && w.form == OFFSET && w.scale == NESTED && w.group == 32 &&
         in.stride == STRIDE && at.groups == 2 * PAIRS && w.units(at.group + at.groups - 1) == 2;
}

// The steps of a panel's chunk. False where they go too far.
inline bool decode_steps(const Weight& w, const Chunk& at, int64_t panel, int side, Steps& steps) {
  const uint8_t* heads = w.blob + panel * w.panel_bytes() + at.heads;
  const Lanes offset_factor = load_numbers(heads + 2 * ROWS, F16);
  store_lanes(steps.factor[side], load_numbers(heads, F16));
  store_lanes(steps.offset_factor[side], mul(offset_factor, spread(1 << SUM_SHIFT)));
  const uint8_t* head = heads + w.factor_bytes();
  Words largest = spread_word(0);
  const auto seen = [&](const Words& x) QC_INLINE {
    largest = larger(largest, larger(x, less(0, x)));
    return x;
  };
  for (int64_t p = 0; p < PAIRS; p++, head += 4 * ROWS) {
    const Words first = seen(load_signed_bytes(head));
    const Words second = seen(load_signed_bytes(head + 2 * ROWS));
    store_words(steps.scale[p][side], pair_up(first, second));
    const Words offset = load_signed_bytes(head + ROWS);
    store_words(steps.offset[p][side], pair_up(offset, load_signed_bytes(head + 3 * ROWS)));
  }
  return largest_lane(largest) <= MOST_STEP;
}

// Whether sums of M rows fit halves.
template <int M>
inline QC_INLINE bool fits(const Block& in) {
  bool all = true;
  repeat<M>([&](auto m) QC_INLINE { all &= in.reach[m * in.stride] <= MOST_REACH; });
  return all;
}

// Adds what a group makes to its sums.
template <int M, int S>
inline QC_INLINE void add_group(const uint8_t* quads, const int8_t* x, Words (&acc)[M * S]) {
  repeat<2 * QUADS>([&](auto q) QC_INLINE {
    Words code[S];
    repeat<S>([&](auto s) QC_INLINE { code[s] = load_words(quads + (q * SIDE + s) * LINE); });
    repeat<M>([&](auto m) QC_INLINE {
      const Words four = load_word(reinterpret_cast<const int32_t*>(x + m * CHUNK + q * 4));
      repeat<S>([&](auto s) QC_INLINE {
        acc[m * S + s] = dot<false>(acc[m * S + s], code[s], four);
      });
    });
  });
}

// Sums of a chunk's codes times the steps.
template <int M, int S>
inline QC_INLINE void add_pairs(const Tile& tile, const Block& in, Words (&all)[M * S]) {
  constexpr int HALF = 1 << 15;
  constexpr int64_t GROUP = 2 * QUADS * SIDE * LINE;
  const int8_t* x = in.codes;
  const uint8_t* quads = tile.quads[0][0];
  for (int64_t p = 0; p < PAIRS; p++, quads += 2 * GROUP, x += 4 * UNIT) {
    Words acc[M * S];
    repeat<M * S>([&](auto i) QC_INLINE { acc[i] = spread_word(0); });
    add_group<M, S>(quads, x, acc);
    repeat<M * S>([&](auto i) QC_INLINE { acc[i] = shift_left(acc[i], 16); });
    add_group<M, S>(quads + GROUP, x + 2 * UNIT, acc);
    repeat<M>([&](auto m) QC_INLINE {
      const Words by = load_word(in.pairs + m * STRIDE + PAIRS + p);
      repeat<S>([&](auto s) QC_INLINE {
        // What a negative lower half took from the upper one is given back.
        const Words halves = flip(plus(acc[m * S + s], spread_word(HALF)), HALF);
        const Words step = shift_halves(load_words(tile.steps.scale[p][s]), by);
        all[m * S + s] = dot_halves(all[m * S + s], halves, step);
      });
    });
  }
}

// M rows times a tile of S panels, added to sums[m][SIDE][ROWS] unless they are the first.
template <int M, int S>
void multiply_pairs(const Tile& tile, const Block& in, bool first, float* sums) {
  Words all[M * S];
  repeat<M * S>([&](auto i) QC_INLINE { all[i] = spread_word(0); });
  add_pairs<M, S>(tile, in, all);
  repeat<M>([&](auto m) QC_INLINE {
    Words rest[S];  // what the sums of codes leave out: offsets times the sums of x
    repeat<S>([&](auto s) QC_INLINE { rest[s] = spread_word(0); });
    for (int64_t p = 0; p < PAIRS; p++) {
      const Words sum = load_word(in.pairs + m * STRIDE + p);
      repeat<S>([&](auto s) QC_INLINE {
        rest[s] = dot_halves(rest[s], load_words(tile.steps.offset[p][s]), sum);
      });
    }
    const Lanes step = spread(in.step[m * STRIDE]);
    repeat<S>([&](auto s) QC_INLINE {
      float* to = sums + (m * SIDE + s) * ROWS;
      const Lanes main = mul(load_lanes(tile.steps.factor[s]), to_lanes(all[m * S + s]));
      const Lanes part = fma(load_lanes(tile.steps.offset_factor[s]), to_lanes(rest[s]), main);
      store_lanes(to, first ? mul(step, part) : fma(step, part, load_lanes(to)));
    });
  });
}

}  // namespace

#include "pairs_avx512.h"
#endif
