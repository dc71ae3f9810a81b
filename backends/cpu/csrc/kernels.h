// The kernels, written once over sixteen lanes; a variant includes a simd_*.h before this file.
//
// Numerics: float32 throughout. Few rows: per group the sum of x times code, then one multiply by
// the scale; forms with a zero or an offset add the group's sum of x. Many rows: panels are decoded
// to floats once, in tiles that stay in the caches, and multiplied with every row.
#include "few.h"
#include "many.h"

namespace {

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
