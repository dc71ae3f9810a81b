// The kernels, written once over sixteen lanes; a variant includes a simd_*.h before this file, and
// has a second file for few rows: each takes a compiler some twenty seconds.
//
// Numerics: the sum of codes times digits of x is exact in each group; groups are scaled and added
// in float32. Few rows decode codes in registers, many rows decode them once to tiles of bytes.
#include "choose.h"
#include "digits.h"
#include "float8.h"
#include "gate.h"
#include "many.h"

namespace {

struct Many {
  template <int BITS, bool TABLE, int P>
  static Run run(int64_t) {
    return many<BITS, TABLE, P>;
  }
};

void multiply(const Weight& w, const Rows& in, const Output& out, int64_t begin, int64_t end) {
  if (w.form == FLOAT8) return float8(w, in, out, begin, end);
  // Up to so many rows the memory sets the pace, and their sums fit registers.
  constexpr int64_t FEW = QC_REGISTERS < 32 ? 1 : MOST_FEW;
  const Run run = in.m <= FEW ? few_rows_of(w, in) : choose<Many>(w, in);
  run(w, in, out, begin, end);
}

template <Number T>
void widen_as(const void* from, int64_t at, int64_t count, float* to) {
  const auto* p = static_cast<const uint8_t*>(from) + at * bytes_of(T);
  int64_t i = 0;
  for (; i + ROWS <= count; i += ROWS, p += ROWS * bytes_of(T)) {
    store_lanes(to + i, load_numbers(p, T));
  }
  for (; i < count; i++) to[i] = to_float(from, at + i, T);
}

void widen(const void* from, int64_t at, Number type, int64_t count, float* to) {
  if (type == F32) return widen_as<F32>(from, at, count, to);
  if (type == F16) return widen_as<F16>(from, at, count, to);
  widen_as<BF16>(from, at, count, to);
}

// Asks for the lines of what a row has of a chunk: its numbers, and where its codes go.
inline void fetch_part(const Weight& w, const void* from, Number type, const Rows& to, int64_t c,
                       int64_t row) {
  const int64_t first = c * to.width, bytes = std::min(to.width, w.k - first) * bytes_of(type);
  const auto* numbers = static_cast<const uint8_t*>(from) + (row * w.k + first) * bytes_of(type);
  for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(numbers + i);
  const Rows part = to.at(c, row);
  for (int64_t i = 0; i < to.width * to.digits; i += LINE) __builtin_prefetch(part.codes + i, 1);
  for (int64_t i = 0; i < to.stride; i += LINE / 4) __builtin_prefetch(part.step + i, 1);
}

// Chunk by chunk, so that some rows of a chunk are written one after the other.
template <int P>
void quantize_matrix(const Weight& w, const void* from, Number type, const Rows& to, int64_t begin,
                     int64_t end) {
  for (int64_t c = 0; c < w.chunks(); c++) {
    const int64_t first = c * to.width, columns = std::min(to.width, w.k - first);
    for (int64_t r = begin; r < end; r++) {
      float x[CHUNK];
      if (c + 1 < w.chunks()) fetch_part(w, from, type, to, c + 1, r);
      widen(from, r * w.k + first, type, columns, x);
      quantize_part<P>(w, w.chunk(c), x, to.at(c, r));
    }
  }
}

void quantize_rows(const Weight& w, const void* from, Number type, const Rows& to, int64_t begin,
                   int64_t end) {
  constexpr int64_t SOME = 16;
  for (; begin < end; begin += SOME) {
    const int64_t last = std::min(begin + SOME, end);
    if (to.digits == 1) quantize_matrix<1>(w, from, type, to, begin, last);
    else if (to.digits == 2) quantize_matrix<2>(w, from, type, to, begin, last);
    else quantize_matrix<3>(w, from, type, to, begin, last);
  }
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
  static const Kernels all = {multiply, quantize, quantize_rows, widen, narrow, gate};
  return all;
}
