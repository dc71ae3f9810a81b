// Sixteen lanes as two AVX2 registers; compiled with -mavx2 -mfma -mf16c.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "panel.h"

namespace {

struct Lanes {
  __m256 a, b;
};
struct Bytes {
  __m128i v;
};

inline Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes spread(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline Lanes load_lanes(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store_lanes(float* p, const Lanes& x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Lanes load_scales(const uint8_t* p, qc::Number type) {
  if (type == qc::F32) return load_lanes(reinterpret_cast<const float*>(p));
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Lanes add(const Lanes& x, const Lanes& y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline Lanes sub(const Lanes& x, const Lanes& y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline Lanes mul(const Lanes& x, const Lanes& y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline Bytes load_bytes(const uint8_t* p) {
  return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))};
}
inline Bytes bits_at(const Bytes& x, int shift, int mask) {
  // Shifts of 16-bit words carry bits between neighbours; the mask removes them.
  return {_mm_and_si128(_mm_srli_epi16(x.v, shift), _mm_set1_epi8(static_cast<char>(mask)))};
}
inline Bytes join(const Bytes& low, const Bytes& high, int shift) {
  return {_mm_or_si128(low.v, _mm_slli_epi16(high.v, shift))};
}
inline Bytes less(const Bytes& x, int amount) {
  return {_mm_sub_epi8(x.v, _mm_set1_epi8(static_cast<char>(amount)))};
}
inline Bytes look_up(const int8_t* table, const Bytes& x) {
  return {_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)), x.v)};
}
inline Lanes from_unsigned(const Bytes& x) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x.v)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x.v, x.v)))};
}
inline Lanes from_signed(const Bytes& x) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x.v)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x.v, x.v)))};
}

}  // namespace
