// Many rows: panels are decoded to bytes once, in tiles that stay in the first cache.
#pragma once
#include <vector>

#include "codes.h"

namespace {
constexpr int64_t QUAD_COUNT = CHUNK / 4;
constexpr int64_t ROWS_AT_ONCE = 512;  // their sums stay in the second cache
constexpr int SIDE = QC_REGISTERS < 32 ? 1 : 4;     // panels decoded at once
constexpr int DIGIT_ROWS = QC_REGISTERS < 32 ? 3 : 6;  // rows times digits whose sums fit registers

// A chunk of SIDE panels.
struct Tile {
  alignas(64) uint8_t quads[QUAD_COUNT][SIDE][LINE];
  alignas(64) float scale[CHUNK / UNIT][SIDE][ROWS], middle[CHUNK / UNIT][SIDE][ROWS];
};

template <int BITS, bool TABLE>
void decode_chunk(const Weight& w, const Chunk& at, int64_t panel, int side, Tile& tile) {
  const Table table = load_table(w.table);
  const uint8_t* base = w.blob + panel * w.panel_bytes();
  Runs runs(base, at);
  int64_t quad = 0;
  for (int64_t g = 0; g < at.groups; g++) {
    const Head head = load_head(w, base + at.heads, g);
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

// M rows of P digits times a tile of S panels, added to sums[m][SIDE][ROWS].
template <bool WIDE, int P, int M, int S>
void multiply_tile(const Weight& w, const Chunk& at, const Tile& tile, const Rows& in, float* sums) {
  constexpr int A = M * P;
  const int64_t words = in.padded / 4;
  const int middle = middle_code(w.bits, w.form == LOOKUP);
  const auto* x = reinterpret_cast<const int32_t*>(in.codes) +
                  at.group * (w.padded_group() / 4);
  const uint8_t* quads = tile.quads[0][0];
  for (int64_t i = 0; i < at.groups; i++) {
    const int64_t g = at.group + i;
    Words acc[A * S];
    repeat<A>([&](auto a) QC_INLINE {
      const Words start = spread_word(-middle * in.totals[a * in.groups + g]);
      repeat<S>([&](auto s) QC_INLINE { acc[a * S + s] = start; });
    });
    for (int64_t left = w.units(g) * QUADS; left > 0; left--, x++, quads += SIDE * LINE) {
      Words code[S];
      repeat<S>([&](auto s) QC_INLINE { code[s] = load_words(quads + s * LINE); });
      repeat<A>([&](auto a) QC_INLINE {
        const Words four = spread_word(x[a * words]);
        repeat<S>([&](auto s) QC_INLINE {
          acc[a * S + s] = dot<WIDE>(acc[a * S + s], code[s], four);
        });
      });
    }
    repeat<M>([&](auto m) QC_INLINE {
      const Lanes step = spread(in.step[m * in.groups + g]);
      repeat<S>([&](auto s) QC_INLINE {
        float* to = sums + (m * SIDE + s) * ROWS;
        const Lanes factor = mul(load_lanes(tile.scale[i][s]), step);
        Lanes all = fma(factor, joined<P>(acc, m * P * S + s, S), load_lanes(to));
        if (w.has_extra()) {
          all = fma(load_lanes(tile.middle[i][s]), spread(in.sums[m * in.groups + g]), all);
        }
        store_lanes(to, all);
      });
    });
  }
}

template <bool WIDE, int P, int S>
void multiply_rows(const Weight& w, const Chunk& at, const Tile& tile, const Rows& in, float* sums) {
  constexpr int M = DIGIT_ROWS / P;
  int64_t m = 0;
  for (; m + M <= in.m; m += M) {
    multiply_tile<WIDE, P, M, S>(w, at, tile, in.from(m), sums + m * SIDE * ROWS);
  }
  for (; m < in.m; m++) {
    multiply_tile<WIDE, P, 1, S>(w, at, tile, in.from(m), sums + m * SIDE * ROWS);
  }
}

template <bool WIDE, int P>
void multiply_side(int64_t side, const Weight& w, const Chunk& at, const Tile& tile, const Rows& in,
                   float* sums) {
  if (side == SIDE) return multiply_rows<WIDE, P, SIDE>(w, at, tile, in, sums);
  if (side == 3) return multiply_rows<WIDE, P, SIDE < 3 ? SIDE : 3>(w, at, tile, in, sums);
  if (side == 2) return multiply_rows<WIDE, P, SIDE < 2 ? SIDE : 2>(w, at, tile, in, sums);
  multiply_rows<WIDE, P, 1>(w, at, tile, in, sums);
}

template <int BITS, bool TABLE, int P>
void many(const Weight& w, const Rows& all, const Output& out, int64_t begin, int64_t end) {
  static thread_local Tile tile;
  static thread_local std::vector<float> sums;
  for (int64_t m0 = 0; m0 < all.m; m0 += ROWS_AT_ONCE) {
    Rows in = all.from(m0);
    in.m = std::min(in.m, ROWS_AT_ONCE);
    for (int64_t panel = begin; panel < end; panel += SIDE) {
      const int64_t side = std::min<int64_t>(SIDE, end - panel);
      sums.assign(static_cast<size_t>(in.m * SIDE * ROWS), 0.f);
      for (int64_t c = 0; c < w.chunks(); c++) {
        const Chunk at = w.chunk(c);
        for (int s = 0; s < side; s++) decode_chunk<BITS, TABLE>(w, at, panel + s, s, tile);
        multiply_side<(BITS == 8 || TABLE), P>(side, w, at, tile, in, sums.data());
      }
      for (int64_t m = 0; m < in.m; m++) {
        for (int s = 0; s < side; s++) {
          write(out, w, m0 + m, panel + s, load_lanes(sums.data() + (m * SIDE + s) * ROWS));
        }
      }
    }
  }
}

}  // namespace
