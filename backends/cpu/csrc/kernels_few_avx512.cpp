// The kernels of few rows for x86 with AVX-512 (F, BW, VL, DQ, VNNI).
#include "simd_avx512.h"
//
#define QC_REGISTERS 32
#include "few_kernels.h"
