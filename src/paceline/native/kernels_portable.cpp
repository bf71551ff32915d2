// The kernels for portable C++.
#include <climits>
#include <cstdint>

#include "half.h"
#include "layout.h"
#include "types.h"

#define PACELINE_BLOCK 4      // rows of a register block
#define PACELINE_REGISTERS 16  // of vectors

namespace paceline {
namespace {
#include "simd_portable.h"
#include "kernels.inl"
}  // namespace

extern const Kernels kernels_portable;
const Kernels kernels_portable = {"portable", PACELINE_BLOCK, linear, quantize, rms_norm, silu_mul, rope,
                             to_f16, attend_split, fold, finish, read, block_max,
                             sum_exp};
}  // namespace paceline
