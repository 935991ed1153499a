// LayerNorm of rows in float32: the mean, then the squares of what is left of it.
#pragma once

#include "backends/native/plain.h"
#include "ops/view.h"

namespace graft {

struct LayerNormArgs { View x; const float* weight; const float* bias; float eps; int64_t rows; View out; };

inline void layer_norm(Team&, int, std::atomic<int64_t>& next, const LayerNormArgs& a, float*) {
  const int64_t n = a.x.size;
  share(next, a.rows, [&](int64_t row) {
    for (int64_t head = 0; head < a.x.heads; ++head) {
      const float* x = a.x.at(row, head);
      float* out = a.out.at(row, head);
      float sums[16] = {};
      for (int64_t i = 0; i < n; ++i) sums[i % 16] += x[i];
      float mean = 0.0f;
      for (float sum : sums) mean += sum;
      mean /= static_cast<float>(n);
      for (int64_t i = 0; i < n; ++i) out[i] = x[i] - mean;
      const float inverse = 1.0f / std::sqrt(dot(out, out, n) / static_cast<float>(n) + a.eps);
      for (int64_t i = 0; i < n; ++i) {
        const float scaled = out[i] * inverse * (a.weight ? a.weight[i] : 1.0f);
        out[i] = scaled + (a.bias ? a.bias[i] : 0.0f);
      }
    }
  });
}

}  // namespace graft
