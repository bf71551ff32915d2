// Sixteen lanes as one 512-bit register. Included inside an anonymous namespace.
constexpr int LANES = 16;
struct F { __m512 v; };   // 16 floats
struct I { __m512i v; };  // 16 int32
struct U { __m512i v; };  // 64 bytes

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F rint(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for integral n in [-126, 127]
inline F pow2(F n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
inline F load_f16(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_f16(std::uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F load_bf16(const std::uint16_t* p) {
  const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
inline F load_u8(const std::uint8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F load_s8(const std::uint8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Stores 16 integral floats in [-128, 127] as int8.
inline void store_s8(std::int8_t* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// Sums of the halves of 32 codes; false where one is -128, which only a NaN becomes.
inline bool sum_codes(const std::int8_t* q, std::int32_t& first, std::int32_t& second) {
  const __m256i low = _mm256_set1_epi8(-128);
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  alignas(32) std::int64_t sums[4];  // of eight codes + 128
  _mm256_store_si256(reinterpret_cast<__m256i*>(sums),
                     _mm256_sad_epu8(_mm256_xor_si256(v, low), _mm256_setzero_si256()));
  first = static_cast<std::int32_t>(sums[0] + sums[1]) - 16 * 128;
  second = static_cast<std::int32_t>(sums[2] + sums[3]) - 16 * 128;
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(v, low)) == 0;
}
inline float reduce_add(F a) {  // lanes i + (i + 8), then 4, 2, 1
  const __m256 lo = _mm512_castps512_ps256(a.v);
  const __m256 hi = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 s8 = _mm256_add_ps(lo, hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a.v); }

// Sixteen reductions at once: lane p of the result is that of a[p], by the same tree.
template <class Op>
inline F reduce16(const F* a, Op op) {
  __m512 b[8], c[4], d[2];
  for (int i = 0; i < 8; ++i) {  // halves of a[2i] and a[2i+1]
    const __m512 x = a[2 * i].v, y = a[2 * i + 1].v;
    b[i] = op(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 x = b[2 * i], y = b[2 * i + 1];
    c[i] = op(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 x = c[2 * i], y = c[2 * i + 1];
    d[i] = op(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xEE));
  }
  const __m512 s =
      op(_mm512_shuffle_ps(d[0], d[1], 0x88), _mm512_shuffle_ps(d[0], d[1], 0xDD));
  // 128-bit block k, lane j holds vector 4 j + k: transpose the 4 x 4 of lanes.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {_mm512_permutexvar_ps(order, s)};
}
inline F reduce_add16(const F* a) {
  return reduce16(a, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); });
}
inline F reduce_max16(const F* a) {
  return reduce16(a, [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); });
}

inline I iload(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline I iset1(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline U uload(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline U low4(U a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(0x0f))}; }
inline U high4(U a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(0x0f))};
}
// (a shifted so that its bit pair C reaches bits 4 and 5) & 0x30 | b
template <int C>
inline U or_pair(U a, U b) {
  __m512i s = a.v;
  if constexpr (C == 0) s = _mm512_slli_epi16(s, 4);
  if constexpr (C == 1) s = _mm512_slli_epi16(s, 2);
  if constexpr (C == 3) s = _mm512_srli_epi16(s, 2);
  return {_mm512_ternarylogic_epi32(s, _mm512_set1_epi8(0x30), b.v, 0xEA)};
}
inline __m512i four_codes(const std::int8_t* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
// The dot products of sixteen outputs with a group (or half of one) of one row, plus an offset,
// which both start and total are told; exact.
template <int BITS>
struct Dot {
  I sum;
  inline void start(std::int32_t offset) { sum = iset1(offset); }
  // Lane o += sum over b of w0[4 o + b] * p[b] + w1[4 o + b] * p[4 + b]; w is unsigned.
  inline void eight(U w0, U w1, const std::int8_t* p) {
    sum.v = _mm512_dpbusd_epi32(sum.v, w0.v, four_codes(p));
    sum.v = _mm512_dpbusd_epi32(sum.v, w1.v, four_codes(p + 4));
  }
  inline I total(std::int32_t) const { return sum; }
};
