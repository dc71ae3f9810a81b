// The kernels for x86 with AVX2, FMA and F16C.
#include "simd_avx2.h"
//
#define QC_REGISTERS 16
#include "kernels.h"
