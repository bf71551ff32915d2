// The phases of a layer. Within a phase threads touch disjoint data; where they share rows, model.cpp
// puts a barrier after each.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attend.h"
#include "chunk.h"
#include "layout.h"
#include "model.h"
#include "tiles.h"
#include "workspace.h"

namespace paceline {

void Model::fetch_ahead_of(int thread, int layer, int phase) const {
  if (layer == static_cast<int>(layers.size())) {
    fetch_ahead(head, work_->shares.back().first(thread));
    return;
  }
  const Layer& l = layers[size(layer)];
  const int first = work_->shares[size(PHASES * layer + phase)].first(thread);
  const int E = config.head_size, H = config.heads, K = config.kv_heads;
  switch (phase) {
    case QKV:
      if (first < H) fetch_ahead(l.q, first * E / TILE);
      else if (first < H + K) fetch_ahead(l.k, (first - H) * E / TILE);
      else fetch_ahead(l.v, (first - H - K) * E / TILE);
      break;
    case PROJECT: fetch_ahead(l.o, first); break;
    case GATE_UP:
      fetch_ahead(l.gate, first * GROUP / TILE);
      fetch_ahead(l.up, first * GROUP / TILE);
      break;
    case DOWN: fetch_ahead(l.down, first); break;
    default: break;
  }
}

template <class Body>
void Model::share(const Chunk& c, int thread, int layer, int phase, Body body) {
  if (c.lane) {
    body(0, units(c, phase));
    return;
  }
  Shares& shares = work_->shares[size(PHASES * layer + phase)];
  for (int begin = 0, end = 0; shares.next(thread, begin, end);) body(begin, end);
}

// Token embeddings and rotary angles; rows are dealt out to the threads.
void Model::embed(Chunk& c, int thread) {
  Workspace& w = *work_;
  const std::ptrdiff_t D = config.hidden, half = config.head_size / 2;
  for (int r = thread; r < c.rows; r += c.n_threads) {
    const std::ptrdiff_t at = c.first + r;
    float* x = w.x.get() + at * D;
    unpack_row(embedding, c.pass.tokens[c.row0 + r], x);
    if (config.embedding_scale != 1.0f)
      for (int i = 0; i < D; ++i) x[i] *= config.embedding_scale;
    const double position = c.pass.positions[c.row0 + r];
    for (int i = 0; i < half; ++i) {
      const double angle = position * config.inverse_frequencies[size(i)];
      w.cos.get()[at * half + i] = static_cast<float>(std::cos(angle)) * config.rope_scale;
      w.sin.get()[at * half + i] = static_cast<float>(std::sin(angle)) * config.rope_scale;
    }
  }
}

void Model::prepare_row(const float* x, int width, const float* norm, int row, float* scratch,
                        const Act& out) {
  const float* y = x;
  if (norm != nullptr) {
    float* to = out.f != nullptr ? out.f + static_cast<std::ptrdiff_t>(row) * width : scratch;
    kernels->rms_norm(x, norm, width, config.eps, to);
    y = to;
  } else if (out.f != nullptr) {
    std::memcpy(out.f + static_cast<std::ptrdiff_t>(row) * width, x, size(width) * sizeof(float));
  }
  if (out.q != nullptr) kernels->quantize(y, 0, row, 1, 0, width / GROUP, out);
}

const Act& Model::prepare(Chunk& c, int thread, Place place, const float* norm) {
  Workspace& w = *work_;
  ThreadSpace& own = w.threads[size(thread)];
  const bool solo = c.solo;
  const Act& out = c.act[place];
  const float* from = place == ATTENDED ? w.attended.get() : w.x.get();
  for (int r = solo ? 0 : thread; r < c.rows; r += solo ? 1 : c.n_threads) {
    const float* x = from + static_cast<std::ptrdiff_t>(c.first + r) * out.n_in;
    if (place == ATTENDED && c.by_split) {
      fold_splits(c, r, own.row.get());
      x = own.row.get();
    }
    prepare_row(x, out.n_in, norm, r, own.row.get(), out);
  }
  if (!solo) Pool::instance().barrier();
  return out;
}

// Queries, keys and values, one head at a time: a head's tiles, bias, norm and rotation, and
// for keys and values the write to the cache.
void Model::attention_inputs(Chunk& c, int thread, int layer) {
  Workspace& w = *work_;
  const Layer& l = layers[size(layer)];
  const int E = config.head_size, H = config.heads, K = config.kv_heads;
  const Act& a = prepare(c, thread, LAYER_INPUT, l.attention_norm);
  float* out = w.threads[size(thread)].tiles.get();
  float* row = w.threads[size(thread)].row.get();
  auto* halves = reinterpret_cast<std::uint16_t*>(row);
  const float scale = 1.0f / std::sqrt(static_cast<float>(E));
  share(c, thread, layer, QKV, [&](int begin, int end) {
    for (int unit = begin; unit < end; ++unit) {
      const bool is_q = unit < H, is_k = !is_q && unit < H + K;
      const int head = is_q ? unit : is_k ? unit - H : unit - H - K;
      const Linear& weights = is_q ? l.q : is_k ? l.k : l.v;
      const float* bias = is_q ? l.q_bias : is_k ? l.k_bias : l.v_bias;
      const float* norm = is_q ? l.q_norm : is_k ? l.k_norm : nullptr;
      kernels->linear(weights, a, head * E / TILE, (head + 1) * E / TILE, out, E, false);
      for (int r = 0; r < c.rows; ++r) {
        float* x = out + static_cast<std::ptrdiff_t>(r) * E;
        if (bias != nullptr)
          for (int i = 0; i < E; ++i) x[i] += bias[head * E + i];
        if (norm != nullptr) {
          std::memcpy(row, x, size(E) * sizeof(float));
          kernels->rms_norm(row, norm, E, config.eps, x);
        }
        if (is_q || is_k)
          kernels->rope(x, w.cos.get() + static_cast<std::ptrdiff_t>(c.first + r) * (E / 2),
                        w.sin.get() + static_cast<std::ptrdiff_t>(c.first + r) * (E / 2), E);
        if (is_q) {
          float* q = w.q.get() + (static_cast<std::ptrdiff_t>(c.first + r) * H + head) * E;
          for (int i = 0; i < E; ++i) q[i] = x[i] * scale;
        } else {
          const std::ptrdiff_t slot = c.pass.slots[c.row0 + r];
          std::uint16_t* plane = (is_k ? c.keys : c.values) + head * c.pass.n_slots * E;
          if (is_k) {
            kernels->to_f16(x, E, halves);
            const std::ptrdiff_t lane = slot % KEY_LANES;
            for (int i = 0; i < E; ++i) plane[(slot - lane) * E + KEY_LANES * i + lane] = halves[i];
          } else {
            kernels->to_f16(x, E, plane + slot * E);
          }
        }
      }
    }
  });
}

void Model::attention(Chunk& c, int thread, int layer) {
  // Items that read the same keys follow one another: the second finds them in the cache.
  const int groups = static_cast<int>(c.groups->size()), splits = c.by_split ? c.max_splits : 1;
  share(c, thread, layer, ATTEND, [&](int begin, int end) {
    for (int item = begin; item < end; ++item) {
      const int split = item / groups % splits, kv_head = item / groups / splits;
      attend(c, thread, (*c.groups)[size(item % groups)], kv_head, split);
    }
  });
}

// The query heads that share kv_head, of a few rows: over all their keys, or one split of them,
// which fold_splits folds with the others. Either way the same bits.
void Model::attend(Chunk& c, int thread, RowGroup rows, int kv_head, int split) {
  Workspace& w = *work_;
  ThreadSpace& own = w.threads[size(thread)];
  const std::ptrdiff_t E = config.head_size, H = config.heads, G = H / config.kv_heads;
  const auto path = [&](int r) -> const Path& { return w.paths[size(c.row0 + rows.first + r)]; };
  const auto keys = [&](int r) { return path(r).n_committed + path(r).n_own; };
  const auto head_at = [&](const Buffer<float>& of, int r) {
    return of.get() + ((c.first + rows.first + r) * H + kv_head * G) * E;
  };
  const auto slots = [&](int r, int at, int n) {
    const Path& p = path(r);
    const std::int32_t* below = w.lists[size(p.list)].data();
    return split_slots(p.committed, p.n_committed, below, at, n, own.slots.get() + r * SPLIT);
  };
  SplitJob job;
  job.keys = c.keys + kv_head * c.pass.n_slots * E;
  job.values = c.values + kv_head * c.pass.n_slots * E;
  job.n_heads = static_cast<int>(G);
  job.head_size = static_cast<int>(E);
  job.scratch = own.attention.get();
  if (!c.by_split) {
    attend_rows(
        *kernels, job, rows.n, keys, [&](int r) { return head_at(w.q, r); },
        [&](int r) { return head_at(w.attended, r); }, slots);
    return;
  }
  job.n_rows = 0;
  for (int r = 0; r < rows.n; ++r) {
    const int n = std::min(SPLIT, keys(r) - split * SPLIT);
    if (n <= 0) continue;
    const std::ptrdiff_t at = ((rows.first + r) * c.max_splits + split) * H + kv_head * G;
    job.row[job.n_rows++] = {head_at(w.q, r),          slots(r, split, n),        n,
                             w.split_max.get() + at, w.split_sum.get() + at, w.split_out.get() + at * E};
  }
  if (job.n_rows > 0) kernels->attend_split(job);
}

// Attention output of a row, [H E], from its stored splits.
void Model::fold_splits(Chunk& c, int row, float* out) {
  Workspace& w = *work_;
  const int E = config.head_size, H = config.heads;
  const Path& path = w.paths[size(c.row0 + row)];
  const int splits = (path.n_committed + path.n_own + SPLIT - 1) / SPLIT;
  for (int h = 0; h < H; ++h) {
    const auto at = [&](int split) {
      return (static_cast<std::ptrdiff_t>(row) * c.max_splits + split) * H + h;
    };
    float* o = out + static_cast<std::ptrdiff_t>(h) * E;
    std::memcpy(o, w.split_out.get() + at(0) * E, size(E) * sizeof(float));
    float top = w.split_max.get()[at(0)], sum = w.split_sum.get()[at(0)];
    for (int s = 1; s < splits; ++s)
      kernels->fold(&top, &sum, o, w.split_max.get()[at(s)], w.split_sum.get()[at(s)],
                    w.split_out.get() + at(s) * E, E);
    kernels->finish(o, sum, E);
  }
}

// x += weights . a
void Model::project(Chunk& c, int thread, int layer, int phase, const Act& a) {
  const Linear& weights = phase == PROJECT ? layers[size(layer)].o : layers[size(layer)].down;
  float* x = work_->x.get() + static_cast<std::ptrdiff_t>(c.first) * config.hidden;
  share(c, thread, layer, phase, [&](int begin, int end) {
    kernels->linear(weights, a, begin, end, x + begin * TILE, config.hidden, true);
  });
}

// silu(gate) * up, 32 outputs at a time, straight into the quantised input of `down`.
void Model::mlp(Chunk& c, int thread, int layer, const Act& a) {
  Workspace& w = *work_;
  const Layer& l = layers[size(layer)];
  const Act& out = c.middle;
  const int at_once = mlp_units(c.rows), width = at_once * GROUP;
  float* gate = w.threads[size(thread)].tiles.get();
  float* up = gate + static_cast<std::ptrdiff_t>(c.rows) * width;
  share(c, thread, layer, GATE_UP, [&](int begin, int end) {
    for (int unit = begin; unit < end; unit += at_once) {
      const int last = std::min(unit + at_once, end);
      const int i0 = unit * GROUP, i1 = std::min(last * GROUP, config.intermediate);
      if (unit > begin) fetch_ahead(l.up, i0 / TILE);
      kernels->linear(l.gate, a, i0 / TILE, i1 / TILE, gate, width, false);
      kernels->linear(l.up, a, i0 / TILE, i1 / TILE, up, width, false);
      for (int r = 0; r < c.rows; ++r) {
        float* g = gate + static_cast<std::ptrdiff_t>(r) * width;
        kernels->silu_mul(g, up + static_cast<std::ptrdiff_t>(r) * width, i1 - i0);
        if (out.f != nullptr)
          std::memcpy(out.f + static_cast<std::ptrdiff_t>(r) * config.intermediate + i0, g,
                      size(i1 - i0) * sizeof(float));
      }
      if (out.q != nullptr) kernels->quantize(gate, width, 0, c.rows, unit, last - unit, out);
    }
  });
}

// Final norm and logits of the wanted rows.
void Model::output(const Chunk& c, int thread) {
  Workspace& w = *work_;
  const std::ptrdiff_t D = config.hidden;
  const Pass& pass = c.pass;
  if (pass.final_tap != nullptr)
    for (int r = thread; r < c.rows; r += c.n_threads)
      kernels->rms_norm(w.x.get() + r * D, final_norm, config.hidden, config.eps,
                        pass.final_tap + (c.row0 + r) * D);
  if (c.n_wanted == 0) return;
  const Act& a = w.last.act();
  for (int i = thread; i < c.n_wanted; i += c.n_threads) {
    const int row = pass.wanted[c.wanted0 + i] - c.row0;
    prepare_row(w.x.get() + row * D, config.hidden, final_norm, i, w.threads[size(thread)].row.get(), a);
  }
  Pool::instance().barrier();
  float* logits = pass.logits + static_cast<std::ptrdiff_t>(c.wanted0) * head.n_out;
  Shares& tiles = w.shares.back();
  for (int begin = 0, end = 0; tiles.next(thread, begin, end);)
    kernels->linear(head, a, begin, end, logits + begin * TILE, head.n_out, false);
}

}  // namespace paceline
