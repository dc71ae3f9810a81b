// Sixteen lanes in plain C++, for machines without a variant of their own.
#pragma once
#include <cstdint>
#include <cstring>

#include "panel.h"

namespace {

struct Lanes {
  float v[16];
};
struct Bytes {
  uint8_t v[16];
};

#define QC_EACH for (int i = 0; i < 16; i++)

inline Lanes zeros() { Lanes r; QC_EACH r.v[i] = 0; return r; }
inline Lanes spread(float x) { Lanes r; QC_EACH r.v[i] = x; return r; }
inline Lanes load_lanes(const float* p) { Lanes r; std::memcpy(r.v, p, 64); return r; }
inline void store_lanes(float* p, const Lanes& a) { std::memcpy(p, a.v, 64); }
inline Lanes load_scales(const uint8_t* p, qc::Number type) {
  Lanes r;
  QC_EACH r.v[i] = qc::to_float(p, i, type);
  return r;
}
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  Lanes r; QC_EACH r.v[i] = a.v[i] * b.v[i] + c.v[i]; return r;
}
inline Lanes add(const Lanes& a, const Lanes& b) { Lanes r; QC_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
inline Lanes sub(const Lanes& a, const Lanes& b) { Lanes r; QC_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
inline Lanes mul(const Lanes& a, const Lanes& b) { Lanes r; QC_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
inline Bytes load_bytes(const uint8_t* p) { Bytes r; std::memcpy(r.v, p, 16); return r; }
inline Bytes bits_at(const Bytes& a, int shift, int mask) {
  Bytes r; QC_EACH r.v[i] = static_cast<uint8_t>((a.v[i] >> shift) & mask); return r;
}
inline Bytes join(const Bytes& low, const Bytes& high, int shift) {
  Bytes r; QC_EACH r.v[i] = static_cast<uint8_t>(low.v[i] | (high.v[i] << shift)); return r;
}
inline Bytes less(const Bytes& a, int amount) {
  Bytes r; QC_EACH r.v[i] = static_cast<uint8_t>(a.v[i] - amount); return r;
}
inline Bytes look_up(const int8_t* table, const Bytes& a) {
  Bytes r; QC_EACH r.v[i] = static_cast<uint8_t>(table[a.v[i]]); return r;
}
inline Lanes from_unsigned(const Bytes& a) { Lanes r; QC_EACH r.v[i] = a.v[i]; return r; }
inline Lanes from_signed(const Bytes& a) {
  Lanes r; QC_EACH r.v[i] = static_cast<int8_t>(a.v[i]); return r;
}

#undef QC_EACH
}  // namespace
