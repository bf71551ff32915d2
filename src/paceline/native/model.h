// A whole decoder forward pass over packed rows (llama, qwen2, qwen3 shapes).
//
// Letters: D hidden, H query heads, K key/value heads, G = H / K, E head size, I MLP width,
// L layers, N rows of a pass, V vocabulary.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pool.h"
#include "types.h"

namespace paceline {

struct Layer {
  Linear q, k, v, o, gate, up, down;
  const float* attention_norm = nullptr;  // [D]
  const float* mlp_norm = nullptr;        // [D]
  const float* q_bias = nullptr;          // [H E], nullptr where the model has none
  const float* k_bias = nullptr;          // [K E]
  const float* v_bias = nullptr;
  const float* q_norm = nullptr;          // [E]
  const float* k_norm = nullptr;
};

struct Config {
  int hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_size = 0;
  float eps = 1e-6f;
  float embedding_scale = 1.0f;
  float rope_scale = 1.0f;                // factor on cos and sin
  std::vector<double> inverse_frequencies;  // [E / 2]
};

// One pass; every pointer is borrowed from the caller for its duration.
struct Pass {
  int n_rows = 0, n_seqs = 0, n_wanted = 0, block_size = 0;
  const std::int32_t* tokens = nullptr;     // [N]
  const std::int32_t* positions = nullptr;  // [N]
  const std::int32_t* parents = nullptr;    // [N], relative to the sequence's first row
  const std::int32_t* slots = nullptr;      // [N]
  const std::int32_t* starts = nullptr;     // [n_seqs + 1]
  const std::int32_t* contexts = nullptr;   // [n_seqs]
  std::vector<const std::int32_t*> tables;  // per sequence: block ids
  const std::int32_t* wanted = nullptr;     // [n_wanted], ascending
  // fp16, per layer: keys [K, n_slots / 16, E, 16], then values [K, n_slots, E]
  std::uint16_t* kv = nullptr;
  std::int64_t n_slots = 0;                 // a multiple of KEY_LANES
  const std::uint8_t* run_attention = nullptr;  // [L] or nullptr: all
  const std::uint8_t* run_mlp = nullptr;
  std::vector<float*> taps;                 // [L + 1]: [N, D] or nullptr
  float* final_tap = nullptr;               // [N, D] or nullptr; FINAL_TAP to Python
  float* logits = nullptr;                  // [n_wanted, head.n_out]
};

// The keys of one row, in order of position: the committed slots of its sequence, then the
// slots of its ancestors and itself. A row that extends its parent's list shares it.
struct Path {
  const std::int32_t* committed = nullptr;
  int n_committed = 0;
  int list = 0;
  int n_own = 0;
};

// Rows [first, first + n) of a chunk, all of one sequence.
struct RowGroup {
  int first = 0, n = 0;
};

struct Workspace;

class Model {
 public:
  explicit Model(Config config);
  ~Model();

  Config config;
  std::vector<Layer> layers;
  Linear embedding, head;
  const float* final_norm = nullptr;
  const Kernels* kernels = nullptr;
  int n_threads = 1;

  // Not reentrant: callers are serialised by a lock.
  void forward(const Pass& pass);
  std::size_t workspace_bytes() const;

 private:
  struct Chunk;  // the rows of a pass that go through the layers together

  void plan(const Pass& pass);
  void reserve(const Pass& pass);
  Chunk cut(const Pass& pass, int row0, int rows) const;
  void shape(Chunk& c);
  std::vector<Chunk> lanes_of(const Chunk& c, int n);
  void group_rows(Chunk& c, std::size_t place);
  int units(const Chunk& c, int phase) const;
  void reset_shares(const Chunk& c);
  void run_chunk(Chunk& c, int thread);
  void run_lanes(const Chunk& c, std::vector<Chunk>& lanes, int thread);
  void begin_layer(Chunk& c, int thread, int layer);
  void end_layer(Chunk& c, int thread, int layer);
  void next_phase(const Chunk& c, int thread, int layer, int phase) const;
  void copy_tap(const Chunk& c, int thread, int layer) const;
  // body(begin, end) for this thread's share of a phase's units.
  template <class Body>
  void share(const Chunk& c, int thread, int layer, int phase, Body body);
  void embed(Chunk& c, int thread);
  // The input of linear layers: `norm` (plain copy where nullptr) and quantisation of x.
  enum Place { LAYER_INPUT, ATTENDED };
  const Act& prepare(Chunk& c, int thread, Place place, const float* norm);
  void prepare_row(const float* x, int width, const float* norm, int row, float* scratch,
                   const Act& out);
  void attention_inputs(Chunk& c, int thread, int layer);
  void attention(Chunk& c, int thread, int layer);
  void attend(Chunk& c, int thread, RowGroup rows, int kv_head, int split);
  void fold_splits(Chunk& c, int row, float* out);
  void project(Chunk& c, int thread, int layer, int phase, const Act& a);
  void mlp(Chunk& c, int thread, int layer, const Act& a);
  void output(const Chunk& c, int thread);
  void fetch_ahead_of(int thread, int layer, int phase) const;

  std::mutex mutex_;
  std::unique_ptr<Workspace> work_;
};

}  // namespace paceline
