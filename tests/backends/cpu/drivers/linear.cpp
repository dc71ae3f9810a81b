// The kernels of products, and the decoding of rows, against plain sums in double: every width,
// form, kind of scale and number of digits, over odd shapes.
#include <algorithm>

#include "driver.h"

using namespace qc;

namespace {

// A weight, its values, and for the bounds what its groups are made of.
struct Made {
  Weight w;
  std::unique_ptr<int8_t[]> table;
  std::unique_ptr<uint8_t[]> blob;
  std::vector<uint8_t> codes;         // [n][k]
  std::vector<double> scale, extra;   // [n][groups]: value = scale * number of the code + extra
  std::vector<double> value, size;    // [n][k]: what it is, and the largest part of a sum for it
};

int64_t blob_bytes(const Weight& w) { return w.panels() * w.panel_bytes(); }

void make_codes(Made& made) {
  const Weight& w = made.w;
  const int64_t kind = below(4), top = (1 << w.bits) - 1;
  made.codes.resize(static_cast<size_t>(w.n * w.k));
  for (auto& code : made.codes) {
    int64_t x = below(top + 1);
    if (kind == 0) x = one_in(9) ? x : top;  // sums as large as can be
    if (kind == 1) x = one_in(2) ? 0 : top;
    if (w.form == FLOAT8 && (x & 127) == 127) x ^= 1;  // not the NaN
    code = static_cast<uint8_t>(x);
  }
}

// Panels of plain scales.
void pack_plain(Made& made) {
  Weight& w = made.w;
  const int64_t count = w.n * w.groups();
  auto scale = exactly<uint8_t>(count * w.step_bytes());
  auto offset = exactly<float>(w.form == OFFSET ? count : 0);
  auto zero = exactly<int32_t>(w.form == ZERO ? count : 0);
  for (int64_t i = 0; i < count; i++) {
    const double s = between(-0.1, 0.1);
    const float wide = static_cast<float>(s);
    const uint16_t half = nearest_half(s);
    if (w.scale == PLAIN_F16) std::memcpy(scale.get() + 2 * i, &half, 2);
    else std::memcpy(scale.get() + 4 * i, &wide, 4);
    made.scale.push_back(w.scale == PLAIN_F16 ? number(&half, 0, F16) : wide);
    double extra = 0;
    if (w.form == OFFSET) extra = offset[i] = static_cast<float>(between(-3, 3));
    if (w.form == ZERO) {
      zero[i] = static_cast<int32_t>(one_in(9) ? below(65535) - 32767 : below(1 << w.bits));
      extra = -made.scale.back() * zero[i];
    }
    made.extra.push_back(extra);
  }
  const void* more = w.form == OFFSET ? static_cast<void*>(offset.get())
                     : w.form == ZERO ? static_cast<void*>(zero.get()) : nullptr;
  const Source from{made.codes.data(), scale.get(), more, w.groups(), w.group};
  pack(w, from, made.blob.get(), 0, w.panels());
}

// Panels of nested scales: the codes of plain ones, and heads as panel.h describes them.
void pack_nested(Made& made) {
  const Weight& w = made.w;
  Weight plain = w;
  plain.scale = PLAIN_F32;
  plain.form = SYMMETRIC;
  auto blob = exactly<uint8_t>(blob_bytes(plain));
  const std::vector<float> ones(static_cast<size_t>(w.n * w.groups()), 1.f);
  pack(plain, {made.codes.data(), ones.data(), nullptr, w.groups(), w.group}, blob.get(), 0,
       w.panels());
  made.scale.resize(ones.size());
  made.extra.resize(ones.size());
  const bool six = !one_in(4);  // bits of steps
  for (int64_t i = 0; i < w.panels() * w.chunks(); i++) {
    const int64_t panel = i / w.chunks();
    const Chunk from = plain.chunk(i % w.chunks()), at = w.chunk(i % w.chunks());
    uint8_t* to = made.blob.get() + panel * w.panel_bytes();
    std::memset(to + at.heads, 0, static_cast<size_t>(at.wide - at.heads));
    std::memcpy(to + at.wide, blob.get() + panel * plain.panel_bytes() + from.wide,
                static_cast<size_t>(at.end - at.wide));
    for (int64_t r = 0; r < std::min(ROWS, w.n - panel * ROWS); r++) {
      for (int64_t part = 0; part < (w.form == OFFSET ? 2 : 1); part++) {
        const uint16_t factor = nearest_half(between(-0.1, 0.1));
        std::memcpy(to + at.heads + 2 * (part * ROWS + r), &factor, 2);
        for (int64_t g = 0; g < at.groups; g++) {
          const auto step = static_cast<int8_t>(six ? below(64) : below(256) - 128);
          to[at.heads + w.factor_bytes() + g * w.head_bytes() + part * ROWS + r] =
              static_cast<uint8_t>(step);
          auto& all = part ? made.extra : made.scale;
          all[static_cast<size_t>((panel * ROWS + r) * w.groups() + at.group + g)] =
              number(&factor, 0, F16) * step;
        }
      }
    }
  }
}

double number_of_code(const Weight& w, uint8_t code) {
  if (w.form == LOOKUP) return w.table[code];
  if (w.form == FLOAT8) return narrow_value(code, 4, 3);
  return w.form == SYMMETRIC ? code - (1 << (w.bits - 1)) : code;
}

void set_values(Made& made) {
  const Weight& w = made.w;
  for (int64_t i = 0; i < w.n * w.k; i++) {
    const auto head = static_cast<size_t>(i / w.k * w.groups() + i % w.k / w.group);
    const double scale = made.scale[head], extra = made.extra[head];
    const double code = number_of_code(w, made.codes[static_cast<size_t>(i)]);
    made.value.push_back(scale * code + extra);
    double most = w.form == FLOAT8 ? std::fabs(code) : 1 << w.bits;
    if (w.form == LOOKUP) most = 128;
    made.size.push_back(std::fabs(scale) * most + 2 * std::fabs(extra));
  }
}

Made made_of(const Weight& shape) {
  Made made;
  made.table = exactly<int8_t>(16);
  for (int i = 0; i < 16; i++) made.table[i] = static_cast<int8_t>(below(256) - 128);
  made.w = shape;
  made.w.table = made.table.get();
  made.blob = exactly<uint8_t>(blob_bytes(made.w));
  made.w.blob = made.blob.get();
  make_codes(made);
  if (shape.scale == NESTED) pack_nested(made);
  else pack_plain(made);
  set_values(made);
  return made;
}

Made make() {
  const Form form = static_cast<Form>(pick({0, 0, 1, 1, 2, 2, 3, 3, 4}));
  const auto bits = static_cast<int>(form == FLOAT8 ? 8 : 1 + below(form == LOOKUP ? 4 : 8));
  const auto scale = static_cast<Scale>(below(form == ZERO || form == FLOAT8 ? 2 : 3));
  const int64_t n = pick({1, 7, 16, 17, 48, 85});
  const int64_t k = one_in(3) ? pick({1, 16, 32, 256, 512}) : 1 + below(700);
  const int64_t group = pick({8, 16, 20, 32, 48, 64, 100, 128, 250, 256});
  if (one_in(5)) {  // a kind that has a kernel of its own
    return made_of({nullptr, nullptr, n, pick({256, 512, 600, 768}), 32, 4, OFFSET, NESTED});
  }
  return made_of({nullptr, nullptr, n, k, std::min(group, k), bits, form, scale});
}

void say(const char* what, const Weight& w, int64_t m, int64_t digits, int64_t row, int64_t column,
         double found, double expected, double bound) {
  fault("%s: bits %d form %d scale %d group %d k %d n %d m %d digits %d at %d,%d: %.9g for %.9g, "
        "bound %.3g", what, w.bits, w.form, w.scale, static_cast<int>(w.group),
        static_cast<int>(w.k), static_cast<int>(w.n), static_cast<int>(m),
        static_cast<int>(digits), static_cast<int>(row), static_cast<int>(column), found, expected,
        bound);
}

void check_rows(const Made& made) {
  const Weight& w = made.w;
  auto row = exactly<float>(w.k);
  for (int64_t r = 0; r < w.n; r++) {
    decode_row(w, r, row.get());
    for (int64_t c = 0; c < w.k; c++) {
      const auto i = static_cast<size_t>(r * w.k + c);
      const double bound = 3e-7 * made.size[i];
      if (!(std::fabs(row[c] - made.value[i]) <= bound)) {
        return say("decode_row", w, 0, 0, r, c, row[c], made.value[i], bound);
      }
    }
  }
}

enum Kind { ANY, WHOLE, FAR_APART, HALF_EMPTY, ONE_SIGN, NOT_FINITE };

// A row of x. WHOLE: multiples of a power of two, with its 127-fold in each chunk, which any number
// of digits holds without loss.
void fill(const Weight& w, Kind kind, float* x) {
  const double unit = std::ldexp(1, static_cast<int>(below(9)) - 8);
  for (int64_t c = 0; c < w.k; c++) {
    double v = between(-1, 1);
    if (kind == WHOLE) v = unit * static_cast<double>(below(255) - 127);
    if (kind == FAR_APART) v *= one_in(16) ? 1000 : 0.001;
    if (kind == ONE_SIGN) v = std::fabs(v) * 0.2 + 0.8;  // sums as large as can be
    if (kind == HALF_EMPTY && (c / w.group % 2 || one_in(2))) v = 0;
    if (kind == WHOLE && c % (w.chunk_groups() * w.group) == 0) v = unit * (one_in(2) ? 127 : -127);
    x[c] = static_cast<float>(v);
  }
  if (kind != NOT_FINITE) return;
  x[below(w.k)] = one_in(2) ? std::numeric_limits<float>::quiet_NaN()
                            : std::numeric_limits<float>::infinity();
}

// What digits.h says of the loss of one x: half a step, of P digits of its group or chunk.
double loss(int64_t digits, double group, double chunk) {
  if (digits == 3) return group / 8355711;
  if (digits == 2) return group / 32639;
  return std::max(std::min(2 * group, chunk), chunk / 128) * 0.5 / 127;
}

// The sums of a row with a row of the weight: expected, and how far off the kernels may be.
struct Expected {
  double sum, bound;
};

Expected product(const Made& made, const float* x, Kind kind, int64_t r, int64_t digits) {
  const Weight& w = made.w;
  const double *value = made.value.data() + r * w.k, *size = made.size.data() + r * w.k;
  const int64_t wide = w.chunk_groups() * w.group;
  const auto largest = [&](int64_t begin, int64_t end) {
    double most = 0;
    for (int64_t c = begin; c < std::min(end, w.k); c++) most = std::fmax(most, std::fabs(x[c]));
    return most;
  };
  Expected all{0, 1e-12};
  for (int64_t first = 0; first < w.k; first += w.group) {
    const double chunk = largest(first / wide * wide, first / wide * wide + wide);
    const double lost = w.form == FLOAT8 || kind == WHOLE
                            ? 0 : loss(digits, largest(first, first + w.group), chunk);
    for (int64_t c = first; c < std::min(first + w.group, w.k); c++) {
      all.sum += x[c] * value[c];
      all.bound += 1.01 * lost * std::fabs(value[c]) + 1.5e-6 * std::fabs(x[c]) * size[c];
    }
  }
  return all;
}

// Activations as the op keeps them, in exact memory.
struct Held {
  std::unique_ptr<uint8_t[]> memory;
  Rows rows;

  Held(const Weight& w, int64_t m, int64_t digits) {
    memory = exactly<uint8_t>(rows_bytes(w, m, digits));
    rows = rows_in(memory.get(), w, m, digits);
  }
  void set(const Weight& w, const float* row, int64_t r) {
    auto padded = exactly<float>(w.padded());
    std::fill(padded.get(), padded.get() + w.padded(), 0.f);
    for (int64_t c = 0; c < w.k; c++) padded[c / w.group * w.padded_group() + c % w.group] = row[c];
    if (w.form == FLOAT8) std::copy_n(padded.get(), w.padded(), const_cast<float*>(rows.x) + r * w.padded());
    else kernels().quantize(w, padded.get(), rows, r);
  }
};

void check_product(const Made& made, int64_t m, int64_t digits) {
  const Weight& w = made.w;
  const auto type = static_cast<Number>(below(3));
  auto x = exactly<float>(m * w.k), bias = exactly<float>(w.n);
  for (int64_t r = 0; r < w.n; r++) bias[r] = static_cast<float>(between(-1, 1));
  std::vector<Kind> kinds;
  Held held(w, m, digits);
  for (int64_t i = 0; i < m; i++) {
    kinds.push_back(static_cast<Kind>(one_in(20) ? int64_t{NOT_FINITE} : below(5)));
    fill(w, kinds.back(), x.get() + i * w.k);
    held.set(w, x.get() + i * w.k, i);
  }
  const int64_t step = w.n + below(3) * below(40);  // rows may be a part of wider ones
  auto y = exactly<uint8_t>(m ? ((m - 1) * step + w.n) * bytes_of(type) : 0);
  const Output out{y.get(), one_in(2) ? bias.get() : nullptr, type, step};
  const int64_t cut = below(w.panels() + 1);
  kernels().multiply(w, held.rows, out, 0, cut);
  kernels().multiply(w, held.rows, out, cut, w.panels());
  const double rounding = type == F32 ? 1e-7 : type == F16 ? 1. / 2000 : 1. / 250;
  for (int64_t i = 0; i < m * w.n; i++) {
    const Kind kind = kinds[static_cast<size_t>(i / w.n)];
    const double found = number(y.get(), i / w.n * step + i % w.n, type);
    if (kind == NOT_FINITE) {
      if (std::isfinite(found)) say("not finite", w, m, digits, i / w.n, i % w.n, found, NAN, 0);
      continue;
    }
    Expected all = product(made, x.get() + i / w.n * w.k, kind, i % w.n, digits);
    if (out.bias) all.sum += bias[i % w.n];
    all.bound += std::fabs(all.sum) * rounding + (type == F16 ? 1e-7 : 1e-6);
    if (type == F16 && std::fabs(all.sum) + all.bound > 65000) continue;
    if (!(std::fabs(found - all.sum) <= all.bound)) {
      return say("product", w, m, digits, i / w.n, i % w.n, found, all.sum, all.bound);
    }
  }
}

void one_case() {
  const Made made = make();
  check_rows(made);
  for (int64_t digits = 1; digits <= (made.w.form == FLOAT8 ? 1 : 3); digits++) {
    check_product(made, one_in(9) ? pick({64, 100}) : pick({0, 1, 2, 3, 4, 8, 9, 17}), digits);
  }
}

}  // namespace

int main(int count, char** arguments) { return run(count, arguments, one_case); }
