// Sixteen lanes in plain C++, for machines without a variant of their own. Little-endian.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "panel.h"

namespace {

struct Lanes {
  float v[16];
};
struct Words {  // sixteen words of 32 bits
  uint32_t v[16];
};
struct Table {
  const int8_t* v;
};

#define QC_EACH for (int i = 0; i < 16; i++)

// **** floats ****

inline Lanes zeros() { Lanes r; QC_EACH r.v[i] = 0; return r; }
inline Lanes spread(float x) { Lanes r; QC_EACH r.v[i] = x; return r; }
inline Lanes load_lanes(const float* p) { Lanes r; std::memcpy(r.v, p, 64); return r; }
inline void store_lanes(float* p, const Lanes& x) { std::memcpy(p, x.v, 64); }
inline Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
  Lanes r; QC_EACH r.v[i] = x.v[i] * y.v[i] + z.v[i]; return r;
}
inline Lanes add(const Lanes& x, const Lanes& y) {
  Lanes r; QC_EACH r.v[i] = x.v[i] + y.v[i]; return r;
}
inline Lanes sub(const Lanes& x, const Lanes& y) {
  Lanes r; QC_EACH r.v[i] = x.v[i] - y.v[i]; return r;
}
inline Lanes mul(const Lanes& x, const Lanes& y) {
  Lanes r; QC_EACH r.v[i] = x.v[i] * y.v[i]; return r;
}
inline Lanes div(const Lanes& x, const Lanes& y) {
  Lanes r; QC_EACH r.v[i] = x.v[i] / y.v[i]; return r;
}
// The second where either is a NaN.
inline Lanes larger(const Lanes& x, const Lanes& y) {
  Lanes r; QC_EACH r.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i]; return r;
}
inline float sum_of(const Lanes& x) { float s = 0; QC_EACH s += x.v[i]; return s; }
inline Lanes load_numbers(const uint8_t* p, qc::Number type) {
  Lanes r; QC_EACH r.v[i] = qc::to_float(p, i, type); return r;
}
inline void store_numbers(uint8_t* p, qc::Number type, const Lanes& x) {
  QC_EACH qc::from_float(p, i, type, x.v[i]);
}

// **** words ****

inline Words load_words(const void* p) { Words r; std::memcpy(r.v, p, 64); return r; }
inline void store_words(void* p, const Words& x) { std::memcpy(p, x.v, 64); }
inline Words spread_word(int32_t x) {
  Words r; QC_EACH r.v[i] = static_cast<uint32_t>(x); return r;
}
inline Words load_word(const int32_t* p) { return spread_word(*p); }
inline Words load_signed_bytes(const uint8_t* p) {
  Words r; QC_EACH r.v[i] = static_cast<uint32_t>(static_cast<int8_t>(p[i])); return r;
}
inline Words load_signed_halves(const uint8_t* p) {
  int16_t half[16];
  std::memcpy(half, p, 32);
  Words r; QC_EACH r.v[i] = static_cast<uint32_t>(half[i]); return r;
}
inline Words join(const Words& x, const Words& y) {
  Words r; QC_EACH r.v[i] = x.v[i] | y.v[i]; return r;
}
inline Words flip(const Words& x, uint32_t bits) {
  Words r; QC_EACH r.v[i] = x.v[i] ^ bits; return r;
}
inline Words plus(const Words& x, const Words& y) {
  Words r; QC_EACH r.v[i] = x.v[i] + y.v[i]; return r;
}
inline int32_t as_signed(uint32_t x) { return static_cast<int32_t>(x); }
inline Words larger(const Words& x, const Words& y) {
  Words r; QC_EACH r.v[i] = as_signed(x.v[i]) > as_signed(y.v[i]) ? x.v[i] : y.v[i]; return r;
}
inline Words mask(const Words& x, uint32_t bits) { Words r; QC_EACH r.v[i] = x.v[i] & bits; return r; }
inline Words shift_left(const Words& x, int by) {
  Words r; QC_EACH r.v[i] = x.v[i] << by; return r;
}
inline Words shift_left_each(const Words& x, const Words& by) {
  Words r; QC_EACH r.v[i] = x.v[i] << by.v[i]; return r;
}
inline Words shift_right(const Words& x, int by) {
  Words r; QC_EACH r.v[i] = x.v[i] >> by; return r;
}
inline Words shift_right_signed(const Words& x, int by) {
  Words r; QC_EACH r.v[i] = static_cast<uint32_t>(as_signed(x.v[i]) >> by); return r;
}
// The upper four bits of every byte.
inline Words upper_nibbles(const Words& x) { return mask(shift_right(x, 4), 0x0f0f0f0fu); }
inline Lanes to_lanes(const Words& x) {
  Lanes r; QC_EACH r.v[i] = static_cast<float>(as_signed(x.v[i])); return r;
}
inline Words rounded(const Lanes& x) {
  Words r; QC_EACH r.v[i] = static_cast<uint32_t>(static_cast<int32_t>(std::lrintf(x.v[i])));
  return r;
}
inline Words bits_of(const Lanes& x) { Words r; std::memcpy(r.v, x.v, 64); return r; }
inline Lanes lanes_of(const Words& x) { Lanes r; std::memcpy(r.v, x.v, 64); return r; }
inline int32_t total_of(const Words& x) {
  uint32_t sum = 0;
  QC_EACH sum += x.v[i];
  return as_signed(sum);
}
inline int32_t largest_of(const Words& x) {
  int32_t best = as_signed(x.v[0]);
  QC_EACH best = as_signed(x.v[i]) > best ? as_signed(x.v[i]) : best;
  return best;
}
// Lane i: the sum, or the largest, of all lanes of x[i].
inline Words total_of_each(const Words (&x)[16]) {
  int32_t sums[16];
  for (int i = 0; i < 16; i++) sums[i] = total_of(x[i]);
  return load_words(sums);
}
inline Words largest_of_each(const Words (&x)[16]) {
  int32_t best[16];
  for (int i = 0; i < 16; i++) best[i] = largest_of(x[i]);
  return load_words(best);
}
inline void store_low_bytes(int8_t* p, const Words& x) {
  QC_EACH p[i] = static_cast<int8_t>(x.v[i] & 255u);
}
// The low halves of words as numbers of sixteen bits.
inline Lanes from_halves(const Words& x) {
  Lanes r;
  QC_EACH {
    uint16_t half = static_cast<uint16_t>(x.v[i]);
    r.v[i] = qc::to_float(&half, 0, qc::F16);
  }
  return r;
}

// **** bytes of words ****

inline Table load_table(const int8_t* p) { return {p}; }
// Every byte of every word becomes the table's entry of that number, 0 to 15.
inline Words look_up(const Table& table, const Words& x) {
  Words r;
  QC_EACH {
    r.v[i] = 0;
    for (int j = 0; j < 32; j += 8) {
      r.v[i] |= static_cast<uint32_t>(static_cast<uint8_t>(table.v[(x.v[i] >> j) & 15])) << j;
    }
  }
  return r;
}
// Adds `value` to the bytes that a mask of 64 bits in memory names.
inline Words add_where(const Words& x, const uint8_t* mask, int8_t value) {
  Words r;
  QC_EACH {
    const uint32_t four = mask[i / 2] >> (i % 2 * 4) & 15u;
    r.v[i] = x.v[i] + (four * 0x00204081u & 0x01010101u) * static_cast<uint32_t>(value);
  }
  return r;
}
// sum + the products of four unsigned bytes of a word with the four signed bytes of `x`. WIDE says
// that the unsigned bytes may exceed 127.
constexpr bool WIDE_DIFFERS = false, WIDE_IS_SIGNED = false;
template <bool WIDE>
inline Words dot(const Words& sum, const Words& codes, const Words& x) {
  Words r = sum;
  for (int j = 0; j < 32; j += 8) {
    QC_EACH {
      const auto code = static_cast<int32_t>(codes.v[i] >> j & 255u);
      r.v[i] += static_cast<uint32_t>(code * static_cast<int8_t>(x.v[i] >> j & 255u));
    }
  }
  return r;
}

#undef QC_EACH
}  // namespace
