// The panel layout and the interface of the kernels that read it. No torch headers here.
//
// A panel is 16 output rows interleaved so that one SIMD lane is one row. It is a run of groups:
//
//   group  = scale[16] (f16 or f32), extra[16] (f32; forms zero and offset), units
//   unit   = 8 columns x 16 rows of codes, `bits` vectors of 16 bytes, as planes:
//     8 bits   vector j: byte r = code[row r][column j]                         (j = 0..7)
//     4 bits   vector j: low nibble = column j, high nibble = column j + 4      (j = 0..3)
//     2 bits   vector j: bits 2f, 2f+1 = column 2f + j                          (j = 0..1, f = 0..3)
//     1 bit    one vector: bit f = column f                                     (f = 0..7)
//   other widths are sums of planes, the widest one holding the low bits: 3 = 2+1, 5 = 4+1,
//   6 = 4+2, 7 = 4+2+1. Eight bits of the form symmetric are stored with their top bit flipped,
//   which makes them signed.
//
// The last group may be short. Columns are padded with code 0 to a multiple of 8 and rows to 16.
#pragma once
#include <cstddef>
#include <cstdint>

namespace qc {

enum Form : int { SYMMETRIC = 0, ZERO = 1, OFFSET = 2, LOOKUP = 3 };
enum Number : int { F32 = 0, F16 = 1, BF16 = 2 };

constexpr int ROWS = 16;  // rows of a panel
constexpr int UNIT = 8;   // columns of a unit

struct Weight {
  const uint8_t* blob;
  const int8_t* table;  // 16 entries, form lookup only
  int64_t n, k, group;
  int bits;
  Form form;
  Number scale;

  int64_t groups() const { return (k + group - 1) / group; }
  int64_t columns(int64_t g) const { return g + 1 < groups() ? group : k - g * group; }
  static int64_t units(int64_t columns) { return (columns + UNIT - 1) / UNIT; }
  int64_t head_bytes() const {
    return ROWS * ((scale == F32 ? 4 : 2) + (form == ZERO || form == OFFSET ? 4 : 0));
  }
  int64_t group_bytes(int64_t g) const { return head_bytes() + units(columns(g)) * ROWS * bits; }
  int64_t panel_bytes() const {
    return (groups() - 1) * group_bytes(0) + group_bytes(groups() - 1);
  }
  int64_t panels() const { return (n + ROWS - 1) / ROWS; }
};

// x as the kernels want it: float32 rows whose groups start at multiples of UNIT columns.
struct Rows {
  const float* x;     // [m][stride]
  const float* sums;  // [m][groups]: sum of each group's columns
  int64_t m, stride;
};

struct Output {
  void* y;            // [m][n]
  const float* bias;  // [n] or null
  Number type;
};

struct Kernels {
  const char* name;
  // Rows [m0, m0 + count), count <= 4, times panels [begin, end).
  void (*few)(const Weight&, const Rows&, const Output&, int64_t begin, int64_t end);
  // Any number of rows times panels [begin, end).
  void (*many)(const Weight&, const Rows&, const Output&, int64_t begin, int64_t end);
};

const Kernels* kernels_generic();
const Kernels* kernels_avx2();

// Packs rows of codes into panels; all pointers at the first row, n rows, any n.
void pack(const Weight& shape, const uint8_t* codes, const void* scale, const float* extra,
          uint8_t* blob, int64_t begin, int64_t end);
// Decodes one row into k floats.
void decode_row(const Weight& weight, int64_t row, float* out);

float to_float(const void* from, int64_t at, Number type);
void from_float(void* to, int64_t at, Number type, float value);

}  // namespace qc
