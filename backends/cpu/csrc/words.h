// From words of packed codes, as GPTQ and its relatives store them, to panels. No torch headers here.
#pragma once
#include "panel.h"

namespace qc {

// How words hold codes.
enum Packing : int {
  ALONG_COLUMNS = 0,  // a row's words are one stream of bits, lowest first
  ALONG_ROWS = 1,     // eight rows of a column, 4 bits each: 0, 2, 4, 6, 1, 3, 5, 7 (AWQ)
};

struct PackedWords {
  const uint32_t* words;
  int64_t row_step, word_step;  // from a row (or eight) to the next, from a word of a row to the next
  Packing packing;
  const int32_t* columns;  // the column at each place, or null where they are in order
};

constexpr int64_t PANELS_TOGETHER = 8;  // whose words of AWQ share cache lines

// Packs panels [begin, end), PANELS_TOGETHER at most; `heads` has no codes.
void pack_words(const Weight& shape, const PackedWords& from, const Source& heads, uint8_t* blob,
                int64_t begin, int64_t end);

}  // namespace qc
