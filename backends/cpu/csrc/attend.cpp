// Attention in float32, whatever the numbers are stored in: scores never leave the caches.
//
// Many rows: a lane is a query, so that softmax needs no sum across lanes; keys are taken in blocks
// with running maxima, as in FlashAttention (Dao et al. 2022, algorithm 1). Few rows, which is
// decoding: a lane is a column, so that keys and values are read once and in place. Either way keys
// that no row of a block sees are not read.
#include "attend.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "simd.h"
//
#include "exponent.h"
#include "repeat.h"
#include "turn.h"

namespace {

using qc::Attention;

constexpr int64_t LANES = 16;
constexpr int64_t KEYS = 64;  // of a block
constexpr int64_t FEW = 8;    // rows that are taken column by column
// Sums that are kept in registers: vectors of rows times keys or columns.
constexpr int SIDE = QC_REGISTERS >= 32 ? 2 : 1;
constexpr int WIDE = QC_REGISTERS >= 32 ? 8 : 4;
constexpr int64_t TILE = SIDE * LANES;
constexpr int64_t MANY = 128;  // rows of a task: blocks of keys are widened once for all of them
constexpr float LOWEST = -std::numeric_limits<float>::max();

// One row of a task: which query of which head.
struct Row {
  int64_t head, query;
};

Row row_at(const Attention& a, int64_t group, int64_t row) {
  return {group * (a.heads / a.groups) + row / a.queries, row % a.queries};
}

const uint8_t* place(const uint8_t* data, const qc::Steps& at, int64_t b, int64_t head,
                     int64_t row, qc::Number type) {
  return data + (b * at.batch + head * at.head + row * at.row) * qc::bytes_of(type);
}

// What is added to the score of a row and a key: minus infinity where the key is not seen.
float added(const Attention& a, int64_t b, const Row& row, int64_t key) {
  if (a.causal && key > row.query) return -std::numeric_limits<float>::infinity();
  if (a.mask.kind == qc::NO_MASK) return 0;
  const int64_t at = b * a.mask.batch + row.head * a.mask.head + row.query * a.mask.query +
                     key * a.mask.key;
  if (a.mask.kind == qc::ADDED) return qc::to_float(a.mask.data, at, a.mask.type);
  return a.mask.data[at] ? 0 : -std::numeric_limits<float>::infinity();
}

// Where a row's flags of keys begin.
const uint8_t* mask_row(const Attention& a, int64_t b, const Row& row) {
  return a.mask.data + b * a.mask.batch + row.head * a.mask.head + row.query * a.mask.query;
}

enum Sight { NONE, SOME, ALL };

// Whether a row sees the keys from `begin` to `end`.
Sight sight(const Attention& a, int64_t b, const Row& row, int64_t begin, int64_t end) {
  if (a.causal && begin > row.query) return NONE;
  if (a.mask.kind == qc::NO_MASK) return a.causal && end - 1 > row.query ? SOME : ALL;
  if (a.mask.kind == qc::ADDED) return SOME;
  const uint8_t* seen = mask_row(a, b, row);
  bool any = false, all = !(a.causal && end - 1 > row.query);
  if (a.mask.key == 1) {
    constexpr uint64_t ONES = 0x0101010101010101u;
    for (uint64_t eight; begin + 8 <= end; begin += 8) {
      std::memcpy(&eight, seen + begin, 8);
      any |= eight != 0;
      all &= eight == ONES;
    }
  }
  for (; begin < end; begin++) {
    any |= seen[begin * a.mask.key] != 0;
    all &= seen[begin * a.mask.key] != 0;
  }
  return !any ? NONE : all ? ALL : SOME;
}

// Rows of numbers as floats, one after the other.
template <qc::Number T>
void widen_rows(const uint8_t* from, int64_t step, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; r++, from += step * qc::bytes_of(T)) {
    for (int64_t c = 0; c < columns; c += LANES, to += LANES) {
      store_lanes(to, load_numbers(from + c * qc::bytes_of(T), T));
    }
  }
}

// **** many rows ****

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

// Scratch of a thread, reused from call to call.
struct Scratch {
  std::vector<float> q, sums, scores, k, v;
};

Scratch& scratch() {
  static thread_local Scratch mine;
  return mine;
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

// **** few rows ****

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

template <qc::Number T>
void rows_of(const Attention& a, int64_t b, int64_t group, int64_t begin, int64_t end) {
  if (a.rows() > FEW) return many_rows<T>(a, b, group, begin, end);
  for (; begin + 2 <= end; begin += 2) few_rows<T, 2>(a, b, group, begin);
  if (begin < end) few_rows<T, 1>(a, b, group, begin);
}

}  // namespace

// A thread's share of few rows is two of them: more would leave none for the others.
int64_t qc::Attention::tile() const { return rows() > FEW ? MANY : 2; }

void qc::attend(const Attention& a, int64_t begin, int64_t end) {
  const int64_t tiles = (a.rows() + a.tile() - 1) / a.tile();
  for (int64_t task = begin; task < end; task++) {
    const int64_t group = task / tiles % a.groups, b = task / tiles / a.groups;
    const int64_t from = task % tiles * a.tile(), to = std::min(a.rows(), from + a.tile());
    if (a.type == F32) rows_of<F32>(a, b, group, from, to);
    else if (a.type == F16) rows_of<F16>(a, b, group, from, to);
    else rows_of<BF16>(a, b, group, from, to);
  }
}
