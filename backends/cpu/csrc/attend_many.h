// Attention of many rows: a lane is a query, so that softmax needs no sum across lanes; keys are taken
// in blocks with running maxima, as in FlashAttention (Dao et al. 2022, algorithm 1).
#pragma once
#include "attend_rows.h"
//
#include "turn.h"

namespace {

constexpr int64_t KEYS = 64;  // of a block
// Sums that are kept in registers: vectors of rows times keys or columns.
constexpr int SIDE = QC_REGISTERS >= 32 ? 2 : 1;
constexpr int WIDE = QC_REGISTERS >= 32 ? 8 : 4;
constexpr int64_t TILE = SIDE * LANES;

// The running result of TILE rows; lanes are rows.
struct Tile {
  float* q;        // [d][TILE], scaled
  float* sums;     // [e][TILE]
  float* scores;   // [KEYS][TILE]
  Lanes top[SIDE], total[SIDE];
};

// Scores of `count` keys; k is [KEYS][d].
void score(const Tile& t, const float* k, int64_t d, int64_t count) {
  for (int64_t key = 0; key < count; key += WIDE) {
    Lanes s[SIDE * WIDE];
    repeat<SIDE * WIDE>([&](auto i) QC_INLINE { s[i] = zeros(); });
    const float* rows = k + key * d;
    for (int64_t c = 0; c < d; c++) {
      Lanes q[SIDE];
      repeat<SIDE>([&](auto r) QC_INLINE { q[r] = load_lanes(t.q + c * TILE + r * LANES); });
      repeat<WIDE>([&](auto j) QC_INLINE {
        const Lanes one = spread(rows[j * d + c]);
        repeat<SIDE>([&](auto r) QC_INLINE { s[j * SIDE + r] = fma(q[r], one, s[j * SIDE + r]); });
      });
    }
    repeat<WIDE>([&](auto j) QC_INLINE {
      repeat<SIDE>([&](auto r) QC_INLINE {
        store_lanes(t.scores + (key + j) * TILE + r * LANES, s[j * SIDE + r]);
      });
    });
  }
}

// Scores become shares of the new maximum; what older shares are worth now.
void share(Tile& t, int64_t count, Lanes (&worth)[SIDE]) {
  for (int r = 0; r < SIDE; r++) {
    float* column = t.scores + r * LANES;
    Lanes top = t.top[r];
    for (int64_t key = 0; key < count; key++) top = larger(top, load_lanes(column + key * TILE));
    worth[r] = power_of_e(sub(t.top[r], top));
    Lanes total = mul(t.total[r], worth[r]);
    for (int64_t key = 0; key < count; key++) {
      const Lanes p = power_of_e(sub(load_lanes(column + key * TILE), top));
      total = add(total, p);
      store_lanes(column + key * TILE, p);
    }
    t.top[r] = top;
    t.total[r] = total;
  }
}

// sums = sums * worth + shares' v; v is [KEYS][e].
void weigh(const Tile& t, const float* v, int64_t e, int64_t count, const Lanes (&worth)[SIDE]) {
  for (int64_t c = 0; c < e; c += WIDE) {
    Lanes s[SIDE * WIDE];
    float* sums = t.sums + c * TILE;
    repeat<SIDE * WIDE>([&](auto i) QC_INLINE {
      s[i] = mul(load_lanes(sums + i * LANES), worth[i % SIDE]);
    });
    for (int64_t key = 0; key < count; key++) {
      Lanes p[SIDE];
      repeat<SIDE>([&](auto r) QC_INLINE {
        p[r] = load_lanes(t.scores + key * TILE + r * LANES);
      });
      repeat<WIDE>([&](auto j) QC_INLINE {
        const Lanes one = spread(v[key * e + c + j]);
        repeat<SIDE>([&](auto r) QC_INLINE { s[j * SIDE + r] = fma(p[r], one, s[j * SIDE + r]); });
      });
    }
    repeat<SIDE * WIDE>([&](auto i) QC_INLINE { store_lanes(sums + i * LANES, s[i]); });
  }
}

// The place after the last key, of those from `begin` to `end`, that a row sees some of.
int64_t last_seen(const Attention& a, int64_t b, const Row& row, int64_t begin, int64_t end) {
  if (a.causal) end = std::min(end, row.query + 1);
  if (a.mask.kind != qc::SEEN) return end;
  const uint8_t* seen = mask_row(a, b, row);
  while (end > begin && !seen[(end - 1) * a.mask.key]) end--;
  return end;
}

// Takes the keys that a row does not see out of its scores, which lie TILE apart.
void hide(const Attention& a, int64_t b, const Row& row, int64_t first, int64_t keys,
          float* scores) {
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  if (a.mask.kind == qc::ADDED) {
    for (int64_t key = 0; key < keys; key++) scores[key * TILE] += added(a, b, row, first + key);
    return;
  }
  if (a.mask.kind == qc::SEEN) {
    const uint8_t* seen = mask_row(a, b, row) + first * a.mask.key;
    for (int64_t key = 0; key < keys; key++) {
      if (!seen[key * a.mask.key]) scores[key * TILE] = NEVER;
    }
  }
  if (!a.causal) return;
  for (int64_t key = std::max<int64_t>(0, row.query + 1 - first); key < keys; key++) {
    scores[key * TILE] = NEVER;
  }
}

// The rows of a task against one block of keys.
void block(const Attention& a, int64_t b, const Row* rows, int64_t count, Tile& t, int64_t first,
           int64_t given, const float* k, const float* v) {
  Sight seen[TILE];
  int64_t end = first;
  for (int64_t r = 0; r < count; r++) {
    seen[r] = sight(a, b, rows[r], first, first + given);
    if (seen[r] == ALL) end = first + given;
    else if (seen[r] == SOME) end = std::max(end, last_seen(a, b, rows[r], first, first + given));
  }
  const int64_t keys = end - first;
  if (keys == 0) return;
  score(t, k, a.d, keys);
  for (int64_t r = 0; r < count; r++) {
    if (seen[r] != ALL) hide(a, b, rows[r], first, keys, t.scores + r);
  }
  Lanes worth[SIDE];
  share(t, keys, worth);
  weigh(t, v, a.e, keys, worth);
}

// Some queries, LANES at most, as lanes of to[d][TILE].
template <qc::Number T>
void load_queries(const Attention& a, int64_t b, const Row* rows, int64_t count, float* to) {
  for (int64_t c = 0; c < a.d; c += LANES) {
    Lanes x[LANES];
    for (int64_t r = 0; r < LANES; r++) {
      if (r >= count) {
        x[r] = zeros();
        continue;
      }
      const uint8_t* q = place(a.q, a.q_at, b, rows[r].head, rows[r].query, T);
      x[r] = mul(load_numbers(q + c * qc::bytes_of(T), T), spread(a.scale));
    }
    turn(x);
    for (int64_t i = 0; i < LANES; i++) store_lanes(to + (c + i) * TILE, x[i]);
  }
}

// The results of the rows that lanes `lane` and on of a tile are.
template <qc::Number T>
void store_results(const Attention& a, int64_t b, const Row* rows, int64_t count, const Tile& tile,
                   int64_t lane) {
  float totals[LANES];
  store_lanes(totals, tile.total[lane / LANES]);
  for (float& total : totals) total = total == 0 ? 0 : 1 / total;
  const Lanes share = load_lanes(totals);
  for (int64_t c = 0; c < a.e; c += LANES) {
    Lanes x[LANES];
    for (int64_t i = 0; i < LANES; i++) {
      x[i] = mul(load_lanes(tile.sums + (c + i) * TILE + lane), share);
    }
    turn(x);
    for (int64_t r = 0; r < count; r++) {
      auto* to = const_cast<uint8_t*>(place(a.out, a.out_at, b, rows[r].head, rows[r].query, T));
      store_numbers(to + c * qc::bytes_of(T), T, x[r]);
    }
  }
}

// Rows `begin` to `end` of one group of heads.
template <qc::Number T>
void many_rows(const Attention& a, int64_t b, int64_t group, int64_t begin, int64_t end) {
  Scratch& s = scratch();
  const int64_t tiles = (end - begin + TILE - 1) / TILE;
  s.q.assign(static_cast<size_t>(tiles * TILE * a.d), 0.f);
  s.sums.assign(static_cast<size_t>(tiles * TILE * a.e), 0.f);
  s.scores.resize(KEYS * TILE);
  // Keys beyond the last are zeros, so that they can be multiplied.
  s.k.assign(static_cast<size_t>(KEYS * a.d), 0.f);
  s.v.resize(static_cast<size_t>(KEYS * a.e));
  std::vector<Row> rows;
  for (int64_t r = begin; r < end; r++) rows.push_back(row_at(a, group, r));
  std::vector<Tile> t(static_cast<size_t>(tiles));
  for (int64_t i = 0; i < tiles; i++) {
    t[i] = {s.q.data() + i * TILE * a.d, s.sums.data() + i * TILE * a.e, s.scores.data(), {}, {}};
    for (int r = 0; r < SIDE; r++) t[i].top[r] = spread(LOWEST), t[i].total[r] = zeros();
  }
  for (int64_t r = 0; r < end - begin; r += LANES) {
    load_queries<T>(a, b, rows.data() + r, std::min(LANES, end - begin - r),
                    t[r / TILE].q + r % TILE);
  }
  for (int64_t first = 0; first < a.keys; first += KEYS) {
    const int64_t keys = std::min(KEYS, a.keys - first);
    bool read = false;
    for (int64_t i = 0; i < tiles; i++) {
      const Row* mine = rows.data() + i * TILE;
      const int64_t count = std::min(TILE, end - begin - i * TILE);
      if (!read) {
        bool any = false;
        for (int64_t r = 0; r < count && !any; r++) {
          any = sight(a, b, mine[r], first, first + keys) != NONE;
        }
        if (!any) continue;
        widen_rows<T>(place(a.k, a.k_at, b, group, first, T), a.k_at.row, keys, a.d, s.k.data());
        widen_rows<T>(place(a.v, a.v_at, b, group, first, T), a.v_at.row, keys, a.e, s.v.data());
        read = true;
      }
      block(a, b, mine, count, t[i], first, keys, s.k.data(), s.v.data());
    }
  }
  for (int64_t r = 0; r < end - begin; r += LANES) {
    store_results<T>(a, b, rows.data() + r, std::min(LANES, end - begin - r), t[r / TILE],
                     r % TILE);
  }
}

}  // namespace
