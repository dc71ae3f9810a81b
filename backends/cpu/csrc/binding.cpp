// The ops, over torch's stable ABI: one binary serves several torch releases.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tensors.h"

using torch::headeronly::ScalarType;
using qc::Tensor;
using qc::kernels;

namespace qc {
namespace {

const Kernels* choose() {
  const char* asked = std::getenv("QCOMPILE_CPU_ISA");
  if (asked && !std::strcmp(asked, "generic")) return kernels_generic();
#if defined(__x86_64__)
  if (!(asked && !std::strcmp(asked, "avx2")) && kernels_avx512() &&
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return kernels_avx512();
  }
  if (kernels_avx2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return kernels_avx2();
  }
#endif
  return kernels_generic();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* chosen = choose();
  return *chosen;
}

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

Weight weight_over(const void* blob, const void* table, int64_t n, int64_t k, int64_t bits,
                   int64_t group, int64_t form, int64_t scale) {
  STD_TORCH_CHECK(bits >= 1 && bits <= 8 && group >= 1 && n >= 1 && k >= 1 && form >= 0 &&
                      form <= FLOAT8 && (form != LOOKUP || bits <= 4) &&
                      (form != FLOAT8 || bits == 8),
                  "qcompile_cpu: unknown shape, width, group or form");
  return {static_cast<const uint8_t*>(blob), static_cast<const int8_t*>(table), n, k, group,
          static_cast<int>(bits), static_cast<Form>(form), static_cast<Number>(scale)};
}

}  // namespace qc

namespace {

// The float32 rows of x with padded groups, and the sums of the groups where a kernel wants them.
struct Prepared {
  std::vector<float> x, sums;
  const float* rows = nullptr;
};

void prepare(const qc::Weight& w, const Tensor& x, int64_t m, bool few, Prepared& out) {
  qc::Number type = qc::number_of(x);
  const void* data = x.data_ptr();
  const int64_t padded = w.padded();
  if (type == qc::F32 && padded == w.k) {
    out.rows = static_cast<const float*>(data);
  } else {
    out.x.assign(static_cast<size_t>(m * padded), 0.f);
    const bool runs = w.group % qc::UNIT != 0 && w.groups() > 1;
    const int64_t run = runs ? w.group : w.k, step = runs ? w.padded_group() : padded;
    for (int64_t r = 0; r < m; r++) {
      float* to = out.x.data() + r * padded;
      for (int64_t c = 0; c < w.k; c += run, to += step) {
        kernels().widen(data, r * w.k + c, type, std::min(run, w.k - c), to);
      }
    }
    out.rows = out.x.data();
  }
  if (!few || (w.form != qc::ZERO && w.form != qc::OFFSET)) return;
  out.sums.resize(static_cast<size_t>(m * w.groups()));
  kernels().sum_groups(w, out.rows, m, out.sums.data());
}

// The bias as float32: its own memory, or `store`.
const float* bias_of(const std::optional<Tensor>& bias, int64_t n, std::vector<float>& store) {
  if (!bias.has_value()) return nullptr;
  STD_TORCH_CHECK(bias->numel() == n, "qcompile_cpu: the bias has not the rows of the weight");
  Tensor values = qc::dense(*bias);
  store.resize(static_cast<size_t>(n));
  kernels().widen(values.data_ptr(), 0, qc::number_of(values), n, store.data());
  return store.data();
}

qc::Weight weight_of(const Tensor& blob, const Tensor& table, int64_t n, int64_t k, int64_t bits,
                     int64_t group, int64_t form, int64_t scale) {
  qc::Weight w = qc::weight_over(blob.data_ptr(), table.data_ptr(), n, k, bits, group, form, scale);
  STD_TORCH_CHECK(blob.numel() == w.panels() * w.panel_bytes(),
                  "qcompile_cpu: the blob does not have the bytes of its shape");
  return w;
}

Tensor panel_linear(const Tensor& given, const Tensor& blob, const Tensor& table,
                    const std::optional<Tensor>& bias, int64_t n, int64_t k, int64_t bits,
                    int64_t group, int64_t form, int64_t scale) {
  qc::Weight w = weight_of(blob, table, n, k, bits, group, form, scale);
  Tensor x = qc::dense(given);
  auto sizes = x.sizes();
  STD_TORCH_CHECK(sizes.size() >= 1 && sizes[sizes.size() - 1] == k,
                  "qcompile_cpu: x has not the columns of the weight");
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = n;
  Tensor y = qc::empty_of(x, shape);
  if (x.numel() == 0) return y;
  const int64_t m = x.numel() / k;
  const bool few = m <= kernels().few_rows;
  Prepared prepared;
  prepare(w, x, m, few, prepared);
  std::vector<float> bias_store;
  qc::Rows rows{prepared.rows, prepared.sums.data(), m, w.padded()};
  qc::Output out{y.data_ptr(), bias_of(bias, n, bias_store), qc::number_of(x)};
  auto run = few ? kernels().few : kernels().many;
  // A thread is worth waking for some ten microseconds of work.
  const int64_t grain = std::max<int64_t>(1, (64 << 10) / (w.panel_bytes() * m));
  torch::stable::parallel_for(0, w.panels(), grain, [&](int64_t begin, int64_t end) {
    run(w, rows, out, begin, end);
  });
  return y;
}

Tensor panel_embedding(const Tensor& given, const Tensor& blob, const Tensor& table, int64_t n,
                       int64_t k, int64_t bits, int64_t group, int64_t form, int64_t scale,
                       ScalarType dtype) {
  qc::Weight w = weight_of(blob, table, n, k, bits, group, form, scale);
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
      kernels().narrow(row.data(), k, y.data_ptr(), i * k, type);
    }
  });
  return y;
}

Tensor panel_pack(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& extra,
                  int64_t bits, int64_t group, int64_t form) {
  int64_t n = codes.size(0), k = codes.size(1);
  qc::Weight w{nullptr, nullptr, n, k, group, static_cast<int>(bits), static_cast<qc::Form>(form),
               scale.scalar_type() == ScalarType::Half ? qc::F16 : qc::F32};
  Tensor blob = torch::stable::new_empty(codes, {w.panels(), w.panel_bytes()});
  const float* more = extra.has_value() ? static_cast<const float*>(extra->data_ptr()) : nullptr;
  torch::stable::parallel_for(0, w.panels(), 1, [&](int64_t begin, int64_t end) {
    qc::pack(w, static_cast<const uint8_t*>(codes.data_ptr()), scale.data_ptr(), more,
             static_cast<uint8_t*>(blob.data_ptr()), begin, end);
  });
  return blob;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(qcompile_cpu, CPU, m) {
  m.impl("panel_linear", TORCH_BOX(&panel_linear));
  m.impl("panel_embedding", TORCH_BOX(&panel_embedding));
  m.impl("panel_pack", TORCH_BOX(&panel_pack));
}
