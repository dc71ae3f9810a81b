// Many rows: panels are decoded to floats once, in tiles that stay in the caches.
#pragma once
#include <algorithm>
#include <vector>

#include "codes.h"

namespace {
constexpr int64_t PIECE = 256;  // columns decoded at once: 16 KiB of floats a panel
constexpr int64_t SIDE = 4;     // panels decoded at once, so that x is read once for all of them

// Where the next code of a panel lies.
struct Cursor {
  const uint8_t* head;
  int64_t group, unit;
};

template <int BITS, int FORM>
void decode_units(const Weight& w, const uint8_t* head, int64_t unit, int64_t count, float* tile) {
  const Table table = load_table(w.table);
  Lanes scale = scale_of<FORM>(w, head), extra = zeros();
  if (FORM == ZERO || FORM == OFFSET) {
    extra = load_lanes(reinterpret_cast<const float*>(head + w.scale_bytes()));
  }
  const Lanes half = spread(static_cast<float>(1 << (BITS - 1)));
  const uint8_t* p = head + w.head_bytes() + unit * ROWS * BITS;
  for (int64_t u = 0; u < count; u++, p += ROWS * BITS) {
    Unit codes = load_unit<BITS, FORM>(p, table);
#pragma GCC unroll 8
    for (int c = 0; c < UNIT; c++, tile += ROWS) {
      Lanes value = number<BITS, FORM>(codes, c, table);
      if (FORM == ZERO || FORM == OFFSET) value = add(value, half);  // exact: the code again
      value = mul(scale, FORM == ZERO ? sub(value, extra) : value);
      if (FORM == OFFSET) value = add(value, extra);  // two roundings, as the spec defines it
      store_lanes(tile, value);
    }
  }
}

// Decodes the next columns of a panel to floats [column][row].
template <int BITS, int FORM>
void decode_piece(const Weight& w, Cursor& at, int64_t columns, float* tile) {
  for (int64_t left = columns / UNIT; left > 0;) {
    const int64_t units = Weight::units(w.columns(at.group));
    const int64_t count = std::min(left, units - at.unit);
    decode_units<BITS, FORM>(w, at.head, at.unit, count, tile);
    tile += count * UNIT * ROWS;
    left -= count;
    at.unit += count;
    if (at.unit == units) at = {at.head + w.group_bytes(at.group), at.group + 1, 0};
  }
}

template <int M>
inline void multiply(const float* tile, int64_t columns, const float* x, int64_t stride,
                     float* sums) {
  Lanes acc[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) acc[m] = load_lanes(sums + m * ROWS);
  for (int64_t c = 0; c < columns; c++) {
    Lanes w = load_lanes(tile + c * ROWS);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) acc[m] = fma(w, spread(x[m * stride + c]), acc[m]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) store_lanes(sums + m * ROWS, acc[m]);
}

// Rows [m, m + M) times the same columns of several tiles.
template <int M>
inline void multiply_side(const float* tiles, int64_t side, int64_t columns, const Rows& in,
                          int64_t column, int64_t m, float* sums) {
  for (int64_t i = 0; i < side; i++) {
    multiply<M>(tiles + i * PIECE * ROWS, columns, in.x + m * in.stride + column, in.stride,
                sums + (i * in.m + m) * ROWS);
  }
}

// The last rows, fewer than a full pass has: all of them in one.
template <int M>
inline void multiply_rest(int64_t left, const float* tiles, int64_t side, int64_t columns,
                          const Rows& in, int64_t column, int64_t m, float* sums) {
  if (left == M) return multiply_side<M>(tiles, side, columns, in, column, m, sums);
  if constexpr (M > 1) multiply_rest<M - 1>(left, tiles, side, columns, in, column, m, sums);
}

#ifndef QC_ROWS_OF_A_TILE
#define QC_ROWS_OF_A_TILE 6
#endif

void multiply_all(const float* tiles, int64_t side, int64_t columns, const Rows& in, int64_t column,
                  float* sums) {
  constexpr int R = QC_ROWS_OF_A_TILE;
  int64_t m = 0;
  for (; m + R <= in.m; m += R) multiply_side<R>(tiles, side, columns, in, column, m, sums);
  multiply_rest<R - 1>(in.m - m, tiles, side, columns, in, column, m, sums);
}

template <int BITS, int FORM>
void many(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  std::vector<float> tiles(static_cast<size_t>(SIDE * PIECE * ROWS));
  std::vector<float> sums(static_cast<size_t>(SIDE * in.m * ROWS));
  const int64_t all = w.padded();
  for (int64_t panel = begin; panel < end; panel += SIDE) {
    const int64_t side = std::min(SIDE, end - panel);
    Cursor cursors[SIDE];
    for (int64_t i = 0; i < side; i++) cursors[i] = {w.blob + (panel + i) * w.panel_bytes(), 0, 0};
    std::fill(sums.begin(), sums.end(), 0.f);
    for (int64_t column = 0; column < all; column += PIECE) {
      const int64_t columns = std::min(PIECE, all - column);
      for (int64_t i = 0; i < side; i++) {
        decode_piece<BITS, FORM>(w, cursors[i], columns, tiles.data() + i * PIECE * ROWS);
      }
      multiply_all(tiles.data(), side, columns, in, column, sums.data());
    }
    for (int64_t i = 0; i < side; i++) {
      for (int64_t m = 0; m < in.m; m++) {
        write(out, w, m, panel + i, load_lanes(sums.data() + (i * in.m + m) * ROWS));
      }
    }
  }
}

}  // namespace
