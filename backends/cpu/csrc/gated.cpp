// A gated layer up to its last product: function(x @ gate) * (x @ up), of which only the result is
// written to memory. Both products of some panels are rounded as the linear op rounds them.
#include <algorithm>

#include "ops.h"
#include "products.h"

namespace qc {
namespace {

constexpr int64_t ROWS_AT_ONCE = 512;        // as the kernels take them
constexpr int64_t BYTES_AT_ONCE = 128 << 10;  // of either product: both stay in the second cache

struct Gated {
  Product first, second;
  Curve curve;
  Number type;
  void* y;
  int64_t m, n;

  // Panels of a piece, whole lines of y.
  int64_t piece() const {
    const int64_t row = std::min(m, ROWS_AT_ONCE) * ROWS * bytes_of(type);
    return std::max<int64_t>(1, BYTES_AT_ONCE / row / PANELS_AT_ONCE) * PANELS_AT_ONCE;
  }
};

Rows some_rows(const Product& p, int64_t begin, int64_t count) {
  Rows rows = p.x->rows().from(begin);
  rows.m = count;
  return rows;
}

// Panels [begin, end) of both products, and what the function makes of them.
void run_panels(const Gated& g, int64_t begin, int64_t end) {
  static thread_local std::vector<uint8_t> scratch;
  const int64_t step = (end - begin) * ROWS, size = bytes_of(g.type);
  const int64_t bytes = std::min(g.m, ROWS_AT_ONCE) * step * size;
  scratch.resize(static_cast<size_t>(2 * bytes));
  uint8_t *first = scratch.data(), *second = first + bytes;
  const auto multiply = [&](const Product& p, int64_t row, int64_t rows, uint8_t* to) {
    const Output out{to, p.out.bias, g.type, step, begin};
    kernels().multiply(p.w, some_rows(p, row, rows), out, begin, end);
  };
  for (int64_t row = 0; row < g.m; row += ROWS_AT_ONCE) {
    const int64_t rows = std::min(ROWS_AT_ONCE, g.m - row);
    multiply(g.first, row, rows, first);
    multiply(g.second, row, rows, second);
    auto* to = static_cast<uint8_t*>(g.y) + (row * g.n + begin * ROWS) * size;
    kernels().gate({g.curve, g.type, first, second, rows, std::min(step, g.n - begin * ROWS), step,
                    to, g.n});
  }
}

void run(const Gated& g) {
  const int64_t panels = g.first.w.panels(), piece = g.piece();
  const int64_t operations =
      operations_of(g.first.w, panels, g.m) + operations_of(g.second.w, panels, g.m);
  if (in_pieces(operations)) {
    const int64_t count = (panels + piece - 1) / piece;
    share_out(count, [&](int64_t i) {
      run_panels(g, panels * i / count, panels * (i + 1) / count);
    });
    return;
  }
  const int64_t bytes = g.first.w.panel_bytes() + g.second.w.panel_bytes();
  const int64_t grain = std::max<int64_t>(1, worth_waking(g.m) / bytes);
  torch::stable::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += piece) run_panels(g, begin, std::min(begin + piece, end));
  });
}

}  // namespace

Tensor panel_gated(const Tensor& given, const std::vector<Tensor>& parts,
                   const std::vector<std::optional<Tensor>>& biases,
                   const std::vector<int64_t>& numbers, int64_t curve, int64_t digits) {
  STD_TORCH_CHECK(parts.size() == 4 && biases.size() == 2 && numbers.size() == 12,
                  "qcompile_cpu: a gated layer has two weights: a blob, a table, a bias or none "
                  "and six numbers each");
  STD_TORCH_CHECK(digits >= 0 && digits <= 3, "qcompile_cpu: digits are 0 to 3");
  STD_TORCH_CHECK(curve == SILU || curve == GELU_TANH, "qcompile_cpu: unknown function of a gate");
  const Tensor x = dense(given);
  const auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  STD_TORCH_CHECK(!shape.empty(), "qcompile_cpu: x has no columns");
  const int64_t k = shape.back(), m = x.numel() ? x.numel() / k : 0;
  const Weight first = weight_of(parts[0], parts[1], numbers.data());
  const Weight second = weight_of(parts[2], parts[3], numbers.data() + 6);
  STD_TORCH_CHECK(k == first.k && k == second.k && first.n == second.n,
                  "qcompile_cpu: the weights of a gated layer do not fit x or each other");
  shape.back() = first.n;
  Tensor y = empty_of(x, shape);
  if (m == 0) return y;
  std::vector<float> store[2];
  const std::unique_ptr<Digits> rows = digits_of(first, x, m, digits);
  const std::unique_ptr<Digits> more =
      rows->serves(second) ? nullptr : digits_of(second, x, m, digits);
  const Number type = number_of(x);
  const auto product = [&](const Weight& w, const Digits* in, size_t i) {
    return Product{w, in, {nullptr, bias_of(biases[i], w.n, store[i]), type}};
  };
  run({product(first, rows.get(), 0), product(second, more ? more.get() : rows.get(), 1),
       static_cast<Curve>(curve), type, y.data_ptr(), m, first.n});
  return y;
}

}  // namespace qc

STABLE_TORCH_LIBRARY_IMPL(qcompile_cpu, CPU, m) {
  m.impl("panel_gated", TORCH_BOX(&qc::panel_gated));
}
