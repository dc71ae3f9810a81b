// Few rows: codes are decoded in registers and never stored.
#pragma once
#include <cstring>
#include <vector>

#include "codes.h"

namespace {

constexpr int64_t AHEAD = 4096;  // bytes beyond the next chunk

// Asks for the lines of one unit's share of a chunk, so far ahead that they come in time: the
// hardware prefetcher stops at page borders. Panels lie one after the other.
inline const uint8_t* fetch(const uint8_t* from, int64_t step) {
  for (int64_t i = 0; i < step; i += LINE) __builtin_prefetch(from + i);
  return from + step;
}

// M rows of P digits of one chunk, as the kernel walks through them.
template <int P, int M>
struct Walk {
  const int32_t* x;                 // four columns of a row's digit: x[quad * A + a]
  const int32_t *starts, *lift;     // starts[group * A + a], lift[group * M + m]
  const float *step, *sums;         // likewise
  int64_t digit_step, group_step;   // for one row these are what Rows has

  const int32_t* four(int a, int quad) const {
    return M == 1 ? x + a * digit_step + quad : x + quad * M * P + a;
  }
  int32_t start(int a, int64_t g, int shift) const {
    return starts[M == 1 ? a * group_step + g : g * M * P + a] * (1 << shift);
  }
};

// Rows [m0, m0 + M) by columns instead of by rows, so that one pointer serves all; rows beyond the
// last are the last again. One row stays where it is.
template <int P, int M>
class Walks {
 public:
  Walks(const Weight& w, const Rows& in, int64_t m0)
      : in_(in), m0_(m0), units_(w.padded_group() / UNIT), last_(w.groups() - 1),
        last_units_(w.units(last_)) {
    for (int64_t c = 0; c < w.chunks(); c++) chunks_.push_back(w.chunk(c));
    if (M == 1) return;
    words_ = in.width / 4;
    size_ = words_ * A + in.groups * (A + 3 * M);
    store_.resize(static_cast<size_t>(w.chunks() * size_));
    for (int64_t c = 0; c < w.chunks(); c++) copy(in.at(c, m0), store_.data() + c * size_);
  }
  // Where things lie in a panel: divisions that every panel would make again.
  const std::vector<Chunk>& chunks() const { return chunks_; }
  int64_t units(int64_t group) const { return group == last_ ? last_units_ : units_; }

  Walk<P, M> at(int64_t chunk) const {
    if (M == 1) {
      const Rows in = in_.at(chunk, m0_);
      return {reinterpret_cast<const int32_t*>(in.codes), in.totals, in.lift, in.step, in.sums,
              in.width / 4, in.groups};
    }
    const int32_t* x = store_.data() + chunk * size_;
    const int32_t* starts = x + words_ * A;
    const int32_t* lift = starts + in_.groups * A;
    const auto* step = reinterpret_cast<const float*>(lift + in_.groups * M);
    return {x, starts, lift, step, step + in_.groups * M, 0, 0};
  }

 private:
  static constexpr int A = M * P;

  void copy(const Rows& in, int32_t* to) const {
    int32_t *starts = to + words_ * A, *rest = starts + in.groups * A;
    const int64_t last = in.m - 1 - m0_, kind = in.groups * M;
    for (int m = 0; m < M; m++) {
      const int64_t row = std::min<int64_t>(m, last);
      for (int p = 0; p < P; p++) {
        const auto* x = reinterpret_cast<const int32_t*>(in.codes + (row * P + p) * in.width);
        const int32_t* totals = in.totals + row * in.stride + p * in.groups;
        for (int64_t i = 0; i < words_; i++) to[i * A + m * P + p] = x[i];
        for (int64_t g = 0; g < in.groups; g++) starts[g * A + m * P + p] = totals[g];
      }
      for (int64_t g = 0; g < in.groups; g++) {
        const int64_t from = row * in.stride + g, place = g * M + m;
        rest[place] = in.lift[from];
        if (P > 1 || g == 0) std::memcpy(rest + kind + place, in.step + from, 4);
        std::memcpy(rest + 2 * kind + place, in.sums + from, 4);
      }
    }
  }

  Rows in_;
  int64_t m0_, units_, last_, last_units_, words_ = 0, size_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<int32_t> store_;
};

// M rows of P digits times one panel. Panels side by side would be several streams for the memory,
// which is slower.
template <int BITS, bool TABLE, int P, int M>
void few_rows(const Weight& w, const Walks<P, M>& rows, int64_t panel, Lanes (&total)[M]) {
  constexpr int A = M * P, SHIFT = middle_shift(BITS, TABLE);
  const auto chunks = static_cast<int64_t>(rows.chunks().size());
  const uint8_t* base = w.blob + panel * rows.chunks().back().end;
  const Table table = load_table(w.table);
  repeat<M>([&](auto m) QC_INLINE { total[m] = zeros(); });
  for (int64_t c = 0; c < chunks; c++) {
    const Chunk& at = rows.chunks()[static_cast<size_t>(c)];
    Walk<P, M> in = rows.at(c);
    const int64_t units = at.groups * rows.units(-1);
    const int64_t step = up_to((at.end - at.heads + units - 1) / units, LINE);
    const uint8_t* ahead = base + at.end + AHEAD;
    Lanes part[M];  // one digit: sums of the chunk in its steps
    repeat<M>([&](auto m) QC_INLINE { part[m] = P == 1 ? zeros() : total[m]; });
    Runs runs(base, at);
    for (int64_t g = 0; g < at.groups; g++) {
      Words sums[A];
      repeat<A>([&](auto a) QC_INLINE {
        sums[a] = spread_word(is_signed(BITS, TABLE) ? 0 : in.start(a, g, SHIFT));
      });
      for (int64_t left = rows.units(at.group + g); left > 0; left--) {
        Words quads[QUADS];
        load_unit<BITS, TABLE>(runs, table, quads);
        runs.next();
        ahead = fetch(ahead, step);
        repeat<QUADS>([&](auto q) QC_INLINE {
          repeat<A>([&](auto a) QC_INLINE {
            sums[a] = dot<(BITS == 8 || TABLE)>(sums[a], quads[q], load_word(in.four(a, q)));
          });
        });
        in.x += M == 1 ? QUADS : QUADS * A;
      }
      const Head head = load_head(w, base + at.heads, g);
      repeat<M>([&](auto m) QC_INLINE {
        const int64_t place = g * M + m;
        part[m] = fma(scaled<P>(head.scale, in.step + place),
                      joined<P>(sums, m * P, 1, in.lift + place), part[m]);
        if (w.has_extra()) part[m] = fma(head.middle, spread(in.sums[place]), part[m]);
      });
    }
    repeat<M>([&](auto m) QC_INLINE {
      total[m] = P == 1 ? fma(spread(in.step[m]), part[m], total[m]) : part[m];
    });
  }
}

template <int BITS, bool TABLE, int P, int M>
void few(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  for (int64_t m0 = 0; m0 < in.m; m0 += M) {
    const Walks<P, M> rows(w, in, m0);
    for (int64_t panel = begin; panel < end; panel++) {
      Lanes total[M];
      few_rows<BITS, TABLE, P, M>(w, rows, panel, total);
      for (int m = 0; m < M && m0 + m < in.m; m++) write(out, w, m0 + m, panel, total[m]);
    }
  }
}

}  // namespace
