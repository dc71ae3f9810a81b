// What many rows are multiplied with, panels decoded to bytes in tiles that stay in the first
// cache, and those rows. A variant includes a simd_*.h before this file.
#pragma once
#include "codes.h"

namespace {

constexpr int64_t QUAD_COUNT = CHUNK / 4;
constexpr int SIDE = QC_REGISTERS < 32 ? 1 : 3;  // panels decoded at once

#ifdef QC_PAIRS
constexpr int64_t PAIRS = 4;  // of groups, in a chunk
// Scales and offsets once more: whole steps of two groups in a word, the first's above, and what
// they are multiplied with.
struct Steps {
  int32_t scale[PAIRS][SIDE][ROWS], offset[PAIRS][SIDE][ROWS];
  float offset_factor[SIDE][ROWS], factor[SIDE][ROWS];
};
#endif

// A chunk of SIDE panels.
struct Tile {
  alignas(LINE) uint8_t quads[QUAD_COUNT][SIDE][LINE];
  alignas(LINE) float scale[CHUNK / UNIT][SIDE][ROWS], middle[CHUNK / UNIT][SIDE][ROWS];
#ifdef QC_PAIRS
  alignas(LINE) Steps steps;
#endif
};

// With one digit, forms with an extra leave codes as they are: their sums begin at zero.
constexpr bool is_centred(int digits, bool extra) { return digits > 1 || !extra; }
// So do those of bytes that `dot` takes as signed.
constexpr bool begins_at_zero(bool wide, int digits, bool extra) {
  return (wide && WIDE_IS_SIGNED) || !is_centred(digits, extra);
}

template <int BITS, bool TABLE>
__attribute__((noinline)) void decode_chunk(const Weight& w, const Chunk& at, int64_t panel,
                                            int side, bool centred, Tile& tile) {
  const Table table = load_table(w.table);
  const uint8_t* base = w.blob + panel * w.panel_bytes();
  Runs runs(base, at);
  int64_t quad = 0;
  for (int64_t g = 0; g < at.groups; g++) {
    const Head head = load_head(w, base + at.heads, g, centred);
    store_lanes(tile.scale[g][side], head.scale);
    store_lanes(tile.middle[g][side], head.middle);
    for (int64_t left = w.units(at.group + g); left > 0; left--, quad += QUADS) {
      Words quads[QUADS];
      load_unit<BITS, TABLE>(runs, table, quads);
      runs.next();
#pragma GCC unroll 4
      for (int q = 0; q < QUADS; q++) store_words(tile.quads[quad + q][side], quads[q]);
    }
  }
}

// Rows of a chunk. A pass over them moves on, row by row.
struct Block {
  const int8_t* codes;
  const int32_t *totals, *lift;
  const float *step, *sums;
  const int32_t *pairs, *reach;  // null where the rows have none
  int64_t width, groups, stride;
  int64_t count, units, last_units;  // groups of this chunk, units of one and of the last
  int32_t shift;                     // sums begin at so many places more than the totals

  Block(const Weight& w, const Chunk& at, const Rows& in)
      : codes(in.codes), totals(in.totals), lift(in.lift), step(in.step), sums(in.sums),
        pairs(in.pairs), reach(in.reach), width(in.width), groups(in.groups), stride(in.stride),
        count(at.groups), units(w.padded_group() / UNIT),
        last_units(w.units(at.group + at.groups - 1)),
        shift(middle_shift(w.bits, w.form == LOOKUP)) {}
  inline QC_INLINE void skip(int64_t rows, int64_t digits) {
    const int64_t words = rows * stride;
    codes += rows * digits * width;
    totals += words;
    lift += words;
    step += words;
    sums += words;
    if (!pairs) return;
    pairs += words;
    reach += words;
  }
};

}  // namespace
