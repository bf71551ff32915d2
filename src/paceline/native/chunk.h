// Internal to the passes: model.cpp, layers.cpp and eagle.cpp.
#pragma once
#include <algorithm>
#include <vector>

#include "layout.h"
#include "model.h"
#include "workspace.h"

namespace paceline {

// In passes this short each thread prepares its own inputs: cheaper than a barrier, unless
// attention comes in many splits, which would be folded twice.
constexpr int SOLO_ROWS = 16, SOLO_SPLIT_ROWS = 2;

// Units of 32 MLP outputs that a thread computes between switches from gate to up.
constexpr int MLP_UNITS = 8;
constexpr int mlp_units(int rows) { return rows <= 16 ? MLP_UNITS : 2; }

// Phases of a layer that hand out shares.
enum Phase { QKV, ATTEND, PROJECT, GATE_UP, DOWN, PHASES };

inline std::size_t size(std::ptrdiff_t n) { return static_cast<std::size_t>(n); }

// The first tiles that a thread will read in a phase to come, on their way to the second-level
// cache while it waits for the others: a stream of weights takes a while to get going.
inline void fetch_ahead(const Linear& w, int tile) {
  constexpr std::ptrdiff_t AHEAD = 12288;
  if (tile >= n_tiles(w.n_out)) return;
  const std::uint8_t* at = w.data + size(tile) * w.tile_bytes;
  const std::ptrdiff_t left = static_cast<std::ptrdiff_t>(size(n_tiles(w.n_out) - tile) * w.tile_bytes);
  for (std::ptrdiff_t i = 0; i < std::min(AHEAD, left); i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Rows of one sequence that share an attention work item: more rows load a key less often, fewer
// rows give the threads more even shares. The grouping never changes a result.
inline int rows_per_item(int n_rows, int kv_heads, int n_threads) {
  // The longest thread's work, where an item costs as much to load as one row to compute.
  const auto cost = [&](int most) {
    const int items = (n_rows + most - 1) / most * kv_heads;
    return (items + n_threads - 1) / n_threads * (1 + most);
  };
  int most = 1;
  for (int rows = 2; rows <= ATTEND_ROWS; rows *= 2)
    if (cost(rows) <= cost(most)) most = rows;
  return most;
}

// Prompts: threads that share a pass's outputs write to cache lines that the others have read, which
// takes a sixth of the time with two. With so many rows for each thread the rows are dealt out
// instead, in lanes of at most LANE_ROWS: a lane goes through a layer in one thread, as if it were a
// pass of its own, and threads wait for each other once a layer, for the keys. Each lane reads all
// weights, so it has rows enough that reading them takes less than computing.
constexpr int LANE_ROWS = 32, LEAST_LANE_ROWS = 24, LANES_PER_THREAD = 4;

// Lanes of a chunk, 0 where the threads share its rows.
constexpr int lane_count(int rows, int n_threads) {
  if (n_threads < 2 || rows < LEAST_LANE_ROWS * n_threads) return 0;
  return n_threads * ((rows + LANE_ROWS * n_threads - 1) / (LANE_ROWS * n_threads));
}

// Rows of the next chunk where so many are left.
constexpr int chunk_rows(int left, int n_threads) {
  const int most = LANES_PER_THREAD * LANE_ROWS * n_threads;
  const int rows = left < most ? left : most;
  return lane_count(rows, n_threads) > 0 ? rows : rows < CHUNK ? rows : CHUNK;
}

// Rows [row0, row0 + rows) of a pass, or of one lane of them.
struct Model::Chunk {
  const Pass& pass;
  int row0 = 0, rows = 0;
  int first = 0;                    // where they begin in the workspace
  int n_threads = 1;
  int wanted0 = 0, n_wanted = 0;  // into pass.wanted
  int max_splits = 1;
  bool solo = false;                // each thread prepares all rows for itself
  bool lane = false;                // one thread does everything
  bool by_split = false;            // attention work items are splits, not whole rows
  std::uint16_t* keys = nullptr;    // of the current layer, see Pass::kv
  std::uint16_t* values = nullptr;
  Act act[2] = {}, middle = {};     // inputs, by Place, and of `down`
  const std::vector<RowGroup>* groups = nullptr;
};

}  // namespace paceline
