// Panels from GPTQ's and AWQ's words against those from plain codes, byte by byte; panels from
// GGUF's blocks, decoded, against what the blocks say in double.
#include <algorithm>

#include "blocks.h"
#include "driver.h"
#include "words.h"

using namespace qc;

namespace {

// **** blocks ****

using Bytes = const uint8_t*;

double half_at(Bytes b) { return number(b, 0, F16); }
int bit(Bytes b, int64_t at) { return b[at / 8] >> at % 8 & 1; }
// Column c of blocks whose first 16 columns are the low halves of bytes.
int nibble(Bytes b, int64_t c) { return b[c % 16] >> (c / 16 * 4) & 15; }

// Number g of eight scales (`minimum`: of eight minimums) of six bits.
int six_bits(Bytes b, int64_t g, bool minimum) {
  if (g < 4) return b[g + (minimum ? 4 : 0)] & 63;
  const int high = b[g - 4 + (minimum ? 4 : 0)] >> 6 << 4;
  return (minimum ? b[g + 4] >> 4 : b[g + 4] & 15) | high;
}
double q4_k_head(Bytes b, int64_t c, int code) {
  return half_at(b) * six_bits(b + 4, c / 32, false) * code -
         half_at(b + 2) * six_bits(b + 4, c / 32, true);
}
// In each 64 columns, the low halves of 32 bytes, then the high ones.
int long_nibble(Bytes b, int64_t c) { return b[c / 64 * 32 + c % 32] >> (c / 32 % 2 * 4) & 15; }
// In each 128 columns, the lowest pairs of 32 bytes, then the next ones.
int pair(Bytes b, int64_t c) { return b[c / 128 * 32 + c % 32] >> (c / 32 % 4 * 2) & 3; }

double q2_k(Bytes b, int64_t c, const int8_t*) {
  const int scale = b[c / 16];
  return half_at(b + 80) * (scale & 15) * pair(b + 16, c) - half_at(b + 82) * (scale >> 4);
}
double q3_k(Bytes b, int64_t c, const int8_t*) {
  const int64_t g = c / 16;
  const int scale = (b[96 + g % 8] >> (g / 8 * 4) & 15) | (b[104 + g % 4] >> (g / 4 * 2) & 3) << 4;
  const int code = pair(b + 32, c) + (b[c % 32] >> (c / 32) & 1) * 4;
  return half_at(b + 108) * (scale - 32) * (code - 4);
}
double q6_k(Bytes b, int64_t c, const int8_t*) {
  const int64_t place = c / 128 * 64 + c % 64;
  const int code = (b[place] >> (c / 64 % 2 * 4) & 15) | pair(b + 128, c) << 4;
  return half_at(b + 208) * static_cast<int8_t>(b[192 + c / 16]) * (code - 32);
}
double iq4_xs(Bytes b, int64_t c, const int8_t* table) {
  const int64_t g = c / 32;
  const int scale = (b[4 + g / 2] >> (g % 2 * 4) & 15) | (b[2 + g / 4] >> (g % 4 * 2) & 3) << 4;
  return half_at(b) * (scale - 32) * table[nibble(b + 8 + 16 * g, c % 32)];
}

struct Type {
  const char* name;
  std::vector<int> halves;  // where a block has numbers of sixteen bits
  double (*value)(Bytes, int64_t column, const int8_t* table);
};

const std::vector<Type> TYPES = {
    {"q4_0", {0}, [](Bytes b, int64_t c, const int8_t*) {
       return half_at(b) * (nibble(b + 2, c) - 8); }},
    {"q4_1", {0, 2}, [](Bytes b, int64_t c, const int8_t*) {
       return half_at(b) * nibble(b + 4, c) + half_at(b + 2); }},
    {"q5_0", {0}, [](Bytes b, int64_t c, const int8_t*) {
       return half_at(b) * (nibble(b + 6, c) + 16 * bit(b + 2, c) - 16); }},
    {"q5_1", {0, 2}, [](Bytes b, int64_t c, const int8_t*) {
       return half_at(b) * (nibble(b + 8, c) + 16 * bit(b + 4, c)) + half_at(b + 2); }},
    {"q8_0", {0}, [](Bytes b, int64_t c, const int8_t*) {
       return half_at(b) * static_cast<int8_t>(b[2 + c]); }},
    {"iq4_nl", {0}, [](Bytes b, int64_t c, const int8_t* table) {
       return half_at(b) * table[nibble(b + 2, c)]; }},
    {"q2_k", {80, 82}, q2_k},
    {"q3_k", {108}, q3_k},
    {"q4_k", {0, 2}, [](Bytes b, int64_t c, const int8_t*) {
       return q4_k_head(b, c, long_nibble(b + 16, c)); }},
    {"q5_k", {0, 2}, [](Bytes b, int64_t c, const int8_t*) {
       return q4_k_head(b, c, long_nibble(b + 48, c) + 16 * (b[16 + c % 32] >> (c / 32) & 1)); }},
    {"q6_k", {208}, q6_k},
    {"iq4_xs", {0}, iq4_xs},
    {"mxfp4", {}, [](Bytes b, int64_t c, const int8_t* table) {
       return std::ldexp(table[nibble(b + 1, c)], b[0] - 128); }},
};

void check_blocks(const Type& made) {
  const BlockType* type = block_type(made.name);
  if (!type) return fault("%s: no such type", made.name);
  const int64_t n = pick({1, 7, 16, 17, 33, 48}), count = pick({1, 2, 3, 8, 9});
  const int64_t k = count * type->columns, row_bytes = count * type->bytes;
  auto data = exactly<uint8_t>(n * row_bytes);
  for (int64_t i = 0; i < n * row_bytes; i++) data[i] = static_cast<uint8_t>(below(256));
  for (int64_t i = 0; i < n * count; i++) {
    uint8_t* block = data.get() + i * type->bytes;
    for (int at : made.halves) {
      const uint16_t half = nearest_half(between(-2, 2));
      std::memcpy(block + at, &half, 2);
    }
    if (made.halves.empty()) block[0] = static_cast<uint8_t>(one_in(9) ? below(3) : below(200));
  }
  auto table = exactly<int8_t>(16);
  for (int i = 0; i < 16; i++) table[i] = static_cast<int8_t>(below(256) - 128);
  Weight w{nullptr, table.get(), n, k, type->group, type->bits, type->form, type->scale};
  const int64_t size = w.panels() * w.panel_bytes();
  auto blob = exactly<uint8_t>(size), again = exactly<uint8_t>(size);
  std::memset(again.get(), 0x3c, static_cast<size_t>(size));
  const int64_t cut = below(w.panels() + 1);
  type->pack({data.get(), row_bytes}, n, k, blob.get(), 0, w.panels());
  type->pack({data.get(), row_bytes}, n, k, again.get(), cut, w.panels());
  type->pack({data.get(), row_bytes}, n, k, again.get(), 0, cut);
  if (std::memcmp(blob.get(), again.get(), static_cast<size_t>(size))) {
    fault("%s n %d k %d: bytes that nobody sets", made.name, static_cast<int>(n),
          static_cast<int>(k));
  }
  w.blob = blob.get();
  const double lost = type->form == OFFSET ? 1e-3 : 0;  // where a scale's part and an offset cancel
  auto row = exactly<float>(k);
  for (int64_t r = 0; r < n; r++) {
    decode_row(w, r, row.get());
    for (int64_t c = 0; c < k; c++) {
      const uint8_t* block = data.get() + r * row_bytes + c / type->columns * type->bytes;
      const double value = made.value(block, c % type->columns, table.get());
      if (std::fabs(row[c] - value) <= 3e-7 * std::fabs(value) + lost) continue;
      return fault("%s n %d k %d at %d,%d: %.9g for %.9g", made.name, static_cast<int>(n),
                   static_cast<int>(k), static_cast<int>(r), static_cast<int>(c),
                   static_cast<double>(row[c]), value);
    }
  }
}

// **** words ****

enum Order { ROWS_FIRST, COLUMNS_FIRST, PERMUTED, AWQ };

struct Stream {
  std::unique_ptr<uint32_t[]> words;
  std::unique_ptr<int32_t[]> columns;
  PackedWords from;
};

Stream stream_of(const Weight& w, Order order, const std::vector<uint8_t>& codes) {
  const int64_t a_row = order == AWQ ? w.k : (w.k * w.bits + 31) / 32;
  const int64_t rows = order == AWQ ? w.n / 8 : w.n, size = rows * a_row;
  Stream made{exactly<uint32_t>(size), exactly<int32_t>(w.k), {}};
  const bool first = order == ROWS_FIRST;
  made.from = {made.words.get(), first ? a_row : 1, first ? 1 : rows,
               order == AWQ ? ALONG_ROWS : ALONG_COLUMNS,
               order == PERMUTED ? made.columns.get() : nullptr};
  for (int64_t i = 0; i < size; i++) made.words[i] = 0;
  for (int64_t c = 0; c < w.k; c++) made.columns[c] = static_cast<int32_t>(c);
  if (order == PERMUTED) std::shuffle(made.columns.get(), made.columns.get() + w.k, randoms);
  for (int64_t i = 0; i < w.n * w.k * w.bits; i++) {
    const int64_t r = i / w.bits / w.k, c = i / w.bits % w.k, b = i % w.bits;
    if (!(codes[static_cast<size_t>(r * w.k + c)] >> b & 1)) continue;
    const int64_t place = order == AWQ ? r % 8 / 2 + r % 2 * 4 : 0, at = c * w.bits + b;
    if (order == AWQ) made.words[r / 8 + c * rows] |= 1u << (4 * place + b);
    else made.words[r * made.from.row_step + at / 32 * made.from.word_step] |= 1u << at % 32;
  }
  return made;
}

void check_words() {
  const auto order = static_cast<Order>(below(4));
  const auto bits = static_cast<int>(order == AWQ ? 4 : 1 + below(8));
  const int64_t n = order == AWQ ? pick({8, 16, 24, 136}) : pick({1, 7, 16, 17, 48, 136});
  const int64_t k = 1 + below(one_in(4) ? 513 : 100), group = pick({8, 16, 20, 32, 128, 256});
  const Weight w{nullptr, nullptr, n, k, std::min(group, k), bits, static_cast<Form>(below(2)),
                 one_in(2) ? PLAIN_F16 : PLAIN_F32};
  std::vector<uint8_t> codes(static_cast<size_t>(n * k)), placed(codes.size());
  for (auto& code : codes) code = static_cast<uint8_t>(below(1 << bits));
  const Stream stream = stream_of(w, order, codes);
  for (int64_t i = 0; i < n * k; i++) {
    placed[static_cast<size_t>(i)] = codes[static_cast<size_t>(i / k * k + stream.columns[i % k])];
  }
  const int64_t heads = n * w.groups(), size = w.panels() * w.panel_bytes();
  auto scale = exactly<uint8_t>(heads * w.step_bytes());
  for (int64_t i = 0; i < heads * w.step_bytes(); i++) scale[i] = static_cast<uint8_t>(below(256));
  auto zero = exactly<int32_t>(w.form == ZERO ? heads : 0);
  for (int64_t i = 0; w.form == ZERO && i < heads; i++) zero[i] = static_cast<int32_t>(below(256));
  Source from{placed.data(), scale.get(), w.form == ZERO ? zero.get() : nullptr, w.groups(),
              w.group};
  auto expected = exactly<uint8_t>(size), found = exactly<uint8_t>(size);
  std::memset(found.get(), 0x3c, static_cast<size_t>(size));
  pack(w, from, expected.get(), 0, w.panels());
  from.codes = nullptr;
  for (int64_t p = 0; p < w.panels(); p += PANELS_TOGETHER) {
    pack_words(w, stream.from, from, found.get(), p, std::min(p + PANELS_TOGETHER, w.panels()));
  }
  if (std::memcmp(expected.get(), found.get(), static_cast<size_t>(size))) {
    fault("words: bits %d form %d order %d n %d k %d group %d", bits, w.form, order,
          static_cast<int>(n), static_cast<int>(k), static_cast<int>(group));
  }
}

// **** numbers ****

void check_numbers() {
  const auto type = static_cast<Number>(below(3));
  const int64_t count = below(70), at = below(3), bytes = (count + at) * bytes_of(type);
  auto from = exactly<uint8_t>(bytes), to = exactly<uint8_t>(bytes);
  for (int64_t i = 0; i < bytes; i++) from[i] = static_cast<uint8_t>(below(256));
  auto wide = exactly<float>(count);
  kernels().widen(from.get(), at, type, count, wide.get());
  kernels().narrow(wide.get(), count, to.get(), at, type);
  for (int64_t i = 0; i < count; i++) {
    const double a = number(from.get(), at + i, type), b = number(to.get(), at + i, type);
    const double w = wide[i];
    const bool nan = std::isnan(a);
    if (nan ? std::isnan(w) && std::isnan(b) : a == w && a == b) continue;
    return fault("number of type %d: %.9g became %.9g, then %.9g", type, a, w, b);
  }
}

// Numbers between those of sixteen bits: the nearest, and of two the even one. A NaN stays one, also
// that whose bits, rounded as a number's, would be those of a zero.
void check_rounding() {
  const Number type = one_in(2) ? F16 : BF16;
  constexpr int64_t COUNT = 48;
  auto from = exactly<float>(COUNT);
  auto to = exactly<uint16_t>(COUNT);
  std::vector<uint16_t> expected;
  const int end = type == F16 ? 0x7bff : 0x7f7f;  // the largest
  for (int64_t i = 0; i < COUNT; i++) {
    const auto low = static_cast<uint16_t>(below(end)), high = static_cast<uint16_t>(low + 1);
    const double a = number(&low, 0, type), b = number(&high, 0, type);
    const double share = one_in(3) ? 0.5 : between(0, 1);
    from[i] = static_cast<float>(a + (b - a) * share);
    const double to_low = from[i] - a, to_high = b - from[i];
    expected.push_back(to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high);
    if (one_in(2)) continue;
    from[i] = -from[i];
    expected.back() = static_cast<uint16_t>(expected.back() | 0x8000);
  }
  const int64_t nan = below(COUNT);
  const uint32_t ones = one_in(2) ? 0x7fffffffu : 0xffffffffu;
  std::memcpy(from.get() + nan, &ones, 4);
  kernels().narrow(from.get(), COUNT, to.get(), 0, type);
  for (int64_t i = 0; i < COUNT; i++) {
    const uint16_t wanted = expected[static_cast<size_t>(i)];
    if (i == nan ? std::isnan(number(to.get(), i, type)) : to[i] == wanted) continue;
    return fault("%.12g as type %d: %04x for %04x", static_cast<double>(from[i]), type, to[i],
                 wanted);
  }
}

void one_case() {
  check_words();
  check_blocks(TYPES[static_cast<size_t>(below(static_cast<int64_t>(TYPES.size())))]);
  check_numbers();
  check_rounding();
}

}  // namespace

int main(int count, char** arguments) { return run(count, arguments, one_case); }
