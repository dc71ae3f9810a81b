// The kernels, written once over sixteen lanes; a variant includes a simd_*.h before this file.
//
// Numerics: float32 throughout. Few rows: per group the sum of x times code, then one multiply by
// the scale; forms with a zero or an offset add the group's sum of x. Many rows: panels are decoded
// to floats once, in tiles that stay in the caches, and multiplied with every row.
#include <algorithm>
#include <vector>

namespace {
using namespace qc;

// **** codes ****

// The numbers of sixteen rows: `low` the first 32 bits, `high` the rest. Four-bit lookups hold
// values instead: bytes of `low` are columns 0, 2, 4, 6, bytes of `high` are columns 1, 3, 5, 7.
struct Unit {
  Words low, high;
};

template <int BITS>
inline Words load_rest(const uint8_t* p) {
  if (BITS == 1) return load_bytes(p);
  Words halves = load_halves(p);
  return BITS == 2 ? halves : join(halves, shift_left(load_bytes(p + 2 * ROWS), 16));
}

template <int BITS, int FORM>
inline Unit load_unit(const uint8_t* p, const Table& table) {
  Unit unit{};
  if (BITS < 4) {
    unit.low = load_rest<BITS & 3>(p);
    return unit;
  }
  unit.low = load_words(p);
  if (BITS == 8) unit.high = load_words(p + 4 * ROWS);
  else if (BITS > 4) unit.high = load_rest<BITS & 3>(p + 4 * ROWS);
  if (BITS == 4 && FORM == LOOKUP) {
    unit.high = look_up(table, mask(shift_right(unit.low, 4), 0x0f0f0f0f));
    unit.low = look_up(table, mask(unit.low, 0x0f0f0f0f));
  }
  return unit;
}

inline Words signed_bits(const Words& x, int at, int bits) {
  int left = 32 - bits - at;
  return shift_right_signed(left ? shift_left(x, left) : x, 32 - bits);
}

inline Words unsigned_bits(const Words& x, int at, int bits) {
  Words low = at ? shift_right(x, at) : x;
  return at + bits == 32 ? low : mask(low, (1u << bits) - 1);
}

// The number of a column that is multiplied with the scale.
template <int BITS, int FORM>
inline __attribute__((always_inline)) Lanes number(const Unit& unit, int column, const Table& table) {
  if (BITS == 4 && FORM == LOOKUP) {
    return to_lanes(signed_bits(column % 2 ? unit.high : unit.low, column / 2 * 8, 8));
  }
  int at = BITS * column;
  Words word = at < 32 ? unit.low : unit.high;
  if (at < 32 && at + BITS > 32) {  // one code at most lies on both sides
    word = join(shift_right(unit.low, at), shift_left(unit.high, 32 - at));
    at = 0;
  }
  at %= 32;
  if (FORM == FLOAT8) {
    Words sign = shift_left(unsigned_bits(word, at + 7, 1), 15);
    return from_halves(join(sign, shift_left(unsigned_bits(word, at, 7), 7)));
  }
  if (FORM != LOOKUP) return to_lanes(signed_bits(word, at, BITS));
  return to_lanes(signed_bits(look_up(table, unsigned_bits(word, at, BITS)), 0, 8));
}

// The factor of a group's numbers.
template <int FORM>
inline Lanes scale_of(const Weight& w, const uint8_t* head) {
  Lanes scale = load_numbers(head, w.scale);
  return FORM == FLOAT8 ? mul(scale, spread(FLOAT8_STEP)) : scale;
}

// **** output ****

void write(const Output& out, const Weight& w, int64_t row, int64_t panel, Lanes value) {
  int64_t first = panel * ROWS, count = std::min<int64_t>(ROWS, w.n - first);
  int64_t at = row * w.n + first;
  if (count == ROWS) {
    if (out.bias) value = add(value, load_lanes(out.bias + first));
    store_numbers(static_cast<uint8_t*>(out.y) + at * bytes_of(out.type), out.type, value);
    return;
  }
  float lanes[ROWS];
  store_lanes(lanes, value);
  for (int64_t r = 0; r < count; r++) {
    from_float(out.y, at + r, out.type, lanes[r] + (out.bias ? out.bias[first + r] : 0.f));
  }
}

// **** few rows ****

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

// **** many rows ****

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

// **** choosing the instance ****

using Run = void (*)(const Weight&, const Rows&, const Output&, int64_t, int64_t);

// Tables have 16 entries at most, hence no lookups wider than 4 bits.
template <int FORM, int BITS>
constexpr Run pick(bool is_few) {
  constexpr int B = FORM == LOOKUP && BITS > 4 ? 4 : BITS;
  return is_few ? few<B, FORM> : many<B, FORM>;
}

template <int FORM>
Run pick_bits(bool is_few, int bits) {
  switch (bits) {
    case 1: return pick<FORM, 1>(is_few);
    case 2: return pick<FORM, 2>(is_few);
    case 3: return pick<FORM, 3>(is_few);
    case 4: return pick<FORM, 4>(is_few);
    case 5: return pick<FORM, 5>(is_few);
    case 6: return pick<FORM, 6>(is_few);
    case 7: return pick<FORM, 7>(is_few);
    default: return pick<FORM, 8>(is_few);
  }
}

Run pick_form(bool is_few, const Weight& w) {
  switch (w.form) {
    case ZERO: return pick_bits<ZERO>(is_few, w.bits);
    case OFFSET: return pick_bits<OFFSET>(is_few, w.bits);
    case LOOKUP: return pick_bits<LOOKUP>(is_few, w.bits);
    case FLOAT8: return pick<FLOAT8, 8>(is_few);
    default: return pick_bits<SYMMETRIC>(is_few, w.bits);
  }
}

void run_few(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  pick_form(true, w)(w, in, out, begin, end);
}

void run_many(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  pick_form(false, w)(w, in, out, begin, end);
}

// **** activations ****

void sum_groups(const Weight& w, const float* x, int64_t m, float* sums) {
  const int64_t groups = w.groups(), stride = w.padded();
  for (int64_t r = 0; r < m; r++) {
    for (int64_t g = 0; g < groups; g++) {
      const float* from = x + r * stride + g * w.padded_group();
      float part[UNIT] = {};  // padding is zero
      for (int64_t u = 0; u < Weight::units(w.columns(g)); u++) {
        for (int c = 0; c < UNIT; c++) part[c] += from[u * UNIT + c];
      }
      *sums++ = ((part[0] + part[4]) + (part[1] + part[5])) +
                ((part[2] + part[6]) + (part[3] + part[7]));
    }
  }
}

void widen(const void* from, int64_t at, Number type, int64_t count, float* to) {
  const auto* p = static_cast<const uint8_t*>(from) + at * bytes_of(type);
  const int64_t step = ROWS * bytes_of(type);
  int64_t i = 0;
  for (; i + ROWS <= count; i += ROWS, p += step) store_lanes(to + i, load_numbers(p, type));
  for (; i < count; i++) to[i] = to_float(from, at + i, type);
}

void narrow(const float* from, int64_t count, void* to, int64_t at, Number type) {
  auto* p = static_cast<uint8_t*>(to) + at * bytes_of(type);
  const int64_t step = ROWS * bytes_of(type);
  int64_t i = 0;
  for (; i + ROWS <= count; i += ROWS, p += step) store_numbers(p, type, load_lanes(from + i));
  for (; i < count; i++) from_float(to, at + i, type, from[i]);
}

constexpr Kernels table_of(const char* name) {
#ifdef QC_EIGHT_ROWS_AT_ONCE
  constexpr int64_t few = 16;
#else
  constexpr int64_t few = 4;
#endif
  return {name, few, run_few, run_many, sum_groups, widen, narrow};
}
}  // namespace
