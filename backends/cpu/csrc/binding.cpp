// The ops, over torch's stable ABI: one binary serves several torch releases.
#include <algorithm>

#include "ops.h"
#include "products.h"

using torch::headeronly::ScalarType;
using qc::Tensor;

namespace qc {
Number number_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return F32;
    case ScalarType::Half: return F16;
    case ScalarType::BFloat16: return BF16;
    default: STD_TORCH_CHECK(false, "qcompile_cpu: activations must be float32, float16 or bfloat16");
  }
}

// Both without the dispatcher where it is not needed: a small product takes as long as one call.
Tensor dense(const Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

Tensor empty_of(const Tensor& x, const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; i--) strides[i - 1] = strides[i] * shape[i];
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(shape.size()), shape.data(), strides.data(), dtype,
      aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

Weight weight_over(const void* blob, const void* table, const int64_t* shape) {
  const int64_t n = shape[0], k = shape[1], bits = shape[2], group = shape[3], form = shape[4];
  const int64_t scale = shape[5];
  STD_TORCH_CHECK(bits >= 1 && bits <= 8 && group >= 1 && group <= CHUNK && n >= 0 && k >= 1 &&
                      form >= 0 && form <= FLOAT8 && (form != LOOKUP || bits <= 4) &&
                      (form != FLOAT8 || bits == 8) && scale >= 0 && scale <= NESTED,
                  "qcompile_cpu: unknown shape, width, group, form or scale");
  return {static_cast<const uint8_t*>(blob), static_cast<const int8_t*>(table), n, k, group,
          static_cast<int>(bits), static_cast<Form>(form), static_cast<Scale>(scale)};
}

// Products of one x with several weights, whose rows are quantized once for each width of groups.
std::vector<Tensor> panel_linears(const Tensor& given, const std::vector<Tensor>& parts,
                                  const std::vector<std::optional<Tensor>>& biases,
                                  const std::vector<int64_t>& numbers, int64_t digits) {
  const size_t count = parts.size() / 2;
  STD_TORCH_CHECK(count && parts.size() == 2 * count && biases.size() == count &&
                      numbers.size() == 6 * count,
                  "qcompile_cpu: a weight has a blob, a table, a bias or none, and six numbers");
  STD_TORCH_CHECK(digits >= 0 && digits <= 3, "qcompile_cpu: digits are 0 to 3");
  Tensor x = qc::dense(given);
  auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  STD_TORCH_CHECK(!shape.empty(), "qcompile_cpu: x has no columns");
  const int64_t k = shape.back(), m = x.numel() ? x.numel() / k : 0;
  std::vector<Tensor> results;
  std::vector<qc::Product> products;
  std::vector<std::unique_ptr<qc::Digits>> rows;
  std::vector<std::vector<float>> bias_store(count);
  for (size_t i = 0; i < count; i++) {
    const qc::Weight w = qc::weight_of(parts[2 * i], parts[2 * i + 1], numbers.data() + 6 * i);
    STD_TORCH_CHECK(k == w.k, "qcompile_cpu: x has not the columns of the weight");
    shape.back() = w.n;
    results.push_back(qc::empty_of(x, shape));
    const float* bias = qc::bias_of(biases[i], w.n, bias_store[i]);
    if (m == 0) continue;
    auto found = std::find_if(rows.begin(), rows.end(), [&](auto& r) { return r->serves(w); });
    if (found == rows.end()) {
      rows.push_back(qc::digits_of(w, x, m, digits));
      found = rows.end() - 1;
    }
    products.push_back({w, found->get(), {results[i].data_ptr(), bias, qc::number_of(x)}});
  }
  if (m) qc::multiply(products, m);
  return results;
}

Tensor panel_linear(const Tensor& x, const Tensor& blob, const Tensor& table,
                    const std::optional<Tensor>& bias, const std::vector<int64_t>& numbers,
                    int64_t digits) {
  return panel_linears(x, {blob, table}, {bias}, numbers, digits)[0];
}

Tensor panel_embedding(const Tensor& given, const Tensor& blob, const Tensor& table,
                       const std::vector<int64_t>& numbers, ScalarType dtype) {
  STD_TORCH_CHECK(numbers.size() == 6, "qcompile_cpu: a shape has six numbers");
  const qc::Weight w = qc::weight_of(blob, table, numbers.data());
  const int64_t n = w.n, k = w.k;
  Tensor ids = qc::dense(given);
  auto sizes = ids.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.push_back(k);
  Tensor y = torch::stable::new_empty(ids, shape, dtype);
  qc::Number type = qc::number_of(y);
  int64_t count = ids.numel();
  bool wide = ids.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || ids.scalar_type() == ScalarType::Int,
                  "qcompile_cpu: ids must be int32 or int64");
  auto id = [&](int64_t i) -> int64_t {
    return wide ? static_cast<const int64_t*>(ids.data_ptr())[i]
                : static_cast<const int32_t*>(ids.data_ptr())[i];
  };
  for (int64_t i = 0; i < count; i++) {
    STD_TORCH_CHECK(id(i) >= 0 && id(i) < n, "qcompile_cpu: id ", id(i), " is outside 0..", n - 1);
  }
  torch::stable::parallel_for(0, count, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(k));
    for (int64_t i = begin; i < end; i++) {
      qc::decode_row(w, id(i), row.data());
      qc::kernels().narrow(row.data(), k, y.data_ptr(), i * k, type);
    }
  });
  return y;
}

}  // namespace qc

namespace {

Tensor panel_pack(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& extra,
                  const std::vector<int64_t>& numbers, int64_t wide_group) {
  STD_TORCH_CHECK(numbers.size() == 6, "qcompile_cpu: a shape has six numbers");
  const qc::Weight w = qc::weight_over(nullptr, nullptr, numbers.data());
  STD_TORCH_CHECK(w.scale != qc::NESTED, "qcompile_cpu: nested scales come from their blocks");
  const qc::Source from{static_cast<const uint8_t*>(codes.data_ptr()), scale.data_ptr(),
                        extra.has_value() ? extra->data_ptr() : nullptr, scale.size(1),
                        wide_group};
  Tensor blob = torch::stable::new_empty(codes, {w.panels(), w.panel_bytes()});
  auto* to = static_cast<uint8_t*>(blob.data_ptr());
  torch::stable::parallel_for(0, w.panels(), 1, [&](int64_t begin, int64_t end) {
    qc::pack(w, from, to, begin, end);
  });
  return blob;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(qcompile_cpu, CPU, m) {
  m.impl("panel_linear", TORCH_BOX(&qc::panel_linear));
  m.impl("panel_linears", TORCH_BOX(&qc::panel_linears));
  m.impl("panel_embedding", TORCH_BOX(&qc::panel_embedding));
  m.impl("panel_pack", TORCH_BOX(&panel_pack));
}
