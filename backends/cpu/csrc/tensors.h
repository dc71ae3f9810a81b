// What the ops share: torch's tensors over its stable ABI, as the kernels want them.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
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

// Memory that a thread keeps from call to call: the first touch of new pages costs more than turning
// activations into digits.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t bytes) {
    for (Block& block : kept()) {
      if (block.size < bytes) continue;
      std::swap(block_, block);
      return;
    }
    block_ = {std::unique_ptr<uint8_t[]>(new uint8_t[static_cast<size_t>(bytes)]), bytes};
  }
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Memory() {
    if (block_.size > MOST_KEPT) return;
    for (Block& block : kept()) {
      if (block.size < block_.size) std::swap(block, block_);
    }
  }
  void* data() const { return block_.bytes.get(); }

 private:
  static constexpr int64_t MOST_KEPT = 16 << 20;  // bytes of a block, of which there are two
  struct Block {
    std::unique_ptr<uint8_t[]> bytes;
    int64_t size = 0;
  };
  static std::array<Block, 2>& kept() {
    static thread_local std::array<Block, 2> blocks;
    return blocks;
  }
  Block block_;
};

// Rows of activations as digits, or as floats with padded groups for the form float8. Memory is left
// as it comes: every row is set before it is read.
class Digits {
 public:
  Digits(const Weight& w, int64_t rows, int64_t digits)
      : wide_(w.form == FLOAT8), group_(w.group), memory_(rows_bytes(w, rows, digits) + LINE) {
    const auto place = reinterpret_cast<uintptr_t>(memory_.data());
    void* begin = reinterpret_cast<void*>(up_to(static_cast<int64_t>(place), LINE));
    view_ = rows_in(begin, w, rows, digits);
  }
  // Row r; `fill` writes its floats, in places that are zero.
  template <typename Fill>
  void set(const Weight& w, int64_t r, const Fill& fill) {
    static thread_local std::vector<float> scratch;
    if (!wide_) scratch.resize(static_cast<size_t>(view_.padded));
    float* row = wide_ ? const_cast<float*>(view_.x) + r * view_.padded : scratch.data();
    if (view_.padded != w.k) std::fill(row, row + view_.padded, 0.f);
    fill(row);
    if (!wide_) kernels().quantize(w, row, view_, r);
  }
  // Rows [begin, end) from those of a matrix.
  void set_rows(const Weight& w, const void* from, Number type, int64_t begin, int64_t end) {
    kernels().quantize_rows(w, from, type, view_, begin, end);
  }
  // Whether rows of a matrix can be taken as they are.
  bool takes_matrix(const Weight& w) const { return !wide_ && view_.padded == w.k; }
  // Whether another weight of as many columns can read these digits: steps belong to groups.
  bool serves(const Weight& w) const {
    return wide_ == (w.form == FLOAT8) && group_ == w.group;
  }
  const Rows& rows() const { return view_; }

 private:
  bool wide_;
  int64_t group_;
  Memory memory_;
  Rows view_;
};

}  // namespace qc
