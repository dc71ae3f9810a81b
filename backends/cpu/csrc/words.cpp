// Panels straight from words of packed codes: a word of sixteen rows is a register.
#include "words.h"

#include <algorithm>

#include "planes.h"

namespace qc {

namespace {

constexpr int64_t WORD = 32;                        // bits
constexpr int64_t MOST_WORDS = CHUNK * 8 / WORD + 2;  // of a chunk; it may begin and end inside one

// Words of the sixteen rows of a panel, zeros for rows that the weight lacks.
struct Panel {
  const PackedWords& from;
  int64_t first, rows;

  void fetch(int64_t word, uint32_t* to) const {
    const uint32_t* p = from.words + first * from.row_step + word * from.word_step;
    if (rows == ROWS && from.row_step == 1) {
      std::memcpy(to, p, ROWS * 4);
      return;
    }
    for (int64_t r = 0; r < ROWS; r++) to[r] = r < rows ? p[r * from.row_step] : 0;
  }
  // Codes of one column, from words that hold eight rows each.
  void column(int64_t column, uint32_t* to) const {
    constexpr int place[8] = {0, 16, 4, 20, 8, 24, 12, 28};
    const uint32_t* p = from.words + first / 8 * from.row_step + column * from.word_step;
    const uint32_t two[2] = {p[0], rows > 8 ? p[from.row_step] : 0};
    for (int r = 0; r < 8; r++) to[r] = two[0] >> place[r] & 15;
    for (int r = 0; r < 8; r++) to[8 + r] = two[1] >> place[r] & 15;
  }
};

// The words of a chunk whose columns are in order; of others each code fetches its own.
struct Words {
  uint32_t at[MOST_WORDS][ROWS];
  int64_t first;

  void load(const Panel& panel, int bits, int64_t begin, int64_t end) {
    first = begin * bits / WORD;
    for (int64_t i = first; i * WORD < end * bits; i++) panel.fetch(i, at[i - first]);
  }
};

// Codes of sixteen rows that begin `shift` bits into a word; `next` is read where they straddle.
inline void codes_at(const uint32_t* word, const uint32_t* next, int64_t shift, int bits,
                     uint32_t* to) {
  const uint32_t mask = (1u << bits) - 1;
  if (shift + bits <= WORD) {
    for (int r = 0; r < ROWS; r++) to[r] = word[r] >> shift & mask;
  } else {
    for (int r = 0; r < ROWS; r++) to[r] = (word[r] >> shift | next[r] << (WORD - shift)) & mask;
  }
}

// The codes of the column at a place.
void codes_of(const Panel& panel, const Words& words, int bits, int64_t place, uint32_t* to) {
  const int32_t* order = panel.from.columns;
  const int64_t column = order ? order[place] : place;
  if (panel.from.packing == ALONG_ROWS) return panel.column(column, to);
  const int64_t word = column * bits / WORD, shift = column * bits % WORD;
  if (order == nullptr) {
    const uint32_t* at = words.at[word - words.first];
    return codes_at(at, at + ROWS, shift, bits, to);
  }
  uint32_t two[2][ROWS];
  panel.fetch(word, two[0]);
  if (shift + bits > WORD) panel.fetch(word + 1, two[1]);
  codes_at(two[0], two[1], shift, bits, to);
}

// A unit of sixteen whole columns in order: quads are spread at once where they are half words.
void put_halves(const Words& words, int64_t place, Codes& codes) {
  const uint32_t* at = words.at[place * 4 / WORD - words.first];
  for (int q = 0; q < QUADS; q++) {
    uint32_t quad[ROWS];
    for (int r = 0; r < ROWS; r++) {
      const uint32_t half = at[q / 2 * ROWS + r] >> (q % 2 * 16) & 0xffffu;
      const uint32_t bytes = (half | half << 8) & 0x00ff00ffu;
      quad[r] = (bytes | bytes << 4) & 0x0f0f0f0fu;
    }
    std::memcpy(codes[q], quad, sizeof quad);
  }
}

void put_codes(const Panel& panel, const Words& words, int bits, int64_t place, int64_t count,
               Codes& codes) {
  const bool in_order = panel.from.packing == ALONG_COLUMNS && panel.from.columns == nullptr;
  if (in_order && bits == 4 && count == UNIT && place % 8 == 0) {
    put_halves(words, place, codes);
    return;
  }
  std::memset(codes, 0, sizeof(Codes));
  for (int64_t q = 0; q * QUADS < count; q++) {
    uint32_t quad[ROWS] = {};
    for (int64_t i = q * QUADS; i < std::min((q + 1) * QUADS, count); i++) {
      uint32_t one[ROWS];
      codes_of(panel, words, bits, place + i, one);
      for (int r = 0; r < ROWS; r++) quad[r] |= one[r] << (i % QUADS * 8);
    }
    std::memcpy(codes[q], quad, sizeof quad);
  }
}

void pack_chunk(const Weight& w, const Panel& panel, const Source& heads, int64_t c, uint8_t* to) {
  const Chunk at = w.chunk(c);
  const int64_t begin = at.group * w.group;
  clear_padding(w.bits, at, to);
  alignas(LINE) Words words;
  if (panel.from.packing == ALONG_COLUMNS && panel.from.columns == nullptr) {
    words.load(panel, w.bits, begin, std::min(w.k, begin + at.groups * w.group));
  }
  int64_t unit = 0;
  for (int64_t g = at.group; g < at.group + at.groups; g++) {
    uint8_t* head = to + at.heads + (g - at.group) * w.head_bytes();
    const int64_t wide = g * w.group / heads.group, columns = w.columns(g);
    for (int64_t r = 0; r < panel.rows; r++) put_head(w, heads, panel.first + r, wide, r, head);
    for (int64_t column = 0; column < columns; column += UNIT, unit++) {
      alignas(LINE) Codes codes;
      const int64_t count = std::min(UNIT, columns - column);
      put_codes(panel, words, w.bits, g * w.group + column, count, codes);
      put_unit(w.bits, at, unit, codes, to);
    }
  }
}

}  // namespace

void pack_words(const Weight& w, const PackedWords& from, const Source& heads, uint8_t* blob,
                int64_t begin, int64_t end) {
  // Panels inside, because the words of neighbours lie in one cache line.
  for (int64_t c = 0; c < w.chunks(); c++) {
    for (int64_t i = begin; i < end; i++) {
      const Panel panel{from, i * ROWS, std::min(ROWS, w.n - i * ROWS)};
      pack_chunk(w, panel, heads, c, blob + i * w.panel_bytes());
    }
  }
}

}  // namespace qc
