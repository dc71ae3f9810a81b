// Sixteen lanes as one AVX-512 register; compiled for AVX-512 F, BW, VL, DQ and VNNI.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "panel.h"

namespace {

struct Lanes {
  __m512 v;
};
struct Words {  // sixteen words of 32 bits
  __m512i v;
};
struct Table {
  __m512i v;
};

inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i load_256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// **** floats ****

inline Lanes zeros() { return {_mm512_setzero_ps()}; }
inline Lanes spread(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load_lanes(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_lanes(float* p, const Lanes& x) { _mm512_storeu_ps(p, x.v); }
inline Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
  return {_mm512_fmadd_ps(x.v, y.v, z.v)};
}
inline Lanes add(const Lanes& x, const Lanes& y) { return {_mm512_add_ps(x.v, y.v)}; }
inline Lanes sub(const Lanes& x, const Lanes& y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline Lanes mul(const Lanes& x, const Lanes& y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline Lanes div(const Lanes& x, const Lanes& y) { return {_mm512_div_ps(x.v, y.v)}; }
// The second where either is a NaN.
inline Lanes larger(const Lanes& x, const Lanes& y) { return {_mm512_max_ps(x.v, y.v)}; }
inline float sum_of(const Lanes& x) { return _mm512_reduce_add_ps(x.v); }
inline Lanes load_numbers(const uint8_t* p, qc::Number type) {
  if (type == qc::F32) return load_lanes(reinterpret_cast<const float*>(p));
  __m256i halves = load_256(p);
  if (type == qc::F16) return {_mm512_cvtph_ps(halves)};
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
// Rounds to nearest even; a NaN must not round to infinity. The instruction for it would also turn
// tiny numbers into zero.
inline __m256i bfloat_bits(__m512 x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16));
}
inline void store_numbers(uint8_t* p, qc::Number type, const Lanes& x) {
  if (type == qc::F32) return store_lanes(reinterpret_cast<float*>(p), x);
  __m256i halves = type == qc::F16 ? _mm512_cvtps_ph(x.v, 0) : bfloat_bits(x.v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
}

// Lane j of row i becomes lane i of row j.
#define QC_TURN 1
inline void turn(Lanes (&x)[16]) {
  __m512 twos[16];
  __m512d fours[16];
  for (int i = 0; i < 16; i += 2) {
    twos[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    twos[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int half = 0; half < 2; half++) {
      const __m512d low = _mm512_castps_pd(twos[i + half]);
      const __m512d high = _mm512_castps_pd(twos[i + 2 + half]);
      fours[i + 2 * half] = _mm512_unpacklo_pd(low, high);
      fours[i + 2 * half + 1] = _mm512_unpackhi_pd(low, high);
    }
  }
  // Row r of fours[4 q + c] is a quarter of column 4 r + c, of the rows 4 q and on.
  for (int c = 0; c < 4; c++) {
    const auto quarter = [&](int q) { return _mm512_castpd_ps(fours[4 * q + c]); };
    const __m512 a = _mm512_shuffle_f32x4(quarter(0), quarter(1), 0x88);
    const __m512 b = _mm512_shuffle_f32x4(quarter(0), quarter(1), 0xdd);
    const __m512 d = _mm512_shuffle_f32x4(quarter(2), quarter(3), 0x88);
    const __m512 e = _mm512_shuffle_f32x4(quarter(2), quarter(3), 0xdd);
    x[c].v = _mm512_shuffle_f32x4(a, d, 0x88);
    x[4 + c].v = _mm512_shuffle_f32x4(b, e, 0x88);
    x[8 + c].v = _mm512_shuffle_f32x4(a, d, 0xdd);
    x[12 + c].v = _mm512_shuffle_f32x4(b, e, 0xdd);
  }
}

// **** words ****

inline Words load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_words(void* p, const Words& x) { _mm512_storeu_si512(p, x.v); }
inline Words spread_word(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Words load_word(const int32_t* p) { return {_mm512_set1_epi32(*p)}; }
inline Words load_signed_bytes(const uint8_t* p) { return {_mm512_cvtepi8_epi32(load_128(p))}; }
inline Words load_signed_halves(const uint8_t* p) { return {_mm512_cvtepi16_epi32(load_256(p))}; }
inline Words join(const Words& x, const Words& y) { return {_mm512_or_si512(x.v, y.v)}; }
inline Words flip(const Words& x, uint32_t bits) {
  return {_mm512_xor_si512(x.v, _mm512_set1_epi32(static_cast<int>(bits)))};
}
inline Words plus(const Words& x, const Words& y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline Words larger(const Words& x, const Words& y) { return {_mm512_max_epi32(x.v, y.v)}; }
inline Words mask(const Words& x, uint32_t bits) {
  return {_mm512_and_si512(x.v, _mm512_set1_epi32(static_cast<int>(bits)))};
}
inline Words shift_left(const Words& x, int by) {
  return {_mm512_slli_epi32(x.v, static_cast<unsigned>(by))};
}
inline Words shift_left_each(const Words& x, const Words& by) {
  return {_mm512_sllv_epi32(x.v, by.v)};
}
inline Words shift_right(const Words& x, int by) {
  return {_mm512_srli_epi32(x.v, static_cast<unsigned>(by))};
}
inline Words shift_right_signed(const Words& x, int by) {
  return {_mm512_srai_epi32(x.v, static_cast<unsigned>(by))};
}
// The upper four bits of every byte.
inline Words upper_nibbles(const Words& x) { return mask(shift_right(x, 4), 0x0f0f0f0fu); }
inline Lanes to_lanes(const Words& x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Words rounded(const Lanes& x) { return {_mm512_cvtps_epi32(x.v)}; }
inline Words bits_of(const Lanes& x) { return {_mm512_castps_si512(x.v)}; }
inline Lanes lanes_of(const Words& x) { return {_mm512_castsi512_ps(x.v)}; }
// Lane i: what `op` makes of all lanes of x[i].
template <typename Op>
inline __attribute__((always_inline)) Words folded(const Words (&x)[16], const Op& op) {
  __m512i twos[8], fours[4];
  for (int i = 0; i < 8; i++) {
    twos[i] = op(_mm512_unpacklo_epi32(x[2 * i].v, x[2 * i + 1].v),
                 _mm512_unpackhi_epi32(x[2 * i].v, x[2 * i + 1].v));
  }
  for (int i = 0; i < 4; i++) {
    fours[i] = op(_mm512_unpacklo_epi64(twos[2 * i], twos[2 * i + 1]),
                  _mm512_unpackhi_epi64(twos[2 * i], twos[2 * i + 1]));
  }
  auto halved = [&](__m512i a, __m512i b) {
    return op(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  return {halved(halved(fours[0], fours[1]), halved(fours[2], fours[3]))};
}
inline Words total_of_each(const Words (&x)[16]) {
  return folded(x, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
}
inline Words largest_of_each(const Words (&x)[16]) {
  return folded(x, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); });
}
// Without a way through memory, where it would wait for what was stored before.
#define QC_DIRECT 1
inline int32_t largest_lane(const Words& x) { return _mm512_reduce_max_epi32(x.v); }
inline void store_some(int32_t* p, const Words& x, int64_t count) {
  if (count == 16) return _mm512_storeu_si512(p, x.v);
  if (count == 8) {
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(x.v));
  }
  _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << count) - 1), x.v);
}
inline void store_low_bytes(int8_t* p, const Words& a, const Words& b, const Words& c,
                            const Words& d) {
  const __m512i low = _mm512_packs_epi32(a.v, b.v), high = _mm512_packs_epi32(c.v, d.v);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high)));
}
inline void store_low_bytes(int8_t* p, const Words& x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}
// The low halves of words as numbers of sixteen bits.
inline Lanes from_halves(const Words& x) {
  return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(x.v))};
}

// **** bytes of words ****

inline Table load_table(const int8_t* p) { return {_mm512_broadcast_i32x4(load_128(p))}; }
// Every byte of every word becomes the table's entry of that number, 0 to 15.
inline Words look_up(const Table& table, const Words& x) {
  return {_mm512_shuffle_epi8(table.v, x.v)};
}
// Adds `value` to the bytes that a mask of 64 bits in memory names.
inline Words add_where(const Words& x, const uint8_t* mask, int8_t value) {
  return {_mm512_mask_add_epi8(x.v, *reinterpret_cast<const __mmask64*>(mask), x.v,
                               _mm512_set1_epi8(value))};
}
// sum + the products of four unsigned bytes of a word with the four signed bytes of `x`. WIDE says
// that the unsigned bytes may exceed 127.
// The instruction does not saturate, so WIDE makes no difference: one template serves both.
constexpr bool WIDE_DIFFERS = false, WIDE_IS_SIGNED = false;
template <bool WIDE>
inline Words dot(const Words& sum, const Words& codes, const Words& x) {
  return {_mm512_dpbusd_epi32(sum.v, codes.v, x.v)};
}
// **** pairs of halves ****

#define QC_PAIRS 1
// The low halves of both, the first's above the second's.
inline Words pair_up(const Words& high, const Words& low) {
  return {_mm512_or_si512(_mm512_slli_epi32(high.v, 16),
                          _mm512_and_si512(low.v, _mm512_set1_epi32(0xffff)))};
}
// Halves shifted left, each as far as its own half of `by` says.
inline Words shift_halves(const Words& x, const Words& by) {
  return {_mm512_sllv_epi16(x.v, by.v)};
}
// sum + the products of the two signed halves of a word with those of `y`.
inline Words dot_halves(const Words& sum, const Words& x, const Words& y) {
  return {_mm512_dpwssd_epi32(sum.v, x.v, y.v)};
}
// The upper eight lanes, below.
inline Words upper_half(const Words& x) { return {_mm512_shuffle_i64x2(x.v, x.v, 0x4e)}; }
// Pairs of neighbouring lanes, the first of them above the second: of eight lanes.
inline void store_pairs(int32_t* p, const Words& x) {
  const __m512i low = _mm512_and_si512(_mm512_srli_epi64(x.v, 32), _mm512_set1_epi64(0xffff));
  const __m512i both = _mm512_or_si512(_mm512_slli_epi64(x.v, 16), low);
  const __m256i words = _mm512_cvtepi64_epi32(both);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(words));
}

}  // namespace
