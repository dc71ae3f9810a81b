// Few rows: codes are decoded in registers, and a group's sum is multiplied by its scale once.
#pragma once
#include <algorithm>
#include <vector>

#include "codes.h"

namespace {
constexpr int64_t SUMMED = 16;  // units summed before the scale: longer sums lose digits

// What the middle code of a group stands for: multiplied with the group's sum of x.
template <int BITS, int FORM>
inline Lanes middle_of(const Weight& w, const uint8_t* head) {
  const Lanes half = spread(static_cast<float>(1 << (BITS - 1)));
  Lanes scale = load_numbers(head, w.scale);
  Lanes extra = load_lanes(reinterpret_cast<const float*>(head + w.scale_bytes()));
  return FORM == ZERO ? mul(scale, sub(half, extra)) : fma(scale, half, extra);
}

// M rows times P panels side by side: more streams for the memory, more sums for the adders.
template <int BITS, int FORM, int M, int P>
void few_rows(const Weight& w, const Rows& in, const Output& out, int64_t m0, int64_t panel) {
  constexpr int S = M == 1 ? 2 : 1;  // sums a row and panel, to hide the latency of adding
  constexpr int AHEAD = 1024;        // the hardware prefetcher stops at page borders
  const int64_t groups = w.groups(), bytes = w.panel_bytes(), head_bytes = w.head_bytes();
  const uint8_t* p = w.blob + panel * bytes;
  const Table table = load_table(w.table);
  Lanes total[M * P];
  for (auto& t : total) t = zeros();
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t* head = p;
    p += head_bytes;
    const float* x = in.x + m0 * in.stride + g * w.padded_group();
    for (int64_t left = Weight::units(w.columns(g)); left > 0; left -= SUMMED) {
      Lanes sums[M * P * S];
#pragma GCC unroll 16
      for (int i = 0; i < M * P * S; i++) sums[i] = zeros();
      const int64_t units = std::min(left, SUMMED);
      for (int64_t u = 0; u < units; u++, p += ROWS * BITS, x += UNIT) {
#pragma GCC unroll 4
        for (int i = 0; i < P; i++) {
          const uint8_t* here = p + i * bytes;
          __builtin_prefetch(here + AHEAD);
          if (BITS > 4) __builtin_prefetch(here + AHEAD + 64);
          Unit unit = load_unit<BITS, FORM>(here, table);
#pragma GCC unroll 8
          for (int c = 0; c < UNIT; c++) {
            Lanes code = number<BITS, FORM>(unit, c, table);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
              Lanes& sum = sums[(m * P + i) * S + c % S];
              sum = fma(code, spread(x[m * in.stride + c]), sum);
            }
          }
        }
      }
      for (int i = 0; i < P; i++) {
        Lanes scale = scale_of<FORM>(w, head + i * bytes);
        for (int m = 0; m < M; m++) {
          const Lanes* both = sums + (m * P + i) * S;
          Lanes sum = S == 2 ? add(both[0], both[S - 1]) : both[0];
          total[m * P + i] = fma(scale, sum, total[m * P + i]);
        }
      }
    }
    if (FORM != ZERO && FORM != OFFSET) continue;
    for (int i = 0; i < P; i++) {
      Lanes extra = middle_of<BITS, FORM>(w, head + i * bytes);
      for (int m = 0; m < M; m++) {
        Lanes& all = total[m * P + i];
        all = fma(extra, spread(in.sums[(m0 + m) * groups + g]), all);
      }
    }
  }
  for (int m = 0; m < M; m++) {
    for (int i = 0; i < P; i++) write(out, w, m0 + m, panel + i, total[m * P + i]);
  }
}

template <int BITS, int FORM>
void few(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  int64_t panel = begin;
#ifndef QC_ONE_ROW_AT_A_TIME
  constexpr auto four = few_rows<BITS, FORM, 4, 1>;
  constexpr auto three = few_rows<BITS, FORM, 3, 1>;
  constexpr auto two = few_rows<BITS, FORM, 2, 2>;
  constexpr auto one = few_rows<BITS, FORM, 1, 2>;
  constexpr decltype(one) by_rows[] = {one, two, three, four};
  const int step = in.m > 2 ? 1 : 2;
#ifdef QC_EIGHT_ROWS_AT_ONCE
  constexpr decltype(one) by_more[] = {
      few_rows<BITS, FORM, 1, 1>, few_rows<BITS, FORM, 2, 1>, three, four,
      few_rows<BITS, FORM, 5, 1>, few_rows<BITS, FORM, 6, 1>, few_rows<BITS, FORM, 7, 1>,
      few_rows<BITS, FORM, 8, 1>};
  for (; in.m > 4 && panel < end; panel++) {
    for (int64_t m = 0; m < in.m; m += 8) {
      by_more[std::min<int64_t>(8, in.m - m) - 1](w, in, out, m, panel);
    }
  }
#endif
  for (; panel + step <= end; panel += step) by_rows[in.m - 1](w, in, out, 0, panel);
#endif
  for (; panel < end; panel++) {
    for (int64_t m = 0; m < in.m; m++) few_rows<BITS, FORM, 1, 1>(w, in, out, m, panel);
  }
}

}  // namespace
