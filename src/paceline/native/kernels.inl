// The kernels, written once over the sixteen lanes that a simd_*.h file provides. Each
// kernels_<path>.cpp includes this inside an anonymous namespace, compiled with its own flags.
// Every reduction has a fixed shape, so all paths give the same bits.

// Weights come to the second-level cache from far ahead and to the first from near: with the
// hardware prefetchers alone two cores read at 60 % of what memory gives.
constexpr int FAR_PREFETCH = 12288, NEAR_PREFETCH = 1024;

// The register blocks only work where everything ends up in one function.
#define ALWAYS_INLINE inline __attribute__((always_inline))

#ifdef PACELINE_HALF_TILES
namespace half_tiles {
#include "simd_avx2_half.h"
#include "linear.inl"
}  // namespace half_tiles
using half_tiles::linear;
#else
#include "linear.inl"
#endif

// exp(x) to about one unit in the last place: x = n ln 2 + r, a polynomial in r, times 2^n.
inline F exp(F x) {
  x = min(max(x, set1(-87.0f)), set1(88.0f));
  const F n = rint(mul(x, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.0f / 5040.0f);
  p = fma(p, r, set1(1.0f / 720.0f));
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return mul(p, pow2(n));
}

inline float exp_one(float x) {
  float t[16];
  store(t, exp(set1(x)));
  return t[0];
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
  F sum = set1(0.0f);
  for (int i = 0; i < n; i += 16) sum = fma(load(x + i), load(x + i), sum);
  const float mean = reduce_add(sum) / static_cast<float>(n) + eps;
  const F scale = set1(1.0f / __builtin_sqrtf(mean));
  for (int i = 0; i < n; i += 16) store(y + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// Quantises up to sixteen groups at once: x[i] are 32 floats, whose codes and scales go to
// place at[i] of `a`. The reductions of all groups share their instructions.
void quantize16(const float* const* x, const std::ptrdiff_t* at, int n, const Act& a) {
  F v[16];
  for (int i = 0; i < 16; ++i)
    v[i] = i < n ? max(abs(load(x[i])), abs(load(x[i] + 16))) : set1(0.0f);
  alignas(64) float scale[16], inverse[16], scaled_sum[16];
  alignas(64) std::int32_t sum0[16] = {}, sum1[16] = {};
  const F largest = reduce_max16(v);
  const F scales = div(largest, set1(127.0f));
  store(scale, scales);
  store(inverse, div(set1(127.0f), largest));
  bool finite[16], all_finite = true;
  for (int i = 0; i < n; ++i) {
    const float top = scale[i] * 127.0f;  // a zero, tiny or non-finite group has no inverse
    const F by = set1(top > 1e-30f && top < 1e38f ? inverse[i] : 0.0f);
    std::int8_t* q = a.q + at[i] * GROUP;
    store_s8(q, rint(mul(load(x[i]), by)));
    store_s8(q + 16, rint(mul(load(x[i] + 16), by)));
    finite[i] = sum_codes(q, sum0[i], sum1[i]);
    all_finite = all_finite && finite[i];
  }
  store(scaled_sum, mul(scales, to_float(iadd(iload(sum0), iload(sum1)))));
  for (int i = 0; i < n; ++i) {
    a.d[at[i]] = scale[i];
    a.ds[at[i]] = scaled_sum[i];
    // An infinity or NaN must reach the logits, not vanish in the codes.
    if (!all_finite && !finite[i]) a.d[at[i]] = a.ds[at[i]] = __builtin_nanf("");
  }
  if (a.offset == nullptr) return;
  for (int i = 0; i < n; ++i) {
    std::int32_t* offset = a.offset + 4 * at[i];
    offset[0] = -32 * sum0[i];
    offset[1] = -32 * sum1[i];
    offset[2] = -32 * (sum0[i] + sum1[i]);
    offset[3] = -128 * (sum0[i] + sum1[i]);
  }
}

void quantize(const float* x, std::ptrdiff_t stride, int row0, int n_rows, int g0, int n_groups,
              const Act& a) {
  const std::ptrdiff_t groups = a.n_in / GROUP;
  const float* from[16];
  std::ptrdiff_t at[16];
  int n = 0, block = 0;
  for (int row = row0; row < row0 + n_rows; ++row, x += stride) {
    while (block_start(a.rows, a.n_blocks, block + 1) <= row) ++block;
    const int start = block_start(a.rows, a.n_blocks, block);
    const int width = block_start(a.rows, a.n_blocks, block + 1) - start;
    for (int g = 0; g < n_groups; ++g) {
      from[n] = x + g * GROUP;
      at[n] = start * groups + static_cast<std::ptrdiff_t>(g0 + g) * width + (row - start);
      if (++n == 16) {
        quantize16(from, at, n, a);
        n = 0;
      }
    }
  }
  if (n > 0) quantize16(from, at, n, a);
}

void silu_mul(float* gate, const float* up, int n) {
  const F one = set1(1.0f);
  for (int i = 0; i < n; i += 16) {
    const F g = load(gate + i);
    const F s = div(g, add(one, exp(sub(set1(0.0f), g))));
    store(gate + i, mul(s, load(up + i)));
  }
}

// Half-split rotary embedding: element i pairs with i + E / 2.
void rope(float* head, const float* cos, const float* sin, int head_size) {
  const int half = head_size / 2;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    const float bs = b * sin[i], as = a * sin[i];
    head[i] = __builtin_fmaf(a, cos[i], -bs);
    head[i + half] = __builtin_fmaf(b, cos[i], as);
  }
}

void to_f16(const float* x, int n, std::uint16_t* y) {
  for (int i = 0; i < n; i += 16) store_f16(y + i, load(x + i));
}

#include "attention.inl"

void fold(float* max_io, float* sum_io, float* out, float split_max, float split_sum,
          const float* split_out, int head_size) {
  const float top = split_max > *max_io ? split_max : *max_io;
  const float keep = exp_one(*max_io - top), take = exp_one(split_max - top);
  *max_io = top;
  *sum_io = __builtin_fmaf(*sum_io, keep, split_sum * take);
  for (int e = 0; e < head_size; e += 16)
    store(out + e, fma(load(out + e), set1(keep), mul(load(split_out + e), set1(take))));
}

void finish(float* out, float sum, int head_size) {
  const F inverse = set1(1.0f / sum);
  for (int e = 0; e < head_size; e += 16) store(out + e, mul(load(out + e), inverse));
}

std::uint64_t read(const std::uint8_t* data, std::size_t bytes) {
  I sum[4] = {iset1(0), iset1(0), iset1(0), iset1(0)};
  for (std::size_t i = 0; i + 256 <= bytes; i += 256) {
    for (int j = 0; j < 4; ++j) {
      __builtin_prefetch(data + i + 64 * j + FAR_PREFETCH, 0, 2);
      __builtin_prefetch(data + i + 64 * j + NEAR_PREFETCH, 0, 3);
      const U u = uload(data + i + 64 * j);
      I x;
      __builtin_memcpy(&x, &u, sizeof x);
      sum[j] = iadd(sum[j], x);
    }
  }
  const I total = iadd(iadd(sum[0], sum[1]), iadd(sum[2], sum[3]));
  std::uint64_t r = 0;
  __builtin_memcpy(&r, &total, sizeof r);
  return r;
}

// Sixteen values, or what is left of them, then `rest`.
inline F load_some(const float* x, int n, float rest) {
  if (n >= 16) return load(x);
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = i < n ? x[i] : rest;
  return load(t);
}

void block_max(const float* x, int n, float* largest) {
  const float lowest = -__builtin_inff();
  int i = 0;
  for (; i + 256 <= n; i += 256, largest += 16) {
    F v[16];
    for (int j = 0; j < 16; ++j) v[j] = load(x + i + 16 * j);
    store(largest, reduce_max16(v));
  }
  for (; i < n; i += 16) *largest++ = reduce_max(load_some(x + i, n - i, lowest));
}

float sum_exp(const float* x, int n, float top, float scale) {
  F sum = set1(0.0f), bad = set1(0.0f);
  for (int i = 0; i < n; i += 16) {
    F e = exp(mul(sub(load_some(x + i, n - i, top), set1(top)), set1(scale)));
    if (n - i < 16) {
      float t[16];
      store(t, e);
      e = load_some(t, n - i, 0.0f);
    }
    sum = add(sum, e);
    // exp clamps: what is not finite must not vanish.
    bad = fma(load_some(x + i, n - i, 0.0f), set1(0.0f), bad);
  }
  return reduce_add(add(sum, bad));
}
