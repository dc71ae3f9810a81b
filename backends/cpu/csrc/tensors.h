// What the ops share: torch's tensors over its stable ABI, as the kernels want them.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

#include "panel.h"

namespace qc {

using Tensor = torch::stable::Tensor;

// The variant for this machine.
const Kernels& kernels();

Number number_of(const Tensor& tensor);

// The tensor, contiguous; without the dispatcher where it is so already.
Tensor dense(const Tensor& x);

// A new tensor of x's dtype.
Tensor empty_of(const Tensor& x, const std::vector<int64_t>& shape);

// A weight over the bytes of `blob`, which the caller keeps.
Weight weight_over(const void* blob, const void* table, int64_t n, int64_t k, int64_t bits,
                   int64_t group, int64_t form, int64_t scale);

// The place of column c in rows whose groups are padded.
inline int64_t padded_place(const Weight& w, int64_t c) {
  return w.group % UNIT == 0 ? c : c / w.group * w.padded_group() + c % w.group;
}

}  // namespace qc
