// What a gated layer adds to products: rows quantized from a matrix, the function between the
// products, and outputs that are a part of wider rows.
#include <algorithm>

#include "driver.h"

using namespace qc;

namespace {

// The digits of some rows, in exact memory.
struct Held {
  std::unique_ptr<uint8_t[]> memory;
  int64_t bytes;
  Rows rows;

  Held(const Weight& w, int64_t m, int64_t digits) : bytes(rows_bytes(w, m, digits)) {
    memory = exactly<uint8_t>(bytes);
    rows = rows_in(memory.get(), w, m, digits);
  }
};

// What is not set is the same in both.
bool same(const Held& a, const Held& b) {
  return std::memcmp(a.memory.get(), b.memory.get(), static_cast<size_t>(a.bytes)) == 0;
}

void check_matrix() {
  const auto type = static_cast<Number>(below(3));
  const int64_t group = pick({16, 32, 48, 64, 128, 256}), k = UNIT * (1 + below(60));
  const Weight w{nullptr, nullptr, 16, k, std::min(group, k), 4, SYMMETRIC, PLAIN_F32};
  const int64_t m = below(40), digits = 1 + below(3);
  auto from = exactly<uint8_t>(m * k * bytes_of(type));
  auto wide = exactly<float>(m * k);
  const float size = static_cast<float>(std::ldexp(1, static_cast<int>(below(20)) - 10));
  for (int64_t i = 0; i < m * k; i++) {
    float x = one_in(9) ? 0.f : size * static_cast<float>(between(-1, 1));
    if (one_in(2000)) x = std::numeric_limits<float>::infinity();
    from_float(from.get(), i, type, x);
  }
  Held one(w, m, digits), all(w, m, digits);
  kernels().widen(from.get(), 0, type, m * k, wide.get());
  for (int64_t r = 0; r < m; r++) kernels().quantize(w, wide.get() + r * k, one.rows, r);
  const int64_t cut = below(m + 1);
  kernels().quantize_rows(w, from.get(), type, all.rows, 0, cut);
  kernels().quantize_rows(w, from.get(), type, all.rows, cut, m);
  if (same(one, all)) return;
  fault("rows of a matrix: type %d group %d k %d m %d digits %d", type, static_cast<int>(group),
        static_cast<int>(k), static_cast<int>(m), static_cast<int>(digits));
}

double expected_of(Curve curve, double x) {
  if (curve == SILU) return x / (1 + std::exp(-x));
  return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

void check_gate() {
  const auto type = static_cast<Number>(below(3));
  const auto curve = static_cast<Curve>(below(2));
  const int64_t rows = below(5), columns = 1 + below(70), step = columns + below(3);
  const int64_t to_step = columns + below(3), count = rows ? (rows - 1) * step + columns : 0;
  const int64_t to_count = rows ? (rows - 1) * to_step + columns : 0, bytes = bytes_of(type);
  auto first = exactly<uint8_t>(count * bytes), second = exactly<uint8_t>(count * bytes);
  auto to = exactly<uint8_t>(to_count * bytes);
  for (int64_t i = 0; i < count; i++) {
    from_float(first.get(), i, type, static_cast<float>(between(-1, 1) * (one_in(5) ? 60 : 4)));
    from_float(second.get(), i, type, static_cast<float>(between(-2, 2)));
  }
  kernels().gate({curve, type, first.get(), second.get(), rows, columns, step, to.get(), to_step});
  for (int64_t i = 0; i < rows * columns; i++) {
    const int64_t at = i / columns * step + i % columns;
    const double x = number(first.get(), at, type), y = number(second.get(), at, type);
    const double expected = expected_of(curve, x) * y;
    const double found = number(to.get(), i / columns * to_step + i % columns, type);
    const double bound = std::fabs(expected) * (type == F32 ? 3e-6 : type == F16 ? 6e-4 : 5e-3) +
                         std::fabs(y) * 1e-6 + (type == F16 ? 1e-7 : 0);
    if (std::fabs(found - expected) <= bound) continue;
    return fault("gate %d of type %d: %.9g for %.9g, x %.9g", curve, type, found, expected, x);
  }
}

void one_case() {
  check_matrix();
  check_gate();
}

}  // namespace

int main(int count, char** arguments) { return run(count, arguments, one_case); }
