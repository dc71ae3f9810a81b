// What the ops that multiply share: weights over tensors, activations as digits, work for threads.
#pragma once
#include <atomic>

#include "tensors.h"

namespace qc {

// A weight over the bytes of `blob`, which has as many as its shape says.
Weight weight_of(const Tensor& blob, const Tensor& table, const int64_t* shape);

// The bias as float32, in `store`; null where there is none.
const float* bias_of(const std::optional<Tensor>& bias, int64_t n, std::vector<float>& store);

// The m rows of x as digits, whose number is what the ops take.
std::unique_ptr<Digits> digits_of(const Weight& w, const Tensor& x, int64_t m, int64_t digits);

// One product of several that read the same x.
struct Product {
  Weight w;
  const Digits* x;
  Output out;
};

// All panels of all products, m rows each.
void multiply(const std::vector<Product>& products, int64_t m);

// **** work for threads ****

// Work that threads take piece by piece, so that they end together.
template <typename Body>
void share_out(int64_t tasks, const Body& body) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t, int64_t) {
    for (int64_t task; (task = next.fetch_add(1)) < tasks;) body(task);
  });
}

constexpr int64_t PANELS_AT_ONCE = 3;       // what the kernels decode at once
constexpr int64_t WORTH_A_PIECE = 32 << 20;  // operations

inline int64_t operations_of(const Weight& w, int64_t panels, int64_t m) {
  return 2 * panels * ROWS * w.k * m;
}

// Whether there are enough operations for pieces; else threads get equal shares at once.
bool in_pieces(int64_t operations);

// Bytes of panels for which, with m rows, a thread is woken: some ten microseconds of work.
inline int64_t worth_waking(int64_t m) { return std::max<int64_t>(1, (64 << 10) / m); }

}  // namespace qc
