// Packing and decoding of panels, one value at a time; conversions of numbers.
#include "panel.h"

#include <cstring>
#include <initializer_list>

namespace qc {

float to_float(const void* from, int64_t at, Number type) {
  if (type == F32) return static_cast<const float*>(from)[at];
  uint16_t bits = static_cast<const uint16_t*>(from)[at];
  if (type == BF16) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
  }
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}

void from_float(void* to, int64_t at, Number type, float value) {
  if (type == F32) {
    static_cast<float*>(to)[at] = value;
    return;
  }
  uint16_t bits;
  if (type == F16) {
    _Float16 half = static_cast<_Float16>(value);
    std::memcpy(&bits, &half, 2);
  } else {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    // Round to nearest even; a NaN must not round to infinity.
    if (value != value) wide |= 0x00400000u;
    else wide += 0x7fffu + ((wide >> 16) & 1u);
    bits = static_cast<uint16_t>(wide >> 16);
  }
  static_cast<uint16_t*>(to)[at] = bits;
}

namespace {

// Where the planes of a code of this width begin, widest first: {width, shift} pairs.
struct Plane {
  int width, shift;
};

int planes(int bits, Plane out[3]) {
  int count = 0, shift = 0;
  for (int width : {8, 4, 2, 1}) {
    if (!(bits & width)) continue;
    out[count++] = {width, shift};
    shift += width;
  }
  return count;
}

// Vector and bit position of a column inside a plane of a unit.
void place(int width, int column, int& vector, int& bit) {
  int vectors = width;  // 8 columns x width bits = width vectors of one byte a row
  vector = column % vectors;
  bit = column / vectors * width;
}

uint8_t get_code(const uint8_t* unit, int bits, int column, int row) {
  Plane list[3];
  int count = planes(bits, list), code = 0;
  for (int i = 0; i < count; i++) {
    int vector, bit, width = list[i].width;
    place(width, column, vector, bit);
    int field = (unit[vector * ROWS + row] >> bit) & ((1 << width) - 1);
    code |= field << list[i].shift;
    unit += width * ROWS;
  }
  return static_cast<uint8_t>(code);
}

// A unit whose 8 x 16 codes lie as [column][row].
void put_unit(uint8_t* unit, int bits, const uint8_t codes[UNIT][ROWS]) {
  Plane list[3];
  int count = planes(bits, list);
  for (int i = 0; i < count; i++) {
    int width = list[i].width, shift = list[i].shift;
    uint8_t mask = static_cast<uint8_t>((1 << width) - 1);
    for (int column = 0; column < UNIT; column++) {
      int vector, bit;
      place(width, column, vector, bit);
      uint8_t* to = unit + vector * ROWS;
      for (int row = 0; row < ROWS; row++) {
        to[row] |= static_cast<uint8_t>(((codes[column][row] >> shift) & mask) << bit);
      }
    }
    unit += width * ROWS;
  }
}

void pack_panel(const Weight& w, const uint8_t* codes, const void* scale, const float* extra,
                uint8_t* out, int64_t panel) {
  int64_t groups = w.groups(), first = panel * ROWS;
  int rows = static_cast<int>(w.n - first < ROWS ? w.n - first : ROWS);
  uint8_t flip = w.form == SYMMETRIC && w.bits == 8 ? 0x80 : 0;
  int64_t size = w.scale == F32 ? 4 : 2;
  std::memset(out, 0, static_cast<size_t>(w.panel_bytes()));
  for (int64_t g = 0; g < groups; g++) {
    for (int r = 0; r < rows; r++) {
      int64_t at = (first + r) * groups + g;
      std::memcpy(out + r * size, static_cast<const uint8_t*>(scale) + at * size,
                  static_cast<size_t>(size));
      if (extra) std::memcpy(out + ROWS * size + r * 4, extra + at, 4);
    }
    uint8_t* unit = out + w.head_bytes();
    int64_t columns = w.columns(g);
    for (int64_t c0 = 0; c0 < columns; c0 += UNIT) {
      uint8_t block[UNIT][ROWS] = {};
      int width = static_cast<int>(columns - c0 < UNIT ? columns - c0 : UNIT);
      for (int r = 0; r < rows; r++) {
        const uint8_t* from = codes + (first + r) * w.k + g * w.group + c0;
        for (int c = 0; c < width; c++) block[c][r] = from[c] ^ flip;
      }
      put_unit(unit, w.bits, block);
      unit += ROWS * w.bits;
    }
    out += w.group_bytes(g);
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
  const uint8_t* group = w.blob + row / ROWS * w.panel_bytes();
  int lane = static_cast<int>(row % ROWS);
  int64_t size = w.scale == F32 ? 4 : 2;
  for (int64_t g = 0; g < w.groups(); g++) {
    float scale = to_float(group, lane, w.scale), extra = 0;
    if (w.form == ZERO || w.form == OFFSET) std::memcpy(&extra, group + ROWS * size + lane * 4, 4);
    const uint8_t* unit = group + w.head_bytes();
    int64_t columns = w.columns(g);
    for (int64_t c = 0; c < columns; c++) {
      int code = get_code(unit + c / UNIT * ROWS * w.bits, w.bits, static_cast<int>(c % UNIT), lane);
      float value;
      if (w.form == LOOKUP) value = scale * static_cast<float>(w.table[code]);
      else if (w.form == OFFSET) value = scale * static_cast<float>(code) + extra;
      else if (w.form == ZERO) value = scale * (static_cast<float>(code) - extra);
      else if (w.bits == 8) value = scale * static_cast<float>(static_cast<int8_t>(code));
      else value = scale * static_cast<float>(code - (1 << (w.bits - 1)));
      *out++ = value;
    }
    group += w.group_bytes(g);
  }
}

}  // namespace qc
