// The kernels, written once over the sixteen lanes that a simd_*.h file provides. Each
// kernels_<path>.cpp includes this inside an anonymous namespace, compiled with its own flags.
// Every reduction has a fixed shape, so all paths give the same bits.

// Weights come to the second-level cache from far ahead and to the first from near: with the
// hardware prefetchers alone two cores read at 60 % of what memory gives.
constexpr int FAR_PREFETCH = 12288, NEAR_PREFETCH = 1024;

// The register blocks only work where everything ends up in one function.
#define ALWAYS_INLINE inline __attribute__((always_inline))

#include "linear.inl"

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
  alignas(64) float scale[16], inverse[16], sum0[16], sum1[16];
  const F largest = reduce_max16(v);
  store(scale, div(largest, set1(127.0f)));
  store(inverse, div(set1(127.0f), largest));
  F q0[16], q1[16];
  for (int i = 0; i < 16; ++i) {
    q0[i] = q1[i] = set1(0.0f);
    if (i >= n) continue;
    const float top = scale[i] * 127.0f;  // a zero, tiny or non-finite group has no inverse
    const F by = set1(top > 1e-30f && top < 1e38f ? inverse[i] : 0.0f);
    q0[i] = rint(mul(load(x[i]), by));
    q1[i] = rint(mul(load(x[i] + 16), by));
    store_s8(a.q + at[i] * GROUP, q0[i]);
    store_s8(a.q + at[i] * GROUP + 16, q1[i]);
  }
  store(sum0, reduce_add16(q0));  // integers below 2^24: exact
  store(sum1, reduce_add16(q1));
  for (int i = 0; i < n; ++i) {
    // An infinity or NaN makes the sum NaN, and must reach the logits, not vanish in the codes.
    const float sum = sum0[i] + sum1[i];
    const bool finite = sum == sum;
    a.d[at[i]] = finite ? scale[i] : __builtin_nanf("");
    a.ds[at[i]] = a.d[at[i]] * sum;
    const auto s0 = static_cast<std::int32_t>(finite ? sum0[i] : 0.0f);
    const auto s1 = static_cast<std::int32_t>(finite ? sum1[i] : 0.0f);
    std::int32_t* offset = a.offset + 4 * at[i];
    offset[0] = -32 * s0;
    offset[1] = -32 * s1;
    offset[2] = -32 * (s0 + s1);
    offset[3] = -128 * (s0 + s1);
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

// Sixteen keys or values as floats, [16, E], kept while rows ask for the same slots.
struct Gathered {
  static constexpr int AHEAD = 32;  // positions between a prefetch and its use
  const std::uint16_t* base;
  int head_size;
  float* rows;
  const std::int32_t* slots = nullptr;
  int n = 0;

  // `count` slots at `want`; `left` of them are still to come from there, these included.
  void get(const std::int32_t* want, int count, int left) {
    if (slots != nullptr && count <= n &&
        __builtin_memcmp(slots, want, sizeof *want * static_cast<std::size_t>(count)) == 0)
      return;
    slots = want;
    n = count;
    for (int p = AHEAD; p < AHEAD + 16 && p < left; ++p) {
      const std::uint16_t* next = base + static_cast<std::ptrdiff_t>(want[p]) * head_size;
      for (int e = 0; e < head_size; e += 32) __builtin_prefetch(next + e, 0, 3);
    }
    for (int p = 0; p < 16; ++p) {
      float* row = rows + p * head_size;
      if (p >= count) {
        for (int e = 0; e < head_size; e += 16) store(row + e, set1(0.0f));
        continue;
      }
      const std::uint16_t* from = base + static_cast<std::ptrdiff_t>(want[p]) * head_size;
      for (int e = 0; e < head_size; e += 16) store(row + e, load_f16(from + e));
    }
  }
};

// For HEADS heads at once (weights and out E and SPLIT apart):
// out[0..16 VECTORS) += sum over p of weights[p] * rows[p], p in order.
template <int HEADS, int VECTORS>
inline void weighted_sum(const float* weights, int n, const float* rows, int head_size, float* out) {
  F acc[HEADS][VECTORS];
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) acc[h][v] = load(out + h * head_size + 16 * v);
  for (int p = 0; p < n; ++p) {
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) {
      const F w = set1(weights[h * SPLIT + p]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        acc[h][v] = fma(w, load(rows + p * head_size + 16 * v), acc[h][v]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(out + h * head_size + 16 * v, acc[h][v]);
}

template <int HEADS>
inline void weighted_sums(const float* weights, int n, const float* rows, int head_size, float* out) {
  int e = 0;
  for (; e + 64 <= head_size; e += 64)
    weighted_sum<HEADS, 4>(weights, n, rows + e, head_size, out + e);
  for (; e < head_size; e += 16)
    weighted_sum<HEADS, 1>(weights, n, rows + e, head_size, out + e);
}

// scores[p] = q . key p, for sixteen keys.
inline void score16(const float* q, const float* rows, int head_size, float* scores) {
  F acc[16];
#pragma GCC unroll 16
  for (int p = 0; p < 16; ++p) acc[p] = set1(0.0f);
  for (int e = 0; e < head_size; e += 16) {
    const F x = load(q + e);
#pragma GCC unroll 16
    for (int p = 0; p < 16; ++p) acc[p] = fma(x, load(rows + p * head_size + e), acc[p]);
  }
  store(scores, reduce_add16(acc));
}

// Turns n scores (room for the next multiple of 16) into exp(score - max).
inline void exponentiate(float* s, int n, float& max_out, float& sum_out) {
  for (int p = n; p % 16 != 0; ++p) s[p] = -__builtin_inff();
  F top = set1(-__builtin_inff());
  for (int p = 0; p < n; p += 16) top = max(load(s + p), top);
  const float largest = reduce_max(top);
  F sum = set1(0.0f);
  for (int p = 0; p < n; p += 16) {
    store(s + p, exp(sub(load(s + p), set1(largest))));
    for (int i = n - p; i < 16; ++i) s[p + i] = 0.0f;  // exp clamps: padding must weigh nothing
    sum = add(sum, load(s + p));
  }
  max_out = largest;
  sum_out = reduce_add(sum);
}

void attend_split(const SplitJob& job) {
  const int E = job.head_size, G = job.n_heads;
  float* rows = job.scratch + static_cast<std::ptrdiff_t>(ATTEND_ROWS) * G * SPLIT;
  int most = 0;
  for (int r = 0; r < job.n_rows; ++r) most = job.row[r].n > most ? job.row[r].n : most;
  const auto scores = [&](int r, int g) { return job.scratch + static_cast<std::ptrdiff_t>(r * G + g) * SPLIT; };
  Gathered keys{job.keys, E, rows}, values{job.values, E, rows};
  for (int p0 = 0; p0 < most; p0 += 16) {
    for (int r = job.n_rows - 1; r >= 0; --r) {  // of a chain, the last row has the most keys
      const SplitJob::Row& row = job.row[r];
      if (p0 >= row.n) continue;
      keys.get(row.slots + p0, row.n - p0 < 16 ? row.n - p0 : 16, row.n - p0);
      for (int g = 0; g < G; ++g) score16(row.q + g * E, rows, E, scores(r, g) + p0);
    }
  }
  for (int r = 0; r < job.n_rows; ++r) {
    const SplitJob::Row& row = job.row[r];
    for (int g = 0; g < G; ++g) exponentiate(scores(r, g), row.n, row.max[g], row.sum[g]);
    for (int e = 0; e < G * E; e += 16) store(row.out + e, set1(0.0f));
  }
  for (int p0 = 0; p0 < most; p0 += 16) {
    for (int r = job.n_rows - 1; r >= 0; --r) {
      const SplitJob::Row& row = job.row[r];
      if (p0 >= row.n) continue;
      const int here = row.n - p0 < 16 ? row.n - p0 : 16;
      values.get(row.slots + p0, here, row.n - p0);
      int g = 0;
      for (; g + 4 <= G; g += 4) weighted_sums<4>(scores(r, g) + p0, here, rows, E, row.out + g * E);
      for (; g + 2 <= G; g += 2) weighted_sums<2>(scores(r, g) + p0, here, rows, E, row.out + g * E);
      for (; g < G; ++g) weighted_sums<1>(scores(r, g) + p0, here, rows, E, row.out + g * E);
    }
  }
}

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
