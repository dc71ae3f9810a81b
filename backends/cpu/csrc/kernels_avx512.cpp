// The kernels for x86 with AVX-512 (F, BW, VL, DQ); an empty variant elsewhere.
#include "panel.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "simd_avx512.h"
//
#define QC_ROWS_OF_A_TILE 12  // 32 registers hold the sums of so many rows
#define QC_EIGHT_ROWS_AT_ONCE
#include "kernels.h"

const qc::Kernels* qc::kernels_avx512() {
  static const Kernels all = table_of("avx512");
  return &all;
}
#else
const qc::Kernels* qc::kernels_avx512() { return nullptr; }
#endif
