// Reading the arguments of the op for experts.
#include "experts_layer.h"

#include <algorithm>

using torch::headeronly::ScalarType;

namespace qc {

Function function_of(const std::string& name, bool gated, double alpha, double limit) {
  static const char* names[] = {"silu",    "gelu", "gelu_tanh", "relu",      "relu2",
                                "sigmoid", "tanh", "identity",  "swiglu_oai"};
  Function found{};
  found.gated = gated;
  found.alpha = static_cast<float>(alpha);
  found.limit = static_cast<float>(limit);
  for (int i = 0; i < 9; i++) {
    if (name == names[i]) {
      found.kind = static_cast<decltype(found.kind)>(i);
      return found;
    }
  }
  STD_TORCH_CHECK(false, "qcompile_cpu: unknown function of experts: ", name);
}

std::vector<float> widened(const Tensor& given) {
  Tensor values = dense(given);
  std::vector<float> out(static_cast<size_t>(values.numel()));
  kernels().widen(values.data_ptr(), 0, number_of(values), values.numel(), out.data());
  return out;
}

constexpr size_t NUMBERS = 8;  // kind, n, k, bits, group, form, scale, permuted

Layer layer_of(const std::vector<Tensor>& parts, const std::vector<int64_t>& shape) {
  Layer layer{};
  layer.experts = parts.at(0).size(0);
  size_t part = 0;
  bool has_down = false;
  for (size_t at = 0; at + NUMBERS <= shape.size(); at += NUMBERS) {
    const int64_t* s = shape.data() + at;
    const Tensor& blob = parts.at(part++);
    const Tensor& table = parts.at(part++);
    Role role{static_cast<RoleKind>(s[0]),
              weight_over(blob.data_ptr(), table.data_ptr(), s + 1),
              table.numel() / layer.experts, nullptr};
    STD_TORCH_CHECK(
        blob.numel() == layer.experts * role.first.panels() * role.first.panel_bytes(),
        "qcompile_cpu: a role does not have the bytes of its shape");
    if (s[7]) role.columns = static_cast<const int32_t*>(parts.at(part++).data_ptr());
    if (role.kind == DOWN) {
      layer.down = role;
      has_down = true;
    } else {
      layer.up.push_back(role);
    }
  }
  STD_TORCH_CHECK(has_down && !layer.up.empty(), "qcompile_cpu: experts without a product");
  // Gate rows first, whatever the order in which the roles came.
  std::sort(layer.up.begin(), layer.up.end(),
            [](const Role& a, const Role& b) { return a.kind < b.kind; });
  return layer;
}

std::vector<ExpertRun> group_pairs(const Tensor& ids, int64_t experts, std::vector<Pair>& pairs) {
  const int64_t tokens = ids.size(0), top = ids.size(1);
  const bool wide = ids.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || ids.scalar_type() == ScalarType::Int,
                  "qcompile_cpu: chosen experts must be int32 or int64");
  auto id = [&](int64_t i) -> int64_t {
    return wide ? static_cast<const int64_t*>(ids.data_ptr())[i]
                : static_cast<const int32_t*>(ids.data_ptr())[i];
  };
  std::vector<int64_t> starts(static_cast<size_t>(experts + 1), 0);
  for (int64_t i = 0; i < tokens * top; i++) {
    STD_TORCH_CHECK(id(i) >= 0 && id(i) < experts, "qcompile_cpu: expert ", id(i),
                    " is outside 0..", experts - 1);
    starts[static_cast<size_t>(id(i) + 1)]++;
  }
  std::vector<ExpertRun> runs;
  for (int64_t e = 0; e < experts; e++) {
    const int64_t begin = starts[static_cast<size_t>(e)];
    starts[static_cast<size_t>(e + 1)] += begin;
    if (starts[static_cast<size_t>(e + 1)] > begin) {
      runs.push_back({e, begin, starts[static_cast<size_t>(e + 1)]});
    }
  }
  pairs.resize(static_cast<size_t>(tokens * top));
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t slot = 0; slot < top; slot++) {
      pairs[static_cast<size_t>(starts[static_cast<size_t>(id(t * top + slot))]++)] = {t, slot};
    }
  }
  return runs;
}

}  // namespace qc
