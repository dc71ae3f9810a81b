// The panel layout and the interface of the kernels that read it. No torch headers here.
//
// A panel is 16 output rows interleaved so that one SIMD lane is one row. It is a run of groups:
//
//   group  = scale[16] (f16 or f32), extra[16] (f32; forms zero and offset), units
//   unit   = 8 columns x 16 rows of codes: a row's 8 codes are one number of 8 * bits bits, code c
//            at bits [c * bits, (c + 1) * bits). The number is cut, low end first, into words of
//            4, 2 and 1 bytes (bits = 8: two words of 4; 7 = 4 + 2 + 1; 6 = 4 + 2; 5 = 4 + 1;
//            3 = 2 + 1), and each word is stored for all 16 rows before the next: little-endian.
//
// Codes are stored minus 2^(bits - 1), in two's complement, so that sums of x times code do not
// grow by a middle value that is subtracted later. Codes of a lookup are stored as they are, and so
// are those of the form float8, which are numbers of the type e4m3fn.
// Every group is padded to a multiple of 8 columns and every panel to 16 rows, with zero bits.
#pragma once
#include <cstddef>
#include <cstdint>

namespace qc {

enum Form : int { SYMMETRIC = 0, ZERO = 1, OFFSET = 2, LOOKUP = 3, FLOAT8 = 4 };
enum Number : int { F32 = 0, F16 = 1, BF16 = 2 };

constexpr int64_t bytes_of(Number type) { return type == F32 ? 4 : 2; }

// A float8 (e4m3fn) whose bits stand in a half is this much smaller than it should be.
constexpr float FLOAT8_STEP = 256.f;
constexpr uint16_t half_of_float8(uint32_t code) {
  return static_cast<uint16_t>((code & 0x80u) << 8 | (code & 0x7fu) << 7);
}

constexpr int ROWS = 16;  // rows of a panel
constexpr int UNIT = 8;   // columns of a unit

struct Weight {
  const uint8_t* blob;
  const int8_t* table;  // 16 entries, form lookup only
  int64_t n, k, group;
  int bits;
  Form form;
  Number scale;

  static int64_t units(int64_t columns) { return (columns + UNIT - 1) / UNIT; }
  int64_t groups() const { return (k + group - 1) / group; }
  int64_t columns(int64_t g) const { return g + 1 < groups() ? group : k - g * group; }
  // Columns as they are stored: all groups start at multiples of UNIT.
  int64_t padded_group() const { return units(group) * UNIT; }
  int64_t padded() const {
    return (groups() - 1) * padded_group() + units(columns(groups() - 1)) * UNIT;
  }
  int64_t scale_bytes() const { return ROWS * bytes_of(scale); }
  int64_t head_bytes() const {
    return scale_bytes() + (form == ZERO || form == OFFSET ? ROWS * 4 : 0);
  }
  int64_t unit_bytes() const { return ROWS * bits; }
  int64_t group_bytes(int64_t g) const { return head_bytes() + units(columns(g)) * unit_bytes(); }
  int64_t panel_bytes() const {
    return (groups() - 1) * group_bytes(0) + group_bytes(groups() - 1);
  }
  int64_t panels() const { return (n + ROWS - 1) / ROWS; }
};

// x as the kernels want it: float32 rows of w.padded() columns.
struct Rows {
  const float* x;     // [m][stride]
  const float* sums;  // [m][groups]: sum of each group's columns; forms zero and offset, few rows
  int64_t m, stride;
};

struct Output {
  void* y;            // [m][n]
  const float* bias;  // [n] or null
  Number type;
};

struct Kernels {
  const char* name;
  int64_t few_rows;  // up to so many rows go to `few`
  // Up to few_rows rows times panels [begin, end): codes are decoded in registers.
  void (*few)(const Weight&, const Rows&, const Output&, int64_t begin, int64_t end);
  // Any number of rows times panels [begin, end): codes are decoded once, to tiles.
  void (*many)(const Weight&, const Rows&, const Output&, int64_t begin, int64_t end);
  // The sums of Rows.
  void (*sum_groups)(const Weight&, const float* x, int64_t m, float* sums);
  // Numbers from and to float32.
  void (*widen)(const void* from, int64_t at, Number type, int64_t count, float* to);
  void (*narrow)(const float* from, int64_t count, void* to, int64_t at, Number type);
};

const Kernels* kernels_generic();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

// Packs rows of codes into panels [begin, end); the pointers are at the first row of all.
void pack(const Weight& shape, const uint8_t* codes, const void* scale, const float* extra,
          uint8_t* blob, int64_t begin, int64_t end);
// Decodes one row into k floats.
void decode_row(const Weight& weight, int64_t row, float* out);

float to_float(const void* from, int64_t at, Number type);
void from_float(void* to, int64_t at, Number type, float value);

}  // namespace qc
