// The kernels for any machine.
#define QC_ONE_ROW_AT_A_TIME
#include "simd_generic.h"
//
#include "kernels.inc"

const qc::Kernels* qc::kernels_generic() {
  static const Kernels all{"generic", run_few, run_many};
  return &all;
}
