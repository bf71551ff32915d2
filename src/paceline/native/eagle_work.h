// Buffers of an EAGLE layer's passes, allocated on first use and kept. Internal to eagle.cpp and
// eagle_draft.cpp.
#pragma once
#include <utility>
#include <vector>

#include "eagle.h"
#include "workspace.h"

namespace paceline {

struct EagleWorkspace {
  struct Thread {
    ActBuffer act[5];            // own inputs, by Place, in short passes
    Buffer<float> row;           // one row of any input
    Buffer<float> tiles;         // outputs of a few tiles, all rows
    Buffer<float> attention;     // scratch of attend_split, then one split's results and running sums
    Buffer<std::int32_t> slots;  // [ATTEND_ROWS, SPLIT]
    Buffer<float> ranking;       // [rank_room(U)]
  };
  std::vector<Thread> threads;
  ActBuffer act[5];              // inputs, by Place, shared by the threads
  ActBuffer middle;              // input of `down`
  Shares fc, qkv, attend, o, gate_up, down, head;
  std::vector<float> cos, sin;   // [positions, E / 2]
  std::vector<std::int32_t> iota;

  // The rows of a pass that go through the layer together.
  const EaglePass* pass = nullptr;
  int row0 = 0, rows = 0, wanted0 = 0, n_wanted = 0;
  std::vector<int> want_of;      // [rows] place among the chunk's wanted ones, -1 where it is not
  std::vector<std::pair<int, int>> groups;  // first and number of wanted rows of a work item
  Buffer<float> fused;           // [rows, D] output of fc
  Buffer<float> q, attended;     // [n_wanted, H E]

  // The rows whose logits are computed.
  std::vector<const float*> scored;
  float* logits = nullptr;       // [scored, U]

  // Drafts in the making: the pass of the next level, its outputs (in turn: a level's rows read
  // the last one's), and the best tokens of the scored rows.
  EaglePass first;               // the rows that drafts bring
  Buffer<float> appended;        // its outputs, [drafts, D]
  EaglePass level;
  int depth = 0;
  bool more = false;
  Buffer<float> outputs[2];      // [rows, D]
  Buffer<float> draft_logits;
  std::vector<float> heats;      // [scored]
  Buffer<std::int32_t> ids;      // [scored, n_best]
  Buffer<float> scores;
};

}  // namespace paceline
