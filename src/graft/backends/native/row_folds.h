// Sums and extremes over the columns of a row, for generated kernels. Sixteen partial results side by side: the order
// is fixed, whatever the vector width.
#pragma once

#include <cmath>
#include <cstdint>

namespace graft {

inline float larger(float a, float b) { return (a > b || a != a) ? a : b; }  // NaN stays NaN
inline float smaller(float a, float b) { return (a < b || a != a) ? a : b; }

template <class Value, class Join> inline float fold(int64_t first, int64_t last, float start, Value value, Join join) {
  float parts[16];
  for (int lane = 0; lane < 16; ++lane) parts[lane] = start;
  int64_t i = first;
  for (; i + 16 <= last; i += 16)
    for (int lane = 0; lane < 16; ++lane) parts[lane] = join(parts[lane], value(i + lane));
  for (; i < last; ++i) parts[(i - first) % 16] = join(parts[(i - first) % 16], value(i));
  for (int step = 8; step; step /= 2)
    for (int lane = 0; lane < step; ++lane) parts[lane] = join(parts[lane], parts[lane + step]);
  return parts[0];
}

template <class Value> inline float row_sum(int64_t first, int64_t last, Value value) {
  return fold(first, last, 0.0f, value, [](float a, float b) { return a + b; });
}

template <class Value> inline float row_max(int64_t first, int64_t last, Value value) {
  return fold(first, last, -INFINITY, value, larger);
}

template <class Value> inline float row_min(int64_t first, int64_t last, Value value) {
  return fold(first, last, INFINITY, value, smaller);
}

}  // namespace graft
