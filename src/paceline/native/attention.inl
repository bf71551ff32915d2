// Attention of a few queries over one split of keys. Included by kernels.inl.
//
// Keys lie in blocks of 16 slots, [E][16], so that a vector holds one component of sixteen keys;
// values lie slot by slot, [E]. Per query: scores with even and odd components summed apart, in
// order; then the exponentials; then the values, in order of position. Queries that share keys
// share the work of loading them, which changes nothing in any of their results.

// Queries at once, as many as the registers hold.
constexpr int QUERIES = PACELINE_REGISTERS > 16 ? 12 : 2;

// Rows of scores that are exponentiated at once.
constexpr int CHAINS = PACELINE_REGISTERS > 16 ? 4 : 2;

// Vectors of a value that so many queries take at once: their sums fill the registers, too.
constexpr int value_vectors(int queries) { return queries <= 6 ? 4 : 2; }

// Whether sixteen slots follow one another.
inline bool consecutive(const std::int32_t* slots) {
  constexpr std::int32_t COUNT[KEY_LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const I from_first = iadd(iload(slots), iset1(-slots[0]));
  return __builtin_memcmp(&from_first, COUNT, sizeof COUNT) == 0;
}

template <int Q>
struct Count {
  static constexpr int value = Q;
};

// block(Count<q>, at) for n queries from `at` on, Q at once and in the end what is left.
template <int Q, class Block>
void each_block(int n, int at, const Block& block) {
  for (; n >= Q; n -= Q, at += Q) block(Count<Q>{}, at);
  if constexpr (Q > 1)
    if (n > 0) each_block<Q - 1>(n, at, block);
}

// How many of n slots follow one another from the first on.
inline int run_length(const std::int32_t* slots, int n) {
  int i = 0;
  while (i + KEY_LANES <= n && slots[i] == slots[0] + i && consecutive(slots + i)) i += KEY_LANES;
  while (i < n && slots[i] == slots[0] + i) ++i;
  return i;
}

// Up to sixteen keys as [E, 16]: in the cache itself where their slots are one whole block's
// beginning, else gathered into `room`.
inline const std::uint16_t* key_block(const std::uint16_t* keys, const std::int32_t* slots, int n,
                                      int head_size, std::uint16_t* room) {
  if (slots[0] % KEY_LANES == 0 && run_length(slots, n) == n)
    return keys + static_cast<std::ptrdiff_t>(slots[0]) * head_size;
  __builtin_memset(room, 0, sizeof *room * static_cast<std::size_t>(KEY_LANES * head_size));
  for (int i = 0; i < n; ++i) {
    const int lane = slots[i] % KEY_LANES;
    const std::uint16_t* from = keys + static_cast<std::ptrdiff_t>(slots[i] - lane) * head_size + lane;
    for (int e = 0; e < head_size; ++e) room[KEY_LANES * e + i] = from[KEY_LANES * e];
  }
  return room;
}

// Scores of Q queries, [Q, QUERY_STRIDE], with sixteen keys, to [Q, SCORE_STRIDE].
template <int Q>
ALWAYS_INLINE void score_block(const std::uint16_t* keys, int head_size, const float* q, float* scores) {
  F even[Q], odd[Q];
#pragma GCC unroll 12
  for (int j = 0; j < Q; ++j) even[j] = odd[j] = set1(0.0f);
  for (int e = 0; e < head_size; e += 2) {
    const F k0 = load_f16(keys + KEY_LANES * e), k1 = load_f16(keys + KEY_LANES * (e + 1));
#pragma GCC unroll 12
    for (int j = 0; j < Q; ++j) {
      even[j] = fma(k0, set1(q[j * QUERY_STRIDE + e]), even[j]);
      odd[j] = fma(k1, set1(q[j * QUERY_STRIDE + e + 1]), odd[j]);
    }
  }
#pragma GCC unroll 12
  for (int j = 0; j < Q; ++j) store(scores + j * SCORE_STRIDE, add(even[j], odd[j]));
}

// out[j][0, 16 VECTORS) += sum over p of weights[j][p] * values[p], p in order; the n values, of E
// components each, follow one another. fresh: the sums begin with these.
template <int Q, int VECTORS>
ALWAYS_INLINE void value_block(const std::uint16_t* values, int n, int head_size, bool fresh,
                               const float* weights, float* const* out, int first) {
  F acc[Q][VECTORS];
#pragma GCC unroll 12
  for (int j = 0; j < Q; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) acc[j][v] = fresh ? set1(0.0f) : load(out[j] + first + 16 * v);
  values += first;
  for (int p = 0; p < n; ++p, values += head_size) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const F x = load_f16(values + 16 * v);
#pragma GCC unroll 12
      for (int j = 0; j < Q; ++j) acc[j][v] = fma(set1(weights[j * SCORE_STRIDE + p]), x, acc[j][v]);
    }
  }
#pragma GCC unroll 12
  for (int j = 0; j < Q; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) store(out[j] + first + 16 * v, acc[j][v]);
}

// The same for all components.
template <int Q>
ALWAYS_INLINE void value_row(const std::uint16_t* values, int n, int head_size, bool fresh,
                             const float* weights, float* const* out) {
  constexpr int V = value_vectors(Q);
  int e = 0;
  for (; e + 16 * V <= head_size; e += 16 * V) value_block<Q, V>(values, n, head_size, fresh, weights, out, e);
  for (; e < head_size; e += 16) value_block<Q, 1>(values, n, head_size, fresh, weights, out, e);
}

// Turns n scores of each of Q queries (with room for the next multiple of 16) into
// exp(score - max). Several at once, since one alone is a chain of dependent instructions.
template <int Q>
ALWAYS_INLINE void exponentiate(float* scores, int n, float* largest, float* sums) {
  F top[Q], sum[Q];
  const int whole = n / 16 * 16;
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
    for (int p = n; p % 16 != 0; ++p) scores[j * SCORE_STRIDE + p] = -__builtin_inff();
    top[j] = set1(-__builtin_inff());
    sum[j] = set1(0.0f);
  }
  for (int p = 0; p < n; p += 16)
#pragma GCC unroll 4
    for (int j = 0; j < Q; ++j) top[j] = max(load(scores + j * SCORE_STRIDE + p), top[j]);
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
    largest[j] = reduce_max(top[j]);
    top[j] = set1(largest[j]);
  }
  for (int p = 0; p < whole; p += 16)
#pragma GCC unroll 4
    for (int j = 0; j < Q; ++j) {
      float* at = scores + j * SCORE_STRIDE + p;
      const F e = exp(sub(load(at), top[j]));
      store(at, e);
      sum[j] = add(sum[j], e);
    }
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
    float* at = scores + j * SCORE_STRIDE + whole;
    if (whole < n) {
      store(at, exp(sub(load(at), top[j])));
      for (int i = n - whole; i < 16; ++i) at[i] = 0.0f;  // exp clamps: padding must weigh nothing
      sum[j] = add(sum[j], load(at));
    }
    sums[j] = reduce_add(sum[j]);
  }
}

// The keys [p0, p0 + 16) of row `last`, and the rows down to `first` that ask for no others.
struct Shared {
  int first, n;

  Shared(int first_row, int n_keys) : first(first_row), n(n_keys) {}
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

// Positions [p, p + 16) of one row, on their way to the second-level cache: from far ahead, as
// few reads fit into the first level's queue.
inline void prefetch_rows(const std::uint16_t* base, const SplitJob::Row& row, int p, int head_size) {
  for (int i = p; i < p + KEY_LANES && i < row.n;) {
    const int n = run_length(row.slots + i, (row.n < p + KEY_LANES ? row.n : p + KEY_LANES) - i);
    const std::uint16_t* at = base + static_cast<std::ptrdiff_t>(row.slots[i]) * head_size;
    for (int e = 0; e < n * head_size; e += 32) __builtin_prefetch(at + e, 0, 2);
    i += n;
  }
}

// Whole sixteens of positions, from the first on, that all rows ask for alike.
inline int common_keys(const SplitJob& job) {
  const SplitJob::Row& last = job.row[job.n_rows - 1];
  int n = last.n;
  for (int r = 0; r < job.n_rows - 1; ++r) {
    const SplitJob::Row& row = job.row[r];
    n = row.n < n ? row.n : n;
    if (row.slots == last.slots) continue;
    int same = 0;
    while (same + KEY_LANES <= n && __builtin_memcmp(row.slots + same, last.slots + same, sizeof *row.slots * KEY_LANES) == 0)
      same += KEY_LANES;
    n = same;
  }
  return n / KEY_LANES * KEY_LANES;
}

void attend_split(const SplitJob& job) {
  constexpr int AHEAD = 64;  // keys between a prefetch and their use
  const int E = job.head_size, G = job.n_heads, n_rows = job.n_rows;
  float* scores = job.scratch;  // [n_rows, G, SCORE_STRIDE]
  float* queries = scores + static_cast<std::ptrdiff_t>(n_rows) * G * SCORE_STRIDE;
  auto* room = reinterpret_cast<std::uint16_t*>(queries + static_cast<std::ptrdiff_t>(n_rows) * G * QUERY_STRIDE);
  float* out[ATTEND_ROWS * MAX_GROUP];
  int most = 0;
  for (int r = 0; r < n_rows; ++r) {
    most = job.row[r].n > most ? job.row[r].n : most;
    for (int g = 0; g < G; ++g) {
      out[r * G + g] = job.row[r].out + g * E;
      for (int e = 0; e < E; e += 16) store(queries + (r * G + g) * QUERY_STRIDE + e, load(job.row[r].q + g * E + e));
    }
  }
  const SplitJob::Row& longest = job.row[n_rows - 1];  // of a chain, the last row
  const int common = common_keys(job);

  for (int p = 0; p < AHEAD; p += KEY_LANES) prefetch_rows(job.keys, longest, p, E);
  for (int p0 = 0; p0 < most; p0 += KEY_LANES) {
    prefetch_rows(job.keys, longest, p0 + AHEAD, E);
    prefetch_rows(job.values, longest, p0, E);
    for (int r = n_rows - 1; r >= 0; --r) {
      if (job.row[r].n <= p0) continue;
      const Shared keys = p0 < common ? Shared{0, KEY_LANES} : Shared(job, r, p0, false);
      const int first = keys.first * G;
      const std::uint16_t* block = key_block(job.keys, job.row[r].slots + p0, keys.n, E, room);
      each_block<QUERIES>((r + 1) * G - first, first, [&](auto q, int at) {
        score_block<q.value>(block, E, queries + at * QUERY_STRIDE, scores + at * SCORE_STRIDE + p0);
      });
      r = keys.first;
    }
  }
  for (int r = 0; r < n_rows; ++r)
    each_block<CHAINS>(G, 0, [&](auto q, int g) {
      exponentiate<q.value>(scores + (r * G + g) * SCORE_STRIDE, job.row[r].n, job.row[r].max + g, job.row[r].sum + g);
    });
  const auto add_values = [&](int first_row, int last_row, int p0, int n) {
    const std::int32_t* slots = job.row[last_row].slots;
    for (int p = p0; p < p0 + n;) {
      const int run = run_length(slots + p, p0 + n - p);
      const std::uint16_t* values = job.values + static_cast<std::ptrdiff_t>(slots[p]) * E;
      each_block<QUERIES>((last_row + 1 - first_row) * G, first_row * G, [&](auto q, int at) {
        value_row<q.value>(values, run, E, p == 0, scores + at * SCORE_STRIDE + p, out + at);
      });
      p += run;
    }
  };
  add_values(0, n_rows - 1, 0, common);
  for (int p0 = common; p0 < most; p0 += KEY_LANES) {
    for (int r = n_rows - 1; r >= 0; --r) {
      if (job.row[r].n <= p0) continue;
      const Shared values(job, r, p0, true);
      add_values(values.first, r, p0, values.n);
      r = values.first;
    }
  }
}
