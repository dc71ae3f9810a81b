#include "products.h"

#include <algorithm>

namespace qc {
namespace {

// Row r of x as floats with padded groups.
void place(const Weight& w, const void* data, Number type, int64_t r, float* to) {
  const bool runs = w.group % UNIT != 0 && w.groups() > 1;
  const int64_t run = runs ? w.group : w.k, step = runs ? w.padded_group() : 0;
  for (int64_t c = 0; c < w.k; c += run, to += step) {
    kernels().widen(data, r * w.k + c, type, std::min(run, w.k - c), to);
  }
}

// Threads get equal shares of the bytes.
void multiply_at_once(const std::vector<Product>& products, int64_t m) {
  int64_t all = 0;
  for (const Product& p : products) all += p.w.panels() * p.w.panel_bytes();
  torch::stable::parallel_for(0, all, worth_waking(m), [&](int64_t begin, int64_t end) {
    int64_t at = 0;
    for (const Product& p : products) {
      const int64_t bytes = p.w.panel_bytes(), count = p.w.panels();
      auto panel_at = [&](int64_t place) {
        return std::min(count, std::max<int64_t>(0, (place - at + bytes - 1) / bytes));
      };
      const int64_t first = panel_at(begin), last = panel_at(end);
      if (first < last) kernels().multiply(p.w, p.x->rows(), p.out, first, last);
      at += count * bytes;
    }
  });
}

}  // namespace

const float* bias_of(const std::optional<Tensor>& bias, int64_t n, std::vector<float>& store) {
  if (!bias.has_value()) return nullptr;
  STD_TORCH_CHECK(bias->numel() == n, "qcompile_cpu: the bias has not the rows of the weight");
  Tensor values = dense(*bias);
  store.resize(static_cast<size_t>(n));
  kernels().widen(values.data_ptr(), 0, number_of(values), n, store.data());
  return store.data();
}

Weight weight_of(const Tensor& blob, const Tensor& table, const int64_t* shape) {
  const Weight w = weight_over(blob.data_ptr(), table.data_ptr(), shape);
  STD_TORCH_CHECK(blob.numel() == w.panels() * w.panel_bytes(),
                  "qcompile_cpu: the blob does not have the bytes of its shape");
  return w;
}

std::unique_ptr<Digits> digits_of(const Weight& w, const Tensor& x, int64_t m, int64_t digits) {
  const Number type = number_of(x);
  auto rows = std::make_unique<Digits>(w, m, digits_for(type, digits));
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / w.k);
  const bool whole = rows->takes_matrix(w);
  torch::stable::parallel_for(0, m, grain, [&](int64_t begin, int64_t end) {
    if (whole) return rows->set_rows(w, x.data_ptr(), type, begin, end);
    for (int64_t r = begin; r < end; r++) {
      rows->set(w, r, [&](float* row) { place(w, x.data_ptr(), type, r, row); });
    }
  });
  return rows;
}

bool in_pieces(int64_t operations) {
  return operations / WORTH_A_PIECE >= 8 * static_cast<int64_t>(torch::stable::get_num_threads());
}

void multiply(const std::vector<Product>& products, int64_t m) {
  int64_t operations = 0;
  for (const Product& p : products) operations += operations_of(p.w, p.w.panels(), m);
  if (!in_pieces(operations)) return multiply_at_once(products, m);
  struct Piece {
    const Product* product;
    int64_t begin, end;
  };
  std::vector<Piece> pieces;
  for (const Product& p : products) {
    const int64_t few = operations_of(p.w, PANELS_AT_ONCE, m);
    const int64_t size = PANELS_AT_ONCE * ((WORTH_A_PIECE + few - 1) / few);
    const int64_t panels = p.w.panels(), count = (panels + size - 1) / size;
    for (int64_t i = 0; i < count; i++) {
      pieces.push_back({&p, panels * i / count, panels * (i + 1) / count});
    }
  }
  share_out(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[static_cast<size_t>(i)];
    const Product& p = *piece.product;
    kernels().multiply(p.w, p.x->rows(), p.out, piece.begin, piece.end);
  });
}

}  // namespace qc
