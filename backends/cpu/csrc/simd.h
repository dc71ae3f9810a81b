// The lanes of the variant that a file is compiled for.
#pragma once
#if defined(__AVX512BW__)
#include "simd_avx512.h"
#define QC_REGISTERS 32
#elif defined(__AVX2__)
#include "simd_avx2.h"
#define QC_REGISTERS 16
#elif defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#define QC_REGISTERS 16
#else
#include "simd_generic.h"
#define QC_REGISTERS 8
#endif
