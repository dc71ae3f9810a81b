// Panels straight from words of packed codes. A word of sixteen rows is a register.
#include "words.h"

#include <algorithm>
#include <vector>

#include "planes.h"

namespace qc {

namespace {

constexpr int64_t WORD = 32;                          // bits
constexpr int64_t MOST_WORDS = CHUNK * 8 / WORD + 2;  // of a chunk; it may begin and end inside one

using Word = uint32_t[ROWS];  // a word of the rows of a panel, or a code of each
using Bytes = uint8_t[ROWS];  // a code of each row

// The rows of a panel.
struct Panel {
  const PackedWords& from;
  int64_t first, rows;

  // Zeros for rows that the weight lacks.
  void fetch(int64_t word, Word& to) const {
    const uint32_t* p = from.words + first * from.row_step + word * from.word_step;
    if (rows == ROWS && from.row_step == 1) {
      std::memcpy(to, p, sizeof to);
      return;
    }
    for (int64_t r = 0; r < ROWS; r++) to[r] = r < rows ? p[r * from.row_step] : 0;
  }
};

// The words of a chunk whose columns are in order.
struct Words {
  Word at[MOST_WORDS];
  int64_t first;

  void load(const Panel& panel, int bits, int64_t begin, int64_t end) {
    first = begin * bits / WORD;
    for (int64_t i = first; i * WORD < end * bits; i++) panel.fetch(i, at[i - first]);
  }
};

// **** columns in order ****

// Adds to each row's quad the code that begins `shift` bits into a word, as byte `b`; `next` is
// read where codes straddle.
inline void add_codes(const Word& word, const Word& next, int64_t shift, int bits, int64_t b,
                      Word& quad) {
  const uint32_t mask = (1u << bits) - 1;
  if (shift + bits <= WORD) {
    for (int r = 0; r < ROWS; r++) quad[r] |= (word[r] >> shift & mask) << (8 * b);
    return;
  }
  for (int r = 0; r < ROWS; r++) {
    quad[r] |= ((word[r] >> shift | next[r] << (WORD - shift)) & mask) << (8 * b);
  }
}

void put_in_order(const Words& words, int bits, int64_t place, int64_t count, Codes& codes) {
  int64_t word = place * bits / WORD - words.first, shift = place * bits % WORD;
  for (int64_t q = 0; q < QUADS; q++) {
    alignas(LINE) Word quad = {};
    for (int64_t b = 0; b < QUADS && q * QUADS + b < count; b++, shift += bits) {
      if (shift >= WORD) {
        shift -= WORD;
        word++;
      }
      add_codes(words.at[word], words.at[word + 1], shift, bits, b, quad);
    }
    std::memcpy(codes[q], quad, sizeof quad);
  }
}

// A whole unit of 4 bits, from the beginning of a word.
void put_halves(const Words& words, int64_t place, Codes& codes) {
  const Word* at = &words.at[place * 4 / WORD - words.first];
  for (int q = 0; q < QUADS; q++) {
    alignas(LINE) Word quad;
    for (int r = 0; r < ROWS; r++) {
      const uint32_t half = at[q / 2][r] >> (q % 2 * 16) & 0xffffu;
      const uint32_t bytes = (half | half << 8) & 0x00ff00ffu;
      quad[r] = (bytes | bytes << 4) & 0x0f0f0f0fu;
    }
    std::memcpy(codes[q], quad, sizeof quad);
  }
}

// **** columns in another order ****

// All columns of a panel, [column][row].
void put_columns(const Panel& panel, int bits, int64_t count, Bytes* to) {
  alignas(LINE) Word two[2];
  int64_t word = 0, shift = 0;
  panel.fetch(word, two[0]);
  for (int64_t i = 0; i < count; i++, shift += bits) {
    if (shift >= WORD) {
      shift -= WORD;
      panel.fetch(++word, two[0]);
    }
    if (shift + bits > WORD) panel.fetch(word + 1, two[1]);
    alignas(LINE) Word code = {};
    add_codes(two[0], two[1], shift, bits, 0, code);
    for (int r = 0; r < ROWS; r++) to[i][r] = static_cast<uint8_t>(code[r]);
  }
}

void put_by_order(const Bytes* columns, const int32_t* order, int64_t count, Codes& codes) {
  static const Bytes none = {};
  for (int64_t q = 0; q < QUADS; q++) {
    alignas(LINE) Bytes four[QUADS];
    for (int64_t b = 0; b < QUADS; b++) {
      const int64_t place = q * QUADS + b;
      std::memcpy(four[b], place < count ? columns[order[place]] : none, ROWS);
    }
    alignas(LINE) Word quad;
    for (int r = 0; r < ROWS; r++) {
      quad[r] = four[0][r] | four[1][r] << 8 | four[2][r] << 16 | uint32_t{four[3][r]} << 24;
    }
    std::memcpy(codes[q], quad, sizeof quad);
  }
}

// **** eight rows in a word ****

constexpr int64_t EIGHT = 8;  // codes of 4 bits in a word
constexpr int64_t SHARED = PANELS_TOGETHER * ROWS / EIGHT;

using Shared = uint32_t[SHARED];

// The high bits of `first` and the low bits of `second` under a mask trade places.
inline void trade(Shared& first, Shared& second, int shift, uint32_t mask) {
  Shared a, b;  // copies, for compilers to see that they do not overlap
  std::memcpy(a, first, sizeof a);
  std::memcpy(b, second, sizeof b);
  for (int e = 0; e < SHARED; e++) {
    const uint32_t traded = (a[e] >> shift ^ b[e]) & mask;
    b[e] ^= traded;
    a[e] ^= traded << shift;
  }
  std::memcpy(first, a, sizeof a);
  std::memcpy(second, b, sizeof b);
}

// Eight columns, a word of eight rows each, become eight rows of eight columns: halves of words
// trade places, then their bytes, then half bytes.
void turn(Shared (&words)[EIGHT]) {
  constexpr uint32_t masks[3] = {0x0000ffffu, 0x00ff00ffu, 0x0f0f0f0fu};
  for (int stage = 0; stage < 3; stage++) {
    const int apart = 4 >> stage, shift = 4 * apart;
    for (int i = 0; i < EIGHT; i++) {
      if (i & apart) continue;
      trade(words[i], words[i + apart], shift, masks[stage]);
    }
  }
}

// The words of columns [begin, end) for panels from `index` on, whose rows share words.
void load_shared(const Weight& w, const PackedWords& from, int64_t index, int64_t begin,
                 int64_t end, Words* to) {
  constexpr int row_of[EIGHT] = {0, 2, 4, 6, 1, 3, 5, 7};
  const int64_t first = index * ROWS / EIGHT;
  const int64_t count = std::min((w.n + EIGHT - 1) / EIGHT - first, SHARED);
  for (int64_t i = 0; i < PANELS_TOGETHER; i++) to[i].first = begin / EIGHT;
  for (int64_t word = begin / EIGHT; word * EIGHT < end; word++) {
    alignas(LINE) Shared words[EIGHT] = {};
    for (int64_t c = 0; c < EIGHT && word * EIGHT + c < w.k; c++) {
      const uint32_t* p = from.words + first * from.row_step + (word * EIGHT + c) * from.word_step;
      if (count == SHARED && from.row_step == 1) std::memcpy(words[c], p, sizeof words[c]);
      else for (int64_t e = 0; e < count; e++) words[c][e] = p[e * from.row_step];
    }
    turn(words);
    for (int p = 0; p < EIGHT; p++) {
      for (int e = 0; e < SHARED; e++) {
        Word& row = to[e / 2].at[word - begin / EIGHT];
        row[e % 2 * EIGHT + row_of[p]] = words[p][e];
      }
    }
  }
}

// **** chunks ****

void put_codes(const Weight& w, const Words& words, int64_t place, int64_t count, Codes& codes) {
  const bool halves = w.bits == 4 && count == UNIT && place % EIGHT == 0;
  if (halves) put_halves(words, place, codes);
  else put_in_order(words, w.bits, place, count, codes);
}

// From the words of the chunk, or from all columns of the panel where they have an order.
void pack_chunk(const Weight& w, const Panel& panel, const Source& heads, const Words* words,
                const Bytes* all, int64_t c, uint8_t* to) {
  const Chunk at = w.chunk(c);
  clear_padding(w.bits, at, to);
  int64_t unit = 0;
  for (int64_t g = at.group; g < at.group + at.groups; g++) {
    uint8_t* head = to + at.heads + (g - at.group) * w.head_bytes();
    const int64_t wide = g * w.group / heads.group, width = w.columns(g);
    for (int64_t r = 0; r < panel.rows; r++) put_head(w, heads, panel.first + r, wide, r, head);
    for (int64_t column = 0; column < width; column += UNIT, unit++) {
      alignas(LINE) Codes codes;
      const int64_t place = g * w.group + column, count = std::min(UNIT, width - column);
      if (all) put_by_order(all, panel.from.columns + place, count, codes);
      else put_codes(w, *words, place, count, codes);
      put_unit(w.bits, at, unit, codes, to);
    }
  }
}

Panel panel_at(const Weight& w, const PackedWords& from, int64_t index) {
  return {from, index * ROWS, std::min(ROWS, w.n - index * ROWS)};
}

void pack_ordered(const Weight& w, const PackedWords& from, const Source& heads, uint8_t* blob,
                  int64_t begin, int64_t end) {
  std::vector<uint8_t> store(static_cast<size_t>(w.k * ROWS));
  auto* all = reinterpret_cast<Bytes*>(store.data());
  for (int64_t i = begin; i < end; i++) {
    const Panel panel = panel_at(w, from, i);
    put_columns(panel, w.bits, w.k, all);
    for (int64_t c = 0; c < w.chunks(); c++) {
      pack_chunk(w, panel, heads, nullptr, all, c, blob + i * w.panel_bytes());
    }
  }
}

}  // namespace

void pack_words(const Weight& w, const PackedWords& from, const Source& heads, uint8_t* blob,
                int64_t begin, int64_t end) {
  if (from.columns) return pack_ordered(w, from, heads, blob, begin, end);
  // Panels inside, because the words of neighbours are neighbours.
  for (int64_t c = 0; c < w.chunks(); c++) {
    const Chunk at = w.chunk(c);
    const int64_t first = at.group * w.group, last = std::min(w.k, first + at.groups * w.group);
    alignas(LINE) Words words[PANELS_TOGETHER];
    if (from.packing == ALONG_ROWS) load_shared(w, from, begin, first, last, words);
    for (int64_t i = begin; i < end; i++) {
      const Panel panel = panel_at(w, from, i);
      Words& here = words[i - begin];
      if (from.packing == ALONG_COLUMNS) here.load(panel, w.bits, first, last);
      pack_chunk(w, panel, heads, &here, nullptr, c, blob + i * w.panel_bytes());
    }
  }
}

}  // namespace qc
