// The kernels for AVX2 with VNNI.
#include <climits>
#include <cstdint>
#include <immintrin.h>

#include "half.h"
#include "layout.h"
#include "types.h"

#define PACELINE_BLOCK 8      // rows of a register block
#define PACELINE_REGISTERS 16  // of vectors
#define PACELINE_HALF_TILES   // linear.inl on half as many lanes

namespace paceline {
namespace {
#include "simd_avx2.h"
#include "kernels.inl"
}  // namespace

extern const Kernels kernels_avxvnni;
const Kernels kernels_avxvnni = {"avxvnni", PACELINE_BLOCK, linear, quantize, rms_norm, silu_mul, rope,
                             to_f16, attend_split, fold, finish, read, block_max,
                             sum_exp};
}  // namespace paceline
