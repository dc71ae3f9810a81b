// Sixteen lanes as four NEON registers; compiled with -march=armv8.2-a+dotprod.
#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "panel.h"

namespace {

struct Lanes {
  float32x4_t a, b, c, d;
};
struct Words {  // sixteen words of 32 bits
  uint32x4_t a, b, c, d;
};
struct Table {
  uint8x16_t v;
};

// What `op` makes of each register, of one or of several operands.
template <typename R, typename Op, typename... X>
inline R each(const Op& op, const X&... x) {
  return {op(x.a...), op(x.b...), op(x.c...), op(x.d...)};
}

inline int32x4_t as_signed(uint32x4_t x) { return vreinterpretq_s32_u32(x); }
inline uint32x4_t as_words(int32x4_t x) { return vreinterpretq_u32_s32(x); }
// Pointers may be at any byte.
inline uint32x4_t load_128(const void* p) {
  return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
}
inline void store_128(void* p, uint32x4_t x) {
  vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u32(x));
}

// **** floats ****

inline Lanes spread(float x) { const float32x4_t v = vdupq_n_f32(x); return {v, v, v, v}; }
inline Lanes zeros() { return spread(0.f); }
inline Lanes load_lanes(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
inline void store_lanes(float* p, const Lanes& x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
inline Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
          vfmaq_f32(z.d, x.d, y.d)};
}
inline Lanes add(const Lanes& x, const Lanes& y) {
  return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)};
}
inline Lanes sub(const Lanes& x, const Lanes& y) {
  return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)};
}
inline Lanes mul(const Lanes& x, const Lanes& y) {
  return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
}
inline Lanes div(const Lanes& x, const Lanes& y) {
  return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)};
}
// The second where either is a NaN; the instruction for the larger one would give the NaN.
inline Lanes larger(const Lanes& x, const Lanes& y) {
  const auto one = [](float32x4_t p, float32x4_t q) { return vbslq_f32(vcgtq_f32(p, q), p, q); };
  return each<Lanes>(one, x, y);
}
inline float sum_of(const Lanes& x) {
  return vaddvq_f32(vaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(x.c, x.d)));
}
// Eight halves as floats.
inline float32x4_t low_floats(uint16x8_t x) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(x)));
}
inline float32x4_t high_floats(uint16x8_t x) { return vcvt_high_f32_f16(vreinterpretq_f16_u16(x)); }
inline Lanes load_numbers(const uint8_t* p, qc::Number type) {
  if (type == qc::F32) return load_lanes(reinterpret_cast<const float*>(p));
  const uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(p));
  const uint16x8_t y = vreinterpretq_u16_u8(vld1q_u8(p + 16));
  if (type == qc::F16) return {low_floats(x), high_floats(x), low_floats(y), high_floats(y)};
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
          vreinterpretq_f32_u32(vshll_high_n_u16(x, 16)),
          vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(y), 16)),
          vreinterpretq_f32_u32(vshll_high_n_u16(y, 16))};
}
// Rounds to nearest even; a NaN must not round to infinity.
inline uint16x4_t bfloat_bits(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), number = vceqq_f32(x, x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t half = vandq_u32(vaddq_u32(odd, vdupq_n_u32(0x7fff)), number);
  const uint32x4_t quiet = vbicq_u32(vdupq_n_u32(0x00400000), number);
  return vaddhn_u32(vorrq_u32(bits, quiet), half);
}
inline uint16x4_t half_bits(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
inline void store_numbers(uint8_t* p, qc::Number type, const Lanes& x) {
  if (type == qc::F32) return store_lanes(reinterpret_cast<float*>(p), x);
  const auto store = [&](const auto& bits) {
    vst1q_u8(p, vreinterpretq_u8_u16(vcombine_u16(bits(x.a), bits(x.b))));
    vst1q_u8(p + 16, vreinterpretq_u8_u16(vcombine_u16(bits(x.c), bits(x.d))));
  };
  if (type == qc::F16) store(half_bits);
  else store(bfloat_bits);
}

// **** words ****

inline Words load_words(const void* p) {
  const auto* at = static_cast<const uint8_t*>(p);
  return {load_128(at), load_128(at + 16), load_128(at + 32), load_128(at + 48)};
}
inline void store_words(void* p, const Words& x) {
  auto* at = static_cast<uint8_t*>(p);
  store_128(at, x.a);
  store_128(at + 16, x.b);
  store_128(at + 32, x.c);
  store_128(at + 48, x.d);
}
inline Words spread_word(int32_t x) {
  const uint32x4_t v = as_words(vdupq_n_s32(x));
  return {v, v, v, v};
}
inline Words load_word(const int32_t* p) {
  const uint32x4_t v = as_words(vld1q_dup_s32(p));
  return {v, v, v, v};
}
inline Words widened(int16x8_t x, int16x8_t y) {
  return {as_words(vmovl_s16(vget_low_s16(x))), as_words(vmovl_high_s16(x)),
          as_words(vmovl_s16(vget_low_s16(y))), as_words(vmovl_high_s16(y))};
}
inline Words load_signed_bytes(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  return widened(vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
}
inline Words load_signed_halves(const uint8_t* p) {
  return widened(vreinterpretq_s16_u8(vld1q_u8(p)), vreinterpretq_s16_u8(vld1q_u8(p + 16)));
}
inline Words join(const Words& x, const Words& y) {
  return {vorrq_u32(x.a, y.a), vorrq_u32(x.b, y.b), vorrq_u32(x.c, y.c), vorrq_u32(x.d, y.d)};
}
inline Words flip(const Words& x, uint32_t bits) {
  const uint32x4_t v = vdupq_n_u32(bits);
  return {veorq_u32(x.a, v), veorq_u32(x.b, v), veorq_u32(x.c, v), veorq_u32(x.d, v)};
}
inline Words plus(const Words& x, const Words& y) {
  return {vaddq_u32(x.a, y.a), vaddq_u32(x.b, y.b), vaddq_u32(x.c, y.c), vaddq_u32(x.d, y.d)};
}
inline uint32x4_t larger_of(uint32x4_t x, uint32x4_t y) {
  return as_words(vmaxq_s32(as_signed(x), as_signed(y)));
}
inline Words larger(const Words& x, const Words& y) { return each<Words>(larger_of, x, y); }
inline Words mask(const Words& x, uint32_t bits) {
  const uint32x4_t v = vdupq_n_u32(bits);
  return {vandq_u32(x.a, v), vandq_u32(x.b, v), vandq_u32(x.c, v), vandq_u32(x.d, v)};
}
// Operators, because they become immediate shifts where `by` is a constant.
inline Words shift_left(const Words& x, int by) {
  const auto n = static_cast<uint32_t>(by);
  return {x.a << n, x.b << n, x.c << n, x.d << n};
}
inline Words shift_left_each(const Words& x, const Words& by) {
  const auto one = [](uint32x4_t v, uint32x4_t n) { return vshlq_u32(v, as_signed(n)); };
  return each<Words>(one, x, by);
}
inline Words shift_right(const Words& x, int by) {
  const auto n = static_cast<uint32_t>(by);
  return {x.a >> n, x.b >> n, x.c >> n, x.d >> n};
}
inline Words shift_right_signed(const Words& x, int by) {
  return each<Words>([&](uint32x4_t v) { return as_words(as_signed(v) >> by); }, x);
}
// The upper four bits of every byte.
inline Words upper_nibbles(const Words& x) {
  const auto one = [](uint32x4_t v) {
    return vreinterpretq_u32_u8(vshrq_n_u8(vreinterpretq_u8_u32(v), 4));
  };
  return each<Words>(one, x);
}
inline Lanes to_lanes(const Words& x) {
  return each<Lanes>([](uint32x4_t v) { return vcvtq_f32_s32(as_signed(v)); }, x);
}
inline Words rounded(const Lanes& x) {
  return each<Words>([](float32x4_t v) { return as_words(vcvtnq_s32_f32(v)); }, x);
}
inline Words bits_of(const Lanes& x) {
  return each<Words>([](float32x4_t v) { return vreinterpretq_u32_f32(v); }, x);
}
inline Lanes lanes_of(const Words& x) {
  return each<Lanes>([](uint32x4_t v) { return vreinterpretq_f32_u32(v); }, x);
}
// Lane i: what `op` makes of all lanes of x[i]; `pairs` does so of neighbours in two registers.
template <typename Op, typename Pairs>
inline Words folded(const Words (&x)[16], const Op& op, const Pairs& pairs) {
  uint32x4_t one[16];
  for (int i = 0; i < 16; i++) one[i] = op(op(x[i].a, x[i].b), op(x[i].c, x[i].d));
  for (int count = 8; count >= 4; count /= 2) {
    for (int i = 0; i < count; i++) one[i] = pairs(one[2 * i], one[2 * i + 1]);
  }
  return {one[0], one[1], one[2], one[3]};
}
inline Words total_of_each(const Words (&x)[16]) {
  return folded(x, [](uint32x4_t p, uint32x4_t q) { return vaddq_u32(p, q); },
                [](uint32x4_t p, uint32x4_t q) { return vpaddq_u32(p, q); });
}
inline Words largest_of_each(const Words (&x)[16]) {
  return folded(x, larger_of, [](uint32x4_t p, uint32x4_t q) {
    return as_words(vpmaxq_s32(as_signed(p), as_signed(q)));
  });
}
// The low halves of eight words.
inline uint16x8_t low_halves(uint32x4_t x, uint32x4_t y) {
  return vuzp1q_u16(vreinterpretq_u16_u32(x), vreinterpretq_u16_u32(y));
}
inline void store_low_bytes(int8_t* p, const Words& x) {
  const uint8x16_t low = vreinterpretq_u8_u16(low_halves(x.a, x.b));
  const uint8x16_t high = vreinterpretq_u8_u16(low_halves(x.c, x.d));
  vst1q_s8(p, vreinterpretq_s8_u8(vuzp1q_u8(low, high)));
}
// The low halves of words as numbers of sixteen bits.
inline Lanes from_halves(const Words& x) {
  const uint16x8_t low = low_halves(x.a, x.b), high = low_halves(x.c, x.d);
  return {low_floats(low), high_floats(low), low_floats(high), high_floats(high)};
}

// **** bytes of words ****

inline Table load_table(const int8_t* p) { return {vreinterpretq_u8_s8(vld1q_s8(p))}; }
// Every byte of every word becomes the table's entry of that number, 0 to 15.
inline Words look_up(const Table& table, const Words& x) {
  const auto one = [&](uint32x4_t v) {
    return vreinterpretq_u32_u8(vqtbl1q_u8(table.v, vreinterpretq_u8_u32(v)));
  };
  return each<Words>(one, x);
}
// Adds `value` to the bytes that a mask of 64 bits in memory names.
inline Words add_where(const Words& x, const uint8_t* mask, int8_t value) {
  const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
  const uint8x16_t bytes = vcombine_u8(vld1_u8(mask), vdup_n_u8(0));
  const uint8x16_t v = vdupq_n_u8(static_cast<uint8_t>(value));
  const auto some = [&](uint32x4_t four, int first) {  // two bytes of the mask
    const uint8x16_t place = vcombine_u8(vdup_n_u8(static_cast<uint8_t>(first)),
                                         vdup_n_u8(static_cast<uint8_t>(first + 1)));
    const uint8x16_t named = vtstq_u8(vqtbl1q_u8(bytes, place), bit);
    return vreinterpretq_u32_u8(vaddq_u8(vreinterpretq_u8_u32(four), vandq_u8(named, v)));
  };
  return {some(x.a, 0), some(x.b, 2), some(x.c, 4), some(x.d, 6)};
}
// sum + the products of four bytes of a word with the four signed bytes of `x`. Both are signed to
// the instruction, so that codes that may exceed 127, WIDE, have to come 128 too small.
constexpr bool WIDE_DIFFERS = true, WIDE_IS_SIGNED = true;
template <bool WIDE>
inline Words dot(const Words& sum, const Words& codes, const Words& x) {
  const auto one = [](uint32x4_t s, uint32x4_t p, uint32x4_t q) {
    return as_words(vdotq_s32(as_signed(s), vreinterpretq_s8_u32(p), vreinterpretq_s8_u32(q)));
  };
  return each<Words>(one, sum, codes, x);
}

}  // namespace
