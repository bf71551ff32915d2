// The kernels without Python, for the address and undefined-behaviour sanitizers:
//   cmake -S . -B build/asan -DCMAKE_BUILD_TYPE=Debug -DPACELINE_PYTHON=OFF
//     -DPACELINE_KERNEL_TESTS=ON -DPACELINE_SANITIZE=ON
//   cmake --build build/asan && ctest --test-dir build/asan --output-on-failure
// (Debug: with sanitizers, optimising the unrolled kernels takes the compiler many minutes.)
// Buffers are exactly as large as documented, so a read or write too far is seen. Every path
// must give the bits of the portable one.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "dispatch.h"
#include "eagle.h"
#include "half.h"
#include "layout.h"
#include "model.h"
#include "rank.h"
#include "tiles.h"
#include "workspace.h"

using namespace paceline;

namespace {

int failures = 0;

void check(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  ++failures;
}

std::mt19937 rng(1);

std::vector<float> random_floats(std::size_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Weights that own their bytes.
struct Matrix {
  std::vector<std::uint8_t> bytes;
  Linear linear;

  Matrix(int format, int n_out, int n_in) {
    linear.format = format;
    linear.n_out = n_out;
    linear.n_in = n_in;
    linear.tile_bytes = tile_bytes(format, n_in);
    bytes.resize(linear.tile_bytes * static_cast<std::size_t>(n_tiles(n_out)));
    linear.data = bytes.data();
  }
};

Matrix random_matrix(int format, int n_out, int n_in) {
  Matrix m(format, n_out, n_in);
  if (is_dense(format) || format == Q4_SUPER || format == Q8_SYM) {
    const std::vector<float> w =
        random_floats(static_cast<std::size_t>(n_out) * static_cast<std::size_t>(n_in), 0.1f);
    pack_float(w.data(), n_out, n_in, format, m.bytes.data());
    return m;
  }
  int type = -1;  // a GGUF type of this format, filled with random codes and plain scales
  for (int t : {GGUF_Q4_1, GGUF_Q5_0, GGUF_Q5_1, GGUF_Q5_K, GGUF_Q6_K})
    if (format_of_gguf(t) == format) type = t;
  const std::size_t row = gguf_row_bytes(type, n_in);
  std::vector<std::uint8_t> raw(row * static_cast<std::size_t>(n_out));
  for (std::uint8_t& b : raw) b = static_cast<std::uint8_t>(rng());
  const int block = type == GGUF_Q4_1 ? 20 : type == GGUF_Q5_0 ? 22 : type == GGUF_Q5_1 ? 24
                    : type == GGUF_Q5_K ? 176 : 210;
  for (std::size_t at = 0; at < raw.size(); at += static_cast<std::size_t>(block)) {
    const std::uint16_t scale = float_to_half(0.01f);
    std::memcpy(&raw[at + (type == GGUF_Q6_K ? 208u : 0u)], &scale, 2);
    if (type != GGUF_Q6_K && type != GGUF_Q5_0) std::memcpy(&raw[at + 2], &scale, 2);
  }
  pack_gguf(type, raw.data(), n_out, n_in, m.bytes.data());
  return m;
}

void test_half() {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const float f = half_to_float(static_cast<std::uint16_t>(h));
    if (std::isnan(f)) continue;
    check(float_to_half(f) == h, "fp16 round trip of " + std::to_string(h));
  }
  check(float_to_half(65520.0f) == 0x7c00, "fp16 overflow");
  check(float_to_half(2.9802322e-8f) == 0, "fp16 tie to even at the smallest subnormal");
  check(float_to_half(1e-10f) == 0, "fp16 underflow");
  std::vector<float> x = random_floats(4096, 1000.0f);
  for (std::size_t i = 0; i < x.size(); i += 3) x[i] *= 1e-9f;
  for (const std::string& name : available_paths()) {
    std::vector<std::uint16_t> y(x.size());
    find_kernels(name)->to_f16(x.data(), static_cast<int>(x.size()), y.data());
    for (std::size_t i = 0; i < x.size(); ++i)
      check(y[i] == float_to_half(x[i]), name + ": fp16 conversion");
  }
}

std::vector<float> run_linear(const Kernels& k, const Linear& w, const std::vector<float>& x, int rows) {
  ActBuffer buffer;
  const bool dense = is_dense(w.format);
  ActForms forms;
  forms.need(w.format);
  const Act& a = buffer.shape(rows, w.n_in, forms, k.max_block);
  if (dense) std::memcpy(a.f, x.data(), static_cast<std::size_t>(rows * w.n_in) * sizeof(float));
  else k.quantize(x.data(), w.n_in, 0, rows, 0, w.n_in / GROUP, a);
  std::vector<float> out(static_cast<std::size_t>(rows) * static_cast<std::size_t>(w.n_out), 0.5f);
  const int tiles = n_tiles(w.n_out);
  k.linear(w, a, 0, tiles / 2, out.data(), w.n_out, false);
  k.linear(w, a, tiles / 2, tiles, out.data() + tiles / 2 * TILE, w.n_out, true);
  return out;
}

void test_linear() {
  for (int format = 0; format < N_FORMATS; ++format) {
    for (int n_in : {256, 768}) {
      const Matrix m = random_matrix(format, 42, n_in);
      for (int rows : {1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 33}) {
        const std::vector<float> x =
            random_floats(static_cast<std::size_t>(rows) * static_cast<std::size_t>(n_in));
        const std::vector<float> truth = run_linear(*find_kernels("portable"), m.linear, x, rows);
        for (const std::string& name : available_paths())
          check(same(run_linear(*find_kernels(name), m.linear, x, rows), truth),
                name + ": format " + std::to_string(format) + ", rows " + std::to_string(rows));
      }
      std::vector<float> row(static_cast<std::size_t>(n_in));
      unpack_row(m.linear, 41, row.data());
      for (float v : row) check(std::isfinite(v), "unpacked row");
    }
  }
}

// Rows of one split: a chain, each a key longer than the one before, or siblings, which differ
// in their last key. Together, alone and on every path they must give the same bits.
void test_attention_rows(int E, int G, int n, bool in_order, bool chain) {
  constexpr int ROWS = ATTEND_ROWS, SLOTS = 304;
  std::vector<std::uint16_t> keys(static_cast<std::size_t>(SLOTS * E)), values(keys.size());
  for (auto* v : {&keys, &values})
    for (std::uint16_t& h : *v) h = float_to_half(random_floats(1)[0]);
  std::vector<std::int32_t> shared(static_cast<std::size_t>(n)), at[ROWS];
  for (int i = 0; i < n; ++i)
    shared[static_cast<std::size_t>(i)] = in_order ? 32 + i : static_cast<std::int32_t>(rng() % SLOTS);
  for (int r = 0; r < ROWS; ++r) {
    at[r] = shared;
    if (chain) at[r].resize(static_cast<std::size_t>(std::max(1, n + r - ROWS + 1)));
    else at[r].back() = 7 + r;
  }
  const std::size_t heads = static_cast<std::size_t>(ROWS * G);
  const std::vector<float> q = random_floats(heads * static_cast<std::size_t>(E), 0.3f);
  std::vector<float> truth;
  std::vector<std::string> paths = available_paths();
  paths.insert(paths.begin(), "portable");
  for (const std::string& name : paths) {
    for (const int together : {1, 2, ROWS}) {
      std::vector<float> max(heads), sum(heads), out(heads * static_cast<std::size_t>(E), -1.0f),
          scratch(attention_scratch(G, E));
      SplitJob job;
      job.keys = keys.data();
      job.values = values.data();
      job.n_heads = G;
      job.head_size = E;
      job.scratch = scratch.data();
      for (int first = 0; first < ROWS; first += together) {
        job.n_rows = together;
        for (int i = 0; i < together; ++i) {
          const int r = first + i;
          job.row[i] = {q.data() + r * G * E,  at[r].data(),       static_cast<int>(at[r].size()),
                        max.data() + r * G, sum.data() + r * G, out.data() + r * G * E};
        }
        find_kernels(name)->attend_split(job);
      }
      out.insert(out.end(), max.begin(), max.end());
      out.insert(out.end(), sum.begin(), sum.end());
      if (truth.empty()) truth = out;
      check(same(out, truth), name + ": attention of " + std::to_string(n) + " keys");
    }
  }
}

void test_attention() {
  for (int head_size : {16, 64, 80, 128})
    for (int n_heads : {1, 3, 6})
      for (int n : {1, 15, 16, 17, 100, 256})
        for (const bool in_order : {true, false})
          for (const bool chain : {true, false})
            test_attention_rows(head_size, n_heads, n, in_order, chain);
  test_attention_rows(MAX_HEAD_SIZE, 2, 100, true, true);
  test_attention_rows(16, MAX_GROUP, 40, false, true);
}

// A whole pass: two sequences, a tree and a chain, with more rows than a chunk.
void test_model() {
  Config c;
  c.hidden = 64;
  c.intermediate = 96;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_size = 32;
  for (int i = 0; i < 16; ++i) c.inverse_frequencies.push_back(std::pow(10000.0, -i / 16.0));
  const int V = 50, L = 2, n_slots = 640;
  const std::vector<float> norm(64, 1.0f), bias = random_floats(128, 0.1f);
  std::vector<Matrix> own;
  own.reserve(32);
  const auto matrix = [&](int format, int n_out, int n_in) {
    own.push_back(random_matrix(format, n_out, n_in));
    return own.back().linear;
  };
  std::vector<Layer> layers;
  for (int l = 0; l < L; ++l) {
    Layer y;
    y.q = matrix(Q4_SUPER, 128, 64);
    y.k = matrix(Q8_SYM, 64, 64);
    y.v = matrix(Q8_SYM, 64, 64);
    y.o = matrix(Q4_SUPER, 64, 128);
    y.gate = matrix(Q4_SUPER, 96, 64);
    y.up = matrix(DENSE_BF16, 96, 64);
    y.down = matrix(Q8_SYM, 64, 96);
    y.attention_norm = y.mlp_norm = norm.data();
    y.q_bias = bias.data();
    layers.push_back(y);
  }
  const Linear embedding = matrix(DENSE_F32, V, 64), head = matrix(Q8_SYM, V, 64);
  const int chain = 300, tree = 9, n = chain + tree;
  std::vector<std::int32_t> tokens, positions, parents, slots, table;
  for (int i = 0; i < 40; ++i) table.push_back(39 - i);
  for (int i = 0; i < chain; ++i) {
    positions.push_back(i);
    parents.push_back(i - 1);
    slots.push_back((39 - i / 16) * 16 + i % 16);
  }
  for (int i = 0; i < tree; ++i) {
    parents.push_back(i == 0 ? -1 : static_cast<int>(rng() % static_cast<unsigned>(i)));
    positions.push_back(parents.back() < 0 ? 0 : positions[static_cast<std::size_t>(chain + parents.back())] + 1);
    slots.push_back(i);
  }
  for (int i = 0; i < n; ++i) tokens.push_back(static_cast<std::int32_t>(rng() % V));
  const std::vector<std::int32_t> starts{0, chain, n}, contexts{0, 0};
  std::vector<std::int32_t> wanted;
  for (int i = 0; i < n; i += 2) wanted.push_back(i);
  std::vector<float> truth;
  std::vector<std::string> paths = available_paths();
  paths.insert(paths.begin(), "portable");
  for (const std::string& name : paths) {
    for (int threads : {1, 2, 3}) {
      Model model(c);
      model.layers = layers;
      model.embedding = embedding;
      model.head = head;
      model.final_norm = norm.data();
      model.kernels = find_kernels(name);
      model.n_threads = threads;
      std::vector<std::uint16_t> kv(static_cast<std::size_t>(L * 2 * 2 * n_slots * 32));
      std::vector<float> logits(wanted.size() * V), tap(static_cast<std::size_t>(n * 64));
      Pass p;
      p.n_rows = n;
      p.n_seqs = 2;
      p.n_wanted = static_cast<int>(wanted.size());
      p.block_size = 16;
      p.tokens = tokens.data();
      p.positions = positions.data();
      p.parents = parents.data();
      p.slots = slots.data();
      p.starts = starts.data();
      p.contexts = contexts.data();
      p.tables = {table.data(), table.data()};
      p.wanted = wanted.data();
      p.kv = kv.data();
      p.n_slots = n_slots;
      p.taps = {nullptr, tap.data(), nullptr};
      p.logits = logits.data();
      model.forward(p);
      logits.insert(logits.end(), tap.begin(), tap.end());
      for (float v : logits) check(std::isfinite(v), name + ": finite logits");
      if (truth.empty()) truth = logits;
      check(same(logits, truth), name + ": forward pass with " + std::to_string(threads) + " threads");
    }
  }
}

// The best of n logits against sorting; ties, and values that are not finite.
void test_rank() {
  for (const int n : {1, 5, 16, 17, 255, 256, 300, 1000}) {
    std::vector<float> x = random_floats(static_cast<std::size_t>(n), 3.0f);
    for (std::size_t i = 0; i + 3 < x.size(); i += 3) x[i + 1] = x[i];
    const int best = std::min(n, 20);
    std::vector<std::int32_t> order;
    for (int i = 0; i < n; ++i) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return x[static_cast<std::size_t>(a)] > x[static_cast<std::size_t>(b)];
    });
    double sum = 0;
    for (const float v : x) sum += std::exp(static_cast<double>(v) / 0.7);
    std::vector<float> truth;
    for (const std::string& name : available_paths()) {
      const Kernels& k = *find_kernels(name);
      std::vector<float> room(static_cast<std::size_t>(rank_room(n))), scores(static_cast<std::size_t>(best));
      std::vector<std::int32_t> ids(static_cast<std::size_t>(best));
      rank(k, x.data(), n, 0.7f, best, room.data(), ids.data(), scores.data());
      for (std::size_t i = 0; i < ids.size(); ++i) {
        check(ids[i] == order[i], name + ": order of " + std::to_string(n) + " logits");
        const double want = static_cast<double>(x[static_cast<std::size_t>(ids[i])]) / 0.7 - std::log(sum);
        check(std::fabs(static_cast<double>(scores[i]) - want) < 1e-4, name + ": log-probability");
      }
      if (truth.empty()) truth = scores;
      check(same(scores, truth), name + ": bits of log-probabilities");
      for (const float bad : {NAN, INFINITY, -INFINITY}) {
        std::vector<float> broken = x;
        broken.back() = bad;
        rank(k, broken.data(), n, 0.7f, 1, room.data(), ids.data(), scores.data());
        check(std::isnan(scores[0]), name + ": logits that are not finite");
      }
    }
  }
}

// An EAGLE layer: more rows than a chunk and a split, then drafts, which must be what passes over
// single rows give.
void test_eagle(bool first) {
  const int D = 64, I = 96, H = 4, K = 2, E = 32, U = 50, V = 70, taps = 3, n = 300;
  EagleConfig c;
  c.hidden = D;
  c.intermediate = I;
  c.heads = H;
  c.kv_heads = K;
  c.head_size = E;
  c.fused = first ? 2 * D : taps * D;
  c.first = first;
  for (int i = 0; i < E / 2; ++i) c.inverse_frequencies.push_back(std::pow(10000.0, -i / 16.0));
  const Matrix embedding = random_matrix(Q8_SYM, V, D), fc = random_matrix(Q8_SYM, D, c.fused),
               qkv = random_matrix(Q8_SYM, (H + 2 * K) * E, first ? D : 2 * D),
               o = random_matrix(DENSE_F32, D, H * E), gate_up = random_matrix(Q8_SYM, 2 * I, D),
               down = random_matrix(DENSE_BF16, D, I), head = random_matrix(Q4_SUPER, U, D);
  const std::vector<float> bias = random_floats(static_cast<std::size_t>(D)), norm(static_cast<std::size_t>(c.fused), 1.5f);
  std::vector<std::int32_t> ids;
  for (int i = 0; i < U; ++i) ids.push_back(i + 7);
  EagleWeights w;
  w.embedding = embedding.linear;
  w.fc = fc.linear;
  w.qkv = qkv.linear;
  w.o = o.linear;
  w.gate_up = gate_up.linear;
  w.down = down.linear;
  w.head = head.linear;
  if (first) w.fc_bias = bias.data();
  else w.fused_norm = w.input_norm = w.hidden_norm = w.final_norm = norm.data();
  w.mlp_norm = norm.data();
  w.target_ids = ids.data();
  const int width = first ? D : c.fused;
  const std::vector<float> features = random_floats(static_cast<std::size_t>(n * width));
  std::vector<float> truth;
  for (const std::string& name : available_paths()) {
    for (const int threads : {1, 2, 3}) {
      EagleLayer layer(c, w, find_kernels(name), threads);
      EagleCache cache(K, E), other(K, E);
      EaglePass pass;
      std::vector<float> out(static_cast<std::size_t>(21 * D));
      pass.fuse = !first;
      pass.out = out.data();
      for (int i = 0; i < n; ++i) {
        EagleCache* of = i < 280 ? &cache : &other;  // two sequences; of the second, all rows wanted
        const int slot = i < 280 ? i : i - 280;
        pass.rows.push_back({of, slot, slot, i % V, features.data() + i * width});
        if (i >= 279) pass.wanted.push_back({i, slot + 1, {}});
      }
      layer.run(pass);
      cache.rows = 280;
      other.rows = 20;
      std::vector<EagleDraft> drafts(2);
      drafts[0].cache = &cache;
      drafts[0].hidden = out.data();
      drafts[1].cache = &other;
      drafts[1].hidden = out.data() + 20 * D;
      drafts[0].depth = 4;
      drafts[1].depth = 3;
      layer.grow(drafts, 3);
      std::vector<float> result = out;
      for (const EagleDraft& d : drafts) {
        for (const double s : d.scores) result.push_back(static_cast<float>(s));
        for (const std::int32_t t : d.tokens) result.push_back(static_cast<float>(t));
        check(d.healthy && d.tokens.size() == (d.depth == 4 ? 31u : 22u), name + ": nodes of a draft");
      }
      std::vector<EagleDraft> chain(1);  // against one row after the other
      chain[0].cache = &cache;
      chain[0].hidden = out.data();
      chain[0].depth = 3;
      layer.grow(chain, 1);
      std::vector<float> hidden(out.begin(), out.begin() + D), logits(static_cast<std::size_t>(U)), room(rank_room(U));
      double score = 0;
      for (int step = 0; step < 3; ++step) {
        std::int32_t id = 0;
        float s = 0;
        layer.logits(hidden.data(), 1, logits.data());
        rank(*find_kernels(name), logits.data(), U, 1.0f, 1, room.data(), &id, &s);
        score += static_cast<double>(s);
        const std::size_t node = static_cast<std::size_t>(step + 1);
        check(chain[0].tokens[node] == ids[static_cast<std::size_t>(id)] &&
                  std::memcmp(&chain[0].scores[node], &score, sizeof score) == 0,
              name + ": a chain is its steps");
        std::vector<float> next(static_cast<std::size_t>(D));
        EaglePass one;
        one.out = next.data();
        one.rows.push_back({&cache, 280 + step, 280 + step, chain[0].tokens[node], hidden.data()});
        one.wanted.push_back({0, 281 + step, {}});
        layer.run(one);
        hidden = next;
      }
      if (truth.empty()) truth = result;
      check(same(result, truth), name + ": EAGLE layer with " + std::to_string(threads) + " threads");
    }
  }
}

}  // namespace

int main() {
  test_half();
  test_linear();
  test_attention();
  test_model();
  test_rank();
  test_eagle(true);
  test_eagle(false);
  std::string names;
  for (const std::string& n : available_paths()) names += " " + n;
  std::printf("%d failures; paths:%s\n", failures, names.c_str());
  return failures == 0 ? 0 : 1;
}
