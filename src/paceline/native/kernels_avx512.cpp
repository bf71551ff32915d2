// The kernels for AVX-512 VNNI.
#include <climits>
#include <cstdint>
#include <immintrin.h>

#include "half.h"
#include "layout.h"
#include "types.h"

#define PACELINE_BLOCK 16      // rows of a register block
#define PACELINE_REGISTERS 32  // of vectors

namespace paceline {
namespace {
#include "simd_avx512.h"
#include "kernels.inl"
}  // namespace

extern const Kernels kernels_avx512;
const Kernels kernels_avx512 = {"avx512", PACELINE_BLOCK, linear, quantize, rms_norm, silu_mul, rope,
                             to_f16, attend_split, fold, finish, read, block_max,
                             sum_exp};
}  // namespace paceline
