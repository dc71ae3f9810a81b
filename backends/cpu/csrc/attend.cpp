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
#include "repeat.h"

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

// e^x for x <= 0, 0 below -87.3; a NaN stays one. 2 units in the last place: Cephes' polynomial.
inline Lanes power_of_e(const Lanes& x) {
  const Lanes low = larger(spread(-88.f), x);
  const Words n = rounded(mul(low, spread(1.44269504088896341f)));
  const Lanes whole = to_lanes(n);
  Lanes r = fma(whole, spread(-0.693359375f), low);
  r = fma(whole, spread(2.12194440e-4f), r);
  Lanes p = fma(r, spread(1.9875691500e-4f), spread(1.3981999507e-3f));
  p = fma(p, r, spread(8.3334519073e-3f));
  p = fma(p, r, spread(4.1665795894e-2f));
  p = fma(p, r, spread(1.6666665459e-1f));
  p = fma(p, r, spread(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), spread(1.f));
  return mul(p, lanes_of(shift_left(plus(n, spread_word(127)), 23)));
}

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

enum Sight { NONE, SOME, ALL };

// Whether a row sees the keys from `begin` to `end`.
Sight sight(const Attention& a, int64_t b, const Row& row, int64_t begin, int64_t end) {
  if (a.causal && begin > row.query) return NONE;
  if (a.mask.kind == qc::NO_MASK) return a.causal && end - 1 > row.query ? SOME : ALL;
  if (a.mask.kind == qc::ADDED) return SOME;
  const uint8_t* seen =
      a.mask.data + b * a.mask.batch + row.head * a.mask.head + row.query * a.mask.query;
  int64_t count = 0;
  if (a.mask.key == 1) {  // a loop of its own, which compilers turn into vectors
    for (int64_t key = begin; key < end; key++) count += seen[key] != 0;
  } else {
    for (int64_t key = begin; key < end; key++) count += seen[key * a.mask.key] != 0;
  }
  if (count == 0) return NONE;
  return count == end - begin && !(a.causal && end - 1 > row.query) ? ALL : SOME;
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
  std::vector<float> q, sums, scores, k, v, row;
};

Scratch& scratch() {
  static thread_local Scratch mine;
  return mine;
}

// The rows of a task against one block of keys; whether it saw any of them.
bool block(const Attention& a, int64_t b, const Row* rows, int64_t count, Tile& t, int64_t first,
           int64_t keys, const float* k, const float* v) {
  bool any = false, all = true;
  for (int64_t r = 0; r < count; r++) {
    const Sight seen = sight(a, b, rows[r], first, first + keys);
    any |= seen != NONE;
    all &= seen == ALL;
  }
  if (!any) return false;
  score(t, k, a.d, keys);
  if (!all) {
    for (int64_t r = 0; r < count; r++) {
      for (int64_t key = 0; key < keys; key++) {
        t.scores[key * TILE + r] += added(a, b, rows[r], first + key);
      }
    }
  }
  Lanes worth[SIDE];
  share(t, keys, worth);
  weigh(t, v, a.e, keys, worth);
  return true;
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
  s.row.resize(static_cast<size_t>(std::max(a.d, a.e)));
  std::vector<Row> rows;
  for (int64_t r = begin; r < end; r++) rows.push_back(row_at(a, group, r));
  std::vector<Tile> t(static_cast<size_t>(tiles));
  for (int64_t i = 0; i < tiles; i++) {
    t[i] = {s.q.data() + i * TILE * a.d, s.sums.data() + i * TILE * a.e, s.scores.data(), {}, {}};
    for (int r = 0; r < SIDE; r++) t[i].top[r] = spread(LOWEST), t[i].total[r] = zeros();
  }
  for (int64_t r = 0; r < end - begin; r++) {
    widen_rows<T>(place(a.q, a.q_at, b, rows[r].head, rows[r].query, T), 0, 1, a.d, s.row.data());
    float* q = t[r / TILE].q + r % TILE;
    for (int64_t c = 0; c < a.d; c++) q[c * TILE] = s.row[c] * a.scale;
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
  for (int64_t r = 0; r < end - begin; r++) {
    const Tile& tile = t[r / TILE];
    const int64_t lane = r % TILE;
    float totals[LANES];
    store_lanes(totals, tile.total[lane / LANES]);
    const float total = totals[lane % LANES], share = total == 0 ? 0 : 1 / total;
    for (int64_t c = 0; c < a.e; c++) s.row[c] = tile.sums[c * TILE + lane] * share;
    auto* to = const_cast<uint8_t*>(place(a.out, a.out_at, b, rows[r].head, rows[r].query, T));
    for (int64_t c = 0; c < a.e; c += LANES) {
      store_numbers(to + c * qc::bytes_of(T), T, load_lanes(s.row.data() + c));
    }
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
