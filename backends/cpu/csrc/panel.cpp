// Packing and decoding of panels; conversions of numbers.
// Little-endian, as the layout is.
#include "panel.h"

#include <algorithm>
#include <cstring>

#include "planes.h"

namespace qc {

namespace {

float float_of(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

uint32_t bits_of(float value) {
  uint32_t out;
  std::memcpy(&out, &value, 4);
  return out;
}

// A half has 1 sign bit, 5 bits of an exponent that is 15 too large, 10 bits of fraction.
// In integers, because compilers before g++ 12 have no type for it on x86.
float half_to_float(uint16_t half) {
  uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
  if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  float small = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -small : small;
}

// Rounds to nearest, ties to even.
uint16_t float_to_half(float value) {
  uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (size >> 13 & 1023u));
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (size < 0x38800000u) {  // below 2**-14: multiples of 2**-24, the unit of floats from 0.5 to 1
    uint32_t multiple = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    return static_cast<uint16_t>(sign | multiple);
  }
  size += 0xfffu + (size >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((size - 0x38000000u) >> 13));
}

}  // namespace

float to_float(const void* from, int64_t at, Number type) {
  if (type == F32) return static_cast<const float*>(from)[at];
  uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return type == BF16 ? float_of(static_cast<uint32_t>(bits) << 16) : half_to_float(bits);
}

void from_float(void* to, int64_t at, Number type, float value) {
  if (type == F32) {
    static_cast<float*>(to)[at] = value;
    return;
  }
  uint16_t bits;
  if (type == F16) {
    bits = float_to_half(value);
  } else {
    uint32_t wide = bits_of(value);
    // Round to nearest even; a NaN must not round to infinity.
    if (value != value) wide |= 0x00400000u;
    else wide += 0x7fffu + ((wide >> 16) & 1u);
    bits = static_cast<uint16_t>(wide >> 16);
  }
  static_cast<uint16_t*>(to)[at] = bits;
}

namespace {

// The codes of one row in a unit, four to a word.
void row_codes(const Weight& w, const Chunk& at, int64_t u, int64_t lane, const uint8_t* panel,
               uint32_t* quads) {
  if (w.bits == 8) {
    for (int q = 0; q < QUADS; q++) {
      std::memcpy(quads + q, panel + at.wide + u * 256 + q * LINE + lane * 4, 4);
    }
    return;
  }
  uint32_t word[2] = {};
  if (w.bits & 4) {
    const uint8_t* from = panel + at.nibbles + u * 128 + lane * 4;
    std::memcpy(word, from, 4);
    std::memcpy(word + 1, from + LINE, 4);
  }
  for (int q = 0; q < QUADS; q++) quads[q] = word[q / 2] >> (q % 2 * 4) & 0x0f0f0f0fu;
  if (w.bits & 2) {
    std::memcpy(word, panel + at.pairs + u * 64 + lane * 4, 4);
    for (int q = 0; q < QUADS; q++) quads[q] |= (word[0] >> (2 * q) & 0x03030303u) << (w.bits & 4);
  }
  if (w.bits & 1) {
    const uint8_t* from = panel + at.bits + u * 32 + lane / 2;
    for (int q = 0; q < QUADS; q++) {
      const uint32_t four = from[q * 8] >> (lane % 2 * 4) & 15u;
      quads[q] |= (four * 0x00204081u & 0x01010101u) << (w.bits & 6);
    }
  }
}

void pack_panel(const Weight& w, const Source& from, uint8_t* panel, int64_t index) {
  const int64_t first = index * ROWS, rows = std::min(ROWS, w.n - first);
  for (int64_t c = 0; c < w.chunks(); c++) {
    const Chunk at = w.chunk(c);
    clear_padding(w.bits, at, panel);
    int64_t unit = 0;
    for (int64_t g = at.group; g < at.group + at.groups; g++) {
      uint8_t* head = panel + at.heads + (g - at.group) * w.head_bytes();
      const int64_t wide = g * w.group / from.group;
      for (int64_t r = 0; r < rows; r++) put_head(w, from, first + r, wide, r, head);
      const int64_t columns = w.columns(g);
      for (int64_t column = 0; column < columns; column += UNIT, unit++) {
        const auto count = static_cast<size_t>(std::min(UNIT, columns - column));
        Codes codes = {};
        for (int64_t r = 0; r < rows; r++) {
          uint8_t row[UNIT] = {};
          std::memcpy(row, from.codes + (first + r) * w.k + g * w.group + column, count);
          for (int q = 0; q < QUADS; q++) std::memcpy(codes[q][r], row + q * 4, 4);
        }
        put_unit(w.bits, at, unit, codes, panel);
      }
    }
  }
}

// What a row's codes of a group mean.
struct Head {
  float scale, extra;
};

Head head_of(const Weight& w, const uint8_t* heads, int64_t group, int64_t lane) {
  const uint8_t* head = heads + w.factor_bytes() + group * w.head_bytes();
  if (w.scale == NESTED) {
    const auto* steps = reinterpret_cast<const int8_t*>(head);
    const float scale = to_float(heads, lane, F16) * static_cast<float>(steps[lane]);
    if (w.form != OFFSET) return {scale, 0};
    return {scale, to_float(heads, ROWS + lane, F16) * static_cast<float>(steps[ROWS + lane])};
  }
  const float scale = to_float(head, lane, w.scale == PLAIN_F16 ? F16 : F32);
  const uint8_t* extra = head + ROWS * w.step_bytes();
  if (w.form == OFFSET) return {scale, to_float(extra, lane, F32)};
  if (w.form != ZERO) return {scale, 0};
  return {scale, static_cast<float>(reinterpret_cast<const int16_t*>(extra)[lane])};
}

float value_of(const Weight& w, int code, const Head& head) {
  switch (w.form) {
    case LOOKUP: return head.scale * static_cast<float>(w.table[code]);
    case OFFSET: return head.scale * static_cast<float>(code) + head.extra;
    case ZERO: return head.scale * (static_cast<float>(code) - head.extra);
    case FLOAT8: {
      const uint16_t bits = half_of_float8(static_cast<uint32_t>(code));
      return head.scale * (to_float(&bits, 0, F16) * FLOAT8_STEP);
    }
    default: return head.scale * static_cast<float>(code - middle_code(w.bits, false));
  }
}

}  // namespace

void pack(const Weight& w, const Source& from, uint8_t* blob, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; panel++) {
    pack_panel(w, from, blob + panel * w.panel_bytes(), panel);
  }
}

void decode_row(const Weight& w, int64_t row, float* out) {
  const uint8_t* panel = w.blob + row / ROWS * w.panel_bytes();
  const int64_t lane = row % ROWS;
  for (int64_t c = 0; c < w.chunks(); c++) {
    const Chunk at = w.chunk(c);
    int64_t unit = 0;
    for (int64_t g = at.group; g < at.group + at.groups; g++) {
      const Head head = head_of(w, panel + at.heads, g - at.group, lane);
      const int64_t columns = w.columns(g);
      for (int64_t column = 0; column < columns; column += UNIT, unit++) {
        const int count = static_cast<int>(std::min(UNIT, columns - column));
        uint32_t quads[QUADS];
        row_codes(w, at, unit, lane, panel, quads);
        const auto* codes = reinterpret_cast<const uint8_t*>(quads);
        for (int i = 0; i < count; i++) *out++ = value_of(w, codes[i], head);
      }
    }
  }
}

}  // namespace qc
