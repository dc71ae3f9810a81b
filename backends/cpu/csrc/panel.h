// The panel layout and the interface of the kernels that read it. No torch headers here.
//
// A panel is 16 output rows interleaved so that one 32-bit lane of a register is one row. It is a
// run of chunks of at most 256 columns, each a run of 64-byte lines:
//
//   chunk = heads, quads of 8 bits | (nibbles, pairs, bits)        each from a 64-byte boundary
//   heads = factors of the chunk (nested scales only), then one head a group:
//           plain:  scale[16] (f16 or f32), extra[16] (form offset: f32; form zero: int16)
//           nested: factor[16], offset factor[16] (f16; the latter for the form offset only), and
//                   in each group step[16], offset step[16] (int8): scale = factor * step
//   unit  = 16 columns = 4 quads; a quad is one 64-byte register: lane r, byte b is column b of row r
//   quads   of 8 bits lie one after the other: 256 bytes a unit;
//   nibbles 128 bytes a unit: two registers, low halves of bytes quads 0 and 2, high 1 and 3;
//   pairs   64 bytes a unit: one register, bits 2q and 2q + 1 of a byte belong to quad q;
//   bits    32 bytes a unit: one 64-bit mask a quad, bit 4 r + b for row r, column b.
//
// A code of 7 bits is a nibble, then a pair, then a bit, lowest first; 6 = 4 + 2, 5 = 4 + 1,
// 3 = 2 + 1. Codes are stored as the spec numbers them. Groups are padded to whole units, panels to
// 16 rows, with zeros. Groups wider than 256 columns are cut evenly, with their scale repeated.
#pragma once
#include <cstddef>
#include <cstdint>

namespace qc {

enum Form : int { SYMMETRIC = 0, ZERO = 1, OFFSET = 2, LOOKUP = 3, FLOAT8 = 4 };
enum Number : int { F32 = 0, F16 = 1, BF16 = 2 };
enum Scale : int { PLAIN_F32 = 0, PLAIN_F16 = 1, NESTED = 2 };

constexpr int64_t bytes_of(Number type) { return type == F32 ? 4 : 2; }

// A float8 (e4m3fn) whose bits stand in a half is this much smaller than it should be.
constexpr float FLOAT8_STEP = 256.f;
constexpr uint16_t half_of_float8(uint32_t code) {
  return static_cast<uint16_t>((code & 0x80u) << 8 | (code & 0x7fu) << 7);
}

constexpr int64_t ROWS = 16;    // rows of a panel
constexpr int64_t UNIT = 16;    // columns of a unit
constexpr int64_t QUADS = 4;    // quads of a unit
constexpr int64_t CHUNK = 256;  // most columns of a chunk
constexpr int64_t LINE = 64;

constexpr int64_t up_to(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Where the parts of a chunk lie, in bytes from the start of its panel.
struct Chunk {
  int64_t heads, wide, nibbles, pairs, bits, end;  // `wide`: quads of 8 bits
  int64_t group, groups;                           // its first group, and how many it has
};

struct Weight {
  const uint8_t* blob;
  const int8_t* table;  // 16 entries, form lookup only
  int64_t n, k, group;  // columns of a group, CHUNK at most
  int bits;
  Form form;
  Scale scale;

  int64_t groups() const { return (k + group - 1) / group; }
  int64_t columns(int64_t g) const { return g + 1 < groups() ? group : k - g * group; }
  int64_t units(int64_t g) const { return (columns(g) + UNIT - 1) / UNIT; }
  // Columns as they are stored: all groups start at multiples of UNIT.
  int64_t padded_group() const { return up_to(group, UNIT); }
  int64_t padded() const { return (groups() - 1) * padded_group() + units(groups() - 1) * UNIT; }
  bool has_extra() const { return form == ZERO || form == OFFSET; }
  int64_t chunk_groups() const { return CHUNK / padded_group(); }
  int64_t width() const { return chunk_groups() * padded_group(); }  // of a chunk, in columns
  int64_t chunks() const { return (groups() + chunk_groups() - 1) / chunk_groups(); }
  int64_t factor_bytes() const { return scale == NESTED ? ROWS * (form == OFFSET ? 4 : 2) : 0; }
  int64_t step_bytes() const {  // what a row has of scale in a group
    return scale == NESTED ? 1 : scale == PLAIN_F16 ? 2 : 4;
  }
  int64_t head_bytes() const {
    const int64_t extra = !has_extra() ? 0 : scale == NESTED ? 1 : form == ZERO ? 2 : 4;
    return ROWS * (step_bytes() + extra);
  }
  Chunk chunk(int64_t c) const {
    Chunk at{};
    at.group = c * chunk_groups();
    at.groups = groups() - at.group < chunk_groups() ? groups() - at.group : chunk_groups();
    const int64_t last = at.group + at.groups - 1;
    const int64_t count = (at.groups - 1) * (padded_group() / UNIT) + units(last);
    at.heads = c * full_chunk();
    at.wide = at.nibbles = at.heads + up_to(factor_bytes() + at.groups * head_bytes(), LINE);
    if (bits == 8) {
      at.end = at.wide + count * 256;
      return at;
    }
    at.pairs = at.nibbles + (bits & 4 ? count * 128 : 0);
    at.bits = at.pairs + (bits & 2 ? count * 64 : 0);
    at.end = at.bits + (bits & 1 ? up_to(count * 32, LINE) : 0);
    return at;
  }
  int64_t panel_bytes() const { return chunk(chunks() - 1).end; }
  int64_t panels() const { return (n + ROWS - 1) / ROWS; }

 private:
  int64_t full_chunk() const {
    const int64_t count = chunk_groups() * (padded_group() / UNIT);
    const int64_t codes = bits & 1 ? count * 32 * (bits - 1) + up_to(count * 32, LINE)
                                   : count * 32 * bits;
    return up_to(factor_bytes() + chunk_groups() * head_bytes(), LINE) + codes;
  }
};

// Activations as the kernels want them: whole numbers of `digits` signed bytes, most significant
// first, times a step; see digits.h. Rows lie chunk by chunk, so that a pass over the rows of one
// chunk is one stream, and another of all else that a row has of a chunk, which lies together.
// Rows of the form float8 stay floats.
struct Rows {
  const int8_t* codes;    // [digits][width]
  // One digit in groups of 32 only: of two groups in a word, the first's above, the sums of x, an
  // eighth of `sums`, and the lifts; how far sums of the digits of a group go, of either sign.
  const int32_t* pairs;   // [2][groups / 2], or null
  const int32_t* reach;   // [1]
  const float* step;      // [groups]; one digit: [1], that of the chunk
  const int32_t* totals;  // [digits][groups]: minus the sum of the group's digits
  const int32_t* lift;    // [groups]: one digit only, places to shift a group's sums
  const float* sums;      // [groups]: sum of the group's x; one digit: in steps
  const float* x;        // [m][padded], form float8 only
  int64_t m, digits, padded;
  int64_t width, groups;  // columns and groups of a full chunk
  int64_t rows;           // between two chunks
  int64_t stride;         // words between what two rows of a chunk have besides codes

  Rows from(int64_t row) const {
    Rows rest = at(0, row);
    rest.x = x + row * padded;
    rest.m = m - row;
    return rest;
  }
  // The rows from `row` on, with all pointers at a chunk.
  Rows at(int64_t chunk, int64_t row) const {
    const int64_t first = chunk * rows + row, words = first * stride;
    Rows there = *this;
    there.codes += first * digits * width;
    there.totals += words;
    there.lift += words;
    there.step += words;
    there.sums += words;
    if (!pairs) return there;
    there.pairs += words;
    there.reach += words;
    return there;
  }
};

// Whether rows have what pairs of groups need.
constexpr bool has_pairs(int64_t group, int64_t digits) { return digits == 1 && group == 32; }

// Words that a row has of a chunk besides codes.
inline int64_t row_words(const Weight& w, int64_t digits) {
  const int64_t groups = w.chunk_groups(), pairs = has_pairs(w.group, digits) ? groups + 1 : 0;
  return pairs + (digits == 1 ? 1 : groups) + groups * (digits + 2);
}
inline int64_t rows_bytes(const Weight& w, int64_t m, int64_t digits) {
  if (w.form == FLOAT8) return 4 * m * w.padded();
  return m * w.chunks() * (digits * w.width() + 4 * row_words(w, digits));
}

// m rows in so many bytes of memory; best from a line on.
inline Rows rows_in(void* memory, const Weight& w, int64_t m, int64_t digits) {
  const auto* words = static_cast<const int32_t*>(memory);
  const auto* floats = static_cast<const float*>(memory);
  const int64_t width = w.width(), groups = w.chunk_groups();
  Rows rows{};
  rows.m = rows.rows = m;
  rows.digits = digits;
  rows.padded = w.padded();
  rows.width = width;
  rows.groups = groups;
  if (w.form == FLOAT8) {
    rows.x = floats;
    return rows;
  }
  const bool paired = has_pairs(w.group, digits);
  const int64_t step = m * w.chunks() * digits * width / 4 + (paired ? groups + 1 : 0);
  const int64_t totals = step + (digits == 1 ? 1 : groups), lift = totals + digits * groups;
  rows.stride = row_words(w, digits);
  rows.codes = static_cast<const int8_t*>(memory);
  rows.step = floats + step;
  rows.totals = words + totals;
  rows.lift = words + lift;
  rows.sums = floats + lift + groups;
  if (!paired) return rows;
  rows.reach = words + step - 1;
  rows.pairs = rows.reach - groups;
  return rows;
}

struct Output {
  void* y;            // [m][n]
  const float* bias;  // [n] or null
  Number type;
  int64_t step = 0;   // between rows; 0: n
  int64_t panel = 0;  // whose rows the first columns are
};

// function(first) * second, which lies between the products of a gated layer.
enum Curve : int { SILU = 0, GELU_TANH = 1 };
struct Gate {
  Curve curve;
  Number type;
  const void *first, *second;  // [rows][columns], `step` between rows
  int64_t rows, columns, step;
  void* to;
  int64_t to_step;
};

struct Kernels {
  // Rows times panels [begin, end).
  void (*multiply)(const Weight&, const Rows&, const Output&, int64_t begin, int64_t end);
  // Row `row` of `to` from its floats, which are padded; `to` says how many digits.
  void (*quantize)(const Weight&, const float* x, const Rows& to, int64_t row);
  // Rows [begin, end) of `to` from those of a matrix of numbers that need no padding.
  void (*quantize_rows)(const Weight&, const void* from, Number type, const Rows& to,
                        int64_t begin, int64_t end);
  // Numbers from and to float32.
  void (*widen)(const void* from, int64_t at, Number type, int64_t count, float* to);
  void (*narrow)(const float* from, int64_t count, void* to, int64_t at, Number type);
  void (*gate)(const Gate&);
};

// Those of the variant that the library was built with.
const Kernels& kernels();

// The middle of the codes, which sums of x times code leave out so as not to grow. A lookup's table
// holds signed bytes, which kernels raise by 128.
constexpr int middle_code(int bits, bool is_lookup) { return is_lookup ? 128 : 1 << (bits - 1); }

// Codes and heads of rows, as a scheme has them.
struct Source {
  const uint8_t* codes;  // [n][k]
  const void* scale;     // [n][wide groups], f16 or f32
  const void* extra;     // [n][wide groups], f32 (offset) or int32 (zero), or null
  int64_t groups;        // wide groups
  int64_t group;         // columns of a wide group
};

// Packs rows of codes into panels [begin, end); the pointers are at the first row of all.
void pack(const Weight& shape, const Source& from, uint8_t* blob, int64_t begin, int64_t end);
// Decodes one row into k floats.
void decode_row(const Weight& weight, int64_t row, float* out);

float to_float(const void* from, int64_t at, Number type);
void from_float(void* to, int64_t at, Number type, float value);

}  // namespace qc
