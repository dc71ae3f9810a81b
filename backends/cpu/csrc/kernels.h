// The kernels, written once over sixteen lanes; a variant includes a simd_*.h before this file.
//
// Numerics: the sum of codes times digits of x is exact in each group; groups are scaled and added
// in float32. Few rows decode codes in registers, many rows decode them once to tiles of bytes.
#include "digits.h"
#include "few.h"
#include "float8.h"
#include "many.h"

namespace {

using Run = void (*)(const Weight&, const Rows&, const Output&, int64_t, int64_t);

// Fewer registers hold the sums of fewer rows.
template <int BITS, bool TABLE, int P>
Run by_rows(int64_t m) {
  if (m == 1) return few<BITS, TABLE, P, 1>;
  if constexpr (QC_REGISTERS >= 32) {
    if (m == 2) return few<BITS, TABLE, P, 2>;
    if (m == 4) return few<BITS, TABLE, P, 4>;
  }
  return many<BITS, TABLE, P>;
}

// Tables have 16 entries at most, hence no lookups wider than 4 bits.
template <int BITS, bool TABLE>
Run by_digits(const Rows& in) {
  constexpr int B = TABLE && BITS > 4 ? 4 : BITS;
  if (in.digits == 1) return by_rows<B, TABLE, 1>(in.m);
  return in.digits == 2 ? by_rows<B, TABLE, 2>(in.m) : by_rows<B, TABLE, 3>(in.m);
}

template <bool TABLE>
Run by_bits(int bits, const Rows& in) {
  switch (bits) {
    case 1: return by_digits<1, TABLE>(in);
    case 2: return by_digits<2, TABLE>(in);
    case 3: return by_digits<3, TABLE>(in);
    case 4: return by_digits<4, TABLE>(in);
    case 5: return by_digits<5, TABLE>(in);
    case 6: return by_digits<6, TABLE>(in);
    case 7: return by_digits<7, TABLE>(in);
    default: return by_digits<8, TABLE>(in);
  }
}

void multiply(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  if (w.form == FLOAT8) return float8(w, in, out, begin, end);
  (w.form == LOOKUP ? by_bits<true>(w.bits, in) : by_bits<false>(w.bits, in))(w, in, out, begin,
                                                                              end);
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

}  // namespace

const qc::Kernels& qc::kernels() {
  static const Kernels all = {multiply, quantize, widen, narrow};
  return all;
}
