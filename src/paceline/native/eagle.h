// An EAGLE head: one decoder layer over a target's features (Li et al. 2024, 2025), and whole
// drafts grown with it.
//
// Letters: D hidden, H query heads, K key/value heads, G = H / K, E head size, I MLP width,
// N rows of a pass, W of them wanted, U draft vocabulary.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pool.h"
#include "types.h"

namespace paceline {

struct EagleConfig {
  int hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_size = 0;
  int fused = 0;                     // input width of `fc`
  bool first = false;                // EAGLE-1: `fc` joins embedding and feature
  bool norm_before_residual = false;
  float eps = 1e-5f;
  float rope_scale = 1.0f;           // factor on cos and sin
  std::vector<double> inverse_frequencies;  // [E / 2]
};

// Everything is borrowed; vectors are nullptr where the head has none.
struct EagleWeights {
  Linear embedding, fc, qkv, o, gate_up, down, head;
  const float* fc_bias = nullptr;      // [D]
  const float* fused_norm = nullptr;   // [fused]
  const float* input_norm = nullptr;   // [D]
  const float* hidden_norm = nullptr;  // [D]
  const float* mlp_norm = nullptr;     // [D]
  const float* final_norm = nullptr;   // [D]
  const std::int32_t* target_ids = nullptr;  // [U]
};

// Keys and values of one sequence, laid out as a target's cache of `capacity` slots. Slots
// [0, rows) are committed; what is behind them is scratch.
class EagleCache {
 public:
  EagleCache(int kv_heads, int head_size);
  int rows = 0;
  void reserve(int slots);
  int capacity() const { return capacity_; }
  int kv_heads() const { return kv_heads_; }
  int head_size() const { return head_size_; }
  std::uint16_t* keys(int kv_head) { return keys_.data() + plane(kv_head); }
  std::uint16_t* values(int kv_head) { return values_.data() + plane(kv_head); }
  std::size_t bytes() const { return 2 * sizeof(std::uint16_t) * keys_.size(); }

 private:
  std::size_t plane(int kv_head) const;
  int kv_heads_, head_size_, capacity_ = 0;
  std::vector<std::uint16_t> keys_, values_;
};

// One row: the feature of a token beside the embedding of the next one, `token`.
struct EagleRow {
  EagleCache* cache;
  int slot, position, token;
  const float* feature;  // [D], or [fused] where the pass fuses
};

// Row `row` is wanted: it sees the slots [0, prefix) and then `own`, its own slot last.
struct EagleQuery {
  int row = 0, prefix = 0;
  std::vector<std::int32_t> own;
};

struct EaglePass {
  std::vector<EagleRow> rows;
  std::vector<EagleQuery> wanted;  // ascending
  bool fuse = false;               // features are target states, to go through `fc` first
  float* out = nullptr;            // [W, D]

  void clear() {
    rows.clear();
    wanted.clear();
  }
};

// The tokens that a sequence may draft: `depth` levels of the best `width` nodes, of which each
// proposes its best `width` children (EAGLE-2's expansion; a chain where width is 1).
struct EagleDraft {
  EagleCache* cache = nullptr;
  // Rows to append to the committed ones first: the features, target states to go through `fc`
  // (EAGLE-1: the layer's), and the embeddings' tokens.
  int count = 0;
  const float* features = nullptr;
  const std::int32_t* waiting = nullptr;
  float* hidden = nullptr;        // [D] the layer's output in the last committed row; written with count
  int depth = 0;
  float heat = 1.0f;                  // temperature of the scores
  std::vector<std::int32_t> end_ids;  // nothing follows these
  // Node 0 is the root, which the caller knows. scores: log-probabilities of the paths.
  std::vector<std::int32_t> tokens, parents;
  std::vector<double> scores;
  bool healthy = true;                // false: the head gave NaN or infinite logits

 private:
  friend class EagleLayer;
  int fed = 0;                        // rows in the cache, scratch included
  std::vector<int> levels, slots;     // of each node: its depth, its row's place in the cache
  std::vector<const float*> outputs;  // of each node's row: the layer's output
  std::vector<int> frontier;          // nodes that get children next
};

struct EagleWorkspace;

class EagleLayer {
 public:
  EagleLayer(EagleConfig config, EagleWeights weights, const Kernels* kernels, int n_threads);
  ~EagleLayer();

  const EagleConfig config;
  const EagleWeights weights;

  // Calls are serialised by a lock. Keys and values of all rows go to their caches.
  void run(const EaglePass& pass);
  void logits(const float* hidden, int n, float* out);  // [n, D] -> [n, U]
  // Appends the rows that the drafts bring, then grows them.
  void grow(std::vector<EagleDraft>& drafts, int width);

 private:
  // Inputs of the matrices: of fc, qkv, o, gate_up, head.
  enum Place { FUSED, LAYER, ATTENDED, MLP, HEAD };

  // Done by one thread, before a barrier.
  void reserve_positions(int n);
  void plan(const EaglePass& pass, int row0, int wanted0);
  void plan_head(std::vector<const float*> hidden, float* logits);
  bool advance(std::vector<EagleDraft>& drafts, int width);
  void append(std::vector<EagleDraft>& drafts);
  void expand(EagleDraft& d, const std::int32_t* ids, const float* scores, int width, int n_best);
  void feed(EagleDraft& d);

  // Done by all threads.
  void pass_through(const EaglePass& pass, int thread);
  template <class Source>
  const Act& inputs(int thread, Place place, Source source);
  void fuse(int thread);
  void project_inputs(int thread);
  const float* layer_input(int row, bool keep, float* room);
  void write_kv(float* x, int unit, const EagleRow& row, std::uint16_t* halves);
  void attention(int thread);
  void attend(int thread, int first, int n, int kv_head);
  void project(int thread, const Linear& w, const Act& a, Shares& tiles, float* out, bool add);
  void mlp(int thread);
  void head(int thread);

  const Kernels* kernels_;
  int n_threads_;
  std::mutex mutex_;
  std::unique_ptr<EagleWorkspace> work_;
};

}  // namespace paceline
