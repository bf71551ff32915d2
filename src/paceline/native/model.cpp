#include "model.h"

#include <algorithm>
#include <cstring>

#include "attend.h"
#include "chunk.h"
#include "layout.h"
#include "workspace.h"

namespace paceline {

Model::Model(Config c) : config(std::move(c)), work_(std::make_unique<Workspace>()) {}
Model::~Model() = default;

std::size_t Model::workspace_bytes() const {
  const Workspace& w = *work_;
  std::size_t n = w.x.bytes() + w.q.bytes() + w.attended.bytes() + w.cos.bytes() + w.sin.bytes() +
                  w.split_max.bytes() + w.split_sum.bytes() + w.split_out.bytes() +
                  w.act[0].bytes() + w.act[1].bytes() + w.middle.bytes() + w.last.bytes();
  for (const ThreadSpace& t : w.threads)
    n += t.act[0].bytes() + t.act[1].bytes() + t.row.bytes() + t.tiles.bytes() +
         t.attention.bytes() + t.slots.bytes();
  return n;
}

// Where every row's keys are; done once per pass.
void Model::plan(const Pass& p) {
  Workspace& w = *work_;
  w.paths.assign(size(p.n_rows), Path{});
  w.lists.clear();
  w.committed.resize(std::max(w.committed.size(), size(p.n_seqs)));
  for (int s = 0; s < p.n_seqs; ++s) {
    std::vector<std::int32_t>& slots = w.committed[size(s)];
    slots.resize(size(p.contexts[s]));
    for (int i = 0; i < p.contexts[s]; ++i)
      slots[size(i)] = p.tables[size(s)][i / p.block_size] * p.block_size + i % p.block_size;
    for (int row = p.starts[s]; row < p.starts[s + 1]; ++row) {
      Path& path = w.paths[size(row)];
      path.committed = slots.data();
      path.n_committed = p.contexts[s];
      if (p.parents[row] < 0) {
        path.list = static_cast<int>(w.lists.size());
        w.lists.emplace_back();
      } else {
        const Path& parent = w.paths[size(p.starts[s] + p.parents[row])];
        path.list = parent.list;
        path.n_own = parent.n_own;
        const std::vector<std::int32_t>& list = w.lists[size(parent.list)];
        if (list.size() != size(parent.n_own)) {  // a sibling extended it first
          path.list = static_cast<int>(w.lists.size());
          std::vector<std::int32_t> copy(list.begin(), list.begin() + parent.n_own);
          w.lists.push_back(std::move(copy));
        }
      }
      w.lists[size(path.list)].push_back(p.slots[row]);
      ++path.n_own;
    }
  }
}

// Makes every buffer large enough, so that threads only ever read their addresses.
void Model::reserve(const Pass& pass) {
  Workspace& w = *work_;
  const int D = config.hidden, E = config.head_size, HE = config.heads * E;
  const int group = config.heads / config.kv_heads;
  const std::size_t rows = size(std::min(pass.n_rows, CHUNK));
  w.x.reserve(rows * size(D));
  w.q.reserve(rows * size(HE));
  w.attended.reserve(rows * size(HE));
  w.cos.reserve(rows * size(E / 2));
  w.sin.reserve(rows * size(E / 2));
  if (w.threads.size() < size(n_threads)) w.threads.resize(size(n_threads));
  for (ThreadSpace& t : w.threads) {
    t.row.reserve(size(std::max({D, config.intermediate, HE})));
    t.tiles.reserve(std::max(rows * size(E), 2 * rows * size(GROUP * mlp_units(static_cast<int>(rows)))));
    t.attention.reserve(attend_floats(group, E));
    t.slots.reserve(ATTEND_ROWS * SPLIT);
  }
  if (w.shares.size() != PHASES * layers.size() + 1)
    w.shares = std::vector<Shares>(PHASES * layers.size() + 1);
}

void Model::group_rows(const Chunk& c) {
  std::vector<RowGroup>& groups = work_->groups;
  const int most = rows_per_item(c.rows, config.kv_heads, c.n_threads);
  groups.clear();
  for (int s = 0; s < c.pass.n_seqs; ++s) {
    const int begin = std::max(c.pass.starts[s] - c.row0, 0);
    const int end = std::min(c.pass.starts[s + 1] - c.row0, c.rows);
    for (int row = begin; row < end; row += most) groups.push_back({row, std::min(most, end - row)});
  }
}

void Model::reset_shares(const Chunk& c) {
  std::vector<Shares>& shares = work_->shares;
  const int attend_items = static_cast<int>(work_->groups.size()) * config.kv_heads * (c.by_split ? c.max_splits : 1);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    Shares* of = &shares[PHASES * l];
    of[QKV].reset(config.heads + 2 * config.kv_heads, c.n_threads);
    of[ATTEND].reset(attend_items, c.n_threads);
    of[PROJECT].reset(n_tiles(config.hidden), c.n_threads);
    of[GATE_UP].reset((config.intermediate + GROUP - 1) / GROUP, c.n_threads);
    of[DOWN].reset(n_tiles(config.hidden), c.n_threads);
  }
  shares.back().reset(n_tiles(head.n_out), c.n_threads);
}

void Model::forward(const Pass& pass) {
  const std::lock_guard<std::mutex> only(mutex_);
  Workspace& w = *work_;
  plan(pass);
  reserve(pass);
  enum { MIDDLE = ATTENDED + 1, LAST };
  ActForms forms[LAST + 1];  // what the matrices read, by place
  for (const Layer& l : layers) {
    for (const Linear* i : {&l.q, &l.k, &l.v, &l.gate, &l.up}) forms[LAYER_INPUT].need(i->format);
    forms[ATTENDED].need(l.o.format);
    forms[MIDDLE].need(l.down.format);
  }
  forms[LAST].need(head.format);
  const int block = kernels->max_block, HE = config.heads * config.head_size;
  for (int row0 = 0, wanted = 0; row0 < pass.n_rows; row0 += CHUNK) {
    Chunk c{pass};
    c.row0 = row0;
    c.rows = std::min(CHUNK, pass.n_rows - row0);
    c.n_threads = n_threads;
    c.wanted0 = wanted;
    while (wanted < pass.n_wanted && pass.wanted[wanted] < row0 + c.rows) ++wanted;
    c.n_wanted = wanted - c.wanted0;
    for (int r = 0; r < c.rows; ++r) {
      const Path& path = w.paths[size(row0 + r)];
      c.max_splits = std::max(c.max_splits, (path.n_committed + path.n_own + SPLIT - 1) / SPLIT);
    }
    c.by_split = c.max_splits > 1 && c.rows * config.kv_heads < 8 * n_threads;
    if (c.by_split) {
      const std::size_t n = size(c.rows) * size(c.max_splits) * size(config.heads);
      w.split_max.reserve(n);
      w.split_sum.reserve(n);
      w.split_out.reserve(n * size(config.head_size));
    }
    c.solo = c.rows <= (c.by_split ? SOLO_SPLIT_ROWS : SOLO_ROWS);
    const auto shape = [&](ActBuffer* acts) {
      acts[LAYER_INPUT].shape(c.rows, config.hidden, forms[LAYER_INPUT], block);
      acts[ATTENDED].shape(c.rows, HE, forms[ATTENDED], block);
    };
    if (!c.solo) shape(w.act);
    else for (ThreadSpace& t : w.threads) shape(t.act);
    w.middle.shape(c.rows, config.intermediate, forms[MIDDLE], block);
    w.last.shape(c.n_wanted, config.hidden, forms[LAST], block);
    group_rows(c);
    reset_shares(c);
    Pool::instance().run(n_threads, [&](int thread, int) {
      Chunk mine = c;
      run_chunk(mine, thread);
    });
  }
}

void Model::run_chunk(Chunk& c, int thread) {
  Pool& pool = Pool::instance();
  Workspace& w = *work_;
  const Pass& pass = c.pass;
  const int D = config.hidden;
  const std::ptrdiff_t plane = static_cast<std::ptrdiff_t>(pass.n_slots) * config.kv_heads * config.head_size;
  embed(c, thread);
  pool.barrier();
  for (std::size_t l = 0; l <= layers.size(); ++l) {
    if (pass.taps[l] != nullptr) {  // x changes only after another barrier
      const std::ptrdiff_t from = c.rows * thread / c.n_threads, to = c.rows * (thread + 1) / c.n_threads;
      std::copy(w.x.get() + from * D, w.x.get() + to * D, pass.taps[l] + (c.row0 + from) * D);
    }
    if (l == layers.size()) break;
    const int layer = static_cast<int>(l), phases = PHASES * layer;
    if (pass.run_attention == nullptr || pass.run_attention[l] != 0) {
      c.keys = pass.kv + 2 * static_cast<std::ptrdiff_t>(l) * plane;
      c.values = c.keys + plane;
      attention_inputs(c, thread, layer);
      fetch_ahead_of(thread, layer, PROJECT);
      pool.barrier();
      attention(c, thread, layer);
      pool.barrier();
      const Act& a = prepare(c, thread, ATTENDED, nullptr);
      project(c, thread, layers[l].o, a, phases + PROJECT);
      fetch_ahead_of(thread, layer, GATE_UP);
      pool.barrier();
    }
    if (pass.run_mlp == nullptr || pass.run_mlp[l] != 0) {
      const Act& a = prepare(c, thread, LAYER_INPUT, layers[l].mlp_norm);
      mlp(c, thread, layer, a);
      fetch_ahead_of(thread, layer, DOWN);
      pool.barrier();
      project(c, thread, layers[l].down, w.middle.act(), phases + DOWN);
      fetch_ahead_of(thread, layer + 1, QKV);
      pool.barrier();
    }
  }
  output(c, thread);
}

}  // namespace paceline
