// Packing and decoding of panels, a row's eight codes at a time; conversions of numbers.
// Little-endian, as the layout is.
#include "panel.h"

#include <cstring>
#include <initializer_list>

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

// Eight codes of one byte each become one number of 8 * bits bits, in three halvings.
uint64_t join_codes(uint64_t codes, int bits) {
  codes &= 0x0101010101010101u * ((1u << bits) - 1);
  for (int width = 8; width < 64; width *= 2) {
    const uint64_t low = ~0ull / ((1ull << width) + 1);  // every other run of `width` bits
    codes = (codes & low) | ((codes & ~low) >> (width - width / 8 * bits));
  }
  return codes;
}

// A row's number in a unit, word by word.
template <typename Copy>
void each_word(int bits, int row, const Copy& copy) {
  int unit_at = 0, number_at = 0;
  for (int width : {4, 4, 2, 1}) {
    if (number_at + width > bits) continue;
    copy(unit_at + row * width, number_at, width);
    unit_at += ROWS * width;
    number_at += width;
  }
}

void pack_head(const Weight& w, const void* scale, const float* extra, int64_t row, int64_t group,
               int lane, uint8_t* head) {
  const int64_t at = row * w.groups() + group, size = bytes_of(w.scale);
  std::memcpy(head + lane * size, static_cast<const uint8_t*>(scale) + at * size,
              static_cast<size_t>(size));
  if (extra) std::memcpy(head + ROWS * size + lane * 4, extra + at, 4);
}

void pack_panel(const Weight& w, const uint8_t* codes, const void* scale, const float* extra,
                uint8_t* out, int64_t panel) {
  const int64_t groups = w.groups(), first = panel * ROWS;
  const int rows = static_cast<int>(w.n - first < ROWS ? w.n - first : ROWS);
  const bool plain = w.form == LOOKUP || w.form == FLOAT8;
  const uint64_t flip = !plain ? 0x0101010101010101u << (w.bits - 1) : 0;
  if (rows < ROWS) std::memset(out, 0, static_cast<size_t>(w.panel_bytes()));
  for (int64_t g = 0; g < groups; g++) {
    for (int r = 0; r < rows; r++) pack_head(w, scale, extra, first + r, g, r, out);
    uint8_t* unit = out + w.head_bytes();
    const int64_t columns = w.columns(g);
    for (int64_t c = 0; c < columns; c += UNIT, unit += w.unit_bytes()) {
      const int64_t left = columns - c;
      for (int r = 0; r < rows; r++) {
        const uint8_t* from = codes + (first + r) * w.k + g * w.group + c;
        uint64_t eight = 0;
        if (left >= UNIT) std::memcpy(&eight, from, UNIT);
        else std::memcpy(&eight, from, static_cast<size_t>(left));
        eight = join_codes(eight ^ flip, w.bits);
        const auto* bytes = reinterpret_cast<const uint8_t*>(&eight);
        each_word(w.bits, r, [&](int to, int at, int width) {
          std::memcpy(unit + to, bytes + at, static_cast<size_t>(width));
        });
      }
    }
    out += w.group_bytes(g);
  }
}

float value_of(const Weight& w, int code, float scale, float extra) {
  if (w.form == LOOKUP) return scale * static_cast<float>(w.table[code]);
  if (w.form == FLOAT8) {
    const uint16_t bits = half_of_float8(static_cast<uint32_t>(code));
    return scale * (to_float(&bits, 0, F16) * FLOAT8_STEP);
  }
  const int half = 1 << (w.bits - 1);  // the top bit is stored flipped
  code ^= half;
  switch (w.form) {
    case OFFSET: return scale * static_cast<float>(code) + extra;
    case ZERO: return scale * (static_cast<float>(code) - extra);
    default: return scale * static_cast<float>(code - half);
  }
}

}  // namespace

void pack(const Weight& w, const uint8_t* codes, const void* scale, const float* extra,
          uint8_t* blob, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; panel++) {
    pack_panel(w, codes, scale, extra, blob + panel * w.panel_bytes(), panel);
  }
}

void decode_row(const Weight& w, int64_t row, float* out) {
  const uint8_t* head = w.blob + row / ROWS * w.panel_bytes();
  const int lane = static_cast<int>(row % ROWS), mask = (1 << w.bits) - 1;
  for (int64_t g = 0; g < w.groups(); g++) {
    float scale = to_float(head, lane, w.scale), extra = 0;
    if (w.form == ZERO || w.form == OFFSET) {
      std::memcpy(&extra, head + w.scale_bytes() + lane * 4, 4);
    }
    const uint8_t* unit = head + w.head_bytes();
    const int64_t columns = w.columns(g);
    for (int64_t c = 0; c < columns; c += UNIT, unit += w.unit_bytes()) {
      uint64_t eight = 0;
      auto* bytes = reinterpret_cast<uint8_t*>(&eight);
      each_word(w.bits, lane, [&](int from, int at, int width) {
        std::memcpy(bytes + at, unit + from, static_cast<size_t>(width));
      });
      const int count = static_cast<int>(columns - c < UNIT ? columns - c : UNIT);
      for (int i = 0; i < count; i++, eight >>= w.bits) {
        *out++ = value_of(w, static_cast<int>(eight) & mask, scale, extra);
      }
    }
    head += w.group_bytes(g);
  }
}

}  // namespace qc
