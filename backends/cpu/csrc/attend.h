// Attention as one call: what the op tells the code of a variant. No torch headers here.
#pragma once
#include "panel.h"

namespace qc {

// Elements from one batch, one head and one row (or query and key) to the next.
struct Steps {
  int64_t batch, head, row;
};

enum MaskKind : int { NO_MASK = 0, SEEN = 1, ADDED = 2 };

struct Mask {
  MaskKind kind;  // bytes that are 1 where a key is seen, or numbers that are added to the scores
  const uint8_t* data;
  Number type;  // of numbers
  int64_t batch, head, query, key;  // elements to the next one; 0 where all share one
};

// softmax(q k' * scale + mask) v. The columns of a row lie together; d and e are multiples of 16.
struct Attention {
  Number type;
  const uint8_t *q, *k, *v;
  uint8_t* out;
  Steps q_at, k_at, v_at, out_at;
  int64_t batch, heads, groups;  // heads / groups of them share keys and values
  int64_t queries, keys, d, e;
  Mask mask;
  bool causal;  // query i sees keys 0 to i
  float scale;

  // Queries that share keys are rows of one run: head after head of a group.
  int64_t rows() const { return heads / groups * queries; }
  int64_t tile() const;   // rows of a task
  int64_t tasks() const { return batch * groups * ((rows() + tile() - 1) / tile()); }
};

// Some of the tasks; each writes rows of its own.
void attend(const Attention& a, int64_t begin, int64_t end);

}  // namespace qc
