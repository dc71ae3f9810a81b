// What the ops share: torch's tensors over its stable ABI, as the kernels want them.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <memory>
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

// Rows of activations as digits, or as floats with padded groups for the form float8. Memory is left
// as it comes: every row is set before it is read.
class Digits {
 public:
  Digits(const Weight& w, int64_t rows, int64_t digits)
      : wide_(w.form == FLOAT8), group_(w.group) {
    const int64_t width = w.width(), groups = w.chunk_groups(), parts = w.chunks() * rows;
    if (wide_) {
      floats_.reset(new float[static_cast<size_t>(rows * w.padded())]);
    } else {
      codes_.reset(new int8_t[static_cast<size_t>(parts * digits * width)]);
      totals_.reset(new int32_t[static_cast<size_t>(parts * (digits + 1) * groups)]);
      step_.reset(new float[static_cast<size_t>(2 * parts * groups)]);
    }
    view_ = {codes_.get(), totals_.get(), totals_.get() + parts * digits * groups,
             step_.get(),  step_.get() + parts * groups, floats_.get(),
             rows,         digits,        w.padded(),    width,
             groups,       rows};
  }
  // Row r; `fill` writes its floats, in places that are zero.
  template <typename Fill>
  void set(const Weight& w, int64_t r, const Fill& fill) {
    static thread_local std::vector<float> scratch;
    if (!wide_) scratch.resize(static_cast<size_t>(view_.padded));
    float* row = wide_ ? floats_.get() + r * view_.padded : scratch.data();
    if (view_.padded != w.k) std::fill(row, row + view_.padded, 0.f);
    fill(row);
    if (!wide_) kernels().quantize(w, row, view_, r);
  }
  // Whether another weight of as many columns can read these digits: steps belong to groups.
  bool serves(const Weight& w) const {
    return wide_ == (w.form == FLOAT8) && group_ == w.group;
  }
  const Rows& rows() const { return view_; }

 private:
  bool wide_;
  int64_t group_;
  std::unique_ptr<float[]> floats_, step_;
  std::unique_ptr<int8_t[]> codes_;
  std::unique_ptr<int32_t[]> totals_;
  Rows view_;
};

}  // namespace qc
