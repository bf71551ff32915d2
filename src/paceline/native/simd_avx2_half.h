// Eight lanes as one 256-bit register: what linear.inl needs, for half a tile at a time, so that
// eight rows' sums fit into sixteen registers. VNNI is used when the compiler flags allow it.
// Included inside a namespace of its own, whose names hide those of simd_avx2.h.
constexpr int LANES = 8;
struct F { __m256 v; };
struct I { __m256i v; };
struct U { __m256i v; };  // 32 bytes

inline F load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.v); }
inline F set1(float x) { return {_mm256_set1_ps(x)}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.v, y.v)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.v, y.v)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.v, y.v)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.v, y.v, z.v)}; }
inline __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline F load_f16(const std::uint16_t* p) { return {_mm256_cvtph_ps(load128(p))}; }
inline F load_bf16(const std::uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16))};
}
inline F load_u8(const std::uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(p)))};
}
inline F load_s8(const std::uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(p)))};
}
inline I iset1(std::int32_t x) { return {_mm256_set1_epi32(x)}; }
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.v, y.v)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline U uload(const std::uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline U low4(U x) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(0x0f))}; }
inline U high4(U x) {
  return {_mm256_and_si256(_mm256_srli_epi16(x.v, 4), _mm256_set1_epi8(0x0f))};
}
template <int C>
inline U or_pair(U x, U y) {
  __m256i s = x.v;
  if constexpr (C == 0) s = _mm256_slli_epi16(s, 4);
  if constexpr (C == 1) s = _mm256_slli_epi16(s, 2);
  if constexpr (C == 3) s = _mm256_srli_epi16(s, 2);
  return {_mm256_or_si256(_mm256_and_si256(s, _mm256_set1_epi8(0x30)), y.v)};
}
inline __m256i four_codes(const std::int8_t* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

// The dot products of eight outputs with a group of one row, see simd_avx512.h.
#ifdef __AVXVNNI__
template <int BITS>
struct Dot {
  I sum;
  inline void start(std::int32_t offset) { sum = iset1(offset); }
  inline void eight(U w0, U w1, const std::int8_t* p) {
    sum.v = _mm256_dpbusd_avx_epi32(sum.v, w0.v, four_codes(p));
    sum.v = _mm256_dpbusd_avx_epi32(sum.v, w1.v, four_codes(p + 4));
  }
  inline I total(std::int32_t) const { return sum; }
};
#else
// Sums of neighbours, times a small number.
template <int BY>
inline I widen(__m256i pairs) {
  return {_mm256_madd_epi16(pairs, _mm256_set1_epi16(BY))};
}
// GCC moves all sums of a group behind all of its products, and spills those. This keeps one here.
inline void here(__m256i& x) { __asm__("" : "+x"(x)); }

// Products are added in 16 bits as long as they fit: to widen them is as dear as to multiply.
template <int BITS>
struct Dot;
template <>
struct Dot<4> {  // a whole group: 16 * 15 * 128 < 2^15
  __m256i pairs;
  inline void start(std::int32_t) { pairs = _mm256_setzero_si256(); }
  inline void eight(U w0, U w1, const std::int8_t* p) {
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w0.v, four_codes(p)));
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w1.v, four_codes(p + 4)));
    here(pairs);
  }
  inline I total(std::int32_t offset) const { return iadd(widen<1>(pairs), iset1(offset)); }
};
template <>
struct Dot<6> {  // eight inputs: 4 * 63 * 128 < 2^15
  I sum;
  inline void start(std::int32_t offset) { sum = iset1(offset); }
  inline void eight(U w0, U w1, const std::int8_t* p) {
    sum = iadd(sum, widen<1>(_mm256_add_epi16(_mm256_maddubs_epi16(w0.v, four_codes(p)),
                                              _mm256_maddubs_epi16(w1.v, four_codes(p + 4)))));
    here(sum.v);
  }
  inline I total(std::int32_t) const { return sum; }
};
template <>
struct Dot<8> {  // the low and the high half of each code apart
  Dot<4> low, high;
  inline void start(std::int32_t offset) {
    low.start(offset);
    high.start(0);
  }
  inline void eight(U w0, U w1, const std::int8_t* p) {
    low.eight(low4(w0), low4(w1), p);
    high.eight(high4(w0), high4(w1), p);
  }
  inline I total(std::int32_t offset) const {
    return iadd(low.total(offset), widen<16>(high.pairs));
  }
};
#endif
