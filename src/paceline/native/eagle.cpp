// A pass through the layer. Within a phase threads touch disjoint data; a barrier follows each.
#include "eagle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attend.h"
#include "chunk.h"
#include "eagle_work.h"
#include "layout.h"
#include "tiles.h"

namespace paceline {

EagleCache::EagleCache(int kv_heads, int head_size) : kv_heads_(kv_heads), head_size_(head_size) {}

std::size_t EagleCache::plane(int kv_head) const { return size(kv_head) * size(capacity_) * size(head_size_); }

void EagleCache::reserve(int slots) {
  constexpr int GROWTH = 256;
  if (slots <= capacity_) return;
  const int more = std::max(slots + GROWTH, capacity_ / 4 * 5);
  const int capacity = (more + KEY_LANES - 1) / KEY_LANES * KEY_LANES;
  for (std::vector<std::uint16_t>* of : {&keys_, &values_}) {
    std::vector<std::uint16_t> grown(size(kv_heads_) * size(capacity) * size(head_size_));
    for (int k = 0; k < kv_heads_; ++k)
      std::copy_n(of->data() + plane(k), size(capacity_) * size(head_size_),
                  grown.data() + size(k) * size(capacity) * size(head_size_));
    of->swap(grown);
  }
  capacity_ = capacity;
}

EagleLayer::EagleLayer(EagleConfig c, EagleWeights w, const Kernels* kernels, int n_threads)
    : config(std::move(c)), weights(w), kernels_(kernels), n_threads_(n_threads),
      work_(std::make_unique<EagleWorkspace>()) {
  work_->threads.resize(size(n_threads));
}
EagleLayer::~EagleLayer() = default;

void EagleLayer::reserve_positions(int n) {
  EagleWorkspace& w = *work_;
  const int half = config.head_size / 2;
  if (static_cast<int>(w.iota.size()) >= n) return;
  n = std::max(2 * n, 1024);
  w.cos.resize(size(n) * size(half));
  w.sin.resize(size(n) * size(half));
  for (int position = static_cast<int>(w.iota.size()); position < n; ++position)
    for (int i = 0; i < half; ++i) {
      const double angle = position * config.inverse_frequencies[size(i)];
      w.cos[size(position) * size(half) + size(i)] = static_cast<float>(std::cos(angle)) * config.rope_scale;
      w.sin[size(position) * size(half) + size(i)] = static_cast<float>(std::sin(angle)) * config.rope_scale;
    }
  w.iota.resize(size(n));
  std::iota(w.iota.begin(), w.iota.end(), 0);
}

// Shapes and shares of the next chunk, which starts at row0 and at wanted row wanted0.
void EagleLayer::plan(const EaglePass& pass, int row0, int wanted0) {
  EagleWorkspace& w = *work_;
  const EagleConfig& c = config;
  const int D = c.hidden, E = c.head_size, HE = c.heads * E, G = c.heads / c.kv_heads;
  const int rows = std::min(CHUNK, static_cast<int>(pass.rows.size()) - row0);
  w.pass = &pass;
  w.row0 = row0;
  w.rows = rows;
  w.wanted0 = wanted0;
  w.n_wanted = 0;
  w.want_of.assign(size(rows), -1);
  const int total = static_cast<int>(pass.wanted.size());
  for (int i = wanted0; i < total && pass.wanted[size(i)].row < row0 + rows; ++i)
    w.want_of[size(pass.wanted[size(i)].row - row0)] = w.n_wanted++;
  w.groups.clear();
  const int most = rows_per_item(w.n_wanted, c.kv_heads, n_threads_);
  const auto cache_of = [&](int i) { return pass.rows[size(pass.wanted[size(wanted0 + i)].row)].cache; };
  for (int i = 0, n; i < w.n_wanted; i += n) {
    for (n = 1; n < most && i + n < w.n_wanted && cache_of(i + n) == cache_of(i);) ++n;
    w.groups.emplace_back(i, n);
  }
  w.fused.reserve(size(rows) * size(D));
  w.q.reserve(size(w.n_wanted) * size(HE));
  w.attended.reserve(size(w.n_wanted) * size(HE));
  const struct { int place, rows, width, format; } shapes[] = {
      {FUSED, rows, c.fused, weights.fc.format}, {LAYER, rows, weights.qkv.n_in, weights.qkv.format},
      {ATTENDED, w.n_wanted, HE, weights.o.format}, {MLP, w.n_wanted, D, weights.gate_up.format}};
  for (const auto& s : shapes) {
    ActForms forms;
    forms.need(s.format);
    if (s.rows > SOLO_ROWS) w.act[s.place].shape(s.rows, s.width, forms, kernels_->max_block);
    else for (auto& t : w.threads) t.act[s.place].shape(s.rows, s.width, forms, kernels_->max_block);
  }
  ActForms forms;
  forms.need(weights.down.format);
  w.middle.shape(w.n_wanted, c.intermediate, forms, kernels_->max_block);
  for (auto& t : w.threads) {
    t.row.reserve(size(std::max({c.fused, 3 * D, HE})));
    t.tiles.reserve(size(std::max(rows * E, 2 * w.n_wanted * GROUP * mlp_units(w.n_wanted))));
    t.attention.reserve(attend_floats(G, E));
    t.slots.reserve(ATTEND_ROWS * SPLIT);
  }
  w.fc.reset(n_tiles(D), n_threads_);
  w.qkv.reset((w.n_wanted > 0 ? c.heads : 0) + 2 * c.kv_heads, n_threads_);
  w.attend.reset(static_cast<int>(w.groups.size()) * c.kv_heads, n_threads_);
  w.o.reset(n_tiles(D), n_threads_);
  w.gate_up.reset((c.intermediate + GROUP - 1) / GROUP, n_threads_);
  w.down.reset(n_tiles(D), n_threads_);
}

void EagleLayer::pass_through(const EaglePass& pass, int thread) {
  Pool& pool = Pool::instance();
  EagleWorkspace& w = *work_;
  const auto copy = [](const float* x, std::ptrdiff_t width) {
    return [=](int r, bool, float*) { return x + r * width; };
  };
  const int n = static_cast<int>(pass.rows.size()), HE = config.heads * config.head_size;
  for (int row0 = 0, wanted0 = 0; row0 < n; row0 += CHUNK) {
    if (thread == 0) plan(pass, row0, wanted0);
    pool.barrier();
    float* out = pass.out + static_cast<std::ptrdiff_t>(wanted0) * config.hidden;
    const int n_wanted = w.n_wanted;  // thread 0 may be at the next chunk's plan when it is needed
    wanted0 += n_wanted;
    if (pass.fuse || config.first) {
      fuse(thread);
      pool.barrier();
    }
    project_inputs(thread);
    pool.barrier();
    if (n_wanted == 0) continue;
    fetch_ahead(weights.o, w.o.first(thread));
    attention(thread);
    pool.barrier();
    const Act& a = inputs(thread, ATTENDED, copy(w.attended.get(), HE));
    project(thread, weights.o, a, w.o, out, true);
    fetch_ahead(weights.gate_up, w.gate_up.first(thread) * GROUP / TILE);
    pool.barrier();
    mlp(thread);
    fetch_ahead(weights.down, w.down.first(thread));
    pool.barrier();
    project(thread, weights.down, w.middle.act(), w.down, out, true);
    pool.barrier();
  }
}

// The input of a matrix, from source(row, keep, room): a row of it, in `room` or elsewhere. keep:
// true once for each row, where source may write what is not its own.
template <class Source>
const Act& EagleLayer::inputs(int thread, Place place, Source source) {
  EagleWorkspace& w = *work_;
  EagleWorkspace::Thread& own = w.threads[size(thread)];
  const int rows = place <= LAYER ? w.rows : place == HEAD ? static_cast<int>(w.scored.size()) : w.n_wanted;
  const bool solo = rows <= SOLO_ROWS;
  const Act& to = solo ? own.act[place].act() : w.act[place].act();
  for (int r = solo ? 0 : thread; r < rows; r += solo ? 1 : n_threads_) {
    const float* x = source(r, !solo || thread == 0, own.row.get());
    if (to.f != nullptr)
      std::memcpy(to.f + static_cast<std::ptrdiff_t>(r) * to.n_in, x, size(to.n_in) * sizeof(float));
    if (to.q != nullptr) kernels_->quantize(x, 0, r, 1, 0, to.n_in / GROUP, to);
  }
  if (!solo) Pool::instance().barrier();
  return to;
}

// EAGLE-1: the residual stream, from embedding and feature; else the feature, from the taps.
void EagleLayer::fuse(int thread) {
  EagleWorkspace& w = *work_;
  const int D = config.hidden;
  const Act& a = inputs(thread, FUSED, [&](int r, bool, float* room) -> const float* {
    const EagleRow& row = w.pass->rows[size(w.row0 + r)];
    if (config.first) {
      unpack_row(weights.embedding, row.token, room);
      std::memcpy(room + D, row.feature, size(D) * sizeof(float));
      return room;
    }
    if (weights.fused_norm == nullptr) return row.feature;
    kernels_->rms_norm(row.feature, weights.fused_norm, config.fused, config.eps, room);
    return room;
  });
  project(thread, weights.fc, a, w.fc, w.fused.get(), false);
}

// One row of the layer's input. keep: its residual stream goes to the outputs, if it is wanted.
const float* EagleLayer::layer_input(int row, bool keep, float* room) {
  const EagleWorkspace& w = *work_;
  const EagleRow& at = w.pass->rows[size(w.row0 + row)];
  const std::ptrdiff_t D = config.hidden;
  const float* feature = config.first || w.pass->fuse ? w.fused.get() + row * D : at.feature;
  const float *x = feature, *residual = feature;
  if (!config.first) {
    float* embedding = room + 2 * D;
    unpack_row(weights.embedding, at.token, embedding);
    kernels_->rms_norm(embedding, weights.input_norm, config.hidden, config.eps, room);
    kernels_->rms_norm(feature, weights.hidden_norm, config.hidden, config.eps, room + D);
    x = room;
    if (config.norm_before_residual) residual = room + D;
  }
  const int wanted = w.want_of[size(row)];
  if (keep && wanted >= 0)
    std::memcpy(w.pass->out + (w.wanted0 + wanted) * D, residual, size(D) * sizeof(float));
  return x;
}

// Queries of the wanted rows, and keys and values of all, one head at a time.
void EagleLayer::project_inputs(int thread) {
  EagleWorkspace& w = *work_;
  const int E = config.head_size, H = config.heads, K = config.kv_heads, half = E / 2;
  const Act& a = inputs(thread, LAYER, [&](int r, bool keep, float* room) { return layer_input(r, keep, room); });
  float* out = w.threads[size(thread)].tiles.get();
  auto* halves = reinterpret_cast<std::uint16_t*>(w.threads[size(thread)].row.get());
  const float scale = 1.0f / std::sqrt(static_cast<float>(E));
  const int skipped = w.n_wanted > 0 ? 0 : H;
  for (int begin = 0, end = 0; w.qkv.next(thread, begin, end);) {
    for (int unit = skipped + begin; unit < skipped + end; ++unit) {
      kernels_->linear(weights.qkv, a, unit * E / TILE, (unit + 1) * E / TILE, out, E, false);
      for (int r = 0; r < w.rows; ++r) {
        const EagleRow& row = w.pass->rows[size(w.row0 + r)];
        float* x = out + static_cast<std::ptrdiff_t>(r) * E;
        const std::size_t at = size(row.position) * size(half);
        if (unit < H + K) kernels_->rope(x, w.cos.data() + at, w.sin.data() + at, E);
        if (unit >= H) {
          write_kv(x, unit - H, row, halves);
        } else if (w.want_of[size(r)] >= 0) {
          float* q = w.q.get() + (static_cast<std::ptrdiff_t>(w.want_of[size(r)]) * H + unit) * E;
          for (int i = 0; i < E; ++i) q[i] = x[i] * scale;
        }
      }
    }
  }
}

// Key (unit < K) or value of one head of one row.
void EagleLayer::write_kv(float* x, int unit, const EagleRow& row, std::uint16_t* halves) {
  const std::ptrdiff_t E = config.head_size, K = config.kv_heads, slot = row.slot;
  if (unit >= K) {
    kernels_->to_f16(x, config.head_size, row.cache->values(unit - config.kv_heads) + slot * E);
    return;
  }
  kernels_->to_f16(x, config.head_size, halves);
  const std::ptrdiff_t lane = slot % KEY_LANES;
  std::uint16_t* to = row.cache->keys(unit) + (slot - lane) * E + lane;
  for (int i = 0; i < E; ++i) to[KEY_LANES * i] = halves[i];
}

void EagleLayer::attention(int thread) {
  EagleWorkspace& w = *work_;
  const int groups = static_cast<int>(w.groups.size());
  for (int begin = 0, end = 0; w.attend.next(thread, begin, end);)
    for (int item = begin; item < end; ++item) {
      const auto [first, n] = w.groups[size(item % groups)];
      attend(thread, first, n, item / groups);
    }
}

// The query heads that share kv_head, of wanted rows [first, first + n).
void EagleLayer::attend(int thread, int first, int n, int kv_head) {
  EagleWorkspace& w = *work_;
  EagleWorkspace::Thread& own = w.threads[size(thread)];
  const std::ptrdiff_t E = config.head_size, H = config.heads, G = H / config.kv_heads;
  const EagleQuery* queries = &w.pass->wanted[size(w.wanted0 + first)];
  EagleCache& cache = *w.pass->rows[size(queries->row)].cache;
  const auto head_at = [&](const Buffer<float>& of, int r) { return of.get() + ((first + r) * H + kv_head * G) * E; };
  SplitJob job;
  job.keys = cache.keys(kv_head);
  job.values = cache.values(kv_head);
  job.n_heads = static_cast<int>(G);
  job.head_size = static_cast<int>(E);
  job.scratch = own.attention.get();
  attend_rows(
      *kernels_, job, n, [&](int r) { return queries[r].prefix + static_cast<int>(queries[r].own.size()); },
      [&](int r) { return head_at(w.q, r); }, [&](int r) { return head_at(w.attended, r); },
      [&](int r, int split, int keys) {
        const EagleQuery& q = queries[r];
        return split_slots(w.iota.data(), q.prefix, q.own.data(), split, keys, own.slots.get() + r * SPLIT);
      });
}

// out [rows, D] (+)= weights . a, with the bias that `fc` may have
void EagleLayer::project(int thread, const Linear& m, const Act& a, Shares& tiles, float* out, bool add) {
  const float* bias = add ? nullptr : weights.fc_bias;
  for (int begin = 0, end = 0; tiles.next(thread, begin, end);) {
    kernels_->linear(m, a, begin, end, out + begin * TILE, m.n_out, add);
    for (int r = 0; r < a.rows && bias != nullptr; ++r)
      for (int i = begin * TILE; i < end * TILE; ++i)
        out[static_cast<std::ptrdiff_t>(r) * m.n_out + i] += bias[i];
  }
}

// silu(gate) * up, 32 outputs at a time, straight into the input of `down`.
void EagleLayer::mlp(int thread) {
  EagleWorkspace& w = *work_;
  const std::ptrdiff_t D = config.hidden, I = config.intermediate;
  const float* x = w.pass->out + w.wanted0 * D;
  const Act& a = inputs(thread, MLP, [&](int r, bool, float* room) {
    kernels_->rms_norm(x + r * D, weights.mlp_norm, config.hidden, config.eps, room);
    return room;
  });
  const Act& out = w.middle.act();
  const int at_once = mlp_units(a.rows), width = at_once * GROUP, up_tile = config.intermediate / TILE;
  float* gate = w.threads[size(thread)].tiles.get();
  float* up = gate + static_cast<std::ptrdiff_t>(a.rows) * width;
  for (int begin = 0, end = 0; w.gate_up.next(thread, begin, end);) {
    for (int unit = begin; unit < end; unit += at_once) {
      const int last = std::min(unit + at_once, end);
      const int i0 = unit * GROUP, i1 = std::min(last * GROUP, config.intermediate);
      kernels_->linear(weights.gate_up, a, i0 / TILE, i1 / TILE, gate, width, false);
      kernels_->linear(weights.gate_up, a, up_tile + i0 / TILE, up_tile + i1 / TILE, up, width, false);
      for (int r = 0; r < a.rows; ++r) {
        float* g = gate + static_cast<std::ptrdiff_t>(r) * width;
        kernels_->silu_mul(g, up + static_cast<std::ptrdiff_t>(r) * width, i1 - i0);
        if (out.f != nullptr) std::memcpy(out.f + r * I + i0, g, size(i1 - i0) * sizeof(float));
      }
      if (out.q != nullptr) kernels_->quantize(gate, width, 0, a.rows, unit, last - unit, out);
    }
  }
}

// Rows whose logits `head` computes, [n, U] to `logits`.
void EagleLayer::plan_head(std::vector<const float*> hidden, float* logits) {
  EagleWorkspace& w = *work_;
  const int n = static_cast<int>(hidden.size()), D = config.hidden;
  w.scored = std::move(hidden);
  w.logits = logits;
  ActForms forms;
  forms.need(weights.head.format);
  if (n > SOLO_ROWS) w.act[HEAD].shape(n, D, forms, kernels_->max_block);
  for (auto& t : w.threads) {
    if (n <= SOLO_ROWS) t.act[HEAD].shape(n, D, forms, kernels_->max_block);
    t.row.reserve(size(D));
  }
  w.head.reset(n_tiles(weights.head.n_out), n_threads_);
}

void EagleLayer::head(int thread) {
  EagleWorkspace& w = *work_;
  const Act& a = inputs(thread, HEAD, [&](int r, bool, float* room) -> const float* {
    if (weights.final_norm == nullptr) return w.scored[size(r)];
    kernels_->rms_norm(w.scored[size(r)], weights.final_norm, config.hidden, config.eps, room);
    return room;
  });
  for (int begin = 0, end = 0; w.head.next(thread, begin, end);)
    kernels_->linear(weights.head, a, begin, end, w.logits + begin * TILE, weights.head.n_out, false);
}

void EagleLayer::run(const EaglePass& pass) {
  const std::lock_guard<std::mutex> only(mutex_);
  int most = 0;
  for (const EagleRow& row : pass.rows) {
    row.cache->reserve(row.slot + 1);
    most = std::max({most, row.position + 1, row.cache->capacity()});
  }
  reserve_positions(most);
  Pool::instance().run(n_threads_, [&](int thread, int) { pass_through(pass, thread); });
}

void EagleLayer::logits(const float* hidden, int n, float* out) {
  const std::lock_guard<std::mutex> only(mutex_);
  std::vector<const float*> rows;
  for (std::ptrdiff_t r = 0; r < n; ++r) rows.push_back(hidden + r * config.hidden);
  plan_head(std::move(rows), out);
  Pool::instance().run(n_threads_, [&](int thread, int) { head(thread); });
}

}  // namespace paceline
