// Python bindings of EAGLE layers and of the ranking of logits.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "eagle.h"
#include "rank.h"

namespace paceline {
namespace {

using Vector = std::optional<In1<float>>;
// Of each wanted row of a part: the rows behind the committed ones that it sees beside itself.
using Above = std::optional<std::vector<std::vector<std::int32_t>>>;
using Grown = std::tuple<std::vector<std::int32_t>, std::vector<std::int32_t>, std::vector<double>, bool>;

class PyEagleLayer {
 public:
  PyEagleLayer(int hidden, int intermediate, int heads, int kv_heads, int head_size, int fused, bool first,
               bool norm_before_residual, float eps, std::vector<double> inverse_frequencies,
               float rope_scale, const PyLinear& embedding, const PyLinear& fc, const PyLinear& qkv,
               const PyLinear& o, const PyLinear& gate_up, const PyLinear& down, const PyLinear& head,
               Vector fc_bias, Vector fused_norm, Vector input_norm, Vector hidden_norm,
               In1<float> mlp_norm, Vector final_norm, In1<std::int32_t> target_ids, int threads,
               const std::string& path)
      : target_ids_(target_ids), vocabulary_(embedding.linear.n_out) {
    require(hidden > 0 && hidden % 16 == 0 && intermediate > 0 && intermediate % 16 == 0 &&
                fused > 0 && fused % 16 == 0 && head_size > 0 && head_size % 16 == 0 &&
                head_size <= MAX_HEAD_SIZE && kv_heads > 0 && heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= MAX_GROUP,
            "head shape is not one that the native core runs");
    require(inverse_frequencies.size() == static_cast<std::size_t>(head_size / 2), "wrong number of rotary frequencies");
    require(!first || fused == 2 * hidden, "fc joins embedding and feature");
    require(first || (input_norm && hidden_norm), "a norm is missing");
    require(threads >= 1 && threads <= Shares::max_threads(), "threads out of range");
    require(target_ids.size() == static_cast<std::size_t>(head.linear.n_out), "one target id per draft token");
    for (std::size_t i = 0; i < target_ids.size(); ++i)
      require(target_ids.data()[i] >= 0 && target_ids.data()[i] < vocabulary_, "a target id has no embedding");
    EagleConfig c;
    c.hidden = hidden;
    c.intermediate = intermediate;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.head_size = head_size;
    c.fused = fused;
    c.first = first;
    c.norm_before_residual = norm_before_residual;
    c.eps = eps;
    c.inverse_frequencies = std::move(inverse_frequencies);
    c.rope_scale = rope_scale;
    EagleWeights w;
    w.embedding = take(embedding, -1, hidden);
    w.fc = take(fc, hidden, fused);
    w.qkv = take(qkv, (heads + 2 * kv_heads) * head_size, first ? hidden : 2 * hidden);
    w.o = take(o, hidden, heads * head_size);
    w.gate_up = take(gate_up, 2 * intermediate, hidden);
    w.down = take(down, hidden, intermediate);
    w.head = take(head, -1, hidden);
    w.fc_bias = vector(fc_bias, hidden);
    w.fused_norm = vector(fused_norm, fused);
    w.input_norm = vector(input_norm, hidden);
    w.hidden_norm = vector(hidden_norm, hidden);
    w.mlp_norm = vector(mlp_norm, hidden);
    w.final_norm = vector(final_norm, hidden);
    w.target_ids = target_ids.data();
    layer_ = std::make_unique<EagleLayer>(std::move(c), w, kernels_or_throw(path), threads);
  }

  EagleCache new_cache() const { return EagleCache(layer_->config.kv_heads, layer_->config.head_size); }

  void run(const std::vector<EagleCache*>& caches, const std::vector<int>& at, const std::vector<int>& count,
           const std::vector<int>& wanted, const std::vector<Above>& above, In1<std::int32_t> tokens,
           In1<std::int32_t> positions, In2<float> features, bool fuse, Out2<float> out) {
    const EagleConfig& c = layer_->config;
    const std::size_t n_parts = caches.size();
    require(at.size() == n_parts && count.size() == n_parts && wanted.size() == n_parts && above.size() == n_parts,
            "part lists differ in length");
    fuse = fuse && !c.first;
    const int width = fuse ? c.fused : c.hidden;
    require(positions.size() == tokens.size() && features.shape(0) == tokens.size() &&
                features.shape(1) == static_cast<std::size_t>(width),
            "row arrays do not fit");
    EaglePass pass;
    pass.fuse = fuse;
    pass.out = out.data();
    for (std::size_t p = 0; p < n_parts; ++p) {
      require(at[p] >= 0 && 0 < count[p] && 0 < wanted[p] && wanted[p] <= count[p] &&
                  (!above[p] || above[p]->size() == static_cast<std::size_t>(wanted[p])),
              "a part is out of range");
      check_cache(caches[p]);
      for (int i = 0; i < count[p]; ++i) {
        const int row = static_cast<int>(pass.rows.size()), slot = at[p] + i, w = i - (count[p] - wanted[p]);
        require(static_cast<std::size_t>(row) < tokens.size(), "parts have more rows than there are");
        const int token = tokens.data()[row], position = positions.data()[row];
        require(token >= 0 && token < vocabulary_ && position >= 0, "a token or position is out of range");
        pass.rows.push_back({caches[p], slot, position, token,
                             features.data() + static_cast<std::ptrdiff_t>(row) * width});
        if (w < 0) continue;
        EagleQuery query;
        query.row = row;
        query.prefix = slot + 1;
        if (above[p]) {
          query.prefix = caches[p]->rows;
          query.own = (*above[p])[static_cast<std::size_t>(w)];
          for (const int s : query.own) require(s >= 0 && s < slot, "a row sees earlier rows only");
          query.own.push_back(slot);
        }
        pass.wanted.push_back(std::move(query));
      }
    }
    require(pass.rows.size() == tokens.size(), "parts have fewer rows than there are");
    require(out.shape(0) == pass.wanted.size() && out.shape(1) == static_cast<std::size_t>(c.hidden),
            "outputs have the wrong shape");
    nb::gil_scoped_release release;
    layer_->run(pass);
  }

  void logits(In2<float> hidden, Out2<float> out) {
    require(hidden.shape(1) == static_cast<std::size_t>(layer_->config.hidden) && out.shape(0) == hidden.shape(0) &&
                out.shape(1) == target_ids_.size(),
            "outputs or logits have the wrong shape");
    nb::gil_scoped_release release;
    layer_->logits(hidden.data(), static_cast<int>(hidden.shape(0)), out.data());
  }

  // Of draft i: count[i] rows to append, and where these are none the layer's output of the last
  // committed one in hidden[i]; else that of the last row goes there.
  std::vector<Grown> grow(const std::vector<EagleCache*>& caches, In1<std::int32_t> tokens, In2<float> features,
                          const std::vector<int>& count, Out2<float> hidden, const std::vector<int>& depths,
                          const std::vector<float>& heats, std::vector<std::vector<std::int32_t>> end_ids, int width) {
    const EagleConfig& c = layer_->config;
    const std::size_t n = caches.size(), D = static_cast<std::size_t>(c.hidden);
    const std::size_t in = static_cast<std::size_t>(c.first ? c.hidden : c.fused);
    require(count.size() == n && hidden.shape(0) == n && hidden.shape(1) == D && depths.size() == n &&
                heats.size() == n && end_ids.size() == n && width > 0 && features.shape(0) == tokens.size() &&
                features.shape(1) == in,
            "draft lists do not fit");
    std::size_t rows = 0;
    for (std::size_t i = 0; i < n; ++i) {
      check_cache(caches[i]);
      require(count[i] >= 0 && depths[i] > 0 && heats[i] > 0, "counts, depths and temperatures must be positive");
      rows += static_cast<std::size_t>(count[i]);
    }
    require(rows == tokens.size(), "drafts do not bring as many rows as there are");
    for (std::size_t i = 0; i < rows; ++i)
      require(tokens.data()[i] >= 0 && tokens.data()[i] < vocabulary_, "a token is out of range");
    std::vector<EagleDraft> drafts(n);
    std::size_t row = 0;
    for (std::size_t i = 0; i < n; ++i) {
      EagleDraft& d = drafts[i];
      d.cache = caches[i];
      d.count = count[i];
      d.features = features.data() + row * in;
      d.waiting = tokens.data() + row;
      d.hidden = hidden.data() + i * D;
      d.depth = depths[i];
      d.heat = heats[i];
      d.end_ids = std::move(end_ids[i]);
      row += static_cast<std::size_t>(count[i]);
    }
    {
      nb::gil_scoped_release release;
      layer_->grow(drafts, width);
    }
    std::vector<Grown> grown;
    for (EagleDraft& d : drafts)
      grown.emplace_back(std::move(d.tokens), std::move(d.parents), std::move(d.scores), d.healthy);
    return grown;
  }

 private:
  void check_cache(const EagleCache* cache) const {
    require(cache != nullptr && cache->kv_heads() == layer_->config.kv_heads &&
                cache->head_size() == layer_->config.head_size && cache->rows >= 0 &&
                cache->rows <= cache->capacity(),
            "the cache belongs to another head");
  }
  Linear take(const PyLinear& l, int n_out, int n_in) {
    bytes_.push_back(l.bytes);
    return checked(l, n_out, n_in);
  }
  const float* vector(const Vector& v, int n) {
    if (!v) return nullptr;
    require(v->size() == static_cast<std::size_t>(n), "a norm or bias has the wrong length");
    vectors_.push_back(*v);
    return v->data();
  }

  std::unique_ptr<EagleLayer> layer_;
  std::vector<Bytes> bytes_;
  std::vector<In1<float>> vectors_;
  In1<std::int32_t> target_ids_;
  int vocabulary_;
};

void py_rank(In2<float> logits, In1<float> heats, Out2<std::int32_t> ids, Out2<float> scores) {
  const std::size_t n = logits.shape(0), U = logits.shape(1), best = ids.shape(1);
  require(heats.size() == n && ids.shape(0) == n && scores.shape(0) == n && scores.shape(1) == best,
          "rank arrays differ in length");
  require(best > 0 && best <= U && U < (1u << 28), "cannot rank so many tokens");
  nb::gil_scoped_release release;
  const Kernels* kernels = kernels_or_throw("");
  std::vector<float> room(static_cast<std::size_t>(rank_room(static_cast<int>(U))));
  for (std::size_t r = 0; r < n; ++r)
    rank(*kernels, logits.data() + r * U, static_cast<int>(U), heats.data()[r], static_cast<int>(best),
         room.data(), ids.data() + r * best, scores.data() + r * best);
}

}  // namespace

void bind_eagle(nb::module_& m) {
  m.def("rank", &py_rank, nb::arg("logits"), nb::arg("heats"), nb::arg("ids"), nb::arg("scores"));
  nb::class_<EagleCache>(m, "EagleCache")
      .def_prop_rw("rows", [](const EagleCache& c) { return c.rows; },
                   [](EagleCache& c, int rows) {
                     require(rows >= 0 && rows <= c.capacity(), "the cache holds fewer rows");
                     c.rows = rows;
                   })
      .def("copy", [](const EagleCache& c, int rows) {
        require(rows >= 0 && rows <= c.rows, "the cache holds fewer rows");
        EagleCache other = c;
        other.rows = rows;
        return other;
      })
      .def_prop_ro("nbytes", &EagleCache::bytes);
  nb::class_<PyEagleLayer>(m, "EagleLayer")
      .def(nb::init<int, int, int, int, int, int, bool, bool, float, std::vector<double>, float, const PyLinear&,
                    const PyLinear&, const PyLinear&, const PyLinear&, const PyLinear&, const PyLinear&,
                    const PyLinear&, Vector, Vector, Vector, Vector, In1<float>, Vector, In1<std::int32_t>, int,
                    const std::string&>(),
           nb::kw_only(), nb::arg("hidden"), nb::arg("intermediate"), nb::arg("heads"), nb::arg("kv_heads"),
           nb::arg("head_size"), nb::arg("fused"), nb::arg("first"), nb::arg("norm_before_residual"), nb::arg("eps"),
           nb::arg("inverse_frequencies"), nb::arg("rope_scale"), nb::arg("embedding"), nb::arg("fc"),
           nb::arg("qkv"), nb::arg("o"), nb::arg("gate_up"), nb::arg("down"), nb::arg("head"),
           nb::arg("fc_bias").none(), nb::arg("fused_norm").none(), nb::arg("input_norm").none(),
           nb::arg("hidden_norm").none(), nb::arg("mlp_norm"), nb::arg("final_norm").none(), nb::arg("target_ids"),
           nb::arg("threads"), nb::arg("path"))
      .def("new_cache", &PyEagleLayer::new_cache)
      .def("run", &PyEagleLayer::run, nb::kw_only(), nb::arg("caches"), nb::arg("at"), nb::arg("count"),
           nb::arg("wanted"), nb::arg("above"), nb::arg("tokens"), nb::arg("positions"), nb::arg("features"),
           nb::arg("fuse"), nb::arg("out"))
      .def("logits", &PyEagleLayer::logits)
      .def("grow", &PyEagleLayer::grow, nb::kw_only(), nb::arg("caches"), nb::arg("tokens"), nb::arg("features"),
           nb::arg("count"), nb::arg("hidden"), nb::arg("depths"), nb::arg("heats"), nb::arg("end_ids"), nb::arg("width"));
}

}  // namespace paceline
