// Sixteen lanes as two 256-bit registers.
// Included inside an anonymous namespace. Same operations as simd_avx512.h, bit for bit.
struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct U { __m256i a, b; };

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F set1(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F rint(F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 pow2_half(__m256 n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
inline F pow2(F n) { return {pow2_half(n.a), pow2_half(n.b)}; }
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline F load_f16(const std::uint16_t* p) {
  return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
}
inline void store_f16(std::uint16_t* p, F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, mode));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, mode));
}
inline void store_s8(std::int8_t* p, F x) {
  const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  const __m256i o = _mm256_permute4x64_epi64(w, 0xD8);  // packs works inside 128-bit halves
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(o), _mm256_extracti128_si256(o, 1)));
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
inline float reduce_add(F x) {
  const __m256 s8 = _mm256_add_ps(x.a, x.b);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
inline float reduce_max(F x) {
  const __m256 s8 = _mm256_max_ps(x.a, x.b);
  const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
}
inline F reduce_add16(const F* x) {
  alignas(32) float out[16];
  for (int i = 0; i < 16; ++i) out[i] = reduce_add(x[i]);
  return load(out);
}
inline F reduce_max16(const F* x) {
  alignas(32) float out[16];
  for (int i = 0; i < 16; ++i) out[i] = reduce_max(x[i]);
  return load(out);
}

inline I iload(const std::int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline I iset1(std::int32_t x) { const __m256i v = _mm256_set1_epi32(x); return {v, v}; }
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline U uload(const std::uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
