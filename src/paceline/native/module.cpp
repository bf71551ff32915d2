// Python bindings. Checks what would otherwise read out of bounds; the friendlier messages are
// in paceline/models/native.py.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "dispatch.h"
#include "layout.h"
#include "model.h"
#include "pool.h"
#include "tiles.h"
#include "workspace.h"

namespace paceline {

const Kernels* kernels_or_throw(const std::string& path) {
  const std::vector<std::string> known = available_paths();
  const Kernels* k = find_kernels(path.empty() ? known.front() : path);
  if (k == nullptr) {
    std::string names;
    for (const std::string& n : known) names += (names.empty() ? "" : ", ") + n;
    throw std::invalid_argument("kernel path '" + path + "' cannot run here; available: " + names);
  }
  return k;
}

namespace {

void check_shape(int format, int n_out, int n_in) {
  require(format >= 0 && format < N_FORMATS, "unknown weight format " + std::to_string(format));
  require(n_out > 0 && n_in > 0 && n_out < (1 << 28) && n_in < (1 << 24), "weight shape out of range");
  require(is_dense(format) || n_in % GROUP == 0,
          "quantised weights need an input width divisible by 32, not " + std::to_string(n_in));
}

}  // namespace

std::size_t packed_bytes(int format, int n_out, int n_in) {
  check_shape(format, n_out, n_in);
  return tile_bytes(format, n_in) * static_cast<std::size_t>(n_tiles(n_out));
}

PyLinear::PyLinear(int format, int n_out, int n_in, Bytes data) : bytes(data) {
  require(data.size() == packed_bytes(format, n_out, n_in), "packed weights have the wrong size");
  linear.format = format;
  linear.n_out = n_out;
  linear.n_in = n_in;
  linear.tile_bytes = tile_bytes(format, n_in);
  linear.data = data.data();
}

void PyLinear::run(In2<float> x, Out2<float> out, int threads, const std::string& path) const {
  const Kernels* k = kernels_or_throw(path);
  const int rows = static_cast<int>(x.shape(0));
  require(x.shape(1) == static_cast<std::size_t>(linear.n_in) && out.shape(0) == x.shape(0) &&
              out.shape(1) == static_cast<std::size_t>(linear.n_out),
          "activations or output do not fit the weights");
  require(threads >= 1 && threads <= Shares::max_threads(), "threads out of range");
  if (rows == 0) return;
  nb::gil_scoped_release release;
  const bool dense = is_dense(linear.format);
  ActBuffer buffer;
  ActForms forms;
  forms.need(linear.format);
  const Act& a = buffer.shape(rows, linear.n_in, forms, k->max_block);
  for (int r = 0; r < rows; ++r) {
    const float* row = x.data() + static_cast<std::size_t>(r) * x.shape(1);
    if (dense) std::memcpy(a.f + static_cast<std::size_t>(r) * x.shape(1), row, x.shape(1) * 4);
    else k->quantize(row, 0, r, 1, 0, linear.n_in / GROUP, a);
  }
  Shares shares;
  shares.reset(n_tiles(linear.n_out), threads);
  Pool::instance().run(threads, [&](int thread, int) {
    for (int b = 0, e = 0; shares.next(thread, b, e);)
      k->linear(linear, a, b, e, out.data() + b * TILE, linear.n_out, false);
  });
}

void PyLinear::row(int index, Out1<float> out) const {
  require(index >= 0 && index < linear.n_out, "row out of range");
  require(out.size() == static_cast<std::size_t>(linear.n_in), "output has the wrong size");
  unpack_row(linear, index, out.data());
}

const Linear& checked(const PyLinear& l, int n_out, int n_in) {
  require((n_out < 0 || l.linear.n_out == n_out) && l.linear.n_in == n_in,
          "a weight matrix is [" + std::to_string(l.linear.n_out) + ", " + std::to_string(l.linear.n_in) +
              "], not [" + std::to_string(n_out) + ", " + std::to_string(n_in) + "]");
  return l.linear;
}

namespace {

class PyModel {
 public:
  PyModel(int hidden, int intermediate, int heads, int kv_heads, int head_size, float eps,
          std::vector<double> inverse_frequencies, float rope_scale, float embedding_scale,
          const PyLinear& embedding, const PyLinear& head, In1<float> final_norm, int threads,
          const std::string& path) {
    require(hidden > 0 && hidden % 16 == 0 && intermediate > 0 && intermediate % 16 == 0 &&
                head_size > 0 && head_size % 16 == 0 && head_size <= MAX_HEAD_SIZE &&
                kv_heads > 0 && heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= MAX_GROUP,
            "model shape is not one that the native core runs");
    require(inverse_frequencies.size() == static_cast<std::size_t>(head_size / 2), "wrong number of rotary frequencies");
    Config c;
    c.hidden = hidden;
    c.intermediate = intermediate;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.head_size = head_size;
    c.eps = eps;
    c.inverse_frequencies = std::move(inverse_frequencies);
    c.rope_scale = rope_scale;
    c.embedding_scale = embedding_scale;
    model_ = std::make_unique<Model>(std::move(c));
    model_->embedding = take(embedding, -1, hidden);
    model_->head = take(head, -1, hidden);
    model_->final_norm = vector(final_norm, hidden);
    model_->kernels = kernels_or_throw(path);
    set_threads(threads);
  }

  void set_threads(int threads) {
    require(threads >= 1 && threads <= Shares::max_threads(),
            "threads must be in 1.." + std::to_string(Shares::max_threads()));
    model_->n_threads = threads;
  }

  void add_layer(const PyLinear& q, const PyLinear& k, const PyLinear& v, const PyLinear& o,
                 const PyLinear& gate, const PyLinear& up, const PyLinear& down,
                 In1<float> attention_norm, In1<float> mlp_norm, std::optional<In1<float>> q_bias,
                 std::optional<In1<float>> k_bias, std::optional<In1<float>> v_bias,
                 std::optional<In1<float>> q_norm, std::optional<In1<float>> k_norm) {
    const Config& c = model_->config;
    const int HE = c.heads * c.head_size, KE = c.kv_heads * c.head_size;
    Layer l;
    l.q = take(q, HE, c.hidden);
    l.k = take(k, KE, c.hidden);
    l.v = take(v, KE, c.hidden);
    l.o = take(o, c.hidden, HE);
    l.gate = take(gate, c.intermediate, c.hidden);
    l.up = take(up, c.intermediate, c.hidden);
    l.down = take(down, c.hidden, c.intermediate);
    l.attention_norm = vector(attention_norm, c.hidden);
    l.mlp_norm = vector(mlp_norm, c.hidden);
    if (q_bias) l.q_bias = vector(*q_bias, HE);
    if (k_bias) l.k_bias = vector(*k_bias, KE);
    if (v_bias) l.v_bias = vector(*v_bias, KE);
    if (q_norm) l.q_norm = vector(*q_norm, c.head_size);
    if (k_norm) l.k_norm = vector(*k_norm, c.head_size);
    model_->layers.push_back(l);
  }

  void forward(In1<std::int32_t> tokens, In1<std::int32_t> positions, In1<std::int32_t> parents,
               In1<std::int32_t> slots, In1<std::int32_t> starts, In1<std::int32_t> contexts,
               std::vector<In1<std::int32_t>> tables, int block_size, In1<std::int32_t> wanted,
               Out1<std::uint16_t> kv, Out2<float> logits, std::vector<int> tap_layers,
               std::optional<Out3<float>> taps,
               std::optional<Bytes> run_attention, std::optional<Bytes> run_mlp) {
    const Config& c = model_->config;
    const std::size_t n = tokens.size(), L = model_->layers.size(), V = static_cast<std::size_t>(model_->head.n_out);
    require(positions.size() == n && parents.size() == n && slots.size() == n, "row arrays differ in length");
    require(starts.size() == contexts.size() + 1 && tables.size() == contexts.size(), "sequence arrays differ in length");
    require(block_size > 0, "block_size must be positive");
    require(logits.shape(0) == wanted.size() && logits.shape(1) == V, "logits have the wrong shape");
    const std::size_t per_slot = 2 * L * static_cast<std::size_t>(c.kv_heads * c.head_size);
    require(per_slot > 0 && kv.size() % (per_slot * KEY_LANES) == 0, "the cache belongs to another model");
    Pass p;
    p.n_rows = static_cast<int>(n);
    p.n_seqs = static_cast<int>(contexts.size());
    p.n_wanted = static_cast<int>(wanted.size());
    p.block_size = block_size;
    p.tokens = tokens.data();
    p.positions = positions.data();
    p.parents = parents.data();
    p.slots = slots.data();
    p.starts = starts.data();
    p.contexts = contexts.data();
    for (const auto& t : tables) p.tables.push_back(t.data());
    p.wanted = wanted.data();
    p.kv = kv.data();
    p.n_slots = static_cast<std::int64_t>(kv.size() / per_slot);
    p.logits = logits.data();
    check_rows(p, tables);
    p.taps.assign(L + 1, nullptr);
    const std::size_t hidden = static_cast<std::size_t>(c.hidden);
    require(taps ? taps->shape(0) == tap_layers.size() && taps->shape(1) == n && taps->shape(2) == hidden
                 : tap_layers.empty(),
            "the taps have the wrong shape");
    for (std::size_t i = 0; i < tap_layers.size(); ++i) {
      const int layer = tap_layers[i];
      require(layer >= FINAL_TAP && layer <= static_cast<int>(L), "no such layer to tap");
      float* to = taps->data() + i * n * hidden;
      (layer == FINAL_TAP ? p.final_tap : p.taps[static_cast<std::size_t>(layer)]) = to;
    }
    require((!run_attention || run_attention->size() == L) && (!run_mlp || run_mlp->size() == L),
            "layer mask has the wrong length");
    if (run_attention) p.run_attention = run_attention->data();
    if (run_mlp) p.run_mlp = run_mlp->data();
    nb::gil_scoped_release release;
    model_->forward(p);
  }

  std::string path() const { return model_->kernels->name; }
  int threads() const { return model_->n_threads; }
  std::size_t workspace_bytes() const { return model_->workspace_bytes(); }

 private:
  void check_rows(const Pass& p, const std::vector<In1<std::int32_t>>& tables) const {
    require(p.starts[0] == 0 && p.starts[p.n_seqs] == p.n_rows, "starts_B1 does not cover the rows");
    const std::int64_t n_blocks = p.n_slots / p.block_size;
    for (int s = 0; s < p.n_seqs; ++s) {
      require(p.starts[s] <= p.starts[s + 1], "starts_B1 must ascend");
      const std::int64_t needed = (static_cast<std::int64_t>(p.contexts[s]) + p.block_size - 1) / p.block_size;
      require(p.contexts[s] >= 0 && static_cast<std::int64_t>(tables[static_cast<std::size_t>(s)].size()) >= needed,
              "a block table is shorter than its context");
      for (std::int64_t b = 0; b < needed; ++b) {
        const std::int32_t block = p.tables[static_cast<std::size_t>(s)][b];
        require(block >= 0 && block < n_blocks, "block id outside the cache");
      }
      for (int r = p.starts[s]; r < p.starts[s + 1]; ++r)
        require(p.parents[r] >= -1 && p.parents[r] < r - p.starts[s], "parents must come before their children");
    }
    for (int r = 0; r < p.n_rows; ++r) {
      require(p.tokens[r] >= 0 && p.tokens[r] < model_->embedding.n_out,
              "token id " + std::to_string(p.tokens[r]) + " is outside the vocabulary of " +
                  std::to_string(model_->embedding.n_out));
      require(p.slots[r] >= 0 && p.slots[r] < p.n_slots, "slot outside the cache");
      require(p.positions[r] >= 0, "negative position");
    }
    for (int i = 0; i < p.n_wanted; ++i)
      require(p.wanted[i] >= (i > 0 ? p.wanted[i - 1] + 1 : 0) && p.wanted[i] < p.n_rows,
              "wanted rows must ascend within the pass");
  }

  Linear take(const PyLinear& l, int n_out, int n_in) {
    weights_.push_back(l.bytes);
    return checked(l, n_out, n_in);
  }
  const float* vector(const In1<float>& v, int n) {
    require(v.size() == static_cast<std::size_t>(n), "a norm or bias has the wrong length");
    vectors_.push_back(v);
    return v.data();
  }

  std::unique_ptr<Model> model_;
  std::vector<Bytes> weights_;
  std::vector<In1<float>> vectors_;
};

void py_pack_gguf(int type, Bytes rows, int n_out, int n_in, Out1<std::uint8_t> dst) {
  const int format = format_of_gguf(type);
  require(format >= 0, "GGUF tensor type " + std::to_string(type) + " has no native form");
  require(dst.size() == packed_bytes(format, n_out, n_in), "packed size mismatch");
  const std::size_t row = gguf_row_bytes(type, n_in);
  require(row > 0 && rows.size() == row * static_cast<std::size_t>(n_out), "tensor size mismatch");
  nb::gil_scoped_release release;
  pack_gguf(type, rows.data(), n_out, n_in, dst.data());
}

void py_unpack_gguf(int type, Bytes rows, Out2<float> out) {
  const std::size_t row = gguf_row_bytes(type, static_cast<int>(out.shape(1)));
  require(row > 0 && rows.size() == row * out.shape(0), "tensor size mismatch");
  nb::gil_scoped_release release;
  for (std::size_t r = 0; r < out.shape(0); ++r)
    unpack_gguf_row(type, rows.data() + r * row, static_cast<int>(out.shape(1)), out.data() + r * out.shape(1));
}

void py_pack_float(In2<float> rows, int format, Out1<std::uint8_t> dst) {
  const int n_out = static_cast<int>(rows.shape(0)), n_in = static_cast<int>(rows.shape(1));
  require(dst.size() == packed_bytes(format, n_out, n_in), "packed size mismatch");
  require(is_dense(format) || format == Q4_SUPER || format == Q8_SYM, "cannot quantise to this format");
  nb::gil_scoped_release release;
  pack_float(rows.data(), n_out, n_in, format, dst.data());
}

// Seconds to read the array once with all threads, the way the kernels read weights.
double read_seconds(Bytes data, int threads, const std::string& path) {
  const Kernels* k = kernels_or_throw(path);
  require(threads >= 1 && threads <= Shares::max_threads(), "threads out of range");
  nb::gil_scoped_release release;
  volatile std::uint64_t sink = 0;
  const auto begin = std::chrono::steady_clock::now();
  Pool::instance().run(threads, [&](int t, int n) {
    const std::size_t share = data.size() / static_cast<std::size_t>(n) / 64 * 64;
    sink = k->read(data.data() + share * static_cast<std::size_t>(t), share);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace
}  // namespace paceline

NB_MODULE(_native, m) {
  // Models live until the interpreter ends; that is no leak.
  nb::set_leak_warnings(false);
  using namespace paceline;
  m.doc() = "CPU core of Paceline; see paceline.models.native.";
  m.def("paths", &available_paths, "Instruction-set paths that run here, fastest first.");
  m.def("format_of_gguf", &format_of_gguf);
  m.def("packed_bytes", &packed_bytes);
  m.def("gguf_row_bytes", &gguf_row_bytes);
  m.def("pack_gguf", &py_pack_gguf);
  m.def("unpack_gguf", &py_unpack_gguf);
  m.def("pack_float", &py_pack_float);
  m.def("read_seconds", &read_seconds);
  m.attr("LAYOUT_VERSION") = 1;
  m.attr("SPLIT") = SPLIT;
  nb::class_<PyLinear>(m, "Linear")
      .def(nb::init<int, int, int, Bytes>())
      .def("run", &PyLinear::run)
      .def("row", &PyLinear::row)
      .def_prop_ro("format", [](const PyLinear& l) { return l.linear.format; })
      .def_prop_ro("n_out", [](const PyLinear& l) { return l.linear.n_out; })
      .def_prop_ro("n_in", [](const PyLinear& l) { return l.linear.n_in; })
      .def_prop_ro("nbytes", [](const PyLinear& l) { return l.bytes.size(); });
  nb::class_<PyModel>(m, "Model")
      .def(nb::init<int, int, int, int, int, float, std::vector<double>, float, float,
                    const PyLinear&, const PyLinear&, In1<float>, int, const std::string&>(),
           nb::kw_only(), nb::arg("hidden"), nb::arg("intermediate"), nb::arg("heads"),
           nb::arg("kv_heads"), nb::arg("head_size"), nb::arg("eps"),
           nb::arg("inverse_frequencies"), nb::arg("rope_scale"), nb::arg("embedding_scale"),
           nb::arg("embedding"), nb::arg("head"), nb::arg("final_norm"), nb::arg("threads"),
           nb::arg("path"))
      .def("add_layer", &PyModel::add_layer, nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("v"),
           nb::arg("o"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("attention_norm"),
           nb::arg("mlp_norm"), nb::arg("q_bias") = nb::none(), nb::arg("k_bias") = nb::none(),
           nb::arg("v_bias") = nb::none(), nb::arg("q_norm") = nb::none(), nb::arg("k_norm") = nb::none())
      .def("forward", &PyModel::forward, nb::kw_only(), nb::arg("tokens"), nb::arg("positions"),
           nb::arg("parents"), nb::arg("slots"), nb::arg("starts"), nb::arg("contexts"),
           nb::arg("tables"), nb::arg("block_size"), nb::arg("wanted"), nb::arg("kv"),
           nb::arg("logits"), nb::arg("tap_layers"), nb::arg("taps") = nb::none(),
           nb::arg("run_attention") = nb::none(), nb::arg("run_mlp") = nb::none())
      .def("set_threads", &PyModel::set_threads)
      .def_prop_ro("threads", &PyModel::threads)
      .def_prop_ro("path", &PyModel::path)
      .def_prop_ro("workspace_bytes", &PyModel::workspace_bytes);
  bind_eagle(m);
}
