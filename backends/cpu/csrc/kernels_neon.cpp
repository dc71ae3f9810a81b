// The kernels for ARM (64 bits) with the dot product instructions.
#include "simd_neon.h"
// There are 32, of half the size of AVX2's.
#define QC_REGISTERS 16
#include "kernels.h"
