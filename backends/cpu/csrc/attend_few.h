// Attention of few rows, which is decoding: a lane is a column, so that keys and values are read once
// and in place.
#pragma once
#include "attend_rows.h"

namespace {

// Scores of R rows and all keys from `first` to `last`, [R][last - first].
template <qc::Number T, int R>
void score_few(const Attention& a, const uint8_t* k, int64_t count, const float* q, float* scores) {
  for (int64_t key = 0; key < count; key++, k += a.k_at.row * qc::bytes_of(T)) {
    Lanes s[R];
    repeat<R>([&](auto r) QC_INLINE { s[r] = zeros(); });
    for (int64_t c = 0; c < a.d; c += LANES) {
      const Lanes x = load_numbers(k + c * qc::bytes_of(T), T);
      repeat<R>([&](auto r) QC_INLINE { s[r] = fma(load_lanes(q + r * a.d + c), x, s[r]); });
    }
    repeat<R>([&](auto r) QC_INLINE { scores[r * count + key] = sum_of(s[r]); });
  }
}

// out [R][e] = scores' v.
template <qc::Number T, int R>
void weigh_few(const Attention& a, const uint8_t* v, int64_t count, const float* scores,
               float* out) {
  constexpr int W = QC_REGISTERS >= 32 ? 4 : 1;
  int64_t c = 0;
  const auto columns = [&](auto width) {
    constexpr int N = decltype(width)::value;
    Lanes s[R * N];
    repeat<R * N>([&](auto i) QC_INLINE { s[i] = zeros(); });
    const uint8_t* at = v + c * qc::bytes_of(T);
    for (int64_t key = 0; key < count; key++, at += a.v_at.row * qc::bytes_of(T)) {
      Lanes x[N];
      repeat<N>([&](auto n) QC_INLINE { x[n] = load_numbers(at + n * LANES * qc::bytes_of(T), T); });
      repeat<R>([&](auto r) QC_INLINE {
        const Lanes p = spread(scores[r * count + key]);
        repeat<N>([&](auto n) QC_INLINE { s[r * N + n] = fma(p, x[n], s[r * N + n]); });
      });
    }
    repeat<R * N>([&](auto i) QC_INLINE {
      store_lanes(out + i / N * a.e + c + i % N * LANES, s[i]);
    });
    c += N * LANES;
  };
  while (c + W * LANES <= a.e) columns(std::integral_constant<int, W>());
  while (c < a.e) columns(std::integral_constant<int, 1>());
}

// Scores become shares; what they add up to.
float share_few(float* scores, int64_t count) {
  float top = LOWEST;
  for (int64_t key = 0; key < count; key++) top = scores[key] < top ? top : scores[key];
  float total = 0;
  for (int64_t key = 0; key < count; key += LANES) {
    float some[LANES] = {};
    const int64_t here = std::min(LANES, count - key);
    std::memcpy(some, scores + key, static_cast<size_t>(here) * 4);
    store_lanes(some, power_of_e(sub(load_lanes(some), spread(top))));
    for (int64_t i = 0; i < here; i++) total += some[i];
    std::memcpy(scores + key, some, static_cast<size_t>(here) * 4);
  }
  return total;
}

template <qc::Number T, int R>
void few_rows(const Attention& a, int64_t b, int64_t group, int64_t begin) {
  Scratch& s = scratch();
  Row rows[R];
  s.q.resize(static_cast<size_t>(R * a.d));
  s.sums.resize(static_cast<size_t>(R * a.e));
  // The keys that any of the rows sees.
  int64_t first = a.keys, last = 0;
  for (int r = 0; r < R; r++) {
    rows[r] = row_at(a, group, begin + r);
    const uint8_t* from = place(a.q, a.q_at, b, rows[r].head, rows[r].query, T);
    widen_rows<T>(from, 0, 1, a.d, s.q.data() + r * a.d);
    for (int64_t c = 0; c < a.d; c++) s.q[r * a.d + c] *= a.scale;
    int64_t from_key = 0, to_key = a.keys;
    while (from_key < to_key && sight(a, b, rows[r], from_key, from_key + 1) == NONE) from_key++;
    while (from_key < to_key && sight(a, b, rows[r], to_key - 1, to_key) == NONE) to_key--;
    first = std::min(first, from_key), last = std::max(last, to_key);
  }
  const int64_t count = std::max<int64_t>(0, last - first);
  s.scores.resize(static_cast<size_t>(R * count));
  if (count == 0) first = 0;
  score_few<T, R>(a, place(a.k, a.k_at, b, group, first, T), count, s.q.data(), s.scores.data());
  float shares[R];
  for (int r = 0; r < R; r++) {
    float* scores = s.scores.data() + r * count;
    if (a.causal || a.mask.kind != qc::NO_MASK) {
      for (int64_t key = 0; key < count; key++) scores[key] += added(a, b, rows[r], first + key);
    }
    const float total = share_few(scores, count);
    shares[r] = total == 0 ? 0 : 1 / total;
  }
  weigh_few<T, R>(a, place(a.v, a.v_at, b, group, first, T), count, s.scores.data(),
                  s.sums.data());
  for (int r = 0; r < R; r++) {
    auto* to = const_cast<uint8_t*>(place(a.out, a.out_at, b, rows[r].head, rows[r].query, T));
    for (int64_t c = 0; c < a.e; c += LANES) {
      const Lanes x = mul(load_lanes(s.sums.data() + r * a.e + c), spread(shares[r]));
      store_numbers(to + c * qc::bytes_of(T), T, x);
    }
  }
}

}  // namespace
