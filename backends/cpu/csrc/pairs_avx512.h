// Four rows times three panels of a chunk, in pairs of groups: what pairs.h does for fewer, as
// instructions. Compilers copy sums from register to register and keep some in memory, which takes
// up to a tenth of the time, and another tenth with any edit.
#pragma once
#include "tile.h"

namespace {

// Registers: 0 to 11 are the sums of a group, row after row; 12 to 23 those of the chunk; 24 to 26
// codes, steps or factors of three panels; 27 what a row has of them; 28 the constant.
#define QC_GROUP(OF) OF(0) OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11)
#define QC_CHUNK(OF) \
  OF(12) OF(13) OF(14) OF(15) OF(16) OF(17) OF(18) OF(19) OF(20) OF(21) OF(22) OF(23)
#define QC_ROWS(OF)                                                 \
  OF(0, 0, 1, 2, 12, 13, 14) OF(1, 3, 4, 5, 15, 16, 17)             \
  OF(2, 6, 7, 8, 18, 19, 20) OF(3, 9, 10, 11, 21, 22, 23)
#define QC_CLEAR(I) "vpxord %%zmm" #I ", %%zmm" #I ", %%zmm" #I "\n\t"
#define QC_RAISE(I) "vpslld $16, %%zmm" #I ", %%zmm" #I "\n\t"
#define QC_PANELS(AT, FROM)                                \
  "vmovdqa64 " AT "(%[" FROM "]), %%zmm24\n\t"            \
  "vmovdqa64 " AT " + 64(%[" FROM "]), %%zmm25\n\t"       \
  "vmovdqa64 " AT " + 128(%[" FROM "]), %%zmm26\n\t"
// Four columns of a row; `AT` is theirs among those of the pair.
#define QC_ROW(AT, M, A, B, C)                                       \
  "vpbroadcastd " #AT " * 4 + " #M " * 256 - 512(%[x]), %%zmm27\n\t" \
  "vpdpbusd %%zmm27, %%zmm24, %%zmm" #A "\n\t"                       \
  "vpdpbusd %%zmm27, %%zmm25, %%zmm" #B "\n\t"                       \
  "vpdpbusd %%zmm27, %%zmm26, %%zmm" #C "\n\t"
#define QC_QUAD(AT)                                                                     \
  QC_PANELS(#AT " * 192", "quads")                                                     \
  QC_ROW(AT, 0, 0, 1, 2) QC_ROW(AT, 1, 3, 4, 5) QC_ROW(AT, 2, 6, 7, 8) QC_ROW(AT, 3, 9, 10, 11)
#define QC_FIRST \
  QC_QUAD(0) QC_QUAD(1) QC_QUAD(2) QC_QUAD(3) QC_QUAD(4) QC_QUAD(5) QC_QUAD(6) QC_QUAD(7)
#define QC_SECOND \
  QC_QUAD(8) QC_QUAD(9) QC_QUAD(10) QC_QUAD(11) QC_QUAD(12) QC_QUAD(13) QC_QUAD(14) QC_QUAD(15)
// A pair's sums times the steps of panel S, raised by the lift of the row. What a negative lower
// half took from the upper one is given back.
#define QC_STEP(S, I, ALL, TEMPORARY)                            \
  "vpaddd %%zmm28, %%zmm" #I ", %%zmm" #I "\n\t"                 \
  "vpsllvw %%zmm27, %%zmm2" #S ", %%zmm" #TEMPORARY "\n\t"       \
  "vpxord %%zmm28, %%zmm" #I ", %%zmm" #I "\n\t"                 \
  "vpdpwssd %%zmm" #TEMPORARY ", %%zmm" #I ", %%zmm" #ALL "\n\t"
#define QC_STEPS(M, A, B, C, ALL_A, ALL_B, ALL_C)         \
  "vpbroadcastd " #M " * 136 + 16(%[pairs]), %%zmm27\n\t" \
  QC_STEP(4, A, ALL_A, 29) QC_STEP(5, B, ALL_B, 30) QC_STEP(6, C, ALL_C, 31)
// Offsets times the sums of x, of pair P.
#define QC_OFFSET(P, M, A, B, C)                                      \
  "vpbroadcastd " #P " * 4 + " #M " * 136 - 16(%[pairs]), %%zmm27\n\t" \
  "vpdpwssd " #P " * 192(%[offset]), %%zmm27, %%zmm" #A "\n\t"        \
  "vpdpwssd " #P " * 192 + 64(%[offset]), %%zmm27, %%zmm" #B "\n\t"   \
  "vpdpwssd " #P " * 192 + 128(%[offset]), %%zmm27, %%zmm" #C "\n\t"
#define QC_OFFSETS(M, A, B, C, ...)                       \
  QC_OFFSET(0, M, A, B, C) QC_OFFSET(1, M, A, B, C)       \
  QC_OFFSET(2, M, A, B, C) QC_OFFSET(3, M, A, B, C)
// What the chunk adds, in its steps.
#define QC_PART(S, I, ALL)                                                         \
  "vcvtdq2ps %%zmm" #ALL ", %%zmm" #ALL "\n\t"                                     \
  "vcvtdq2ps %%zmm" #I ", %%zmm" #I "\n\t"                                         \
  "vmulps %%zmm2" #S ", %%zmm" #ALL ", %%zmm" #ALL "\n\t"                          \
  "vfmadd231ps (" #S " - 4) * 64 + 768(%[offset]), %%zmm" #I ", %%zmm" #ALL "\n\t"
#define QC_PARTS(M, A, B, C, ALL_A, ALL_B, ALL_C) \
  QC_PART(4, A, ALL_A) QC_PART(5, B, ALL_B) QC_PART(6, C, ALL_C)
#define QC_ADD(AT, ALL)                                           \
  "vfmadd213ps " #AT " * 64(%[sums]), %%zmm27, %%zmm" #ALL "\n\t" \
  "vmovups %%zmm" #ALL ", " #AT " * 64(%[sums])\n\t"
#define QC_SET(AT, ALL)                                           \
  "vmulps %%zmm27, %%zmm" #ALL ", %%zmm" #ALL "\n\t"              \
  "vmovups %%zmm" #ALL ", " #AT " * 64(%[sums])\n\t"
#define QC_ADDS(M, A, B, C, ALL_A, ALL_B, ALL_C)      \
  "vbroadcastss " #M " * 136(%[step]), %%zmm27\n\t"   \
  QC_ADD(A, ALL_A) QC_ADD(B, ALL_B) QC_ADD(C, ALL_C)
#define QC_SETS(M, A, B, C, ALL_A, ALL_B, ALL_C)      \
  "vbroadcastss " #M " * 136(%[step]), %%zmm27\n\t"   \
  QC_SET(A, ALL_A) QC_SET(B, ALL_B) QC_SET(C, ALL_C)

static_assert(STRIDE == 34 && SIDE == 3 && PAIRS == 4 && CHUNK == 256 && ROWS * 4 == LINE,
              "the instructions know where things lie");

template <>
void multiply_pairs<4, 3>(const Tile& tile, const Block& in, bool first, float* sums) {
  const uint8_t* quads = tile.quads[0][0];
  const int8_t* x = in.codes + 512;  // so that all rows are near
  const int32_t *pairs = in.pairs, *scale = tile.steps.scale[0][0];
  int64_t left = PAIRS;
  asm volatile(
      "vpbroadcastd %[half], %%zmm28\n\t" QC_CHUNK(QC_CLEAR)
      "1:\n\t" QC_GROUP(QC_CLEAR) QC_FIRST QC_GROUP(QC_RAISE) QC_SECOND
      QC_PANELS("0", "scale") QC_ROWS(QC_STEPS)
      "add $3072, %[quads]\n\t add $64, %[x]\n\t add $192, %[scale]\n\t add $4, %[pairs]\n\t"
      "dec %[left]\n\t jnz 1b\n\t"
      QC_GROUP(QC_CLEAR) QC_ROWS(QC_OFFSETS) QC_PANELS("960", "offset") QC_ROWS(QC_PARTS)
      "test %[first], %[first]\n\t jnz 2f\n\t" QC_ROWS(QC_ADDS)
      "jmp 3f\n\t"
      "2:\n\t" QC_ROWS(QC_SETS)
      "3:\n\t"
      : [quads] "+r"(quads), [x] "+r"(x), [pairs] "+r"(pairs), [scale] "+r"(scale),
        [left] "+r"(left)
      : [offset] "r"(tile.steps.offset[0][0]), [step] "r"(in.step), [sums] "r"(sums),
        [first] "r"(static_cast<int>(first)), [half] "r"(1 << 15)
      : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
        "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18",
        "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28",
        "xmm29", "xmm30", "xmm31");
}

}  // namespace
