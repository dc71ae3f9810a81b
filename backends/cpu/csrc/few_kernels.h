// The kernels for few rows; a variant includes a simd_*.h before this file.
#include "choose.h"
#include "few.h"

namespace {

// One pass over a panel for all rows, or for one where registers are few.
struct Few {
  template <int BITS, bool TABLE, int P>
  static Run run(int64_t m) {
    if constexpr (QC_REGISTERS >= 32) {
      if (m > 4) return few<BITS, TABLE, P, MOST_FEW>;
      if (m > 2) return few<BITS, TABLE, P, 4>;
      if (m == 2) return few<BITS, TABLE, P, 2>;
    }
    return few<BITS, TABLE, P, 1>;
  }
};

}  // namespace

qc::Run qc::few_rows_of(const Weight& w, const Rows& in) { return choose<Few>(w, in); }
