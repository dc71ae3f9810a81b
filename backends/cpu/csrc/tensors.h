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

Number number_of(const Tensor& tensor);

// The tensor, contiguous; without the dispatcher where it is so already.
Tensor dense(const Tensor& x);

// A new tensor of x's dtype.
Tensor empty_of(const Tensor& x, const std::vector<int64_t>& shape);

// A weight over the bytes of `blob`, which the caller keeps. `shape` is n, k, bits, group, form,
// scale: what the ops take.
Weight weight_over(const void* blob, const void* table, const int64_t* shape);

// The place of column c in rows whose groups are padded.
inline int64_t padded_place(const Weight& w, int64_t c) {
  return w.group % UNIT == 0 ? c : c / w.group * w.padded_group() + c % w.group;
}

// Signed bytes of activations: what the numerics `exact` takes for a dtype, or one where `asked`.
inline int64_t digits_for(Number type, int64_t asked) {
  return asked ? asked : type == BF16 ? 2 : 3;
}

// Rows of activations with padded groups, and the same rows as digits.
class Digits {
 public:
  Digits(const Weight& w, int64_t rows, int64_t digits)
      : floats_(static_cast<size_t>(rows * w.padded())),
        codes_(static_cast<size_t>(rows * digits * w.padded())),
        start_(static_cast<size_t>(rows * digits * w.groups())),
        step_(static_cast<size_t>(rows * w.groups())), sums_(step_.size()),
        view_{codes_.data(), start_.data(), step_.data(), sums_.data(), floats_.data(),
              rows,          digits,        w.padded(),   w.groups()} {}
  float* row(int64_t r) { return floats_.data() + r * view_.padded; }
  // After row r is filled.
  void quantize(const Weight& w, int64_t r) {
    if (w.form != FLOAT8) kernels().quantize(w, row(r), view_, r);
  }
  const Rows& rows() const { return view_; }

 private:
  std::vector<float> floats_;
  std::vector<int8_t> codes_;
  std::vector<int32_t> start_;
  std::vector<float> step_, sums_;
  Rows view_;
};

}  // namespace qc
