// From GGUF's blocks to panels. No torch headers here.
#pragma once
#include "panel.h"

namespace qc {

// Weights as a file has them: rows of blocks, side by side.
struct Blocks {
  const uint8_t* data;
  int64_t row_bytes;
};

// A block type that has a way to panels, and what its panels are.
struct BlockType {
  const char* name;
  int64_t columns, bytes;  // of a block
  int bits;
  int64_t group;
  Form form;
  Scale scale;
  // Panels [begin, end) of n rows and k columns, a multiple of a block's.
  void (*pack)(const Blocks&, int64_t n, int64_t k, uint8_t* blob, int64_t begin, int64_t end);
};

// The type of this name, or null.
const BlockType* block_type(const char* name);

}  // namespace qc
