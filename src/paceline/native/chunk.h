// Internal to model.cpp and layers.cpp.
#pragma once
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

// Rows [row0, row0 + rows) of a pass.
struct Model::Chunk {
  const Pass& pass;
  int row0 = 0, rows = 0;
  int n_threads = 1;
  int wanted0 = 0, n_wanted = 0;  // into pass.wanted
  int max_splits = 1;
  bool solo = false;                // each thread prepares all rows for itself
  bool by_split = false;            // attention work items are splits, not whole rows
  std::uint16_t* keys = nullptr;    // of the current layer, see Pass::kv
  std::uint16_t* values = nullptr;
};

}  // namespace paceline
