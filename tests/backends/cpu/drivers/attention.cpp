// Attention against softmax in double: few and many queries, shared heads, masks of either kind,
// turned memory, rows that see nothing.
#include "attend.h"

#include <algorithm>

#include "driver.h"

using namespace qc;

namespace {

// Numbers of four dimensions, in the order of batch, head, row and column, or with heads inside.
struct Block {
  std::unique_ptr<uint8_t[]> data;
  Steps at;

  Block(Number type, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
    const int64_t count = batch * heads * rows * columns;
    data = exactly<uint8_t>(count * bytes_of(type));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; i++) from_float(data.get(), i, type, normal(randoms));
    const bool turned = one_in(2);
    at = {heads * rows * columns, turned ? columns : rows * columns,
          turned ? heads * columns : columns};
    if (batch == 1) at.batch = 0;  // as torch's sizes of one are told
    if (heads == 1) at.head = 0;
  }
};

// Some of the scores: by chance, keys that a prompt has padded, or almost none.
std::unique_ptr<uint8_t[]> make_mask(Attention& a) {
  a.mask = {static_cast<MaskKind>(below(3)), nullptr, static_cast<Number>(below(3)), 0, 0, 0, 0};
  if (a.mask.kind == NO_MASK) return nullptr;
  const int64_t batch = one_in(2) ? a.batch : 1, heads = one_in(2) ? a.heads : 1;
  const int64_t queries = one_in(4) ? 1 : a.queries, count = batch * heads * queries * a.keys;
  const bool turned = one_in(2), seen = a.mask.kind == SEEN;
  auto made = exactly<uint8_t>(count * (seen ? 1 : bytes_of(a.mask.type)));
  const int64_t way = below(3);
  for (int64_t i = 0; i < count; i++) {
    const int64_t key = turned ? i / queries % a.keys : i % a.keys;
    const bool sees = way == 0 ? !one_in(3) : way == 1 ? 2 * key <= a.keys : one_in(50);
    if (seen) made[i] = sees;
    else from_float(made.get(), i, a.mask.type,
                    sees ? 0.25f * static_cast<float>(below(7)) : -INFINITY);
  }
  a.mask.data = made.get();
  a.mask.key = turned ? queries : 1;
  a.mask.query = queries == 1 ? 0 : turned ? 1 : a.keys;
  a.mask.head = heads == 1 ? 0 : queries * a.keys;
  a.mask.batch = batch == 1 ? 0 : heads * queries * a.keys;
  return made;
}

double added(const Attention& a, int64_t b, int64_t h, int64_t query, int64_t key) {
  if (a.causal && key > query) return -INFINITY;
  const int64_t at = b * a.mask.batch + h * a.mask.head + query * a.mask.query + key * a.mask.key;
  if (a.mask.kind == SEEN) return a.mask.data[at] ? 0 : -INFINITY;
  return a.mask.kind == ADDED ? number(a.mask.data, at, a.mask.type) : 0;
}

// What a query of a head takes of each key; zeros where it sees none.
std::vector<double> shares(const Attention& a, int64_t b, int64_t h, int64_t query) {
  const int64_t group = h / (a.heads / a.groups);
  const int64_t q = b * a.q_at.batch + h * a.q_at.head + query * a.q_at.row;
  std::vector<double> all;
  double top = -INFINITY, total = 0;
  for (int64_t key = 0; key < a.keys; key++) {
    const int64_t k = b * a.k_at.batch + group * a.k_at.head + key * a.k_at.row;
    double sum = 0;
    for (int64_t c = 0; c < a.d; c++) {
      sum += number(a.q, q + c, a.type) * number(a.k, k + c, a.type);
    }
    all.push_back(sum * a.scale + added(a, b, h, query, key));
    top = std::max(top, all.back());
  }
  for (double& x : all) {
    x = top == -INFINITY ? 0 : std::exp(x - top);
    total += x;
  }
  for (double& x : all) x = total > 0 ? x / total : 0;
  return all;
}

// The error of the output, relative to its length.
double error_of(const Attention& a) {
  double lost = 0, length = 0;
  for (int64_t i = 0; i < a.batch * a.heads * a.queries; i++) {
    const int64_t query = i % a.queries, h = i / a.queries % a.heads, b = i / a.queries / a.heads;
    const int64_t group = h / (a.heads / a.groups);
    const std::vector<double> share = shares(a, b, h, query);
    for (int64_t c = 0; c < a.e; c++) {
      double expected = 0;
      for (int64_t key = 0; key < a.keys; key++) {
        const int64_t v = b * a.v_at.batch + group * a.v_at.head + key * a.v_at.row + c;
        expected += share[static_cast<size_t>(key)] * number(a.v, v, a.type);
      }
      const int64_t at = b * a.out_at.batch + h * a.out_at.head + query * a.out_at.row + c;
      const double found = number(a.out, at, a.type);
      lost += (found - expected) * (found - expected);
      length += expected * expected;
    }
  }
  return length > 0 ? std::sqrt(lost / length) : std::sqrt(lost);
}

void one_case() {
  Attention a{};
  a.type = static_cast<Number>(below(3));
  a.batch = one_in(3) ? 2 : 1;
  a.groups = pick({1, 2, 3});
  a.heads = a.groups * pick({1, 2, 4});
  a.queries = pick({1, 1, 2, 3, 5, 17, 33, 70});
  a.keys = pick({0, 1, 2, 15, 63, 64, 65, 130});
  a.d = pick({16, 32, 64, 80, 256});
  a.e = pick({16, 48, 64, 96});
  const int64_t batch = one_in(4) ? 1 : a.batch;  // keys that a batch shares
  const Block q(a.type, a.batch, a.heads, a.queries, a.d), k(a.type, batch, a.groups, a.keys, a.d);
  const Block v(a.type, batch, a.groups, a.keys, a.e);
  auto out = exactly<uint8_t>(a.batch * a.heads * a.queries * a.e * bytes_of(a.type));
  a.q = q.data.get(), a.k = k.data.get(), a.v = v.data.get(), a.out = out.get();
  a.q_at = q.at, a.k_at = k.at, a.v_at = v.at;
  a.out_at = {a.queries * a.heads * a.e, a.e, a.heads * a.e};
  a.causal = one_in(3);
  a.scale = 0.2f;
  const auto mask = make_mask(a);
  const int64_t cut = below(a.tasks() + 1);
  attend(a, 0, cut);
  attend(a, cut, a.tasks());
  const double error = error_of(a);
  const double bound = a.type == F32 ? 3e-6 : a.type == F16 ? 6e-4 : 4.5e-3;
  if (error <= bound) return;
  fault("attention: type %d batch %d heads %d groups %d queries %d keys %d d %d e %d mask %d "
        "causal %d: error %.3g", a.type, static_cast<int>(a.batch), static_cast<int>(a.heads),
        static_cast<int>(a.groups), static_cast<int>(a.queries), static_cast<int>(a.keys),
        static_cast<int>(a.d), static_cast<int>(a.e), a.mask.kind, a.causal, error);
}

}  // namespace

int main(int count, char** arguments) { return run(count, arguments, one_case); }
