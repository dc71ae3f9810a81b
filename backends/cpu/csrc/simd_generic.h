// Sixteen lanes in plain C++, for machines without a variant of their own. Little-endian.
#pragma once
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
inline Lanes load_numbers(const uint8_t* p, qc::Number type) {
  Lanes r; QC_EACH r.v[i] = qc::to_float(p, i, type); return r;
}
inline void store_numbers(uint8_t* p, qc::Number type, const Lanes& x) {
  QC_EACH qc::from_float(p, i, type, x.v[i]);
}

// **** words ****

inline Words load_words(const uint8_t* p) { Words r; std::memcpy(r.v, p, 64); return r; }
inline Words load_halves(const uint8_t* p) {
  uint16_t half[16];
  std::memcpy(half, p, 32);
  Words r; QC_EACH r.v[i] = half[i]; return r;
}
inline Words load_bytes(const uint8_t* p) { Words r; QC_EACH r.v[i] = p[i]; return r; }
inline Words join(const Words& x, const Words& y) {
  Words r; QC_EACH r.v[i] = x.v[i] | y.v[i]; return r;
}
inline Words mask(const Words& x, uint32_t bits) { Words r; QC_EACH r.v[i] = x.v[i] & bits; return r; }
inline Words shift_left(const Words& x, int by) {
  Words r; QC_EACH r.v[i] = x.v[i] << by; return r;
}
inline Words shift_right(const Words& x, int by) {
  Words r; QC_EACH r.v[i] = x.v[i] >> by; return r;
}
inline Words shift_right_signed(const Words& x, int by) {
  Words r; QC_EACH r.v[i] = static_cast<uint32_t>(static_cast<int32_t>(x.v[i]) >> by); return r;
}
inline Lanes to_lanes(const Words& x) {
  Lanes r; QC_EACH r.v[i] = static_cast<float>(static_cast<int32_t>(x.v[i])); return r;
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

#undef QC_EACH
}  // namespace
