// The kernels for any little-endian machine.
#include "simd_generic.h"
//
#define QC_REGISTERS 8
#include "kernels.h"
