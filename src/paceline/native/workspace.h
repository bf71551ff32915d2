// Buffers of a forward pass, allocated on first use and kept.
#pragma once
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "layout.h"
#include "model.h"

namespace paceline {

constexpr int CHUNK = 128;  // rows that threads take through the layers together; fits the caches

// Memory aligned to cache lines, without initialisation.
template <class T>
class Buffer {
 public:
  T* reserve(std::size_t n) {
    if (n > size_) {
      data_.reset(static_cast<T*>(::operator new[](n * sizeof(T), std::align_val_t{64})));
      size_ = n;
    }
    return data_.get();
  }
  T* get() const { return data_.get(); }
  std::size_t bytes() const { return size_ * sizeof(T); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<T[], Free> data_;
  std::size_t size_ = 0;
};

// Forms of an input that the matrices reading it ask for.
struct ActForms {
  bool quantised = false, offsets = false, dense = false;
  void need(int format) {
    if (is_dense(format)) dense = true;
    else quantised = true;
    if (!is_dense(format) && !traits(format).affine) offsets = true;
  }
};

class ActBuffer {
 public:
  // Lays out `rows` rows of `width`.
  const Act& shape(int rows, int width, const ActForms& forms, int max_block) {
    act_.rows = rows;
    act_.n_in = width;
    act_.n_blocks = block_count(rows, max_block);
    const std::size_t n = static_cast<std::size_t>(rows) * static_cast<std::size_t>(width);
    const std::size_t groups = n / GROUP;
    act_.q = forms.quantised ? q_.reserve(n) : nullptr;
    act_.d = forms.quantised ? d_.reserve(groups) : nullptr;
    act_.ds = forms.quantised ? ds_.reserve(groups) : nullptr;
    act_.offset = forms.offsets ? offset_.reserve(4 * groups) : nullptr;
    act_.f = forms.dense ? f_.reserve(n) : nullptr;
    return act_;
  }
  const Act& act() const { return act_; }
  // Room for so many rows, of which `part` lays out some: rows of other parts are not touched.
  Act part(int first, int rows, int max_block) const {
    Act a = act_;
    a.rows = rows;
    a.n_blocks = block_count(rows, max_block);
    const std::ptrdiff_t n = static_cast<std::ptrdiff_t>(first) * a.n_in, groups = n / GROUP;
    if (a.q != nullptr) a.q += n, a.d += groups, a.ds += groups;
    if (a.offset != nullptr) a.offset += 4 * groups;
    if (a.f != nullptr) a.f += n;
    return a;
  }
  std::size_t bytes() const {
    return q_.bytes() + d_.bytes() + ds_.bytes() + offset_.bytes() + f_.bytes();
  }

 private:
  Act act_;
  Buffer<std::int8_t> q_;
  Buffer<float> d_, ds_, f_;
  Buffer<std::int32_t> offset_;
};

struct ThreadSpace {
  ActBuffer act[2];             // own inputs, by Place, in short passes
  Buffer<float> row;            // one row of max(D, I, H E)
  Buffer<float> tiles;          // outputs of a few tiles, all rows
  Buffer<float> attention;      // scratch of attend_split, then one split's results and running sums
  Buffer<std::int32_t> slots;   // [ATTEND_ROWS, SPLIT]
};

struct Workspace {
  Buffer<float> x;              // [rows, D] residual stream
  Buffer<float> q, attended;    // [rows, H E]
  Buffer<float> cos, sin;       // [rows, E / 2]
  Buffer<float> split_max, split_sum, split_out;  // [rows, splits, H (, E)]
  ActBuffer act[2];             // inputs, by Place, shared by the threads
  ActBuffer middle, last;       // input of `down`; of the head
  std::vector<ThreadSpace> threads;
  std::vector<Shares> shares;   // five per layer, and the head's
  std::vector<Path> paths;      // [N]
  std::vector<std::vector<RowGroup>> groups;  // of the current chunk or its lanes, for attention
  std::vector<std::vector<std::int32_t>> lists;      // slots below the committed prefix
  std::vector<std::vector<std::int32_t>> committed;  // per sequence
};

}  // namespace paceline
