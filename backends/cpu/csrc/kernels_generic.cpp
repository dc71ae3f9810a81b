// The kernels for any machine.
#define QC_ONE_ROW_AT_A_TIME
#include "simd_generic.h"
//
#include "kernels.h"

const qc::Kernels* qc::kernels_generic() {
  static const Kernels all = table_of("generic");
  return &all;
}
