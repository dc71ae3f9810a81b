// Few rows: codes are decoded in registers and never stored.
#pragma once
#include "codes.h"

namespace {

constexpr int64_t AHEAD = 4096;  // bytes beyond the next chunk

// Asks for the lines of one unit's share of a chunk, so far ahead that they come in time: the
// hardware prefetcher stops at page borders. Panels lie one after the other.
inline const uint8_t* fetch(const uint8_t* from, int64_t step) {
  for (int64_t i = 0; i < step; i += LINE) __builtin_prefetch(from + i);
  return from + step;
}

// M rows of P digits times one panel. Panels side by side would be several streams for the memory,
// which is slower.
template <int BITS, bool TABLE, int P, int M>
void few_rows(const Weight& w, const Rows& in, const Output& out, int64_t panel) {
  constexpr int A = M * P, MIDDLE = middle_code(BITS, TABLE);
  const int64_t chunks = w.chunks(), words = in.padded / 4;
  const uint8_t* base = w.blob + panel * w.panel_bytes();
  const auto* x = reinterpret_cast<const int32_t*>(in.codes);
  const Table table = load_table(w.table);
  Lanes total[M];
  repeat<M>([&](auto m) QC_INLINE { total[m] = zeros(); });
  for (int64_t c = 0; c < chunks; c++) {
    const Chunk at = w.chunk(c);
    const int64_t units = at.groups * (w.padded_group() / UNIT);
    const int64_t step = up_to((at.end - at.heads + units - 1) / units, LINE);
    const uint8_t* ahead = base + at.end + AHEAD;
    Runs runs(base, at);
    for (int64_t g = at.group; g < at.group + at.groups; g++) {
      Words sums[A];
      repeat<A>([&](auto a) QC_INLINE {
        sums[a] = spread_word(-MIDDLE * in.totals[a * in.groups + g]);
      });
      for (int64_t left = w.units(g); left > 0; left--, x += QUADS) {
        Words quads[QUADS];
        load_unit<BITS, TABLE>(runs, table, quads);
        runs.next();
        ahead = fetch(ahead, step);
        repeat<QUADS>([&](auto q) QC_INLINE {
          repeat<A>([&](auto a) QC_INLINE {
            sums[a] = dot<(BITS == 8 || TABLE)>(sums[a], quads[q], spread_word(x[a * words + q]));
          });
        });
      }
      const Head head = load_head(w, base + at.heads, g - at.group);
      repeat<M>([&](auto m) QC_INLINE {
        const Lanes factor = mul(head.scale, spread(in.step[m * in.groups + g]));
        total[m] = fma(factor, joined<P>(sums, m * P, 1), total[m]);
        if (w.has_extra()) {
          total[m] = fma(head.middle, spread(in.sums[m * in.groups + g]), total[m]);
        }
      });
    }
  }
  repeat<M>([&](auto m) QC_INLINE { write(out, w, m, panel, total[m]); });
}

template <int BITS, bool TABLE, int P, int M>
void few(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; panel++) few_rows<BITS, TABLE, P, M>(w, in, out, panel);
}

}  // namespace
