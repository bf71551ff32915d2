#include "tiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "half.h"
#include "layout.h"

namespace paceline {
namespace {

constexpr int SUPER = SUPER_GROUPS * GROUP;

// Up to eight groups of one output row, in the terms of every quantised format.
struct SuperRow {
  int groups = SUPER_GROUPS;
  std::uint8_t q[SUPER];            // unsigned codes
  std::uint16_t scale[SUPER_GROUPS], minimum[SUPER_GROUPS];  // fp16 (not super)
  std::uint16_t factor, min_factor;                         // fp16 (super)
  std::uint8_t code[2 * SUPER_GROUPS];                      // integer scales, `halves` a group
  std::uint8_t min_code[SUPER_GROUPS];
};

std::uint16_t read16(const std::uint8_t* p) {
  std::uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}
void write16(std::uint8_t* p, std::uint16_t v) { std::memcpy(p, &v, 2); }

// Where code k of group `group` is: its byte and shift, and those of its two high bits.
struct Place {
  std::size_t byte;
  int shift;
  std::size_t high_byte;
  int high_shift;
};
Place place(int bits, int lane, int k) {
  const int vector = k / 4, byte = 4 * lane + k % 4;
  if (bits == 8) return {static_cast<std::size_t>(64 * vector + byte), 0, 0, 0};
  return {static_cast<std::size_t>(64 * (vector / 2) + byte), 4 * (vector % 2),
          static_cast<std::size_t>(256 + 64 * (vector / 4) + byte), 2 * (vector % 4)};
}

std::size_t super_offset(int format, int super) {
  return static_cast<std::size_t>(super) *
         static_cast<std::size_t>(header_bytes(format, SUPER_GROUPS) +
                                  SUPER_GROUPS * quant_bytes(format));
}

// Writes one lane of a super-block; the tile's bytes start out as zeros.
void write_super(int format, std::uint8_t* block, int lane, const SuperRow& s) {
  const Traits t = traits(format);
  if (t.super) {
    write16(block + 2 * lane, s.factor);
    if (t.affine) write16(block + 32 + 2 * lane, s.min_factor);
  }
  for (int g = 0; g < s.groups; ++g) {
    std::uint8_t* scales = block + header_base(format) + g * header_stride(format);
    if (!t.super) {
      write16(scales + 2 * lane, s.scale[g]);
      if (t.affine) write16(scales + 32 + 2 * lane, s.minimum[g]);
    } else if (t.affine) {
      scales[lane] = s.code[g];
      scales[16 + lane] = s.min_code[g];
    } else {
      scales[lane] = s.code[2 * g];
      scales[16 + lane] = s.code[2 * g + 1];
    }
    std::uint8_t* quants = block + header_bytes(format, s.groups) + g * quant_bytes(format);
    for (int k = 0; k < GROUP; ++k) {
      const Place p = place(t.bits, lane, k);
      const unsigned code = s.q[g * GROUP + k];
      const unsigned low = t.bits == 8 ? code : code & 15u;
      quants[p.byte] = static_cast<std::uint8_t>(quants[p.byte] | (low << p.shift));
      if (t.bits == 6)
        quants[p.high_byte] =
            static_cast<std::uint8_t>(quants[p.high_byte] | ((code >> 4) << p.high_shift));
    }
  }
}

// Floats of one lane of a super-block of n groups.
void read_super(int format, const std::uint8_t* block, int lane, int n, float* out) {
  const Traits t = traits(format);
  for (int g = 0; g < n; ++g) {
    const std::uint8_t* scales = block + header_base(format) + g * header_stride(format);
    float scale[2], minimum = 0.0f;
    if (!t.super) {
      scale[0] = scale[1] = half_to_float(read16(scales + 2 * lane));
      if (t.affine) minimum = half_to_float(read16(scales + 32 + 2 * lane));
    } else if (t.affine) {
      scale[0] = scale[1] =
          static_cast<float>(scales[lane]) * half_to_float(read16(block + 2 * lane));
      minimum = static_cast<float>(scales[16 + lane]) * -half_to_float(read16(block + 32 + 2 * lane));
    } else {
      const float factor = half_to_float(read16(block + 2 * lane));
      scale[0] = static_cast<float>(static_cast<std::int8_t>(scales[lane])) * factor;
      scale[1] = static_cast<float>(static_cast<std::int8_t>(scales[16 + lane])) * factor;
    }
    const std::uint8_t* quants = block + header_bytes(format, n) + g * quant_bytes(format);
    for (int k = 0; k < GROUP; ++k) {
      const Place p = place(t.bits, lane, k);
      int code = quants[p.byte] >> p.shift;
      if (t.bits < 8) code &= 15;
      if (t.bits == 6) code |= ((quants[p.high_byte] >> p.high_shift) & 3) << 4;
      const float q = static_cast<float>(code - t.zero);
      out[g * GROUP + k] = q * scale[k / 16] + minimum;
    }
  }
}

// --- GGUF blocks -------------------------------------------------------------------------

// 6-bit scale and minimum j of a Q4_K or Q5_K super-block.
void k_scale(const std::uint8_t* packed, int j, std::uint8_t& scale, std::uint8_t& minimum) {
  if (j < 4) {
    scale = packed[j] & 63;
    minimum = packed[j + 4] & 63;
  } else {
    scale = static_cast<std::uint8_t>((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4));
    minimum = static_cast<std::uint8_t>((packed[j + 4] >> 4) | ((packed[j] >> 6) << 4));
  }
}

// Group g of a type with groups of 32.
void read_group(int type, const std::uint8_t* block, SuperRow& s, int g) {
  std::uint8_t* q = s.q + g * GROUP;
  s.scale[g] = read16(block);
  s.minimum[g] = 0;
  if (type == GGUF_Q8_0) {
    for (int k = 0; k < GROUP; ++k) q[k] = static_cast<std::uint8_t>(block[2 + k] + 128);
    return;
  }
  const bool has_min = type == GGUF_Q4_1 || type == GGUF_Q5_1;
  const bool five = type == GGUF_Q5_0 || type == GGUF_Q5_1;
  const std::uint8_t* p = block + 2;
  if (has_min) {
    s.minimum[g] = read16(p);
    p += 2;
  }
  std::uint32_t high = 0;
  if (five) {
    std::memcpy(&high, p, 4);
    p += 4;
  }
  for (int k = 0; k < GROUP; ++k) {
    unsigned code = k < 16 ? p[k] & 15u : p[k - 16] >> 4;
    if (five) code |= ((high >> k) & 1u) << 4;
    if (type == GGUF_Q5_0) code += 16;  // (code - 16) becomes (code + 16) - 32
    q[k] = static_cast<std::uint8_t>(code);
  }
  if (type == GGUF_Q4_0)  // d (q - 8) = d q + (-8 d): exact in fp16
    s.minimum[g] = float_to_half(-8.0f * half_to_float(s.scale[g]));
}

void read_q4k_q5k(bool five, const std::uint8_t* block, SuperRow& s) {
  s.factor = read16(block);
  s.min_factor = read16(block + 2);
  for (int j = 0; j < 8; ++j) k_scale(block + 4, j, s.code[j], s.min_code[j]);
  const std::uint8_t* high = block + 16;
  const std::uint8_t* low = block + 16 + (five ? 32 : 0);
  for (int k = 0; k < SUPER; ++k) {
    const int g = k / GROUP, i = k % GROUP;
    unsigned code = (low[32 * (g / 2) + i] >> (4 * (g % 2))) & 15u;
    if (five) code |= ((high[i] >> g) & 1u) << 4;
    s.q[k] = static_cast<std::uint8_t>(code);
  }
}

void read_q6k(const std::uint8_t* block, SuperRow& s) {
  s.factor = read16(block + 208);
  for (int j = 0; j < 16; ++j) s.code[j] = block[192 + j];
  for (int k = 0; k < SUPER; ++k) {
    const int half = k / 128, i = k % 128;  // 128 codes share 64 low and 32 high bytes
    const unsigned low = (block[64 * half + i % 64] >> (4 * (i / 64))) & 15u;
    const unsigned high = (block[128 + 32 * half + i % 32] >> (2 * (i / 32))) & 3u;
    s.q[k] = static_cast<std::uint8_t>(low | (high << 4));
  }
}

struct BlockShape { int weights; int bytes; };
BlockShape block_shape(int type) {
  switch (type) {
    case GGUF_F32: return {1, 4};
    case GGUF_F16: case GGUF_BF16: return {1, 2};
    case GGUF_Q4_0: return {32, 18};
    case GGUF_Q4_1: return {32, 20};
    case GGUF_Q5_0: return {32, 22};
    case GGUF_Q5_1: return {32, 24};
    case GGUF_Q8_0: return {32, 34};
    case GGUF_Q4_K: return {256, 144};
    case GGUF_Q5_K: return {256, 176};
    case GGUF_Q6_K: return {256, 210};
    default: return {0, 0};
  }
}

SuperRow read_gguf_super(int type, const std::uint8_t* row, int super, int n_in) {
  SuperRow s{};
  s.groups = std::min(SUPER_GROUPS, n_in / GROUP - super * SUPER_GROUPS);
  const BlockShape shape = block_shape(type);
  const std::uint8_t* block = row + static_cast<std::size_t>(super) *
                                        static_cast<std::size_t>(SUPER / shape.weights * shape.bytes);
  if (type == GGUF_Q4_K || type == GGUF_Q5_K) read_q4k_q5k(type == GGUF_Q5_K, block, s);
  else if (type == GGUF_Q6_K) read_q6k(block, s);
  else
    for (int g = 0; g < s.groups; ++g) read_group(type, block + g * shape.bytes, s, g);
  return s;
}

// --- quantising floats -------------------------------------------------------------------

struct Affine { float scale, minimum; };  // w ~ scale * q - minimum, minimum >= 0

// To the nearest integer, ties to even, for |x| < 2^22; without a call, so that loops vectorise.
inline float nearest(float x) {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23
  return (x + shift) - shift;
}
inline float nearest_code(float x, float most) { return nearest(std::min(std::max(x, 0.0f), most)); }

// Sums over a group, kept in lanes while it goes by.
struct Sums {
  static constexpr int LANES = 8;
  float lane[LANES] = {};
  float total() const {
    float t = 0.0f;
    for (float x : lane) t += x;
    return t;
  }
};

// Fits 4-bit codes to a group: rounds, then solves scale and minimum by least squares for those
// codes, a few times from a few starting widths; keeps the smallest squared error.
Affine fit_affine4(const float* w) {
  float lo = 0.0f, hi = w[0];
  Sums weights;
  for (int k = 0; k < GROUP; ++k) {
    lo = std::min(lo, w[k]);
    hi = std::max(hi, w[k]);
    weights.lane[k % Sums::LANES] += w[k];
  }
  if (!(hi > lo)) return {0.0f, std::max(0.0f, -lo)};
  const float sw = weights.total();
  Affine best{(hi - lo) / 15.0f, -lo};
  float best_error = INFINITY;
  for (int trial = 0; trial < 12; ++trial) {
    Affine a{(hi - lo) / (15.0f + 0.25f * static_cast<float>(trial - 4)), -lo};
    for (int round = 0; round < 2; ++round) {
      const float inverse = 1.0f / a.scale;
      Sums q_, qq_, qw_, error_;
      for (int k = 0; k < GROUP; k += Sums::LANES)
        for (int i = 0; i < Sums::LANES; ++i) {
          const float x = w[k + i], q = nearest_code((x + a.minimum) * inverse, 15.0f);
          const float e = a.scale * q - a.minimum - x;
          error_.lane[i] += e * e;
          q_.lane[i] += q;
          qq_.lane[i] += q * q;
          qw_.lane[i] += q * x;
        }
      const float sq = q_.total(), sqq = qq_.total(), sqw = qw_.total(), error = error_.total();
      if (error < best_error) best_error = error, best = a;
      const float n = GROUP, det = n * sqq - sq * sq;
      if (!(det > 0.0f)) break;
      Affine next{(n * sqw - sq * sw) / det, -(sqq * sw - sq * sqw) / det};
      if (next.minimum < 0.0f) next = {sqw / sqq, 0.0f};
      if (!(next.scale > 0.0f)) break;
      a = next;
    }
  }
  return best;
}

SuperRow quantize_q4(const float* w, int groups) {
  SuperRow s{};
  s.groups = groups;
  Affine fit[SUPER_GROUPS];
  float top = 0.0f, min_top = 0.0f;
  for (int g = 0; g < groups; ++g) {
    fit[g] = fit_affine4(w + g * GROUP);
    top = std::max(top, fit[g].scale);
    min_top = std::max(min_top, fit[g].minimum);
  }
  s.factor = float_to_half(top / 255.0f);
  s.min_factor = float_to_half(min_top / 255.0f);
  const float factor = half_to_float(s.factor), min_factor = half_to_float(s.min_factor);
  const auto code = [](float x, float unit) {
    return static_cast<std::uint8_t>(
        unit > 0.0f ? nearest_code(x / unit, 255.0f) : 0.0f);
  };
  for (int g = 0; g < groups; ++g) {
    s.code[g] = code(fit[g].scale, factor);
    s.min_code[g] = code(fit[g].minimum, min_factor);
    const float scale = s.code[g] * factor, minimum = s.min_code[g] * min_factor;
    for (int k = 0; k < GROUP; ++k)
      s.q[g * GROUP + k] = static_cast<std::uint8_t>(
          scale > 0.0f ? nearest_code((w[g * GROUP + k] + minimum) / scale, 15.0f) : 0.0f);
  }
  return s;
}

SuperRow quantize_q8(const float* w, int groups) {
  SuperRow s{};
  s.groups = groups;
  for (int g = 0; g < groups; ++g) {
    float largest = 0.0f;
    for (int k = 0; k < GROUP; ++k) largest = std::max(largest, std::fabs(w[g * GROUP + k]));
    s.scale[g] = float_to_half(largest / 127.0f);
    const float scale = half_to_float(s.scale[g]);
    for (int k = 0; k < GROUP; ++k) {
      const float q = scale > 0.0f ? std::nearbyintf(w[g * GROUP + k] / scale) : 0.0f;
      s.q[g * GROUP + k] = static_cast<std::uint8_t>(std::clamp(q, -127.0f, 127.0f) + 128.0f);
    }
  }
  return s;
}

void write_dense(int format, std::uint8_t* tile, int lane, const float* w, int n_in) {
  for (int k = 0; k < n_in; ++k) {
    const std::size_t at = static_cast<std::size_t>(k) * TILE + static_cast<std::size_t>(lane);
    if (format == DENSE_BF16) write16(tile + 2 * at, float_to_bf16(w[k]));
    else if (format == DENSE_F16) write16(tile + 2 * at, float_to_half(w[k]));
    else std::memcpy(tile + 4 * at, w + k, 4);
  }
}

// Calls fill(super, lane's block) for each super-block of each row.
template <class Fill>
void pack_rows(int format, int n_out, int n_in, std::uint8_t* dst, Fill fill) {
  const std::size_t bytes = tile_bytes(format, n_in);
  std::memset(dst, 0, bytes * static_cast<std::size_t>(n_tiles(n_out)));
  const int supers = (n_in + SUPER - 1) / SUPER;
  for (int row = 0; row < n_out; ++row) {
    std::uint8_t* tile = dst + static_cast<std::size_t>(row / TILE) * bytes;
    for (int s = 0; s < supers; ++s)
      write_super(format, tile + super_offset(format, s), row % TILE, fill(row, s));
  }
}

}  // namespace

int format_of_gguf(int type) {
  switch (type) {
    case GGUF_F32: return DENSE_F32;
    case GGUF_F16: return DENSE_F16;
    case GGUF_BF16: return DENSE_BF16;
    case GGUF_Q4_0: case GGUF_Q4_1: return Q4_AFFINE;
    case GGUF_Q5_0: return Q6_SYM;
    case GGUF_Q5_1: return Q6_AFFINE;
    case GGUF_Q8_0: return Q8_SYM;
    case GGUF_Q4_K: return Q4_SUPER;
    case GGUF_Q5_K: return Q6_SUPER;
    case GGUF_Q6_K: return Q6_SUPER16;
    default: return -1;
  }
}

std::size_t gguf_row_bytes(int type, int n_in) {
  const BlockShape shape = block_shape(type);
  if (shape.weights == 0 || n_in <= 0 || n_in % shape.weights != 0) return 0;
  return static_cast<std::size_t>(n_in / shape.weights) * static_cast<std::size_t>(shape.bytes);
}

void unpack_gguf_row(int type, const std::uint8_t* row, int n_in, float* out) {
  const int format = format_of_gguf(type);
  if (is_dense(format)) {
    for (int k = 0; k < n_in; ++k) {
      if (type == GGUF_F32) std::memcpy(out + k, row + 4 * static_cast<std::size_t>(k), 4);
      else {
        const std::uint16_t h = read16(row + 2 * static_cast<std::size_t>(k));
        out[k] = type == GGUF_F16 ? half_to_float(h) : bf16_to_float(h);
      }
    }
    return;
  }
  std::vector<std::uint8_t> block(static_cast<std::size_t>(header_bytes(format, SUPER_GROUPS) +
                                                           SUPER_GROUPS * quant_bytes(format)));
  for (int s = 0; s * SUPER < n_in; ++s) {
    std::fill(block.begin(), block.end(), std::uint8_t{0});
    const SuperRow super = read_gguf_super(type, row, s, n_in);
    write_super(format, block.data(), 0, super);
    read_super(format, block.data(), 0, super.groups, out + s * SUPER);
  }
}

void pack_gguf(int type, const std::uint8_t* rows, int n_out, int n_in, std::uint8_t* dst) {
  const int format = format_of_gguf(type);
  const std::size_t row_bytes = gguf_row_bytes(type, n_in);
  if (is_dense(format)) {
    const std::size_t bytes = tile_bytes(format, n_in);
    std::memset(dst, 0, bytes * static_cast<std::size_t>(n_tiles(n_out)));
    std::vector<float> row(static_cast<std::size_t>(n_in));
    for (int o = 0; o < n_out; ++o) {
      unpack_gguf_row(type, rows + static_cast<std::size_t>(o) * row_bytes, n_in, row.data());
      write_dense(format, dst + static_cast<std::size_t>(o / TILE) * bytes, o % TILE, row.data(), n_in);
    }
    return;
  }
  pack_rows(format, n_out, n_in, dst, [&](int row, int super) {
    return read_gguf_super(type, rows + static_cast<std::size_t>(row) * row_bytes, super, n_in);
  });
}

void pack_float(const float* rows, int n_out, int n_in, int format, std::uint8_t* dst) {
  const auto row_at = [&](int row) {
    return rows + static_cast<std::size_t>(row) * static_cast<std::size_t>(n_in);
  };
  if (is_dense(format)) {
    const std::size_t bytes = tile_bytes(format, n_in);
    std::memset(dst, 0, bytes * static_cast<std::size_t>(n_tiles(n_out)));
    for (int o = 0; o < n_out; ++o)
      write_dense(format, dst + static_cast<std::size_t>(o / TILE) * bytes, o % TILE, row_at(o), n_in);
    return;
  }
  pack_rows(format, n_out, n_in, dst, [&](int row, int super) {
    const int groups = std::min(SUPER_GROUPS, n_in / GROUP - super * SUPER_GROUPS);
    const float* w = row_at(row) + super * SUPER;
    return format == Q4_SUPER ? quantize_q4(w, groups) : quantize_q8(w, groups);
  });
}

void unpack_row(const Linear& w, int row, float* out) {
  const std::uint8_t* tile = w.data + static_cast<std::size_t>(row / TILE) * w.tile_bytes;
  const int lane = row % TILE;
  if (is_dense(w.format)) {
    for (int k = 0; k < w.n_in; ++k) {
      const std::size_t at = static_cast<std::size_t>(k) * TILE + static_cast<std::size_t>(lane);
      if (w.format == DENSE_F32) std::memcpy(out + k, tile + 4 * at, 4);
      else if (w.format == DENSE_F16) out[k] = half_to_float(read16(tile + 2 * at));
      else out[k] = bf16_to_float(read16(tile + 2 * at));
    }
    return;
  }
  for (int s = 0; s * SUPER < w.n_in; ++s) {
    const int groups = std::min(SUPER_GROUPS, w.n_in / GROUP - s * SUPER_GROUPS);
    read_super(w.format, tile + super_offset(w.format, s), lane, groups, out + s * SUPER);
  }
}

}  // namespace paceline
