// Attention of a few rows over their keys: splits are fixed ranges of a row's keys, folded in
// order, so that a row's bits do not depend on which rows stand beside it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "types.h"

namespace paceline {

// Floats that attend_rows needs: the kernel's, one split's results, and running sums.
inline std::size_t attend_floats(int n_heads, int head_size) {
  const std::size_t heads = static_cast<std::size_t>(ATTEND_ROWS) * static_cast<std::size_t>(n_heads);
  return static_cast<std::size_t>(attention_scratch(n_heads, head_size)) +
         heads * (static_cast<std::size_t>(head_size) + 4);
}

// Slots of the n keys of a split, in order of position: those of the committed prefix, then those of
// `own`. They go to `room` where they don't lie in one piece.
inline const std::int32_t* split_slots(const std::int32_t* committed, int n_committed, const std::int32_t* own,
                                       int split, int n, std::int32_t* room) {
  const int first = split * SPLIT;
  if (first + n <= n_committed) return committed + first;
  const int before = std::max(n_committed - first, 0);
  if (before > 0) std::copy_n(committed + first, before, room);
  std::copy_n(own + (first + before - n_committed), n - before, room + before);
  return room;
}

// One key/value head (job's keys, values, n_heads, head_size and scratch are set; scratch holds
// attend_floats) and at most ATTEND_ROWS rows. For row r < n: keys(r) of them, query(r) and
// out(r) [G, E], slots(r, split, n_keys) where a split's keys are.
template <typename Keys, typename Query, typename Out, typename Slots>
void attend_rows(const Kernels& kernels, SplitJob& job, int n, Keys keys, Query query, Out out, Slots slots) {
  const std::ptrdiff_t G = job.n_heads, E = job.head_size;
  float* split_out = job.scratch + attention_scratch(job.n_heads, job.head_size);
  float* split_max = split_out + ATTEND_ROWS * G * E;  // [rows, G]
  float* split_sum = split_max + ATTEND_ROWS * G;
  float* total_max = split_sum + ATTEND_ROWS * G;
  float* total_sum = total_max + ATTEND_ROWS * G;
  for (int split = 0;; ++split) {
    job.n_rows = 0;
    int of[ATTEND_ROWS];  // the job's rows, as members of the group
    for (int r = 0; r < n; ++r) {
      const int left = std::min(SPLIT, keys(r) - split * SPLIT);
      if (left <= 0) continue;
      of[job.n_rows] = r;
      job.row[job.n_rows++] = {query(r), slots(r, split, left), left,
                               (split > 0 ? split_max : total_max) + r * G,
                               (split > 0 ? split_sum : total_sum) + r * G,
                               split > 0 ? split_out + r * G * E : out(r)};
    }
    if (job.n_rows == 0) break;
    kernels.attend_split(job);
    for (int i = 0; i < job.n_rows && split > 0; ++i)
      for (int g = 0; g < G; ++g)
        kernels.fold(total_max + of[i] * G + g, total_sum + of[i] * G + g, out(of[i]) + g * E,
                     job.row[i].max[g], job.row[i].sum[g], job.row[i].out + g * E, job.head_size);
  }
  for (int r = 0; r < n; ++r)
    for (int g = 0; g < G; ++g) kernels.finish(out(r) + g * E, total_sum[r * G + g], job.head_size);
}

}  // namespace paceline
