// Few rows: codes are decoded in registers and never stored.
#pragma once
#include "codes.h"

namespace {

// The next chunk of a panel, or the first of the next panels, is fetched while one is worked on: the
// hardware prefetcher stops at page borders.
inline const uint8_t* fetch(const uint8_t* from, int64_t step) {
  for (int64_t i = 0; i < step; i += LINE) __builtin_prefetch(from + i);
  return from + step;
}

// M rows of P digits times S panels side by side, which lie `apart` bytes apart.
template <int BITS, bool TABLE, int P, int M, int S>
void few_rows(const Weight& w, const Rows& in, const Output& out, int64_t panel) {
  constexpr int A = M * P;
  const int64_t bytes = w.panel_bytes(), chunks = w.chunks(), words = in.padded / 4;
  const uint8_t* base = w.blob + panel * bytes;
  const auto* x = reinterpret_cast<const int32_t*>(in.codes);
  const Table table = load_table(w.table);
  Lanes total[S * M];
  repeat<S * M>([&](auto i) QC_INLINE { total[i] = zeros(); });
  for (int64_t c = 0; c < chunks; c++) {
    const Chunk at = w.chunk(c);
    const int64_t units = at.groups * (w.padded_group() / UNIT);
    const int64_t step = up_to((at.end - at.heads + units - 1) / units, LINE);
    Runs runs[S];
    const uint8_t* ahead[S];
    repeat<S>([&](auto s) QC_INLINE {
      runs[s] = Runs(base + s * bytes, at);
      ahead[s] = base + s * bytes + (c + 1 < chunks ? at.end : S * bytes);
    });
    for (int64_t g = at.group; g < at.group + at.groups; g++) {
      Words sums[A * S];
      repeat<A>([&](auto a) QC_INLINE {
        const Words start = spread_word(in.start[a * in.groups + g]);
        repeat<S>([&](auto s) QC_INLINE { sums[a * S + s] = start; });
      });
      for (int64_t left = w.units(g); left > 0; left--, x += QUADS) {
        repeat<S>([&](auto s) QC_INLINE {
          Words quads[QUADS];
          load_unit<BITS, TABLE>(runs[s], table, quads);
          runs[s].next();
          ahead[s] = fetch(ahead[s], step);
          repeat<QUADS>([&](auto q) QC_INLINE {
            repeat<A>([&](auto a) QC_INLINE {
              Words& sum = sums[a * S + s];
              sum = dot<(BITS == 8 || TABLE)>(sum, quads[q], spread_word(x[a * words + q]));
            });
          });
        });
      }
      repeat<S>([&](auto s) QC_INLINE {
        const Head head = load_head(w, base + s * bytes + at.heads, g - at.group);
        repeat<M>([&](auto m) QC_INLINE {
          Lanes& all = total[s * M + m];
          const Lanes factor = mul(head.scale, spread(in.step[m * in.groups + g]));
          all = fma(factor, joined<P>(sums, m * P * S + s, S), all);
          if (w.has_extra()) all = fma(head.middle, spread(in.sums[m * in.groups + g]), all);
        });
      });
    }
  }
  repeat<S>([&](auto s) QC_INLINE {
    repeat<M>([&](auto m) QC_INLINE { write(out, w, m, panel + s, total[s * M + m]); });
  });
}

// As many panels side by side as keep the multipliers busy and fit the registers.
template <int BITS, bool TABLE, int P, int M>
void few(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  constexpr int A = M * P;
  constexpr int S = QC_REGISTERS < 32 ? 1 : A == 1 ? 4 : A <= 6 ? 2 : 1;
  int64_t panel = begin;
  for (; panel + S <= end; panel += S) few_rows<BITS, TABLE, P, M, S>(w, in, out, panel);
  for (; panel < end; panel++) few_rows<BITS, TABLE, P, M, 1>(w, in, out, panel);
}

}  // namespace
