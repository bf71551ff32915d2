// Packing weights into tiles, and reading a row back. Portable code, run at load time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "types.h"

namespace paceline {

// GGUF tensor types (the numbers are the file format's).
enum GgufType : int {
  GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7,
  GGUF_Q8_0 = 8, GGUF_Q4_K = 12, GGUF_Q5_K = 13, GGUF_Q6_K = 14, GGUF_BF16 = 30,
};

// The tile format that holds a GGUF type exactly; -1 where there is none.
int format_of_gguf(int type);

// Bytes of one row of n_in weights in a GGUF file; 0 where n_in does not fit the type.
std::size_t gguf_row_bytes(int type, int n_in);

// Packs rows [n_out, n_in] of a GGUF tensor; dst has n_tiles(n_out) * tile_bytes(format, n_in).
void pack_gguf(int type, const std::uint8_t* rows, int n_out, int n_in, std::uint8_t* dst);

// Unpacks a GGUF row to floats.
void unpack_gguf_row(int type, const std::uint8_t* row, int n_in, float* out);

// Packs floats; quantised formats are Q4_SUPER and Q8_SYM.
void pack_float(const float* rows, int n_out, int n_in, int format, std::uint8_t* dst);

// Row `row` of a packed matrix as floats (an embedding look-up).
void unpack_row(const Linear& w, int row, float* out);

}  // namespace paceline
