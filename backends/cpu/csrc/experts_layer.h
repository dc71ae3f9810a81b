// The experts of a layer, as the op's arguments describe them: the matrices of each role, the
// function between the products, and which rows of the tokens every expert has.
#pragma once
#include <cmath>
#include <string>

#include "tensors.h"

namespace qc {

enum RoleKind : int64_t { GATE = 0, UP = 1, GATE_UP = 2, DOWN = 3 };

// The matrices of one role: `experts` weights of one shape, one after the other.
struct Role {
  RoleKind kind;
  Weight first;
  int64_t table_step;
  const int32_t* columns;  // [experts][k]: column of x at each place, or null

  Weight of(int64_t expert) const {
    Weight w = first;
    w.blob += expert * w.panels() * w.panel_bytes();
    w.table += expert * table_step;
    return w;
  }
  const int32_t* columns_of(int64_t expert) const {
    return columns ? columns + expert * first.k : nullptr;
  }
};

// Rows [begin, end) of the sorted pairs belong to one expert.
struct ExpertRun {
  int64_t expert, begin, end;
};

struct Pair {
  int64_t token, slot;
};

struct Layer {
  std::vector<Role> up;
  Role down;
  int64_t experts;
  std::vector<float> up_bias, down_bias;  // [experts][n], empty without
};

struct Function {
  enum { SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, TANH, IDENTITY, SWIGLU_OAI } kind;
  bool gated;
  float alpha, limit;

  float plain(float x) const {
    switch (kind) {
      case SILU: return x / (1.f + std::exp(-x));
      case GELU: return 0.5f * x * (1.f + std::erf(x * 0.70710678f));
      case GELU_TANH:
        return 0.5f * x * (1.f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
      case RELU: return x > 0 ? x : 0;
      case RELU2: return x > 0 ? x * x : 0;
      case SIGMOID: return 1.f / (1.f + std::exp(-x));
      case TANH: return std::tanh(x);
      default: return x;
    }
  }
  float pair(float gate, float up) const {
    gate = std::min(gate, limit);
    up = std::min(std::max(up, -limit), limit);
    if (kind == SWIGLU_OAI) return (up + 1.f) * gate / (1.f + std::exp(-gate * alpha));
    return plain(gate) * up;
  }
};

// By name; `gated` says that it takes a gate and an up value.
Function function_of(const std::string& name, bool gated, double alpha, double limit);

// Parts and shape as the op takes them; biases are added by the caller.
Layer layer_of(const std::vector<Tensor>& parts, const std::vector<int64_t>& shape);

// The pairs of token and slot by expert, and the runs of equal experts.
std::vector<ExpertRun> group_pairs(const Tensor& ids, int64_t experts, std::vector<Pair>& pairs);

// All values as float32.
std::vector<float> widened(const Tensor& given);

}  // namespace qc
