// Writing a chunk of a panel: its codes from the quads of a unit, its heads and its padding.
//
// Compilers turn the loops over the sixteen rows into vector instructions; each of them has a
// constant length for that.
#pragma once
#include <cstring>

#include "panel.h"

namespace {
using namespace qc;

// The codes of a unit, [quad][row][column].
using Codes = uint8_t[QUADS][ROWS][QUADS];

inline void put_nibbles(const Codes& codes, uint8_t* to) {
  const uint8_t* q = &codes[0][0][0];
  for (int half = 0; half < 2; half++, q += 2 * LINE, to += LINE) {
    for (int i = 0; i < LINE; i++) to[i] = static_cast<uint8_t>((q[i] & 15) | q[LINE + i] << 4);
  }
}

inline void put_pairs(const Codes& codes, int at, uint8_t* to) {
  const uint8_t* q = &codes[0][0][0];
  for (int i = 0; i < LINE; i++) {
    const int low = (q[i] >> at & 3) | (q[LINE + i] >> at & 3) << 2;
    const int high = (q[2 * LINE + i] >> at & 3) | (q[3 * LINE + i] >> at & 3) << 2;
    to[i] = static_cast<uint8_t>(low | high << 4);
  }
}

inline void put_bits(const Codes& codes, int at, uint8_t* to) {
  const uint8_t* q = &codes[0][0][0];
  for (int i = 0; i < 4 * LINE / 8; i++, q += 8) {
    uint64_t eight;
    std::memcpy(&eight, q, 8);
    eight = eight >> at & 0x0101010101010101u;
    // The product gathers the lowest bits of the eight bytes in its highest byte.
    to[i] = static_cast<uint8_t>(eight * 0x0102040810204080u >> 56);
  }
}

// The codes of unit u of a chunk, to the chunk's runs.
inline void put_unit(int bits, const Chunk& at, int64_t u, const Codes& codes, uint8_t* panel) {
  if (bits == 8) {
    std::memcpy(panel + at.wide + u * 256, codes, sizeof(Codes));
    return;
  }
  if (bits & 4) put_nibbles(codes, panel + at.nibbles + u * 128);
  if (bits & 2) put_pairs(codes, bits & 4, panel + at.pairs + u * 64);
  if (bits & 1) put_bits(codes, bits & 6, panel + at.bits + u * 32);
}

// Zeros where neither `put_unit` nor heads of sixteen rows write.
inline void clear_padding(int bits, const Chunk& at, uint8_t* panel) {
  std::memset(panel + at.heads, 0, static_cast<size_t>(at.wide - at.heads));
  if (bits != 8 && bits & 1) std::memset(panel + at.end - LINE, 0, LINE);
}

// The head of one row in a group.
inline void put_head(const Weight& w, const Source& from, int64_t row, int64_t wide, int64_t lane,
                     uint8_t* head) {
  const int64_t at = row * from.groups + wide, size = w.step_bytes();
  std::memcpy(head + lane * size, static_cast<const uint8_t*>(from.scale) + at * size,
              static_cast<size_t>(size));
  uint8_t* extra = head + ROWS * size;
  if (w.form == OFFSET) {
    std::memcpy(extra + lane * 4, static_cast<const float*>(from.extra) + at, 4);
  } else if (w.form == ZERO) {
    const auto zero = static_cast<int16_t>(static_cast<const int32_t*>(from.extra)[at]);
    std::memcpy(extra + lane * 2, &zero, 2);
  }
}

}  // namespace
