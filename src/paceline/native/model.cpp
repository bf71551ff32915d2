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
  const int most = chunk_rows(pass.n_rows, n_threads);
  const std::size_t rows = size(most), short_rows = size(std::min(most, SOLO_ROWS));
  w.x.reserve(rows * size(D));
  w.q.reserve(rows * size(HE));
  w.attended.reserve(rows * size(HE));
  w.cos.reserve(rows * size(E / 2));
  w.sin.reserve(rows * size(E / 2));
  if (w.threads.size() < size(n_threads)) w.threads.resize(size(n_threads));
  for (ThreadSpace& t : w.threads) {
    t.row.reserve(size(std::max({D, config.intermediate, HE})));
    const std::size_t at_once = std::min(rows, size(CHUNK));  // a lane is shorter
    t.tiles.reserve(std::max({at_once * size(E), 2 * at_once * size(GROUP * mlp_units(most)),
                              2 * short_rows * size(GROUP * mlp_units(SOLO_ROWS))}));
    t.attention.reserve(attend_floats(group, E));
    t.slots.reserve(ATTEND_ROWS * SPLIT);
  }
  if (w.shares.size() != PHASES * layers.size() + 1)
    w.shares = std::vector<Shares>(PHASES * layers.size() + 1);
}

// Groups of rows for attention, kept in place `place` of the workspace.
void Model::group_rows(Chunk& c, std::size_t place) {
  std::vector<RowGroup>& groups = work_->groups[place];
  c.groups = &groups;
  const int most = rows_per_item(c.rows, config.kv_heads, c.n_threads);
  groups.clear();
  for (int s = 0; s < c.pass.n_seqs; ++s) {
    const int begin = std::max(c.pass.starts[s] - c.row0, 0);
    const int end = std::min(c.pass.starts[s + 1] - c.row0, c.rows);
    for (int row = begin; row < end; row += most) groups.push_back({row, std::min(most, end - row)});
  }
}

int Model::units(const Chunk& c, int phase) const {
  switch (phase) {
    case QKV: return config.heads + 2 * config.kv_heads;
    case ATTEND: return static_cast<int>(c.groups->size()) * config.kv_heads * (c.by_split ? c.max_splits : 1);
    case GATE_UP: return (config.intermediate + GROUP - 1) / GROUP;
    default: return n_tiles(config.hidden);
  }
}

void Model::reset_shares(const Chunk& c) {
  std::vector<Shares>& shares = work_->shares;
  for (std::size_t l = 0; l < layers.size(); ++l)
    for (int phase = 0; phase < PHASES; ++phase)
      shares[PHASES * l + size(phase)].reset(units(c, phase), c.n_threads);
  shares.back().reset(n_tiles(head.n_out), c.n_threads);
}

// Rows [row0, row0 + rows) as a chunk whose inputs have no room yet.
Model::Chunk Model::cut(const Pass& pass, int row0, int rows) const {
  Chunk c{pass};
  c.row0 = row0;
  c.rows = rows;
  c.n_threads = n_threads;
  for (int r = 0; r < rows; ++r) {
    const Path& path = work_->paths[size(row0 + r)];
    c.max_splits = std::max(c.max_splits, (path.n_committed + path.n_own + SPLIT - 1) / SPLIT);
  }
  c.by_split = c.max_splits > 1 && rows * config.kv_heads < 8 * n_threads;
  c.solo = rows <= (c.by_split ? SOLO_SPLIT_ROWS : SOLO_ROWS);
  return c;
}

// Room for the inputs of a chunk's matrices, each in the forms that they ask for.
void Model::shape(Chunk& c) {
  Workspace& w = *work_;
  ActForms layer_input, attended, middle, last;
  for (const Layer& l : layers) {
    for (const Linear* i : {&l.q, &l.k, &l.v, &l.gate, &l.up}) layer_input.need(i->format);
    attended.need(l.o.format);
    middle.need(l.down.format);
  }
  last.need(head.format);
  const int block = kernels->max_block;
  const auto both = [&](ActBuffer* acts) {
    c.act[LAYER_INPUT] = acts[LAYER_INPUT].shape(c.rows, config.hidden, layer_input, block);
    c.act[ATTENDED] = acts[ATTENDED].shape(c.rows, config.heads * config.head_size, attended, block);
  };
  if (!c.solo) both(w.act);
  else for (ThreadSpace& t : w.threads) both(t.act);
  c.middle = w.middle.shape(c.rows, config.intermediate, middle, block);
  w.last.shape(c.n_wanted, config.hidden, last, block);
  if (c.by_split) {
    const std::size_t n = size(c.rows) * size(c.max_splits) * size(config.heads);
    w.split_max.reserve(n);
    w.split_sum.reserve(n);
    w.split_out.reserve(n * size(config.head_size));
  }
}

// A shaped chunk's rows in n even parts.
std::vector<Model::Chunk> Model::lanes_of(const Chunk& c, int n) {
  Workspace& w = *work_;
  std::vector<Chunk> lanes;
  for (int i = 0; i < n; ++i) {
    const int first = block_start(c.rows, n, i), rows = block_start(c.rows, n, i + 1) - first;
    Chunk lane = cut(c.pass, c.row0 + first, rows);
    lane.first = first;
    lane.n_threads = 1;
    lane.lane = lane.solo = true;
    lane.by_split = false;
    for (const Place place : {LAYER_INPUT, ATTENDED})
      lane.act[place] = w.act[place].part(first, rows, kernels->max_block);
    lane.middle = w.middle.part(first, rows, kernels->max_block);
    group_rows(lane, size(i));
    lanes.push_back(lane);
  }
  return lanes;
}

void Model::forward(const Pass& pass) {
  const std::lock_guard<std::mutex> only(mutex_);
  Workspace& w = *work_;
  plan(pass);
  reserve(pass);
  for (int row0 = 0, wanted = 0, rows = 0; row0 < pass.n_rows; row0 += rows) {
    rows = chunk_rows(pass.n_rows - row0, n_threads);
    Chunk c = cut(pass, row0, rows);
    c.wanted0 = wanted;
    while (wanted < pass.n_wanted && pass.wanted[wanted] < row0 + rows) ++wanted;
    c.n_wanted = wanted - c.wanted0;
    const int n_lanes = lane_count(rows, n_threads);
    shape(c);
    w.groups.resize(std::max(w.groups.size(), size(std::max(1, n_lanes))));
    if (n_lanes == 0) {
      group_rows(c, 0);
      reset_shares(c);
      Pool::instance().run(n_threads, [&](int thread, int) {
        Chunk mine = c;
        if (c.solo)
          for (const Place place : {LAYER_INPUT, ATTENDED})
            mine.act[place] = w.threads[size(thread)].act[place].act();
        run_chunk(mine, thread);
      });
    } else {
      std::vector<Chunk> lanes = lanes_of(c, n_lanes);
      for (Shares& s : w.shares) s.reset(n_lanes, n_threads);
      w.shares.back().reset(n_tiles(head.n_out), n_threads);
      Pool::instance().run(n_threads, [&](int thread, int) { run_lanes(c, lanes, thread); });
    }
  }
}

// This thread's rows of a chunk as they enter a layer, to whoever asked for them.
void Model::copy_tap(const Chunk& c, int thread, int layer) const {
  float* tap = c.pass.taps[size(layer)];
  if (tap == nullptr) return;
  const std::ptrdiff_t D = config.hidden, part = c.lane ? 0 : thread;
  const std::ptrdiff_t from = c.rows * part / c.n_threads, to = c.rows * (part + 1) / c.n_threads;
  const float* x = work_->x.get();
  std::copy(x + (c.first + from) * D, x + (c.first + to) * D, tap + (c.row0 + from) * D);
}

// Before a phase that reads what other threads wrote in the last one. A lane's rows are one thread's;
// while others are waited for, the weights of the next phase are on their way.
void Model::next_phase(const Chunk& c, int thread, int layer, int phase) const {
  if (c.lane) return;
  if (phase != ATTEND) fetch_ahead_of(thread, layer, phase);
  Pool::instance().barrier();
}

// Up to the queries, keys and values of a layer.
void Model::begin_layer(Chunk& c, int thread, int layer) {
  const Pass& pass = c.pass;
  copy_tap(c, thread, layer);  // x changes only after another barrier
  if (layer == static_cast<int>(layers.size())) return;
  const std::ptrdiff_t plane = static_cast<std::ptrdiff_t>(pass.n_slots) * config.kv_heads * config.head_size;
  c.keys = pass.kv + 2 * layer * plane;
  c.values = c.keys + plane;
  if (pass.run_attention == nullptr || pass.run_attention[layer] != 0) attention_inputs(c, thread, layer);
}

// The rest of it, which reads the keys of all rows.
void Model::end_layer(Chunk& c, int thread, int layer) {
  const Pass& pass = c.pass;
  if (pass.run_attention == nullptr || pass.run_attention[layer] != 0) {
    next_phase(c, thread, layer, PROJECT);
    attention(c, thread, layer);
    next_phase(c, thread, layer, ATTEND);
    project(c, thread, layer, PROJECT, prepare(c, thread, ATTENDED, nullptr));
    next_phase(c, thread, layer, GATE_UP);
  }
  if (pass.run_mlp == nullptr || pass.run_mlp[layer] != 0) {
    mlp(c, thread, layer, prepare(c, thread, LAYER_INPUT, layers[size(layer)].mlp_norm));
    next_phase(c, thread, layer, DOWN);
    project(c, thread, layer, DOWN, c.middle);
    next_phase(c, thread, layer + 1, QKV);
  }
}

// All threads share every phase of the rows.
void Model::run_chunk(Chunk& c, int thread) {
  embed(c, thread);
  Pool::instance().barrier();
  const int n_layers = static_cast<int>(layers.size());
  for (int layer = 0; layer < n_layers; ++layer) {
    begin_layer(c, thread, layer);
    end_layer(c, thread, layer);
  }
  copy_tap(c, thread, n_layers);
  output(c, thread);
}

// Each thread takes whole lanes from one layer's keys to the next one's.
void Model::run_lanes(const Chunk& c, std::vector<Chunk>& lanes, int thread) {
  const int n_layers = static_cast<int>(layers.size());
  for (int layer = -1; layer < n_layers; ++layer) {
    Shares& shares = work_->shares[size(layer < 0 ? QKV : PHASES * layer + ATTEND)];
    for (int begin = 0, end = 0; shares.next(thread, begin, end);)
      for (int i = begin; i < end; ++i) {
        Chunk& lane = lanes[size(i)];
        if (layer < 0) embed(lane, 0);
        else end_layer(lane, thread, layer);
        begin_layer(lane, thread, layer + 1);
      }
    Pool::instance().barrier();
  }
  output(c, thread);
}

}  // namespace paceline
