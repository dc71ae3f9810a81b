// The kernels of few rows for x86 with AVX2, FMA and F16C.
#include "simd_avx2.h"
//
#define QC_REGISTERS 16
#include "few_kernels.h"
