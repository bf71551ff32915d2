// Matrix product of a tile of 16 outputs with a block of rows. Included by kernels.inl.
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

template <int FORMAT>
ALWAYS_INLINE Scales<FORMAT> load_scales(const std::uint8_t* header, int group, F factor, F min_factor) {
  constexpr Traits T = traits(FORMAT);
  Scales<FORMAT> r;
  const std::uint8_t* p = header + header_base(FORMAT) + group * header_stride(FORMAT);
  if constexpr (!T.super) {
    r.s[0] = load_f16(reinterpret_cast<const std::uint16_t*>(p));
    if constexpr (T.affine) r.m = load_f16(reinterpret_cast<const std::uint16_t*>(p + 32));
  } else if constexpr (T.affine) {
    r.s[0] = mul(load_u8(p), factor);
    r.m = mul(load_u8(p + 16), min_factor);
  } else {
    r.s[0] = mul(load_s8(p), factor);
    r.s[1] = mul(load_s8(p + 16), factor);
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

template <int FORMAT, int R, int J>
ALWAYS_INLINE void dot_pair(const std::uint8_t* quants, const std::int8_t* q, I* dot) {
  U w0, w1;
  decode<traits(FORMAT).bits, J>(quants, w0, w1);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    dot[r] = dot4<traits(FORMAT).bits>(dot[r], w0, q + r * GROUP + 8 * J);
    dot[r] = dot4<traits(FORMAT).bits>(dot[r], w1, q + r * GROUP + 8 * J + 4);
  }
}

// One group times R rows; q, d, ds, offset point at the first of them.
template <int FORMAT, int R>
ALWAYS_INLINE void group_rows(const std::uint8_t* quants, const Scales<FORMAT>& scales,
                       const std::int8_t* q, const float* d, const float* ds,
                       const std::int32_t* offset, F* acc) {
  constexpr Traits T = traits(FORMAT);
  I dot[R];
  if constexpr (T.halves == 2) {
    F half[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) dot[r] = iset1(offset[4 * r]);
    dot_pair<FORMAT, R, 0>(quants, q, dot);
    dot_pair<FORMAT, R, 1>(quants, q, dot);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      half[r] = mul(to_float(dot[r]), scales.s[0]);
      dot[r] = iset1(offset[4 * r + 1]);
    }
    dot_pair<FORMAT, R, 2>(quants, q, dot);
    dot_pair<FORMAT, R, 3>(quants, q, dot);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      acc[r] = fma(fma(to_float(dot[r]), scales.s[1], half[r]), set1(d[r]), acc[r]);
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) dot[r] = iset1(T.affine ? 0 : offset[4 * r + (T.zero == 128 ? 3 : 2)]);
    dot_pair<FORMAT, R, 0>(quants, q, dot);
    dot_pair<FORMAT, R, 1>(quants, q, dot);
    dot_pair<FORMAT, R, 2>(quants, q, dot);
    dot_pair<FORMAT, R, 3>(quants, q, dot);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      acc[r] = fma(to_float(dot[r]), mul(scales.s[0], set1(d[r])), acc[r]);
    if constexpr (T.affine) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r] = fma(scales.m, set1(ds[r]), acc[r]);
    }
  }
}

// One tile times one block of R rows; q, d, ds, offset point at the block's first row. Up to
// sixteen sums stay in registers while a group goes by; integer sums exist for eight at a time.
template <int FORMAT, int R>
ALWAYS_INLINE void tile_block(const std::uint8_t* tile, int groups, const std::int8_t* q, const float* d,
                       const float* ds, const std::int32_t* offset, F* acc) {
  constexpr Traits T = traits(FORMAT);
  constexpr int QB = quant_bytes(FORMAT);
  constexpr int FIRST = R <= 8 ? R : (R + 1) / 2, REST = R - FIRST;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = set1(0.0f);
  const std::uint8_t* header = tile;
  for (int g0 = 0; g0 < groups; g0 += SUPER_GROUPS) {
    const int n = groups - g0 < SUPER_GROUPS ? groups - g0 : SUPER_GROUPS;
    const std::uint8_t* quants = header + header_bytes(FORMAT, n);
    F factor = set1(0.0f), min_factor = factor;
    if constexpr (T.super) {
      factor = load_f16(reinterpret_cast<const std::uint16_t*>(header));
      if constexpr (T.affine)
        min_factor = sub(set1(0.0f), load_f16(reinterpret_cast<const std::uint16_t*>(header + 32)));
    }
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 8
      for (int b = 0; b < QB; b += 64) {
        __builtin_prefetch(quants + FAR_PREFETCH + b, 0, 2);
        __builtin_prefetch(quants + NEAR_PREFETCH + b, 0, 3);
      }
      const Scales<FORMAT> scales = load_scales<FORMAT>(header, i, factor, min_factor);
      group_rows<FORMAT, FIRST>(quants, scales, q, d, ds, offset, acc);
      if constexpr (REST > 0)
        group_rows<FORMAT, REST>(quants, scales, q + FIRST * GROUP, d + FIRST, ds + FIRST,
                                 T.affine ? nullptr : offset + 4 * FIRST, acc + FIRST);
      quants += QB;
      q += R * GROUP;
      d += R;
      ds += R;
      if constexpr (!T.affine) offset += 4 * R;
    }
    header = quants;
  }
}

// A dense tile: inputs in order, one fused multiply-add each.
template <int FORMAT, int R>
inline void dense_block(const std::uint8_t* tile, int n_in, const float* x, F* acc) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = set1(0.0f);
  for (int k = 0; k < n_in; ++k) {
    F w;
    if constexpr (FORMAT == DENSE_BF16)
      w = load_bf16(reinterpret_cast<const std::uint16_t*>(tile) + 16 * k);
    else if constexpr (FORMAT == DENSE_F16)
      w = load_f16(reinterpret_cast<const std::uint16_t*>(tile) + 16 * k);
    else
      w = load(reinterpret_cast<const float*>(tile) + 16 * k);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = fma(w, set1(x[static_cast<std::ptrdiff_t>(r) * n_in + k]), acc[r]);
  }
}

__attribute__((noinline)) void write_tile(float* out, F acc, int lanes, bool add_to) {
  if (lanes == TILE) {
    store(out, add_to ? add(load(out), acc) : acc);
    return;
  }
  float t[TILE];
  store(t, acc);
  for (int i = 0; i < lanes; ++i) out[i] = add_to ? out[i] + t[i] : t[i];
}

template <int FORMAT, int R>
inline void tile_rows(const Linear& w, const Act& a, int tile, int row, float* out,
                      std::ptrdiff_t stride, bool add_to) {
  const std::uint8_t* bytes = w.data + static_cast<std::size_t>(tile) * w.tile_bytes;
  F acc[R];
  const std::ptrdiff_t first = row;
  if constexpr (is_dense(FORMAT)) {
    dense_block<FORMAT, R>(bytes, w.n_in, a.f + first * w.n_in, acc);
  } else {
    const int groups = w.n_in / GROUP;
    tile_block<FORMAT, R>(bytes, groups, a.q + first * w.n_in, a.d + first * groups,
                          a.ds + first * groups,
                          traits(FORMAT).affine ? nullptr : a.offset + 4 * first * groups, acc);
  }
  const int left = w.n_out - tile * TILE;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    write_tile(out + (first + r) * stride, acc[r], left < TILE ? left : TILE, add_to);
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
