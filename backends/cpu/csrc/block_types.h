// GGUF's block types, sixteen blocks side by side: one 32-bit lane is one row's block.
//
// A type says where a block's words begin (AT) and how many it has (WORDS); a field of SIDE_BYTES
// that fits no word lies at SIDE. `quad` gives four codes of a row from the words, `w[word][row]`,
// as panels number them. Fields are described in schemes/gguf/decode_*.py, which the tests compare.
#pragma once
#include "panel.h"

namespace {
using namespace qc;

using Word = uint32_t[ROWS];  // the same word of sixteen blocks
constexpr uint32_t HALF_SIGN = 0x8000u;

// The four low bits as the lowest bits of four bytes.
inline uint32_t spread_bits(uint32_t four) { return (four & 15u) * 0x00204081u & 0x01010101u; }

inline uint32_t nibbles_of(uint32_t word, int64_t half) { return word >> (4 * half) & 0x0f0f0f0fu; }
inline uint32_t pairs_of(uint32_t word, int64_t place) { return word >> (2 * place) & 0x03030303u; }
inline uint32_t bits_of(uint32_t word, int64_t place) { return word >> place & 0x01010101u; }
inline uint32_t byte_of(const Word* w, int64_t place, int r) {
  return w[place / 4][r] >> (8 * (place % 4)) & 255u;
}

// **** 32 columns, one scale ****

struct Short {
  static constexpr int COLUMNS = 32, GROUP = 32, SIDE = 0, SIDE_BYTES = 2, AT = 2, WORDS = 4;
  static constexpr Scale SCALE = PLAIN_F16;
};

struct Q4_0 : Short {
  static constexpr int BYTES = 18, BITS = 4;
  static constexpr Form FORM = SYMMETRIC;
  static uint32_t quad(const Word* w, int64_t q, int r) { return nibbles_of(w[q % 4][r], q / 4); }
};

struct IQ4_NL : Q4_0 {
  static constexpr Form FORM = LOOKUP;
};

struct MXFP4 : Q4_0 {
  static constexpr int BYTES = 17, SIDE_BYTES = 1, AT = 1;
  static constexpr Form FORM = LOOKUP;
  static constexpr Scale SCALE = PLAIN_F32;
  // The bits of 2 ** (e - 128) as a float, of which the two smallest are below its normal numbers.
  static uint32_t scale(uint32_t e) { return e > 1 ? (e - 1) << 23 : 0x00200000u << e; }
};

struct Q5_0 : Short {
  static constexpr int BYTES = 22, BITS = 5, WORDS = 5;
  static constexpr Form FORM = SYMMETRIC;
  static uint32_t quad(const Word* w, int64_t q, int r) {
    return nibbles_of(w[1 + q % 4][r], q / 4) | spread_bits(w[0][r] >> (4 * q)) << 4;
  }
};

struct Q8_0 : Short {
  static constexpr int BYTES = 34, BITS = 8, WORDS = 8;
  static constexpr Form FORM = SYMMETRIC;
  static uint32_t quad(const Word* w, int64_t q, int r) { return w[q][r] ^ 0x80808080u; }
};

// The first word holds scale and offset.
struct ShortOffset : Short {
  static constexpr int SIDE_BYTES = 0, AT = 0;
  static constexpr Form FORM = OFFSET;
};

struct Q4_1 : ShortOffset {
  static constexpr int BYTES = 20, BITS = 4, WORDS = 5;
  static uint32_t quad(const Word* w, int64_t q, int r) { return Q4_0::quad(w + 1, q, r); }
};

struct Q5_1 : ShortOffset {
  static constexpr int BYTES = 24, BITS = 5, WORDS = 6;
  static uint32_t quad(const Word* w, int64_t q, int r) { return Q5_0::quad(w + 1, q, r); }
};

// **** 256 columns, steps of a factor ****
// `step` and `offset_step` fit a signed byte by their widths.

struct Long {
  static constexpr int COLUMNS = 256, AT = 0, SIDE = 0, SIDE_BYTES = 0;
  static constexpr Scale SCALE = NESTED;
  static constexpr Form FORM = SYMMETRIC;
  // Factors in the first word: scale, then offset.
  static uint32_t factors(const Word* w, int r) { return w[0][r]; }
  static int offset_step(const Word*, int64_t, int) { return 0; }
};

struct Q2_K : Long {
  static constexpr int BYTES = 84, BITS = 2, GROUP = 16, WORDS = 21;
  static constexpr Form FORM = OFFSET;
  static uint32_t factors(const Word* w, int r) { return w[20][r]; }
  static int step(const Word* w, int64_t g, int r) { return byte_of(w, g, r) & 15; }
  static int offset_step(const Word* w, int64_t g, int r) { return byte_of(w, g, r) >> 4; }
  static uint32_t quad(const Word* w, int64_t q, int r) {
    return pairs_of(w[4 + q / 32 * 8 + q % 8][r], q / 8 % 4);
  }
};

struct Q3_K : Long {
  static constexpr int BYTES = 110, BITS = 3, GROUP = 16, WORDS = 27, SIDE = 108, SIDE_BYTES = 2;
  static int step(const Word* w, int64_t g, int r) {
    const uint32_t low = byte_of(w + 24, g % 8, r) >> (g / 8 * 4) & 15;
    return static_cast<int>(low | (byte_of(w + 26, g % 4, r) >> (g / 4 * 2) & 3) << 4) - 32;
  }
  static uint32_t quad(const Word* w, int64_t q, int r) {
    return pairs_of(w[8 + q / 32 * 8 + q % 8][r], q / 8 % 4) | bits_of(w[q % 8][r], q / 8) << 2;
  }
};

struct Q4_K : Long {
  static constexpr int BYTES = 144, BITS = 4, GROUP = 32, WORDS = 36;
  static constexpr Form FORM = OFFSET;
  // Number g of the scales (`at` 0) or of the minimums (`at` 1), six bits each.
  static int six_bits(const Word* w, int64_t at, int64_t g, int r) {
    const uint32_t first = byte_of(w + 1 + at, g % 4, r);
    if (g < 4) return first & 63;
    return (byte_of(w + 3, g % 4, r) >> (4 * at) & 15) | first >> 6 << 4;
  }
  static int step(const Word* w, int64_t g, int r) { return six_bits(w, 0, g, r); }
  static int offset_step(const Word* w, int64_t g, int r) { return six_bits(w, 1, g, r); }
  static uint32_t codes(const Word* w, int64_t q, int r) {
    return nibbles_of(w[q / 16 * 8 + q % 8][r], q / 8 % 2);
  }
  static uint32_t quad(const Word* w, int64_t q, int r) { return codes(w + 4, q, r); }
};

struct Q5_K : Q4_K {
  static constexpr int BYTES = 176, BITS = 5, WORDS = 44;
  static uint32_t quad(const Word* w, int64_t q, int r) {
    return codes(w + 12, q, r) | bits_of(w[4 + q % 8][r], q / 8) << 4;
  }
};

struct Q6_K : Long {
  static constexpr int BYTES = 210, BITS = 6, GROUP = 16, WORDS = 52, SIDE = 208, SIDE_BYTES = 2;
  static int step(const Word* w, int64_t g, int r) {
    return static_cast<int8_t>(byte_of(w + 48, g, r));
  }
  static uint32_t quad(const Word* w, int64_t q, int r) {
    const uint32_t low = nibbles_of(w[q / 32 * 16 + q % 16][r], q / 16 % 2);
    return low | pairs_of(w[32 + q / 32 * 8 + q % 8][r], q / 8 % 4) << 4;
  }
};

struct IQ4_XS : Long {
  static constexpr int BYTES = 136, BITS = 4, GROUP = 32, WORDS = 34;
  static constexpr Form FORM = LOOKUP;
  static int step(const Word* w, int64_t g, int r) {
    const uint32_t low = w[1][r] >> (4 * g) & 15, high = w[0][r] >> (16 + 2 * g) & 3;
    return static_cast<int>(low | high << 4) - 32;
  }
  static uint32_t quad(const Word* w, int64_t q, int r) {
    return nibbles_of(w[2 + q / 8 * 4 + q % 4][r], q / 4 % 2);
  }
};

}  // namespace
