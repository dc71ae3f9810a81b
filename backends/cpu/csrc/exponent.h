// e^x over lanes. A variant includes a simd_*.h before this file.
#pragma once

namespace {

// e^x for x <= 88, 0 below -87.3; a NaN stays one. 2 units in the last place: Cephes' polynomial.
inline Lanes power_of_e(const Lanes& x) {
  const Lanes low = larger(spread(-88.f), x);
  const Words n = rounded(mul(low, spread(1.44269504088896341f)));
  const Lanes whole = to_lanes(n);
  Lanes r = fma(whole, spread(-0.693359375f), low);
  r = fma(whole, spread(2.12194440e-4f), r);
  Lanes p = fma(r, spread(1.9875691500e-4f), spread(1.3981999507e-3f));
  p = fma(p, r, spread(8.3334519073e-3f));
  p = fma(p, r, spread(4.1665795894e-2f));
  p = fma(p, r, spread(1.6666665459e-1f));
  p = fma(p, r, spread(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), spread(1.f));
  return mul(p, lanes_of(shift_left(plus(n, spread_word(127)), 23)));
}

}  // namespace
