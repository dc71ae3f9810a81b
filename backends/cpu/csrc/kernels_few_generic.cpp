// The kernels of few rows for any little-endian machine.
#include "simd_generic.h"
//
#define QC_REGISTERS 8
#include "few_kernels.h"
