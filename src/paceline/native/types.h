// Plain data shared by every translation unit of the CPU core. No inline functions with
// external linkage live here: files compiled for different instruction sets include it, and
// the linker must never replace a portable function by one that needs AVX-512.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

// How a weight matrix is stored. "affine": w = s * q + m; "sym": w = s * (q - zero);
// "super": the scales of up to eight groups are small integers times one fp16 factor.
enum Format : int {
  Q4_AFFINE = 0,   // 4-bit groups of 32, fp16 scale and minimum      (Q4_0, Q4_1)
  Q4_SUPER = 1,    // 4-bit groups of 32, 8-bit scales and minima     (Q4_K, requantised)
  Q6_SYM = 2,      // 6-bit groups of 32, fp16 scale                  (Q5_0)
  Q6_AFFINE = 3,   // 6-bit groups of 32, fp16 scale and minimum      (Q5_1)
  Q6_SUPER = 4,    // 6-bit groups of 32, 8-bit scales and minima     (Q5_K)
  Q6_SUPER16 = 5,  // 6-bit groups of 16, signed 8-bit scales         (Q6_K)
  Q8_SYM = 6,      // 8-bit groups of 32, fp16 scale                  (Q8_0, requantised)
  DENSE_BF16 = 7,
  DENSE_F16 = 8,
  DENSE_F32 = 9,
  N_FORMATS = 10,
};

constexpr int TILE = 16;         // output rows interleaved together
constexpr int GROUP = 32;        // inputs that share a scale
constexpr int SUPER_GROUPS = 8;  // groups that share one header
constexpr int SPLIT = 256;       // key positions per attention work item
constexpr int ATTEND_ROWS = 4;   // rows per attention work item, at most
constexpr int MAX_GROUP = 64;    // query heads that share a key/value head, at most
constexpr int FINAL_TAP = -1;    // not a layer: the states after the final norm
constexpr int KEY_LANES = 16;    // slots whose keys are interleaved

// A weight matrix [n_out, n_in] cut into tiles of 16 outputs; see layout.h for a tile's bytes.
struct Linear {
  int format = DENSE_F32;
  int n_out = 0;
  int n_in = 0;
  std::size_t tile_bytes = 0;
  const std::uint8_t* data = nullptr;
};

// Activations of `rows` rows of width n_in. The quantised form is laid out by blocks of rows
// that a kernel processes together: block b holds rows [start(b), start(b + 1)), and inside it
// the order is [group][row][32], so that a kernel reads it front to back.
struct Act {
  int rows = 0;
  int n_in = 0;
  int n_blocks = 0;
  std::int8_t* q = nullptr;    // [rows, n_in] int8
  float* d = nullptr;          // [rows, groups] scale of each group
  float* ds = nullptr;         // [rows, groups] scale times the group's integer sum
  // [rows, groups, 4] what unsigned codes add to a dot product, negated, for sums h0 and h1 of
  // the half groups: -32 h0, -32 h1, -32 (h0 + h1), -128 (h0 + h1); nullptr where all that read
  // it have minima instead
  std::int32_t* offset = nullptr;
  float* f = nullptr;          // [rows, n_in] float form, for dense weights
};

// One key/value head and one split, for up to ATTEND_ROWS rows: each row's G query heads against
// at most SPLIT keys. Rows that share keys load them once.
struct SplitJob {
  const std::uint16_t* keys = nullptr;    // [slots / 16, E, 16] fp16
  const std::uint16_t* values = nullptr;  // [slots, E]
  int n_rows = 0;
  int n_heads = 0;    // G
  int head_size = 0;  // E
  struct Row {
    const float* q;             // [G, E], already divided by sqrt(E)
    const std::int32_t* slots;  // [n] in order of position
    int n;
    float* max;  // [G] largest score
    float* sum;  // [G] sum of exp(score - max)
    float* out;  // [G, E] sum of exp(score - max) * value
  } row[ATTEND_ROWS];
  float* scratch = nullptr;  // attention_scratch(G, E) floats
};

// The kernels of one instruction set. Every table gives the same bits as every other.
struct Kernels {
  const char* name;
  int max_block;  // rows per block of Act
  // out[r * stride + (t - tile0) * 16 + lane] (+)= weights . activations, tiles [tile0, tile1)
  void (*linear)(const Linear&, const Act&, int tile0, int tile1, float* out,
                 std::ptrdiff_t stride, bool add);
  // Quantises groups [g0, g0 + n_groups) of rows [row0, row0 + n_rows); row i's are the
  // n_groups * 32 floats at x + i * stride.
  void (*quantize)(const float* x, std::ptrdiff_t stride, int row0, int n_rows, int g0,
                   int n_groups, const Act&);
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y);
  // gate[i] = silu(gate[i]) * up[i]
  void (*silu_mul)(float* gate, const float* up, int n);
  void (*rope)(float* head, const float* cos, const float* sin, int head_size);
  void (*to_f16)(const float* x, int n, std::uint16_t* y);
  void (*attend_split)(const SplitJob&);
  // Folds one more split into the running (max, sum, out) of one head.
  void (*fold)(float* max, float* sum, float* out, float split_max, float split_sum,
               const float* split_out, int head_size);
  void (*finish)(float* out, float sum, int head_size);  // out /= sum
  std::uint64_t (*read)(const std::uint8_t* data, std::size_t bytes);  // bandwidth probe
  // Largest of each sixteen of n values (of fewer at the end), ceil(n / 16) of them.
  void (*block_max)(const float* x, int n, float* largest);
  // Sum of exp((x[i] - top) * scale); NaN where a value is not finite.
  float (*sum_exp)(const float* x, int n, float top, float scale);
};

// Floats from one query to the next in the scratch of attend_split: fixed, so that addresses are,
// and no multiple of a page's part, so that they spread over the first-level cache.
constexpr int MAX_HEAD_SIZE = 512;
constexpr int QUERY_STRIDE = MAX_HEAD_SIZE + 16, SCORE_STRIDE = SPLIT + 16;

// Scores, queries and sixteen gathered keys.
constexpr std::size_t attention_scratch(int n_heads, int head_size) {
  return static_cast<std::size_t>(ATTEND_ROWS * n_heads) * (SCORE_STRIDE + QUERY_STRIDE) +
         KEY_LANES / 2 * static_cast<std::size_t>(head_size);
}

}  // namespace paceline
