// Loops that are unrolled while templates are expanded, so that arrays indexed in them can live in
// registers: compilers unroll ordinary loops only after they have decided that.
#pragma once
#include <utility>

#define QC_INLINE __attribute__((always_inline))

namespace {

template <typename Body, int... I>
inline QC_INLINE void repeat_each(const Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>()), ...);
}

// body(0), ..., body(N - 1); the argument is a constant of its own type.
template <int N, typename Body>
inline QC_INLINE void repeat(const Body& body) {
  repeat_each(body, std::make_integer_sequence<int, N>());
}

}  // namespace
