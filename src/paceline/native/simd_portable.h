// Sixteen lanes as plain arrays. Included inside an anonymous namespace. Same operations as
// simd_avx512.h, bit for bit: fma is the fused operation, in hardware or in libm.
constexpr int LANES = 16;
struct F { float v[16]; };
struct I { std::int32_t v[16]; };
struct U { std::uint8_t v[64]; };

template <class Op>
inline F lanes(Op op) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = op(i);
  return r;
}
inline F load(const float* p) { return lanes([=](int i) { return p[i]; }); }
inline void store(float* p, F a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
inline F set1(float x) { return lanes([=](int) { return x; }); }
inline F add(F a, F b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
inline F sub(F a, F b) { return lanes([&](int i) { return a.v[i] - b.v[i]; }); }
inline F mul(F a, F b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
inline F div(F a, F b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
inline F fma(F a, F b, F c) {
  return lanes([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline F max(F a, F b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F min(F a, F b) { return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F abs(F a) { return lanes([&](int i) { return __builtin_fabsf(a.v[i]); }); }
inline F rint(F a) { return lanes([&](int i) { return __builtin_nearbyintf(a.v[i]); }); }
// What the vector conversions give: values out of range and NaN become INT32_MIN.
inline std::int32_t to_int(float x) {
  return x >= -2147483648.0f && x < 2147483648.0f
             ? static_cast<std::int32_t>(__builtin_nearbyintf(x))
             : INT32_MIN;
}
inline F pow2(F n) {
  return lanes([&](int i) {
    return bits_to_float((static_cast<std::uint32_t>(to_int(n.v[i])) + 127u) << 23);
  });
}
inline F load_f16(const std::uint16_t* p) { return lanes([=](int i) { return half_to_float(p[i]); }); }
inline void store_f16(std::uint16_t* p, F a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]);
}
inline F load_bf16(const std::uint16_t* p) { return lanes([=](int i) { return bf16_to_float(p[i]); }); }
inline F load_u8(const std::uint8_t* p) { return lanes([=](int i) { return static_cast<float>(p[i]); }); }
inline F load_s8(const std::uint8_t* p) {
  return lanes([=](int i) { return static_cast<float>(static_cast<std::int8_t>(p[i])); });
}
inline void store_s8(std::int8_t* p, F a) {
  for (int i = 0; i < 16; ++i) {
    const std::int32_t x = to_int(a.v[i]);
    p[i] = static_cast<std::int8_t>(x < -128 ? -128 : x > 127 ? 127 : x);
  }
}
// Sums of the halves of 32 codes; false where one is -128, which only a NaN becomes.
inline bool sum_codes(const std::int8_t* q, std::int32_t& first, std::int32_t& second) {
  bool finite = true;
  first = second = 0;
  for (int i = 0; i < 32; ++i) {
    (i < 16 ? first : second) += q[i];
    finite = finite && q[i] != -128;
  }
  return finite;
}
inline float reduce_add(F a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
inline float reduce_max(F a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}
inline F reduce_add16(const F* a) { return lanes([=](int i) { return reduce_add(a[i]); }); }
inline F reduce_max16(const F* a) { return lanes([=](int i) { return reduce_max(a[i]); }); }

inline I iload(const std::int32_t* p) {
  I r;
  for (int i = 0; i < 16; ++i) r.v[i] = p[i];
  return r;
}
inline I iset1(std::int32_t x) {
  I r;
  for (int i = 0; i < 16; ++i) r.v[i] = x;
  return r;
}
inline I iadd(I a, I b) {
  for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
  return a;
}
inline F to_float(I a) { return lanes([&](int i) { return static_cast<float>(a.v[i]); }); }
inline U uload(const std::uint8_t* p) {
  U r;
  __builtin_memcpy(r.v, p, 64);
  return r;
}
inline U low4(U a) {
  for (int i = 0; i < 64; ++i) a.v[i] = a.v[i] & 0x0f;
  return a;
}
inline U high4(U a) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<std::uint8_t>(a.v[i] >> 4);
  return a;
}
template <int C>
inline U or_pair(U a, U b) {
  for (int i = 0; i < 64; ++i)
    b.v[i] = static_cast<std::uint8_t>(b.v[i] | (((a.v[i] >> (2 * C)) & 3) << 4));
  return b;
}
// The dot products of sixteen outputs with a group of one row, see simd_avx512.h.
template <int BITS>
struct Dot {
  I sum;
  inline void start(std::int32_t offset) { sum = iset1(offset); }
  inline void eight(U w0, U w1, const std::int8_t* p) {
    for (int o = 0; o < 16; ++o)
      for (int b = 0; b < 4; ++b)
        sum.v[o] += w0.v[4 * o + b] * p[b] + w1.v[4 * o + b] * p[4 + b];
  }
  inline I total(std::int32_t) const { return sum; }
};
