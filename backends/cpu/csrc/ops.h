// The ops that a model calls for every token, as C++ functions; the binding gives them to torch's
// dispatcher, the shims to compiled C++ code.
#pragma once
#include <string>

#include "tensors.h"

namespace qc {

using Numbers = std::vector<int64_t>;

Tensor panel_linear(const Tensor& x, const Tensor& blob, const Tensor& table,
                    const std::optional<Tensor>& bias, const Numbers& shape, int64_t digits);
std::vector<Tensor> panel_linears(const Tensor& x, const std::vector<Tensor>& parts,
                                  const std::vector<std::optional<Tensor>>& biases,
                                  const Numbers& shapes, int64_t digits);
Tensor panel_gated(const Tensor& x, const std::vector<Tensor>& parts,
                   const std::vector<std::optional<Tensor>>& biases, const Numbers& shapes,
                   int64_t function, int64_t digits);
Tensor panel_embedding(const Tensor& ids, const Tensor& blob, const Tensor& table,
                       const Numbers& shape, torch::headeronly::ScalarType dtype);
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const std::optional<Tensor>& mask, bool causal, double scale);
Tensor panel_experts(const Tensor& x, const Tensor& ids, const Tensor& weights,
                     const std::vector<Tensor>& parts, const Numbers& shape,
                     const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                     const std::string& function, bool gated, double alpha, double limit,
                     int64_t digits);

}  // namespace qc
