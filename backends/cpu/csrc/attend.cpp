// Attention in float32, whatever the numbers are stored in: scores never leave the caches. Keys that
// no row of a block sees are not read.
#include "attend_few.h"
#include "attend_many.h"

namespace {

constexpr int64_t FEW = 8;    // rows that are taken column by column
constexpr int64_t MANY = 128;  // rows of a task: blocks of keys are widened once for all of them

template <qc::Number T>
void rows_of(const Attention& a, int64_t b, int64_t group, int64_t begin, int64_t end) {
  if (a.rows() > FEW) return many_rows<T>(a, b, group, begin, end);
  for (; begin + 2 <= end; begin += 2) few_rows<T, 2>(a, b, group, begin);
  if (begin < end) few_rows<T, 1>(a, b, group, begin);
}

}  // namespace

// A thread's share of few rows is two of them: more would leave none for the others.
int64_t qc::Attention::tile() const { return rows() > FEW ? MANY : 2; }

void qc::attend(const Attention& a, int64_t begin, int64_t end) {
  const int64_t tiles = (a.rows() + a.tile() - 1) / a.tile();
  for (int64_t task = begin; task < end; task++) {
    const int64_t group = task / tiles % a.groups, b = task / tiles / a.groups;
    const int64_t from = task % tiles * a.tile(), to = std::min(a.rows(), from + a.tile());
    if (a.type == F32) rows_of<F32>(a, b, group, from, to);
    else if (a.type == F16) rows_of<F16>(a, b, group, from, to);
    else rows_of<BF16>(a, b, group, from, to);
  }
}
