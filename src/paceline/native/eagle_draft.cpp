// Drafts, level by level: the logits of the frontier, its best children, their rows.
#include <algorithm>
#include <cmath>

#include "chunk.h"
#include "eagle.h"
#include "eagle_work.h"
#include "layout.h"
#include "rank.h"

namespace paceline {

// The children of a draft's frontier, whose ranked tokens are ids, scores [frontier, n_best]; and
// the frontier that follows.
void EagleLayer::expand(EagleDraft& d, const std::int32_t* ids, const float* scores, int width, int n_best) {
  std::vector<int> added;
  for (std::size_t f = 0; f < d.frontier.size(); ++f) {
    const int node = d.frontier[f];
    const float* of = scores + f * size(n_best);
    if (std::isnan(of[0])) {
      d.healthy = false;
      continue;
    }
    for (int i = 0; i < n_best; ++i) {
      added.push_back(static_cast<int>(d.tokens.size()));
      d.tokens.push_back(weights.target_ids[ids[f * size(n_best) + size(i)]]);
      d.parents.push_back(node);
      d.scores.push_back(d.scores[size(node)] + static_cast<double>(of[i]));
      d.levels.push_back(d.levels[size(node)] + 1);
    }
  }
  d.slots.resize(d.tokens.size());
  d.outputs.resize(d.tokens.size());
  std::stable_sort(added.begin(), added.end(), [&](int a, int b) { return d.scores[size(a)] > d.scores[size(b)]; });
  d.frontier.clear();
  for (const int node : added) {
    const bool ends = std::find(d.end_ids.begin(), d.end_ids.end(), d.tokens[size(node)]) != d.end_ids.end();
    if (!ends && static_cast<int>(d.frontier.size()) < width) d.frontier.push_back(node);
  }
  std::sort(d.frontier.begin(), d.frontier.end());
}

// The frontier's rows: each sees the committed rows, its ancestors, itself.
void EagleLayer::feed(EagleDraft& d) {
  EagleWorkspace& w = *work_;
  float* outputs = w.outputs[w.depth % 2].get();
  for (const int node : d.frontier) {
    EagleQuery query;
    query.row = static_cast<int>(w.level.rows.size());
    query.prefix = d.cache->rows;
    d.slots[size(node)] = d.fed++;
    for (int above = node; above > 0; above = d.parents[size(above)]) query.own.push_back(d.slots[size(above)]);
    std::reverse(query.own.begin(), query.own.end());
    const int position = d.cache->rows + d.levels[size(node)] - 1;
    w.level.rows.push_back({d.cache, d.slots[size(node)], position, d.tokens[size(node)],
                            d.outputs[size(d.parents[size(node)])]});
    d.outputs[size(node)] = outputs + static_cast<std::ptrdiff_t>(query.row) * config.hidden;
    w.level.wanted.push_back(std::move(query));
  }
}

// From the ranked tokens of a level to the rows of the next one; false where none follows.
bool EagleLayer::advance(std::vector<EagleDraft>& drafts, int width) {
  EagleWorkspace& w = *work_;
  const int n_best = std::min(width, weights.head.n_out);
  std::size_t at = 0;
  ++w.depth;
  w.level.clear();
  w.level.out = w.outputs[w.depth % 2].get();
  w.heats.clear();
  std::vector<const float*> scored;
  for (EagleDraft& d : drafts) {
    const std::size_t n = d.frontier.size();
    expand(d, w.ids.get() + at * size(n_best), w.scores.get() + at * size(n_best), width, n_best);
    at += n;
    if (w.depth >= d.depth) d.frontier.clear();
    feed(d);
    for (const int node : d.frontier) {
      scored.push_back(d.outputs[size(node)]);
      w.heats.push_back(d.heat);
    }
  }
  plan_head(std::move(scored), w.draft_logits.get());
  return !w.level.rows.empty();
}

// The pass over the rows that drafts bring, which their caches count from now on.
void EagleLayer::append(std::vector<EagleDraft>& drafts) {
  EagleWorkspace& w = *work_;
  const std::ptrdiff_t D = config.hidden, in = config.first ? config.hidden : config.fused;
  w.first.clear();
  w.first.fuse = !config.first;
  w.appended.reserve(drafts.size() * size(D));
  w.first.out = w.appended.get();
  for (EagleDraft& d : drafts) {
    if (d.count == 0) continue;
    for (int r = 0; r < d.count; ++r) {
      const int slot = d.cache->rows + r;
      w.first.rows.push_back({d.cache, slot, slot, d.waiting[r], d.features + r * in});
    }
    d.cache->rows += d.count;
    w.first.wanted.push_back({static_cast<int>(w.first.rows.size()) - 1, d.cache->rows, {}});
  }
}

void EagleLayer::grow(std::vector<EagleDraft>& drafts, int width) {
  const std::lock_guard<std::mutex> only(mutex_);
  EagleWorkspace& w = *work_;
  const std::size_t U = size(weights.head.n_out), most = drafts.size() * size(width);
  const int n_best = std::min(width, weights.head.n_out);
  int positions = 0;
  w.depth = 0;
  w.heats.clear();
  std::vector<const float*> scored;
  append(drafts);
  const float* appended = w.first.out;
  for (EagleDraft& d : drafts) {
    const float* hidden = d.hidden;
    if (d.count > 0) {
      hidden = appended;
      appended += config.hidden;
    }
    d.cache->reserve(d.cache->rows + width * d.depth);
    positions = std::max({positions, d.cache->capacity(), d.cache->rows + d.depth});
    d.tokens = {-1};
    d.parents = {-1};
    d.scores = {0.0};
    d.levels = d.slots = d.frontier = {0};
    d.outputs = {hidden};
    d.fed = d.cache->rows;
    scored.push_back(hidden);
    w.heats.push_back(d.heat);
  }
  reserve_positions(positions);
  for (Buffer<float>& b : w.outputs) b.reserve(most * size(config.hidden));
  w.draft_logits.reserve(most * U);
  w.ids.reserve(most * size(n_best));
  w.scores.reserve(most * size(n_best));
  for (auto& t : w.threads) t.ranking.reserve(size(rank_room(weights.head.n_out)));
  plan_head(std::move(scored), w.draft_logits.get());
  Pool& pool = Pool::instance();
  pool.run(n_threads_, [&](int thread, int) {
    if (!w.first.rows.empty()) pass_through(w.first, thread);
    for (;;) {
      head(thread);
      pool.barrier();
      for (std::size_t r = size(thread); r < w.scored.size(); r += size(n_threads_))
        rank(*kernels_, w.logits + r * U, static_cast<int>(U), w.heats[r], n_best,
             w.threads[size(thread)].ranking.get(), w.ids.get() + r * size(n_best),
             w.scores.get() + r * size(n_best));
      pool.barrier();
      if (thread == 0) w.more = advance(drafts, width);
      pool.barrier();
      if (!w.more) break;
      pass_through(w.level, thread);
    }
  });
  for (EagleDraft& d : drafts)
    if (d.count > 0) std::copy_n(d.outputs[0], config.hidden, d.hidden);
}

}  // namespace paceline
