// A square of numbers turned, so that lanes become rows. A variant includes a simd_*.h before this
// file; one that has no instructions for it goes through memory.
#pragma once

namespace {

#ifndef QC_TURN
inline void turn(Lanes (&x)[16]) {
  float rows[16][16], columns[16][16];
  for (int i = 0; i < 16; i++) store_lanes(rows[i], x[i]);
  for (int i = 0; i < 16; i++) {
    for (int j = 0; j < 16; j++) columns[j][i] = rows[i][j];
  }
  for (int i = 0; i < 16; i++) x[i] = load_lanes(columns[i]);
}
#endif

}  // namespace
