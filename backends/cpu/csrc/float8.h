// Weights of float8 (e4m3fn), whose values are no whole numbers of one size: sums in float32.
#pragma once
#include "codes.h"

namespace {

// Column `byte` of a quad as floats, FLOAT8_STEP too small.
inline Lanes float8_of(const Words& quad, int byte) {
  Words code = shift_right(quad, byte * 8);
  return from_halves(join(shift_left(mask(code, 0x80u), 8), shift_left(mask(code, 0x7fu), 7)));
}

template <int M>
void float8_rows(const Weight& w, const Rows& in, const Output& out, int64_t m0, int64_t panel) {
  const uint8_t* base = w.blob + panel * w.panel_bytes();
  const float* x = in.x + m0 * in.padded;
  Lanes total[M];
  for (auto& t : total) t = zeros();
  for (int64_t c = 0; c < w.chunks(); c++) {
    const Chunk at = w.chunk(c);
    const uint8_t* quad = base + at.wide;
    for (int64_t g = 0; g < at.groups; g++) {
      Lanes sums[M];
      for (auto& sum : sums) sum = zeros();
      for (int64_t left = w.units(at.group + g) * QUADS; left > 0; left--, quad += LINE, x += 4) {
        const Words codes = load_words(quad);
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) {
          const Lanes value = float8_of(codes, b);
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) sums[m] = fma(value, spread(x[m * in.padded + b]), sums[m]);
        }
      }
      const Lanes scale = mul(load_head(w, base + at.heads, g).scale, spread(FLOAT8_STEP));
      for (int m = 0; m < M; m++) total[m] = fma(scale, sums[m], total[m]);
    }
  }
  for (int m = 0; m < M; m++) write(out, w, m0 + m, panel, total[m]);
}

void float8(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  constexpr int M = 8;
  for (int64_t panel = begin; panel < end; panel++) {
    int64_t m = 0;
    for (; m + M <= in.m; m += M) float8_rows<M>(w, in, out, m, panel);
    for (; m < in.m; m++) float8_rows<1>(w, in, out, m, panel);
  }
}

}  // namespace
