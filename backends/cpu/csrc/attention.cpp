// The attention op: checks torch's tensors and tells the kernel where their rows lie.
#include "attend.h"

#include <array>
#include <cmath>

#include "ops.h"

using qc::Tensor;

namespace {

// The tensor; a contiguous one where columns do not lie together.
Tensor with_rows(const Tensor& x) {
  return x.size(3) == 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

// Steps over a dimension of one are 0: a batch may share keys.
qc::Steps steps_of(const Tensor& x) {
  const auto step = [&](int64_t dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  return {step(0), step(1), x.stride(2)};
}

qc::Mask mask_of(const std::optional<Tensor>& mask, const std::array<int64_t, 4>& shape) {
  if (!mask.has_value()) return {qc::NO_MASK, nullptr, qc::F32, 0, 0, 0, 0};
  const int64_t rank = mask->dim();
  STD_TORCH_CHECK(rank <= 4, "qcompile_cpu: a mask has four dimensions at most");
  std::array<int64_t, 4> steps{};
  for (int64_t i = 0; i < rank; i++) {
    const int64_t size = mask->size(i), wanted = shape[static_cast<size_t>(4 - rank + i)];
    STD_TORCH_CHECK(size == 1 || size == wanted, "qcompile_cpu: the mask does not fit the scores");
    steps[static_cast<size_t>(4 - rank + i)] = size == 1 ? 0 : mask->stride(i);
  }
  const bool seen = mask->scalar_type() == torch::headeronly::ScalarType::Bool;
  return {seen ? qc::SEEN : qc::ADDED,
          static_cast<const uint8_t*>(mask->data_ptr()),
          seen ? qc::F32 : qc::number_of(*mask),
          steps[0], steps[1], steps[2], steps[3]};
}

}  // namespace

namespace qc {

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const std::optional<Tensor>& mask, bool causal, double scale) {
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
                  "qcompile_cpu: attention takes four dimensions");
  const Tensor q = with_rows(query), k = with_rows(key), v = with_rows(value);
  const qc::Number type = qc::number_of(q);
  STD_TORCH_CHECK(qc::number_of(k) == type && qc::number_of(v) == type,
                  "qcompile_cpu: queries, keys and values are of one dtype");
  const int64_t b = q.size(0), h = q.size(1), m = q.size(2), d = q.size(3);
  const int64_t g = k.size(1), keys = k.size(2), e = v.size(3);
  const auto batch = [&](const Tensor& x) { return x.size(0) == b || x.size(0) == 1; };
  STD_TORCH_CHECK(batch(k) && batch(v) && v.size(1) == g && v.size(2) == keys && k.size(3) == d &&
                      g > 0 && h % g == 0 && d % 16 == 0 && e % 16 == 0,
                  "qcompile_cpu: queries, keys and values do not fit, or columns are no multiple "
                  "of 16");
  // Heads of one query lie together, as the projection after this wants them.
  const std::array<int64_t, 4> shape{b, h, m, e}, strides{m * h * e, e, h * e, 1};
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(q.get(), &dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      4, shape.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &made));
  Tensor out(made);
  const auto bytes = [](const Tensor& x) { return static_cast<uint8_t*>(x.data_ptr()); };
  const qc::Attention a{type,
                        bytes(q), bytes(k), bytes(v), bytes(out),
                        steps_of(q), steps_of(k), steps_of(v),
                        {strides[0], strides[1], strides[2]},
                        b, h, g, m, keys, d, e,
                        mask_of(mask, {b, h, m, keys}),
                        causal, static_cast<float>(scale)};
  if (b && m && e) {
    torch::stable::parallel_for(0, a.tasks(), 1, [&](int64_t begin, int64_t end) {
      qc::attend(a, begin, end);
    });
  }
  return out;
}

}  // namespace qc

STABLE_TORCH_LIBRARY_IMPL(qcompile_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&qc::attention));
}
