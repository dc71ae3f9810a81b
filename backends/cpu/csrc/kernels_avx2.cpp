// The kernels for x86 with AVX2, FMA and F16C; an empty variant elsewhere.
#include "panel.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
//
#include "kernels.h"

const qc::Kernels* qc::kernels_avx2() {
  static const Kernels all = table_of("avx2");
  return &all;
}
#else
const qc::Kernels* qc::kernels_avx2() { return nullptr; }
#endif
