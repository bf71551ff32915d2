// The bytes of a tile, as compile-time arithmetic (constexpr, so nothing here is linked).
//
// A quantised tile holds 16 output rows. Its inputs come in super-blocks of up to eight groups
// of 32 (the last may be shorter): first a header with the scales, padded to 64 bytes, then the
// groups. Inside a group, input 4k + b of output o is byte 4o + b of vector k (k = 0..7), which
// is what one vpdpbusd consumes:
//   4 bits: vectors 2j and 2j + 1 are the low and high nibbles of 64 bytes j = 0..3
//   6 bits: the same for the low four bits, then two times 64 bytes with two high bits each
//   8 bits: eight times 64 bytes
// A dense tile holds input k of output o at index 16 k + o.
#pragma once
#include "types.h"

namespace paceline {

struct Traits {
  int bits;          // stored bits per weight
  bool affine;       // has minima
  bool super;        // integer scales times one fp16 factor per super-block
  int halves;        // scales per group of 32
  int zero;          // subtracted from q when not affine
};

constexpr Traits traits(int format) {
  switch (format) {
    case Q4_AFFINE: return {4, true, false, 1, 0};
    case Q4_SUPER: return {4, true, true, 1, 0};
    case Q6_SYM: return {6, false, false, 1, 32};
    case Q6_AFFINE: return {6, true, false, 1, 0};
    case Q6_SUPER: return {6, true, true, 1, 0};
    case Q6_SUPER16: return {6, false, true, 2, 32};
    case Q8_SYM: return {8, false, false, 1, 128};
    case DENSE_BF16:
    case DENSE_F16: return {16, false, false, 0, 0};
    default: return {32, false, false, 0, 0};
  }
}

constexpr bool is_dense(int format) { return format >= DENSE_BF16; }

constexpr int quant_bytes(int format) { return traits(format).bits * GROUP * TILE / 8; }

// Offset of group i's scales inside a header, and the size of a header of n groups.
constexpr int header_base(int format) {
  return !traits(format).super ? 0 : traits(format).affine ? 64 : 32;
}
constexpr int header_stride(int format) {
  return !traits(format).super && traits(format).affine ? 64 : 32;
}
constexpr int header_bytes(int format, int groups) {
  return (header_base(format) + groups * header_stride(format) + 63) / 64 * 64;
}

constexpr std::size_t tile_bytes(int format, int n_in) {
  if (is_dense(format))
    return static_cast<std::size_t>(n_in) * TILE * static_cast<std::size_t>(traits(format).bits / 8);
  const int groups = n_in / GROUP, whole = groups / SUPER_GROUPS, rest = groups % SUPER_GROUPS;
  std::size_t bytes = static_cast<std::size_t>(whole) *
                      static_cast<std::size_t>(header_bytes(format, SUPER_GROUPS));
  if (rest > 0) bytes += static_cast<std::size_t>(header_bytes(format, rest));
  return bytes + static_cast<std::size_t>(groups) * static_cast<std::size_t>(quant_bytes(format));
}

constexpr int n_tiles(int n_out) { return (n_out + TILE - 1) / TILE; }

// Blocks of rows in an Act: as even as possible, none above max_block.
constexpr int block_count(int rows, int max_block) { return (rows + max_block - 1) / max_block; }
constexpr int block_start(int rows, int n_blocks, int b) { return rows * b / n_blocks; }

}  // namespace paceline
