// The experts of a layer: tokens are grouped by expert, and only experts that some token chose are
// touched. Both products of an expert run on panels, as the linear op's do; what lies between them
// stays in float32.
#include <algorithm>

#include "experts_layer.h"
#include "ops.h"
#include "products.h"

namespace qc {
namespace {

constexpr int64_t ROWS_AT_ONCE = 1024;  // bounds the memory between the products
constexpr int64_t PANELS_A_TASK = 16;

// Rows of one role's input in its own order of columns, and its output.
struct Buffers {
  Digits x;
  std::vector<float> y;

  Buffers(const Weight& w, int64_t rows, int64_t digits)
      : x(w, rows, digits), y(static_cast<size_t>(rows * w.n)) {}
};

// Puts a row of k floats into the order and padding of a role.
void place_row(const Weight& w, const int32_t* columns, const float* from, float* to) {
  if (!columns && w.padded() == w.k) {
    std::copy(from, from + w.k, to);
    return;
  }
  for (int64_t c = 0; c < w.k; c++) to[padded_place(w, c)] = from[columns ? columns[c] : c];
}

// One role's product for all runs.
struct Product {
  const Role* role;
  Buffers* buffers;
  const float* bias;  // of expert 0, or null
  int64_t bias_step;
};

void multiply_runs(const std::vector<Product>& products, const std::vector<ExpertRun>& runs) {
  struct Task {
    int64_t product, run, begin, end;
  };
  std::vector<Task> tasks;
  for (size_t p = 0; p < products.size(); p++) {
    const int64_t panels = products[p].role->first.panels();
    for (size_t r = 0; r < runs.size(); r++) {
      for (int64_t at = 0; at < panels; at += PANELS_A_TASK) {
        tasks.push_back({static_cast<int64_t>(p), static_cast<int64_t>(r), at,
                         std::min(at + PANELS_A_TASK, panels)});
      }
    }
  }
  share_out(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const Task& task = tasks[static_cast<size_t>(i)];
    const Product& product = products[static_cast<size_t>(task.product)];
    const ExpertRun& run = runs[static_cast<size_t>(task.run)];
    const Weight w = product.role->of(run.expert);
    Rows in = product.buffers->x.rows().from(run.begin);
    in.m = run.end - run.begin;
    Output out{product.buffers->y.data() + run.begin * w.n,
               product.bias ? product.bias + run.expert * product.bias_step : nullptr, F32};
    kernels().multiply(w, in, out, task.begin, task.end);
  });
}

// The rows between the products: the function of what the up products gave.
void apply(const Function& function, const std::vector<Buffers>& up, const Layer& layer,
           const std::vector<ExpertRun>& runs, Buffers& down) {
  const Weight& w = layer.down.first;
  const int64_t width = w.k;
  const bool apart = layer.up.size() == 2;
  share_out(static_cast<int64_t>(runs.size()), [&](int64_t i) {
    const ExpertRun& run = runs[static_cast<size_t>(i)];
    std::vector<float> row(static_cast<size_t>(width));
    for (int64_t r = run.begin; r < run.end; r++) {
      const float* first = up[0].y.data() + r * layer.up[0].first.n;
      const float* second = apart ? up[1].y.data() + r * width : first + width;
      for (int64_t c = 0; c < width; c++) {
        row[static_cast<size_t>(c)] =
            function.gated ? function.pair(first[c], second[c]) : function.plain(first[c]);
      }
      const int32_t* columns = layer.down.columns_of(run.expert);
      down.x.set(w, r, [&](float* to) { place_row(w, columns, row.data(), to); });
    }
  });
}

// Some runs of pairs, through both products, added to the tokens' sums.
void run_experts(const Layer& layer, const Function& function, const float* x,
                 const std::vector<Pair>& pairs, const std::vector<ExpertRun>& given,
                 const float* shares, int64_t top, std::vector<int64_t>& place_of, float* out,
                 int64_t tokens, int64_t digits) {
  const int64_t start = given.front().begin, rows = given.back().end - start;
  std::vector<ExpertRun> runs;
  for (const ExpertRun& run : given) {
    runs.push_back({run.expert, run.begin - start, run.end - start});
  }
  const int64_t h = layer.up[0].first.k;
  std::vector<Buffers> up;
  up.reserve(layer.up.size());  // digits point into themselves
  for (const Role& role : layer.up) up.emplace_back(role.first, rows, digits);
  Buffers down(layer.down.first, rows, digits);
  share_out(static_cast<int64_t>(runs.size()), [&](int64_t i) {
    const ExpertRun& run = runs[static_cast<size_t>(i)];
    for (int64_t r = run.begin; r < run.end; r++) {
      const float* row = x + pairs[static_cast<size_t>(start + r)].token * h;
      for (size_t p = 0; p < up.size(); p++) {
        const Role& role = layer.up[p];
        const int32_t* columns = role.columns_of(run.expert);
        up[p].x.set(role.first, r, [&](float* to) { place_row(role.first, columns, row, to); });
      }
    }
  });
  std::vector<Product> products;
  int64_t bias_at = 0, bias_step = 0;
  for (const Role& role : layer.up) bias_step += role.first.n;
  for (size_t i = 0; i < up.size(); i++) {
    const float* bias = layer.up_bias.empty() ? nullptr : layer.up_bias.data() + bias_at;
    products.push_back({&layer.up[i], &up[i], bias, bias_step});
    bias_at += layer.up[i].first.n;
  }
  multiply_runs(products, runs);
  apply(function, up, layer, runs, down);
  const float* bias = layer.down_bias.empty() ? nullptr : layer.down_bias.data();
  const int64_t n = layer.down.first.n;
  multiply_runs({{&layer.down, &down, bias, n}}, runs);
  // By token and slot, so that the order of the sums does not depend on the threads.
  std::fill(place_of.begin(), place_of.end(), -1);
  for (int64_t r = 0; r < rows; r++) {
    const Pair& pair = pairs[static_cast<size_t>(start + r)];
    place_of[static_cast<size_t>(pair.token * top + pair.slot)] = r;
  }
  torch::stable::parallel_for(0, tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      for (int64_t slot = 0; slot < top; slot++) {
        const int64_t r = place_of[static_cast<size_t>(t * top + slot)];
        if (r < 0) continue;
        const float share = shares[t * top + slot];
        const float* from = down.y.data() + r * n;
        for (int64_t c = 0; c < n; c++) out[t * n + c] += share * from[c];
      }
    }
  });
}

std::vector<float> bias_of(const std::optional<Tensor>& bias, int64_t needed) {
  if (!bias.has_value()) return {};
  STD_TORCH_CHECK(bias->numel() == needed, "qcompile_cpu: a bias has not the rows of its experts");
  return widened(*bias);
}

}  // namespace

Tensor panel_experts(const Tensor& given, const Tensor& given_ids, const Tensor& weights,
                     const std::vector<Tensor>& parts, const std::vector<int64_t>& shape,
                     const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                     const std::string& name, bool gated, double alpha, double limit,
                     int64_t asked_digits) {
  Layer layer = layer_of(parts, shape);
  const Function function = function_of(name, gated, alpha, limit);
  Tensor x = dense(given), ids = dense(given_ids);
  const int64_t h = layer.up[0].first.k, n = layer.down.first.n, tokens = x.size(0);
  int64_t up_rows = 0;
  for (const Role& role : layer.up) up_rows += role.first.n;
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == h, "qcompile_cpu: x has not the columns of experts");
  STD_TORCH_CHECK(up_rows == layer.down.first.k * (gated ? 2 : 1),
                  "qcompile_cpu: the products of experts do not fit each other");
  STD_TORCH_CHECK(ids.dim() == 2 && ids.size(0) == tokens && weights.numel() == ids.numel(),
                  "qcompile_cpu: tokens, chosen experts and their weights do not fit each other");
  layer.up_bias = bias_of(up_bias, layer.experts * up_rows);
  layer.down_bias = bias_of(down_bias, layer.experts * n);
  Tensor y = empty_of(x, {tokens, n});
  if (y.numel() == 0) return y;
  std::vector<float> wide, shares = widened(weights), sums(static_cast<size_t>(tokens * n), 0.f);
  const float* rows = static_cast<const float*>(x.data_ptr());
  if (number_of(x) != F32) {
    wide = widened(x);
    rows = wide.data();
  }
  std::vector<Pair> pairs;
  const std::vector<ExpertRun> runs = group_pairs(ids, layer.experts, pairs);
  const int64_t top = ids.size(1);
  std::vector<int64_t> place_of(static_cast<size_t>(tokens * top));
  for (size_t at = 0; at < runs.size();) {
    std::vector<ExpertRun> some;
    int64_t count = 0;
    while (at < runs.size() && (some.empty() || count + runs[at].end - runs[at].begin <=
                                                    ROWS_AT_ONCE)) {
      count += runs[at].end - runs[at].begin;
      some.push_back(runs[at++]);
    }
    run_experts(layer, function, rows, pairs, some, shares.data(), top, place_of, sums.data(),
                tokens, digits_for(number_of(x), asked_digits));
  }
  kernels().narrow(sums.data(), tokens * n, y.data_ptr(), 0, number_of(y));
  return y;
}

}  // namespace qc

STABLE_TORCH_LIBRARY_IMPL(qcompile_cpu, CPU, m) {
  m.impl("panel_experts", TORCH_BOX(&qc::panel_experts));
}
