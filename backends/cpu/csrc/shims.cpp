// The ops as plain C functions, in the form that Inductor's C++ code calls: without a dispatcher,
// without boxing. Tensors come as handles that the caller keeps; results are handles it owns.
// Failures are exceptions, as everywhere in that code; the number returned is always success.
#include <cstdarg>

#include "ops.h"

using qc::Tensor;

namespace {

Tensor borrowed(AtenTensorHandle handle) {
  AtenTensorHandle own;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &own));
  return Tensor(own);
}

std::optional<Tensor> maybe(const AtenTensorHandle* handle) {
  return handle ? std::optional<Tensor>(borrowed(*handle)) : std::nullopt;
}

std::vector<Tensor> list(const AtenTensorHandle* handles, int64_t count) {
  std::vector<Tensor> all;
  all.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; i++) all.push_back(borrowed(handles[i]));
  return all;
}

qc::Numbers numbers(const int64_t* first, int64_t count) { return {first, first + count}; }

void give(const Tensor& result, AtenTensorHandle* to) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(result.get(), to));
}

}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_panel_linear(AtenTensorHandle x, AtenTensorHandle blob,
                                           AtenTensorHandle table, const AtenTensorHandle* bias,
                                           const int64_t* shape, int64_t shape_len, int64_t digits,
                                           AtenTensorHandle* result) {
  give(qc::panel_linear(borrowed(x), borrowed(blob), borrowed(table), maybe(bias),
                        numbers(shape, shape_len), digits),
       result);
  return AOTI_TORCH_SUCCESS;
}

// One place for each result follows.
AOTITorchError aoti_torch_cpu_panel_linears(AtenTensorHandle x, const AtenTensorHandle* parts,
                                            int64_t parts_len, const AtenTensorHandle** biases,
                                            int64_t biases_len, const int64_t* shapes,
                                            int64_t shapes_len, int64_t digits, ...) {
  std::vector<std::optional<Tensor>> added;
  for (int64_t i = 0; i < biases_len; i++) added.push_back(maybe(biases[i]));
  const std::vector<Tensor> results = qc::panel_linears(
      borrowed(x), list(parts, parts_len), added, numbers(shapes, shapes_len), digits);
  va_list places;
  va_start(places, digits);
  for (const Tensor& result : results) give(result, va_arg(places, AtenTensorHandle*));
  va_end(places);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cpu_panel_gated(AtenTensorHandle x, const AtenTensorHandle* parts,
                                          int64_t parts_len, const AtenTensorHandle** biases,
                                          int64_t biases_len, const int64_t* shapes,
                                          int64_t shapes_len, int64_t function, int64_t digits,
                                          AtenTensorHandle* result) {
  std::vector<std::optional<Tensor>> added;
  for (int64_t i = 0; i < biases_len; i++) added.push_back(maybe(biases[i]));
  give(qc::panel_gated(borrowed(x), list(parts, parts_len), added, numbers(shapes, shapes_len),
                       function, digits),
       result);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cpu_panel_embedding(AtenTensorHandle ids, AtenTensorHandle blob,
                                              AtenTensorHandle table, const int64_t* shape,
                                              int64_t shape_len, int32_t dtype,
                                              AtenTensorHandle* result) {
  give(qc::panel_embedding(borrowed(ids), borrowed(blob), borrowed(table),
                           numbers(shape, shape_len),
                           static_cast<torch::headeronly::ScalarType>(dtype)),
       result);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cpu_attention(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                                        const AtenTensorHandle* mask, int32_t is_causal,
                                        double scale, AtenTensorHandle* result) {
  give(qc::attention(borrowed(q), borrowed(k), borrowed(v), maybe(mask), is_causal != 0, scale),
       result);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cpu_panel_experts(
    AtenTensorHandle x, AtenTensorHandle ids, AtenTensorHandle weights,
    const AtenTensorHandle* parts, int64_t parts_len, const int64_t* shape, int64_t shape_len,
    const AtenTensorHandle* up_bias, const AtenTensorHandle* down_bias, const char* function,
    int32_t gated, double alpha, double limit, int64_t digits, AtenTensorHandle* result) {
  give(qc::panel_experts(borrowed(x), borrowed(ids), borrowed(weights), list(parts, parts_len),
                         numbers(shape, shape_len), maybe(up_bias), maybe(down_bias), function,
                         gated != 0, alpha, limit, digits),
       result);
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"
