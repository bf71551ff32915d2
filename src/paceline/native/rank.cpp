#include "rank.h"

#include <algorithm>
#include <cmath>

namespace paceline {

void rank(const Kernels& kernels, const float* values, int n, float heat, int n_best,
          float* room, std::int32_t* ids, float* scores) {
  constexpr int BLOCK = 16;
  const int n_blocks = (n + BLOCK - 1) / BLOCK, n_supers = (n_blocks + BLOCK - 1) / BLOCK;
  float *blocks = room, *supers = room + n_blocks;  // the largest of each sixteen; and of those
  kernels.block_max(values, n, blocks);
  kernels.block_max(blocks, n_blocks, supers);
  const float top = *std::max_element(supers, supers + n_supers), scale = 1.0f / heat;
  const float sum = kernels.sum_exp(values, n, top, scale);
  if (!std::isfinite(sum)) {
    scores[0] = NAN;
    return;
  }
  const float log_sum = std::log(sum);
  for (int i = 0; i < n_best; ++i) {
    float* super = std::max_element(supers, supers + n_supers);
    float* block = blocks + (super - supers) * BLOCK;
    float *const first_block = block, *const last_block = std::min(block + BLOCK, blocks + n_blocks);
    while (*block != *super) ++block;
    const int first = static_cast<int>(block - blocks) * BLOCK, last = std::min(first + BLOCK, n);
    const auto taken = [&](int at) { return std::find(ids, ids + i, at) != ids + i; };
    int at = first;
    while (values[at] != *block || taken(at)) ++at;
    ids[i] = at;
    scores[i] = (*block - top) * scale - log_sum;
    // What the block has left, the one just taken aside.
    *block = -INFINITY;
    for (int j = first; j < last; ++j)
      if (j != at && !taken(j)) *block = std::max(*block, values[j]);
    *super = *std::max_element(first_block, last_block);
  }
}

}  // namespace paceline
