// Panels straight from GGUF's blocks: sixteen rows of a chunk at a time, whose codes pass through a
// buffer of a few kilobytes.
#include "blocks.h"

#include <algorithm>

#include "block_types.h"
#include "planes.h"

namespace qc {

namespace {

// Sixteen blocks; those of rows that a weight lacks are zeros.
template <class T>
struct Lanes {
  uint32_t words[T::WORDS][ROWS];
  uint16_t side[ROWS];
};

constexpr int64_t AHEAD = 512;

template <class T>
void gather(const uint8_t* from, int64_t step, int64_t rows, Lanes<T>& to) {
  if (rows < ROWS) std::memset(&to, 0, sizeof to);
  for (int64_t r = 0; r < rows; r++, from += step) {
    __builtin_prefetch(from + AHEAD);
    for (int i = 0; i < T::WORDS; i++) std::memcpy(&to.words[i][r], from + T::AT + 4 * i, 4);
    to.side[r] = from[T::SIDE];
    if (T::SIDE_BYTES == 2) std::memcpy(&to.side[r], from + T::SIDE, 2);
  }
}

// One value a row, where a row is there.
template <class V, class F>
void put_lanes(uint8_t* to, int64_t rows, const F& value) {
  V all[ROWS];
  for (int r = 0; r < ROWS; r++) all[r] = static_cast<V>(value(r));
  std::memcpy(to, all, rows * sizeof(V));
}

template <class T>
void put_heads(const Lanes<T>& lanes, int64_t rows, uint8_t* heads, uint8_t* head) {
  const Word* w = lanes.words;
  if constexpr (T::SCALE == NESTED) {
    put_lanes<uint16_t>(heads, rows, [&](int r) {
      return T::SIDE_BYTES ? lanes.side[r] : T::factors(w, r);
    });
    if (T::FORM == OFFSET) {
      put_lanes<uint16_t>(heads + 2 * ROWS, rows,
                          [&](int r) { return T::factors(w, r) >> 16 ^ HALF_SIGN; });
    }
    for (int64_t g = 0; g < T::COLUMNS / T::GROUP; g++) {
      put_lanes<int8_t>(head, rows, [&](int r) { return T::step(w, g, r); });
      head += ROWS;
      if (T::FORM != OFFSET) continue;
      put_lanes<int8_t>(head, rows, [&](int r) { return T::offset_step(w, g, r); });
      head += ROWS;
    }
  } else if constexpr (T::SCALE == PLAIN_F32) {
    put_lanes<uint32_t>(head, rows, [&](int r) { return T::scale(lanes.side[r]); });
  } else if constexpr (T::FORM == OFFSET) {
    put_lanes<uint16_t>(head, rows, [&](int r) { return w[0][r]; });
    put_lanes<float>(head + 2 * ROWS, rows, [&](int r) {
      const auto half = static_cast<uint16_t>(w[0][r] >> 16);
      return to_float(&half, 0, F16);
    });
  } else {
    put_lanes<uint16_t>(head, rows, [&](int r) { return lanes.side[r]; });
  }
}

template <class T>
void put_block(const Lanes<T>& lanes, int64_t rows, const Chunk& at, int64_t unit, uint8_t* panel) {
  for (int64_t u = 0; u < T::COLUMNS / UNIT; u++) {
    alignas(LINE) Codes codes;
    for (int q = 0; q < QUADS; q++) {
      uint32_t quad[ROWS];
      for (int r = 0; r < ROWS; r++) quad[r] = T::quad(lanes.words, u * QUADS + q, r);
      std::memcpy(codes[q], quad, sizeof quad);
      if (rows < ROWS) std::memset(codes[q][rows], 0, (ROWS - rows) * QUADS);
    }
    put_unit(T::BITS, at, unit + u, codes, panel);
  }
}

template <class T>
void pack_blocks(const Blocks& from, int64_t n, int64_t k, uint8_t* blob, int64_t begin,
                 int64_t end) {
  const Weight w{nullptr, nullptr, n, k, T::GROUP, T::BITS, T::FORM, T::SCALE};
  constexpr int64_t groups = T::COLUMNS / T::GROUP;
  const int64_t blocks = k / T::COLUMNS;
  // Two in turns: what was just written in pieces cannot be read as a whole for a while.
  alignas(LINE) Lanes<T> lanes[2];
  for (int64_t index = begin; index < end; index++) {
    const int64_t rows = std::min(ROWS, n - index * ROWS);
    const uint8_t* block = from.data + index * ROWS * from.row_bytes;
    uint8_t* panel = blob + index * w.panel_bytes();
    int64_t done = 0;
    if (blocks) gather<T>(block, from.row_bytes, rows, lanes[0]);
    for (int64_t c = 0; c < w.chunks(); c++) {
      const Chunk at = w.chunk(c);
      clear_padding(T::BITS, at, panel);
      uint8_t* head = panel + at.heads + w.factor_bytes();
      for (int64_t b = 0; b < at.groups / groups; b++) {
        const Lanes<T>& now = lanes[done++ % 2];
        if (done < blocks) {
          gather<T>(block + done * T::BYTES, from.row_bytes, rows, lanes[done % 2]);
        }
        put_heads<T>(now, rows, panel + at.heads, head + b * groups * w.head_bytes());
        put_block<T>(now, rows, at, b * T::COLUMNS / UNIT, panel);
      }
    }
  }
}

template <class T>
constexpr BlockType type_of(const char* name) {
  return {name, T::COLUMNS, T::BYTES, T::BITS, T::GROUP, T::FORM, T::SCALE, pack_blocks<T>};
}

constexpr BlockType TYPES[] = {
    type_of<Q4_0>("q4_0"), type_of<Q4_1>("q4_1"),     type_of<Q5_0>("q5_0"),
    type_of<Q5_1>("q5_1"), type_of<Q8_0>("q8_0"),     type_of<IQ4_NL>("iq4_nl"),
    type_of<Q2_K>("q2_k"), type_of<Q3_K>("q3_k"),     type_of<Q4_K>("q4_k"),
    type_of<Q5_K>("q5_k"), type_of<Q6_K>("q6_k"),     type_of<IQ4_XS>("iq4_xs"),
    type_of<MXFP4>("mxfp4"),
};

}  // namespace

const BlockType* block_type(const char* name) {
  for (const BlockType& type : TYPES) {
    if (std::strcmp(type.name, name) == 0) return &type;
  }
  return nullptr;
}

}  // namespace qc
