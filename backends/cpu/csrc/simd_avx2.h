// Sixteen lanes as two AVX2 registers; compiled with -mavx2 -mfma -mf16c.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "panel.h"

namespace {

struct Lanes {
  __m256 a, b;
};
struct Words {  // sixteen words of 32 bits
  __m256i a, b;
};
struct Table {
  __m256i v;
};

inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// **** floats ****

inline Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes spread(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline Lanes load_lanes(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store_lanes(float* p, const Lanes& x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
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
inline Lanes div(const Lanes& x, const Lanes& y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
// The second where either is a NaN.
inline Lanes larger(const Lanes& x, const Lanes& y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline float sum_of(const Lanes& x) {
  __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline Lanes load_numbers(const uint8_t* p, qc::Number type) {
  if (type == qc::F32) return load_lanes(reinterpret_cast<const float*>(p));
  __m128i a = load_128(p), b = load_128(p + 16);
  if (type == qc::F16) return {_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)};
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16))};
}
// Rounds to nearest even; a NaN must not round to infinity.
inline __m256i bfloat_bits(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
inline void store_numbers(uint8_t* p, qc::Number type, const Lanes& x) {
  if (type == qc::F32) return store_lanes(reinterpret_cast<float*>(p), x);
  __m256i both;
  if (type == qc::F16) {
    both = _mm256_set_m128i(_mm256_cvtps_ph(x.b, 0), _mm256_cvtps_ph(x.a, 0));
  } else {
    // The pack works on halves of 128 bits; the permutation puts the quarters in order.
    both = _mm256_permute4x64_epi64(
        _mm256_packus_epi32(bfloat_bits(x.a), bfloat_bits(x.b)), 0xd8);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}

// **** words ****

inline __m256i load_256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline Words load_words(const void* p) {
  return {load_256(p), load_256(static_cast<const uint8_t*>(p) + 32)};
}
inline void store_words(void* p, const Words& x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.b);
}
inline Words spread_word(int32_t x) { __m256i v = _mm256_set1_epi32(x); return {v, v}; }
inline Words load_word(const int32_t* p) { return spread_word(*p); }
inline Words load_signed_bytes(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline Words load_signed_halves(const uint8_t* p) {
  return {_mm256_cvtepi16_epi32(load_128(p)), _mm256_cvtepi16_epi32(load_128(p + 16))};
}
inline Words join(const Words& x, const Words& y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
inline Words flip(const Words& x, uint32_t bits) {
  __m256i v = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_xor_si256(x.a, v), _mm256_xor_si256(x.b, v)};
}
inline Words plus(const Words& x, const Words& y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline Words larger(const Words& x, const Words& y) {
  return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
inline Words mask(const Words& x, uint32_t bits) {
  __m256i v = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_and_si256(x.a, v), _mm256_and_si256(x.b, v)};
}
inline Words shift_left(const Words& x, int by) {
  return {_mm256_slli_epi32(x.a, by), _mm256_slli_epi32(x.b, by)};
}
inline Words shift_left_each(const Words& x, const Words& by) {
  return {_mm256_sllv_epi32(x.a, by.a), _mm256_sllv_epi32(x.b, by.b)};
}
inline Words shift_right(const Words& x, int by) {
  return {_mm256_srli_epi32(x.a, by), _mm256_srli_epi32(x.b, by)};
}
inline Words shift_right_signed(const Words& x, int by) {
  return {_mm256_srai_epi32(x.a, by), _mm256_srai_epi32(x.b, by)};
}
// The upper four bits of every byte.
inline Words upper_nibbles(const Words& x) { return mask(shift_right(x, 4), 0x0f0f0f0fu); }
inline Lanes to_lanes(const Words& x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
inline Words rounded(const Lanes& x) {
  return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
inline Words bits_of(const Lanes& x) {
  return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
inline Lanes lanes_of(const Words& x) {
  return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
inline int32_t total_of(const Words& x) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi32(x.a, x.b));
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
         ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}
inline int32_t largest_of(const Words& x) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_max_epi32(x.a, x.b));
  int32_t best = lanes[0];
  for (int i = 1; i < 8; i++) best = lanes[i] > best ? lanes[i] : best;
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
  const __m256i low = _mm256_set1_epi32(255);
  // The packs work on halves of 128 bits; the permutation puts the quarters in order.
  __m256i halves = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  __m256i bytes = _mm256_packus_epi16(halves, halves);
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(bytes));
}
// The low halves of words as numbers of sixteen bits.
inline Lanes from_halves(const Words& x) {
  __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(both)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1))};
}

// **** bytes of words ****

inline Table load_table(const int8_t* p) { return {_mm256_broadcastsi128_si256(load_128(p))}; }
// Every byte of every word becomes the table's entry of that number, 0 to 15.
inline Words look_up(const Table& table, const Words& x) {
  return {_mm256_shuffle_epi8(table.v, x.a), _mm256_shuffle_epi8(table.v, x.b)};
}
// Where 32 bits of a mask are set, a byte of ones.
inline __m256i bytes_where(const uint8_t* mask) {
  int32_t bits;
  __builtin_memcpy(&bits, mask, 4);
  const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                          0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
  __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte);
  return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
}
// Adds `value` to the bytes that a mask of 64 bits in memory names.
inline Words add_where(const Words& x, const uint8_t* mask, int8_t value) {
  const __m256i v = _mm256_set1_epi8(value);
  return {_mm256_add_epi8(x.a, _mm256_and_si256(bytes_where(mask), v)),
          _mm256_add_epi8(x.b, _mm256_and_si256(bytes_where(mask + 4), v))};
}
template <bool WIDE>
inline __m256i dot_half(__m256i sum, __m256i codes, __m256i x) {
  const __m256i ones = _mm256_set1_epi16(1);
  if (!WIDE) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), ones));
  }
  // Two products of wide codes do not fit sixteen bits: one at a time.
  const __m256i even = _mm256_set1_epi16(255);
  __m256i first = _mm256_maddubs_epi16(_mm256_and_si256(codes, even), x);
  __m256i second = _mm256_maddubs_epi16(_mm256_andnot_si256(even, codes), x);
  return _mm256_add_epi32(
      sum, _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones)));
}
// sum + the products of four unsigned bytes of a word with the four signed bytes of `x`. WIDE says
// that the unsigned bytes may exceed 127.
constexpr bool WIDE_DIFFERS = true, WIDE_IS_SIGNED = false;
template <bool WIDE>
inline Words dot(const Words& sum, const Words& codes, const Words& x) {
  return {dot_half<WIDE>(sum.a, codes.a, x.a), dot_half<WIDE>(sum.b, codes.b, x.b)};
}

}  // namespace
