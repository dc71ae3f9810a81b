// The kernel for a weight and its rows, among those that are compiled for every width of codes,
// with and without a table, and every number of digits.
#pragma once
#include "panel.h"

namespace qc {

// Rows times panels [begin, end).
using Run = void (*)(const Weight&, const Rows&, const Output&, int64_t begin, int64_t end);

constexpr int64_t MOST_FEW = 8;
// That for MOST_FEW rows or fewer, of the variant that the library was built with.
Run few_rows_of(const Weight& w, const Rows& in);

}  // namespace qc

namespace {
using namespace qc;

template <typename Kind, int BITS, bool TABLE>
Run by_digits(const Rows& in) {
  if (in.digits == 1) return Kind::template run<BITS, TABLE, 1>(in.m);
  if (in.digits == 2) return Kind::template run<BITS, TABLE, 2>(in.m);
  return Kind::template run<BITS, TABLE, 3>(in.m);
}

// Tables have 16 entries at most, hence no lookups wider than 4 bits.
template <typename Kind>
Run choose(const Weight& w, const Rows& in) {
  const bool table = w.form == LOOKUP;
  switch (w.bits) {
    case 1: return table ? by_digits<Kind, 1, true>(in) : by_digits<Kind, 1, false>(in);
    case 2: return table ? by_digits<Kind, 2, true>(in) : by_digits<Kind, 2, false>(in);
    case 3: return table ? by_digits<Kind, 3, true>(in) : by_digits<Kind, 3, false>(in);
    case 4: return table ? by_digits<Kind, 4, true>(in) : by_digits<Kind, 4, false>(in);
    case 5: return by_digits<Kind, 5, false>(in);
    case 6: return by_digits<Kind, 6, false>(in);
    case 7: return by_digits<Kind, 7, false>(in);
    default: return by_digits<Kind, 8, false>(in);
  }
}

}  // namespace
