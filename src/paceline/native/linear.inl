// Matrix product of a tile of 16 outputs with a block of rows. Included by kernels.inl, on the
// types of LANES outputs: a tile whose outputs are more than that is worked on part by part.
//
// Per output and row: for each group of 32 inputs in order, an exact integer dot product, then
//   acc = fma(float(dot), scale * d, acc); acc = fma(minimum, ds, acc)
// and where each half of a group has its own scale
//   acc = fma(fma(float(dot1), scale1, float(dot0) * scale0), d, acc)
// so the result depends on nothing but that row, that output and the order of groups.

template <int FORMAT>
struct Scales {
  F s[2];
  F m;
};

// work(0) ... work(N - 1), unrolled so early that arrays indexed by it become registers.
template <int N, class Work>
ALWAYS_INLINE void each(Work&& work) {
  if constexpr (N > 1) each<N - 1>(work);
  if constexpr (N > 0) work(N - 1);
}
#define INLINED __attribute__((always_inline))
// work(row, part)
template <int R, int P, class Work>
ALWAYS_INLINE void each(Work&& work) {
  each<R>([&](int r) INLINED { each<P>([&](int p) INLINED { work(r, p); }); });
}

constexpr int PARTS = TILE / LANES, PART_BYTES = 4 * LANES;  // bytes of each vector of a group

// factors: of the scales and of the minima
template <int FORMAT>
ALWAYS_INLINE Scales<FORMAT> load_scales(const std::uint8_t* header, int group, int part, const F* factors) {
  constexpr Traits T = traits(FORMAT);
  Scales<FORMAT> r;
  const std::uint8_t* p = header + header_base(FORMAT) + group * header_stride(FORMAT) +
                          part * LANES * (T.super ? 1 : 2);
  if constexpr (!T.super) {
    r.s[0] = load_f16(reinterpret_cast<const std::uint16_t*>(p));
    if constexpr (T.affine) r.m = load_f16(reinterpret_cast<const std::uint16_t*>(p + 32));
  } else if constexpr (T.affine) {
    r.s[0] = mul(load_u8(p), factors[0]);
    r.m = mul(load_u8(p + 16), factors[1]);
  } else {
    r.s[0] = mul(load_s8(p), factors[0]);
    r.s[1] = mul(load_s8(p + 16), factors[0]);
  }
  return r;
}

// Vectors 2j and 2j + 1 of a group.
template <int BITS, int J>
ALWAYS_INLINE void decode(const std::uint8_t* quants, U& w0, U& w1) {
  if constexpr (BITS == 8) {
    w0 = uload(quants + 128 * J);
    w1 = uload(quants + 128 * J + 64);
  } else {
    const U raw = uload(quants + 64 * J);
    w0 = low4(raw);
    w1 = high4(raw);
    if constexpr (BITS == 6) {
      const U high = uload(quants + 256 + 64 * (J / 2));
      w0 = or_pair<(2 * J) % 4>(high, w0);
      w1 = or_pair<(2 * J) % 4 + 1>(high, w1);
    }
  }
}

// Eight inputs of P parts of a tile, `quants` being those of the first.
template <int BITS, int R, int P, int J>
ALWAYS_INLINE void dot_pair(const std::uint8_t* quants, const std::int8_t* q, Dot<BITS> (*dot)[R]) {
  U w0[P], w1[P];
  each<P>([&](int p) INLINED { decode<BITS, J>(quants + p * PART_BYTES, w0[p], w1[p]); });
  each<R, P>([&](int r, int p) INLINED { dot[p][r].eight(w0[p], w1[p], q + r * GROUP + 8 * J); });
}

// One group times R rows; q, d, ds, offset point at the first of them, `acc` at their sums for the
// first of P parts, which lie STRIDE apart.
template <int FORMAT, int R, int P, int STRIDE>
ALWAYS_INLINE void group_rows(const std::uint8_t* quants, const Scales<FORMAT>* scales,
                       const std::int8_t* q, const float* d, const float* ds,
                       const std::int32_t* offset, F* acc) {
  constexpr Traits T = traits(FORMAT);
  constexpr int WHOLE = T.zero == 128 ? 3 : 2;
  Dot<T.bits> dot[P][R];
  if constexpr (T.halves == 2) {
    F half[P][R];
    each<R, P>([&](int r, int p) INLINED { dot[p][r].start(offset[4 * r]); });
    dot_pair<T.bits, R, P, 0>(quants, q, dot);
    dot_pair<T.bits, R, P, 1>(quants, q, dot);
    each<R, P>([&](int r, int p) INLINED {
      half[p][r] = mul(to_float(dot[p][r].total(offset[4 * r])), scales[p].s[0]);
      dot[p][r].start(offset[4 * r + 1]);
    });
    dot_pair<T.bits, R, P, 2>(quants, q, dot);
    dot_pair<T.bits, R, P, 3>(quants, q, dot);
    each<R, P>([&](int r, int p) INLINED {
      F& sum = acc[p * STRIDE + r];
      const F dots = to_float(dot[p][r].total(offset[4 * r + 1]));
      sum = fma(fma(dots, scales[p].s[1], half[p][r]), set1(d[r]), sum);
    });
  } else {
    const auto start = [&](int r) INLINED { return T.affine ? 0 : offset[4 * r + WHOLE]; };
    each<R, P>([&](int r, int p) INLINED { dot[p][r].start(start(r)); });
    dot_pair<T.bits, R, P, 0>(quants, q, dot);
    dot_pair<T.bits, R, P, 1>(quants, q, dot);
    dot_pair<T.bits, R, P, 2>(quants, q, dot);
    dot_pair<T.bits, R, P, 3>(quants, q, dot);
    each<R, P>([&](int r, int p) INLINED {
      F& sum = acc[p * STRIDE + r];
      const F dots = to_float(dot[p][r].total(start(r)));
      sum = fma(dots, mul(scales[p].s[0], set1(d[r])), sum);
      if constexpr (T.affine) sum = fma(scales[p].m, set1(ds[r]), sum);
    });
  }
}

// One group times R rows, from part PART of the tile on: as many parts at once as registers can
// hold integer sums of, eight in all.
template <int FORMAT, int R, int PART>
ALWAYS_INLINE void part_rows(const std::uint8_t* header, int group, const std::uint8_t* quants,
                             const F (*factors)[2], const std::int8_t* q, const float* d,
                             const float* ds, const std::int32_t* offset, F (*acc)[R]) {
  constexpr int P = R * PARTS <= 8 ? PARTS : 1;
  constexpr int FIRST = R <= 8 ? R : (R + 1) / 2, REST = R - FIRST;
  Scales<FORMAT> scales[P];
  each<P>([&](int p) INLINED {
    scales[p] = load_scales<FORMAT>(header, group, PART + p, factors[PART + p]);
  });
  const std::uint8_t* at = quants + PART * PART_BYTES;
  group_rows<FORMAT, FIRST, P, R>(at, scales, q, d, ds, offset, acc[PART]);
  if constexpr (REST > 0)
    group_rows<FORMAT, REST, P, R>(at, scales, q + FIRST * GROUP, d + FIRST, ds + FIRST,
                                   traits(FORMAT).affine ? nullptr : offset + 4 * FIRST,
                                   acc[PART] + FIRST);
  if constexpr (PART + P < PARTS) {
    // Not the same codes, for all that GCC knows: it would keep them, and spill them.
    __asm__("" : "+r"(q), "+r"(d), "+r"(ds));
    part_rows<FORMAT, R, PART + P>(header, group, quants, factors, q, d, ds, offset, acc);
  }
}

// One tile times one block of R rows; q, d, ds, offset point at the block's first row. Where there
// are registers enough, up to sixteen sums stay in them while a group goes by; integer sums exist
// for eight rows at a time.
template <int FORMAT, int R>
ALWAYS_INLINE void tile_block(const std::uint8_t* tile, int groups, const std::int8_t* q, const float* d,
                       const float* ds, const std::int32_t* offset, F (*acc)[R]) {
  constexpr Traits T = traits(FORMAT);
  constexpr int QB = quant_bytes(FORMAT);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int part = 0; part < PARTS; ++part) acc[part][r] = set1(0.0f);
  const std::uint8_t* header = tile;
  for (int g0 = 0; g0 < groups; g0 += SUPER_GROUPS) {
    const int n = groups - g0 < SUPER_GROUPS ? groups - g0 : SUPER_GROUPS;
    const std::uint8_t* quants = header + header_bytes(FORMAT, n);
    F factors[PARTS][2];  // of the scales and of the minima
    for (int part = 0; part < PARTS; ++part) {
      factors[part][0] = factors[part][1] = set1(0.0f);
      if constexpr (T.super) {
        const auto* f = reinterpret_cast<const std::uint16_t*>(header) + part * LANES;
        factors[part][0] = load_f16(f);
        if constexpr (T.affine) factors[part][1] = sub(set1(0.0f), load_f16(f + TILE));
      }
    }
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 8
      for (int b = 0; b < QB; b += 64) {
        __builtin_prefetch(quants + FAR_PREFETCH + b, 0, 2);
        __builtin_prefetch(quants + NEAR_PREFETCH + b, 0, 3);
      }
      part_rows<FORMAT, R, 0>(header, i, quants, factors, q, d, ds, offset, acc);
      quants += QB;
      q += R * GROUP;
      d += R;
      ds += R;
      if constexpr (!T.affine) offset += 4 * R;
    }
    header = quants;
  }
}

// A part of a dense tile: inputs in order, one fused multiply-add each.
template <int FORMAT, int R>
inline void dense_block(const std::uint8_t* tile, int n_in, const float* x, int part, F* acc) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = set1(0.0f);
  for (int k = 0; k < n_in; ++k) {
    const int at = TILE * k + LANES * part;
    F w;
    if constexpr (FORMAT == DENSE_BF16)
      w = load_bf16(reinterpret_cast<const std::uint16_t*>(tile) + at);
    else if constexpr (FORMAT == DENSE_F16)
      w = load_f16(reinterpret_cast<const std::uint16_t*>(tile) + at);
    else
      w = load(reinterpret_cast<const float*>(tile) + at);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = fma(w, set1(x[static_cast<std::ptrdiff_t>(r) * n_in + k]), acc[r]);
  }
}

// The first `left` of LANES outputs.
__attribute__((noinline)) void write_part(float* out, F acc, int left, bool add_to) {
  if (left >= LANES) {
    store(out, add_to ? add(load(out), acc) : acc);
    return;
  }
  float t[LANES];
  store(t, acc);
  for (int i = 0; i < left; ++i) out[i] = add_to ? out[i] + t[i] : t[i];
}

template <int FORMAT, int R>
inline void tile_rows(const Linear& w, const Act& a, int tile, int row, float* out,
                      std::ptrdiff_t stride, bool add_to) {
  const std::uint8_t* bytes = w.data + static_cast<std::size_t>(tile) * w.tile_bytes;
  F acc[PARTS][R];
  const std::ptrdiff_t first = row;
  if constexpr (is_dense(FORMAT)) {
    for (int part = 0; part < PARTS; ++part)
      dense_block<FORMAT, R>(bytes, w.n_in, a.f + first * w.n_in, part, acc[part]);
  } else {
    const int groups = w.n_in / GROUP;
    tile_block<FORMAT, R>(bytes, groups, a.q + first * w.n_in, a.d + first * groups,
                          a.ds + first * groups,
                          traits(FORMAT).affine ? nullptr : a.offset + 4 * first * groups, acc);
  }
  const int left = w.n_out - tile * TILE;
  for (int part = 0; part < PARTS; ++part) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      write_part(out + (first + r) * stride + LANES * part, acc[part][r], left - LANES * part, add_to);
  }
}

template <int FORMAT>
void linear_format(const Linear& w, const Act& a, int tile0, int tile1, float* out,
                   std::ptrdiff_t stride, bool add_to) {
  for (int tile = tile0; tile < tile1; ++tile, out += TILE) {
    for (int b = 0; b < a.n_blocks; ++b) {
      const int row = block_start(a.rows, a.n_blocks, b);
      const int rows = block_start(a.rows, a.n_blocks, b + 1) - row;
      switch (rows) {
        case 1: tile_rows<FORMAT, 1>(w, a, tile, row, out, stride, add_to); break;
        case 2: tile_rows<FORMAT, 2>(w, a, tile, row, out, stride, add_to); break;
        case 3: tile_rows<FORMAT, 3>(w, a, tile, row, out, stride, add_to); break;
        case 4: tile_rows<FORMAT, 4>(w, a, tile, row, out, stride, add_to); break;
#if PACELINE_BLOCK > 4
        case 5: tile_rows<FORMAT, 5>(w, a, tile, row, out, stride, add_to); break;
        case 6: tile_rows<FORMAT, 6>(w, a, tile, row, out, stride, add_to); break;
        case 7: tile_rows<FORMAT, 7>(w, a, tile, row, out, stride, add_to); break;
        case 8: tile_rows<FORMAT, 8>(w, a, tile, row, out, stride, add_to); break;
#endif
#if PACELINE_BLOCK > 8
        case 9: tile_rows<FORMAT, 9>(w, a, tile, row, out, stride, add_to); break;
        case 10: tile_rows<FORMAT, 10>(w, a, tile, row, out, stride, add_to); break;
        case 11: tile_rows<FORMAT, 11>(w, a, tile, row, out, stride, add_to); break;
        case 12: tile_rows<FORMAT, 12>(w, a, tile, row, out, stride, add_to); break;
        case 13: tile_rows<FORMAT, 13>(w, a, tile, row, out, stride, add_to); break;
        case 14: tile_rows<FORMAT, 14>(w, a, tile, row, out, stride, add_to); break;
        case 15: tile_rows<FORMAT, 15>(w, a, tile, row, out, stride, add_to); break;
        case 16: tile_rows<FORMAT, 16>(w, a, tile, row, out, stride, add_to); break;
#endif
        default: break;
      }
    }
  }
}

void linear(const Linear& w, const Act& a, int tile0, int tile1, float* out, std::ptrdiff_t stride,
            bool add_to) {
  switch (w.format) {
    case Q4_AFFINE: return linear_format<Q4_AFFINE>(w, a, tile0, tile1, out, stride, add_to);
    case Q4_SUPER: return linear_format<Q4_SUPER>(w, a, tile0, tile1, out, stride, add_to);
    case Q6_SYM: return linear_format<Q6_SYM>(w, a, tile0, tile1, out, stride, add_to);
    case Q6_AFFINE: return linear_format<Q6_AFFINE>(w, a, tile0, tile1, out, stride, add_to);
    case Q6_SUPER: return linear_format<Q6_SUPER>(w, a, tile0, tile1, out, stride, add_to);
    case Q6_SUPER16: return linear_format<Q6_SUPER16>(w, a, tile0, tile1, out, stride, add_to);
    case Q8_SYM: return linear_format<Q8_SYM>(w, a, tile0, tile1, out, stride, add_to);
    case DENSE_BF16: return linear_format<DENSE_BF16>(w, a, tile0, tile1, out, stride, add_to);
    case DENSE_F16: return linear_format<DENSE_F16>(w, a, tile0, tile1, out, stride, add_to);
    default: return linear_format<DENSE_F32>(w, a, tile0, tile1, out, stride, add_to);
  }
}
