// The ops that make panels from what checkpoints store.
#include <string>

#include "blocks.h"
#include "tensors.h"
#include "words.h"

using qc::Tensor;

namespace {

constexpr int64_t TOGETHER = qc::PANELS_TOGETHER;

uint8_t* bytes_of(const Tensor& blob, const qc::Weight& w) {
  STD_TORCH_CHECK(blob.is_contiguous() && blob.numel() == w.panels() * w.panel_bytes() &&
                      blob.scalar_type() == torch::headeronly::ScalarType::Byte,
                  "qcompile_cpu: the blob does not have the bytes of its shape");
  return static_cast<uint8_t*>(blob.data_ptr());
}

void panel_from_blocks(const Tensor& given, std::string name, std::vector<int64_t> numbers,
                       const Tensor& blob) {
  STD_TORCH_CHECK(numbers.size() == 6, "qcompile_cpu: a shape has six numbers");
  const qc::Weight w = qc::weight_over(nullptr, nullptr, numbers.data());
  const qc::BlockType* type = qc::block_type(name.c_str());
  STD_TORCH_CHECK(type != nullptr, "qcompile_cpu: no way from blocks of ", name, " to panels");
  STD_TORCH_CHECK(type->bits == w.bits && type->group == w.group && type->form == w.form &&
                      type->scale == w.scale,
                  "qcompile_cpu: panels of ", name, " have another spec");
  Tensor data = qc::dense(given);
  const int64_t row_bytes = w.k / type->columns * type->bytes;
  STD_TORCH_CHECK(w.k % type->columns == 0 && data.numel() == w.n * row_bytes,
                  "qcompile_cpu: the data are not rows of whole blocks of ", name);
  const qc::Blocks from{static_cast<const uint8_t*>(data.data_ptr()), row_bytes};
  uint8_t* to = bytes_of(blob, w);
  torch::stable::parallel_for(0, w.panels(), 1, [&](int64_t begin, int64_t end) {
    type->pack(from, w.n, w.k, to, begin, end);
  });
}

void panel_from_words(const Tensor& words, const Tensor& scale, const std::optional<Tensor>& zero,
                      const std::optional<Tensor>& columns, std::vector<int64_t> numbers,
                      int64_t wide_group, std::vector<int64_t> steps, int64_t packing,
                      const Tensor& blob) {
  STD_TORCH_CHECK(numbers.size() == 6 && steps.size() == 2, "qcompile_cpu: six and two numbers");
  const qc::Weight w = qc::weight_over(nullptr, nullptr, numbers.data());
  STD_TORCH_CHECK(w.form <= qc::ZERO && w.scale != qc::NESTED && zero.has_value() == (w.form != 0),
                  "qcompile_cpu: words have plain scales, and zeros or none");
  STD_TORCH_CHECK(packing == qc::ALONG_COLUMNS || (packing == qc::ALONG_ROWS && w.bits == 4),
                  "qcompile_cpu: unknown packing");
  const qc::PackedWords from{static_cast<const uint32_t*>(words.data_ptr()), steps[0], steps[1],
                             static_cast<qc::Packing>(packing),
                             columns.has_value()
                                 ? static_cast<const int32_t*>(columns->data_ptr())
                                 : nullptr};
  const qc::Source heads{nullptr, scale.data_ptr(), zero.has_value() ? zero->data_ptr() : nullptr,
                         scale.size(1), wide_group};
  uint8_t* to = bytes_of(blob, w);
  torch::stable::parallel_for(0, w.panels(), TOGETHER, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += TOGETHER) {
      qc::pack_words(w, from, heads, to, begin, std::min(begin + TOGETHER, end));
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(qcompile_cpu, CPU, m) {
  m.impl("panel_from_blocks", TORCH_BOX(&panel_from_blocks));
  m.impl("panel_from_words", TORCH_BOX(&panel_from_words));
}
