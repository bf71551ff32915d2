// Attention of a few queries over one split of keys. Included by kernels.inl.
//
// Keys lie in blocks of 16 slots, [E][16], so that a vector holds one component of sixteen keys;
// values lie slot by slot, [E]. Per query: scores with even and odd components summed apart, in
// order; then the exponentials; then the values, in order of position. Queries that share keys
// share the work of loading them, which changes nothing in any of their results.

// Queries at once, as many as the registers hold.
constexpr int SCORE_QUERIES = PACELINE_BLOCK > 4 ? 12 : 2, VALUE_QUERIES = PACELINE_BLOCK > 4 ? 6 : 2;

// Up to sixteen keys as [E, 16]: in the cache itself where their slots are one whole block's
// beginning, else gathered into `room`.
inline const std::uint16_t* key_block(const std::uint16_t* keys, const std::int32_t* slots, int n,
                                      int head_size, std::uint16_t* room) {
  bool run = slots[0] % KEY_LANES == 0;
  for (int i = 1; i < n && run; ++i) run = slots[i] == slots[0] + i;
  if (run) return keys + static_cast<std::ptrdiff_t>(slots[0]) * head_size;
  __builtin_memset(room, 0, sizeof *room * static_cast<std::size_t>(KEY_LANES * head_size));
  for (int i = 0; i < n; ++i) {
    const int lane = slots[i] % KEY_LANES;
    const std::uint16_t* from = keys + static_cast<std::ptrdiff_t>(slots[i] - lane) * head_size + lane;
    for (int e = 0; e < head_size; ++e) room[KEY_LANES * e + i] = from[KEY_LANES * e];
  }
  return room;
}

template <int Q>
ALWAYS_INLINE void score_block(const std::uint16_t* keys, int head_size, const float* const* q,
                               float* const* scores) {
  F even[Q], odd[Q];
#pragma GCC unroll 12
  for (int j = 0; j < Q; ++j) even[j] = odd[j] = set1(0.0f);
  for (int e = 0; e < head_size; e += 2) {
    const F k0 = load_f16(keys + KEY_LANES * e), k1 = load_f16(keys + KEY_LANES * (e + 1));
#pragma GCC unroll 12
    for (int j = 0; j < Q; ++j) {
      even[j] = fma(k0, set1(q[j][e]), even[j]);
      odd[j] = fma(k1, set1(q[j][e + 1]), odd[j]);
    }
  }
#pragma GCC unroll 12
  for (int j = 0; j < Q; ++j) store(scores[j], add(even[j], odd[j]));
}

template <int Q>
void score_blocks(const std::uint16_t* keys, int head_size, int n, const float* const* q,
                  float* const* scores) {
  for (; n >= Q; n -= Q, q += Q, scores += Q) score_block<Q>(keys, head_size, q, scores);
  if constexpr (Q > 1)
    if (n > 0) score_blocks<Q - 1>(keys, head_size, n, q, scores);
}

// out[0, 16 VECTORS) += sum over p of weights[p] * rows[p][first, ...), p in order.
template <int Q, int VECTORS>
ALWAYS_INLINE void value_block(const std::uint16_t* const* rows, int n, int first,
                               const float* const* weights, float* const* out) {
  F acc[Q][VECTORS];
#pragma GCC unroll 6
  for (int j = 0; j < Q; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) acc[j][v] = load(out[j] + first + 16 * v);
  for (int p = 0; p < n; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const F x = load_f16(rows[p] + first + 16 * v);
#pragma GCC unroll 6
      for (int j = 0; j < Q; ++j) acc[j][v] = fma(set1(weights[j][p]), x, acc[j][v]);
    }
  }
#pragma GCC unroll 6
  for (int j = 0; j < Q; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) store(out[j] + first + 16 * v, acc[j][v]);
}

template <int Q>
void value_blocks(const std::uint16_t* const* rows, int n_keys, int head_size, int n,
                  const float* const* weights, float* const* out) {
  for (; n >= Q; n -= Q, weights += Q, out += Q) {
    int e = 0;
    for (; e + 64 <= head_size; e += 64) value_block<Q, 4>(rows, n_keys, e, weights, out);
    for (; e < head_size; e += 16) value_block<Q, 1>(rows, n_keys, e, weights, out);
  }
  if constexpr (Q > 1)
    if (n > 0) value_blocks<Q - 1>(rows, n_keys, head_size, n, weights, out);
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

// The keys [p0, p0 + 16) of row `last`, and the rows down to `first` that ask for no others.
struct Shared {
  int first, n;

  // exact: the rows must want as many of them, too.
  Shared(const SplitJob& job, int last, int p0, bool exact) {
    n = count(job.row[last], p0);
    for (first = last; first > 0; --first) {
      const SplitJob::Row& row = job.row[first - 1];
      const int wants = count(row, p0);
      if (wants <= 0 || wants > n || (exact && wants != n)) break;
      if (__builtin_memcmp(row.slots + p0, job.row[last].slots + p0,
                           sizeof *row.slots * static_cast<std::size_t>(wants)) != 0)
        break;
    }
  }

  static int count(const SplitJob::Row& row, int p0) {
    return row.n - p0 < KEY_LANES ? row.n - p0 : KEY_LANES;
  }
};

// Sixteen positions from `p` on, on their way to the second-level cache: from far ahead, as
// few reads fit into the first level's queue.
inline void prefetch_rows(const std::uint16_t* base, const SplitJob::Row& row, int p, int head_size) {
  for (int i = p; i < p + KEY_LANES && i < row.n; ++i) {
    const std::uint16_t* at = base + static_cast<std::ptrdiff_t>(row.slots[i]) * head_size;
    for (int e = 0; e < head_size; e += 32) __builtin_prefetch(at + e, 0, 2);
  }
}

void attend_split(const SplitJob& job) {
  constexpr int AHEAD = 64;  // keys between a prefetch and their use
  const int E = job.head_size, G = job.n_heads;
  auto* room = reinterpret_cast<std::uint16_t*>(job.scratch + static_cast<std::ptrdiff_t>(ATTEND_ROWS) * G * SPLIT);
  const float* in[ATTEND_ROWS * MAX_GROUP];
  float* out[ATTEND_ROWS * MAX_GROUP];
  const auto scores = [&](int r, int g) { return job.scratch + static_cast<std::ptrdiff_t>(r * G + g) * SPLIT; };
  int most = 0;
  for (int r = 0; r < job.n_rows; ++r) most = job.row[r].n > most ? job.row[r].n : most;
  const SplitJob::Row& longest = job.row[job.n_rows - 1];  // of a chain, the last row

  for (int p = 0; p < AHEAD; p += KEY_LANES) prefetch_rows(job.keys, longest, p, E);
  for (int p0 = 0; p0 < most; p0 += KEY_LANES) {
    prefetch_rows(job.keys, longest, p0 + AHEAD, E);
    prefetch_rows(job.values, longest, p0, E);
    for (int r = job.n_rows - 1; r >= 0; --r) {
      if (job.row[r].n <= p0) continue;
      const Shared keys(job, r, p0, false);
      int n = 0;
      for (int i = keys.first; i <= r; ++i)
        for (int g = 0; g < G; ++g, ++n) {
          in[n] = job.row[i].q + g * E;
          out[n] = scores(i, g) + p0;
        }
      score_blocks<SCORE_QUERIES>(key_block(job.keys, job.row[r].slots + p0, keys.n, E, room), E, n, in, out);
      r = keys.first;
    }
  }
  for (int r = 0; r < job.n_rows; ++r) {
    const SplitJob::Row& row = job.row[r];
    for (int g = 0; g < G; ++g) exponentiate(scores(r, g), row.n, row.max[g], row.sum[g]);
    for (int e = 0; e < G * E; e += 16) store(row.out + e, set1(0.0f));
  }
  for (int p0 = 0; p0 < most; p0 += KEY_LANES) {
    for (int r = job.n_rows - 1; r >= 0; --r) {
      if (job.row[r].n <= p0) continue;
      const Shared values(job, r, p0, true);
      const std::uint16_t* rows[KEY_LANES];
      for (int p = 0; p < values.n; ++p)
        rows[p] = job.values + static_cast<std::ptrdiff_t>(job.row[r].slots[p0 + p]) * E;
      int n = 0;
      for (int i = values.first; i <= r; ++i)
        for (int g = 0; g < G; ++g, ++n) {
          in[n] = scores(i, g) + p0;
          out[n] = job.row[i].out + g * E;
        }
      value_blocks<VALUE_QUERIES>(rows, values.n, E, n, in, out);
      r = values.first;
    }
  }
}
