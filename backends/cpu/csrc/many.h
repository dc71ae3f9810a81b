// Many rows: panels are decoded to bytes once, in tiles that stay in the first cache.
#pragma once
#include <memory>

#include "pairs.h"

namespace {

constexpr int64_t ROWS_AT_ONCE = 512;  // their sums stay in the second cache

// What rows add up to over the chunks.
struct alignas(LINE) Sums {
  float of[ROWS_AT_ONCE][SIDE][ROWS];
};

// Rows whose sums, of digits and of groups, fit registers.
constexpr int rows_together(int digits) {
  return QC_REGISTERS < 32 ? (digits == 1 ? 3 : 1) : (digits == 1 ? 4 : 2);
}

// The lines of the next chunk of some panels, asked for little by little while this one is
// multiplied; after the last chunk comes the first of the next panels.
class Ahead {
 public:
  Ahead(const Weight& w, const Chunk& at, int64_t panel, int64_t side, int64_t blocks)
      : panel_bytes_(w.panel_bytes()), length_(at.end - at.heads), left_(side * length_) {
    const bool last = at.end == panel_bytes_;
    next_ = w.blob + (last ? panel + side : panel) * panel_bytes_ + (last ? 0 : at.end);
    share_ = up_to((left_ + blocks - 1) / blocks, LINE);
  }
  void fetch() {
    for (int64_t i = 0; i < share_ && left_ > 0; i += LINE, left_ -= LINE) {
      __builtin_prefetch(next_ + at_);
      at_ += LINE;
      if (at_ < length_) continue;
      at_ = 0;
      next_ += panel_bytes_;
    }
  }

 private:
  const uint8_t* next_;
  int64_t panel_bytes_, length_, left_, share_, at_ = 0;
};

// What the sums of codes leave out: middles times the sums of x.
template <int M, int S>
inline QC_INLINE void add_middles(const Tile& tile, const Block& in, Lanes (&part)[M * S]) {
  const float *middle = tile.middle[0][0], *sums = in.sums;
  for (int64_t left = in.count; left > 0; left--, middle += SIDE * ROWS, sums++) {
    Lanes at[S];
    repeat<S>([&](auto s) QC_INLINE { at[s] = load_lanes(middle + s * ROWS); });
    repeat<M>([&](auto m) QC_INLINE {
      const Lanes sum = spread(sums[m * in.stride]);
      repeat<S>([&](auto s) QC_INLINE { part[m * S + s] = fma(at[s], sum, part[m * S + s]); });
    });
  }
}

// M rows of P digits times a tile of S panels, added to sums[m][SIDE][ROWS] unless they are the
// first. All that is added up stays in registers for a chunk: with fewer sums at a time than fit,
// those of one block are scaled while the next one's products run.
template <bool WIDE, bool EXTRA, int P, int M, int S>
inline QC_INLINE void multiply_tile(const Tile& tile, const Block& in, bool first, float* sums) {
  constexpr int A = M * P;
  const uint8_t* quads = tile.quads[0][0];
  const float* scale = tile.scale[0][0];
  const int8_t* x = in.codes;
  const Words shift = spread_word(in.shift);
  Lanes part[M * S];  // one digit: in steps of the chunk
  repeat<M>([&](auto m) QC_INLINE {
    repeat<S>([&](auto s) QC_INLINE {
      const float* from = sums + (m * SIDE + s) * ROWS;
      part[m * S + s] = P == 1 || first ? zeros() : load_lanes(from);
    });
  });
  for (int64_t g = 0; g < in.count; g++, scale += SIDE * ROWS) {
    Words acc[A * S];
    repeat<A>([&](auto a) QC_INLINE {
      const int32_t* total = in.totals + a / P * in.stride + a % P * in.groups + g;
      const Words start = begins_at_zero(WIDE, P, EXTRA)
                              ? spread_word(0)
                              : shift_left_each(load_word(total), shift);
      repeat<S>([&](auto s) QC_INLINE { acc[a * S + s] = start; });
    });
    for (int64_t left = g + 1 < in.count ? in.units : in.last_units; left > 0; left--) {
      repeat<QUADS>([&](auto q) QC_INLINE {
        Words code[S];
        repeat<S>([&](auto s) QC_INLINE { code[s] = load_words(quads + (q * SIDE + s) * LINE); });
        repeat<A>([&](auto a) QC_INLINE {
          const int8_t* from = x + a * in.width + q * 4;
          const Words four = load_word(reinterpret_cast<const int32_t*>(from));
          repeat<S>([&](auto s) QC_INLINE {
            acc[a * S + s] = dot<WIDE>(acc[a * S + s], code[s], four);
          });
        });
      });
      quads += QUADS * SIDE * LINE;
      x += UNIT;
    }
    repeat<M>([&](auto m) QC_INLINE {
      const int64_t place = m * in.stride + g;
      repeat<S>([&](auto s) QC_INLINE {
        part[m * S + s] = fma(scaled<P>(load_lanes(scale + s * ROWS), in.step + place),
                              joined<P>(acc, m * P * S + s, S, in.lift + place), part[m * S + s]);
      });
    });
  }
  if (EXTRA) add_middles<M, S>(tile, in, part);
  repeat<M>([&](auto m) QC_INLINE {
    const Lanes step = spread(in.step[m * in.stride]);
    repeat<S>([&](auto s) QC_INLINE {
      float* to = sums + (m * SIDE + s) * ROWS;
      Lanes all = part[m * S + s];
      if (P == 1) all = first ? mul(step, all) : fma(step, all, load_lanes(to));
      store_lanes(to, all);
    });
  });
}

// `blocks` blocks of M rows.
template <bool WIDE, bool EXTRA, int P, int M, int S>
void multiply_blocks(int64_t blocks, const Tile& tile, const Block& from, bool first, float* sums,
                     Ahead& ahead) {
  Block in = from;
  for (; blocks > 0; blocks--, sums += M * SIDE * ROWS) {
    ahead.fetch();
#ifdef QC_PAIRS
    if constexpr (P == 1 && EXTRA) {
      if (in.pairs && fits<M>(in)) {
        multiply_pairs<M, S>(tile, in, first, sums);
        in.skip(M, P);
        continue;
      }
    }
#endif
    multiply_tile<WIDE, EXTRA, P, M, S>(tile, in, first, sums);
    in.skip(M, P);
  }
}

// `blocks` blocks of `rows` rows, M at most.
template <bool WIDE, bool EXTRA, int P, int M, int S>
void choose_blocks(int64_t rows, int64_t blocks, const Tile& tile, const Block& in, bool first,
                   float* sums, Ahead& ahead) {
  if constexpr (M > 1) {
    if (rows < M) {
      return choose_blocks<WIDE, EXTRA, P, M - 1, S>(rows, blocks, tile, in, first, sums, ahead);
    }
  }
  multiply_blocks<WIDE, EXTRA, P, M, S>(blocks, tile, in, first, sums, ahead);
}

// All m rows, in blocks as even as can be.
template <bool WIDE, bool EXTRA, int P, int S>
void multiply_rows(const Tile& tile, const Block& given, int64_t m, bool first, float* sums,
                   Ahead& ahead) {
  constexpr int64_t M = rows_together(P);
  const int64_t blocks = (m + M - 1) / M, rows = m / blocks, more = m % blocks;
  Block in = given;
  choose_blocks<WIDE, EXTRA, P, M, S>(rows, blocks - more, tile, in, first, sums, ahead);
  if (more == 0) return;
  const int64_t done = (blocks - more) * rows;
  in.skip(done, P);
  sums += done * SIDE * ROWS;
  choose_blocks<WIDE, EXTRA, P, M, S>(rows + 1, more, tile, in, first, sums, ahead);
}

// A tile of `side` panels, S at most.
template <bool WIDE, bool EXTRA, int P, int S>
void multiply_side(int64_t side, const Tile& tile, const Block& in, int64_t m, bool first,
                   float* sums, Ahead& ahead) {
  if constexpr (S > 1) {
    if (side < S) {
      return multiply_side<WIDE, EXTRA, P, S - 1>(side, tile, in, m, first, sums, ahead);
    }
  }
  multiply_rows<WIDE, EXTRA, P, S>(tile, in, m, first, sums, ahead);
}

// Whole panels of one type.
template <Number T>
void write_whole(const Output& out, const Weight& w, int64_t m0, int64_t m, int64_t panel,
                 int64_t side, const float* sums) {
  const int64_t step = out.step ? out.step : w.n;
  auto* to = static_cast<uint8_t*>(out.y) + (m0 * step + (panel - out.panel) * ROWS) * bytes_of(T);
  Lanes bias[SIDE];
  for (int64_t s = 0; s < side; s++) {
    bias[s] = out.bias ? load_lanes(out.bias + (panel + s) * ROWS) : spread(-0.f);
  }
  for (int64_t i = 0; i < m; i++, sums += SIDE * ROWS, to += step * bytes_of(T)) {
    repeat<SIDE>([&](auto s) QC_INLINE {
      if (s >= side) return;
      store_numbers(to + s * ROWS * bytes_of(T), T, add(load_lanes(sums + s * ROWS), bias[s]));
    });
  }
}

// The rows of panels [panel, panel + side), whose sums are in sums[m][SIDE][ROWS].
inline void write_side(const Output& out, const Weight& w, int64_t m0, int64_t m, int64_t panel,
                       int64_t side, const float* sums) {
  if ((panel + side) * ROWS <= w.n) {
    if (out.type == F32) return write_whole<F32>(out, w, m0, m, panel, side, sums);
    if (out.type == F16) return write_whole<F16>(out, w, m0, m, panel, side, sums);
    return write_whole<BF16>(out, w, m0, m, panel, side, sums);
  }
  for (int64_t i = 0; i < m; i++, sums += SIDE * ROWS) {
    for (int64_t s = 0; s < side; s++) {
      write(out, w, m0 + i, panel + s, load_lanes(sums + s * ROWS));
    }
  }
}

// Decodes a chunk of some panels; whether with steps, for pairs of groups.
template <int BITS, bool TABLE, int P, bool EXTRA>
bool decode_side(const Weight& w, const Chunk& at, int64_t panel, int64_t side, const Rows& in,
                 Tile& tile) {
  const bool centred = is_centred(P, EXTRA) || is_signed(BITS, TABLE);
  for (int s = 0; s < side; s++) {
    decode_chunk<BITS, TABLE>(w, at, panel + s, s, centred, tile);
  }
#ifdef QC_PAIRS
  if constexpr (may_have_pairs(BITS, TABLE, P, EXTRA)) {
    bool paired = are_pairs(w, at, in);
    for (int s = 0; s < side && paired; s++) {
      paired = decode_steps(w, at, panel + s, s, tile.steps);
    }
    return paired;
  }
#endif
  return false;
}

template <int BITS, bool TABLE, int P, bool EXTRA>
void many_panels(const Weight& w, const Rows& all, const Output& out, int64_t begin, int64_t end) {
  constexpr bool WIDE = WIDE_DIFFERS && (BITS == 8 || TABLE);
  static thread_local Tile tile;
  static thread_local std::unique_ptr<Sums> place(new Sums);
  float* sums = place->of[0][0];
  for (int64_t m0 = 0; m0 < all.m; m0 += ROWS_AT_ONCE) {
    const int64_t rows = std::min(all.m - m0, ROWS_AT_ONCE);
    const int64_t sides = (end - begin + SIDE - 1) / SIDE;
    for (int64_t i = 0, panel = begin, side; i < sides; i++, panel += side) {
      side = begin + (end - begin) * (i + 1) / sides - panel;  // as even as can be
      for (int64_t c = 0; c < w.chunks(); c++) {
        const Chunk at = w.chunk(c);
        Rows in = all.at(c, m0);
        in.m = rows;
        if (!decode_side<BITS, TABLE, P, EXTRA>(w, at, panel, side, in, tile)) in.pairs = nullptr;
        Ahead ahead(w, at, panel, side, (rows + rows_together(P) - 1) / rows_together(P));
        const Block block(w, at, in);
        multiply_side<WIDE, EXTRA, P, SIDE>(side, tile, block, rows, c == 0, sums, ahead);
      }
      write_side(out, w, m0, rows, panel, side, sums);
    }
  }
}

template <int BITS, bool TABLE, int P>
void many(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  if (w.has_extra()) return many_panels<BITS, TABLE, P, true>(w, in, out, begin, end);
  many_panels<BITS, TABLE, P, false>(w, in, out, begin, end);
}

}  // namespace
