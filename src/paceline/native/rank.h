// The best of many logits.
#pragma once
#include <cstdint>

#include "types.h"

namespace paceline {

constexpr int rank_room(int n) { return (n + 15) / 16 + (n + 255) / 256; }

// The n_best of n values (n_best <= n), the best first and among equals the first, with their
// log-probabilities at a temperature. Where a value is not finite: NaN in scores[0], and nothing
// else is written. room: rank_room(n) floats.
void rank(const Kernels& kernels, const float* values, int n, float heat, int n_best,
          float* room, std::int32_t* ids, float* scores);

}  // namespace paceline
