// RMSNorm of rows, or of every head of a row, in float32.
#pragma once

#include "backends/native/plain.h"
#include "ops/view.h"

namespace graft {

struct RmsNormArgs {
  View x; View residual; const float* weight; float eps; float offset; int64_t rows; View out;  // residual: or none
};

inline float inverse_root_mean_square(const float* x, float eps, int64_t n) {
  return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

// out = x / sqrt(mean(x²) + eps) * (weight + offset); `out` may be `x`.
inline void rms_norm_row(const float* x, const float* weight, float eps, float offset, int64_t n, float* out) {
  const float inverse = inverse_root_mean_square(x, eps, n);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * inverse * (weight[i] + offset);
}

// The same plus a residual; `out` may be either.
inline void rms_norm_and_add(const float* x, const float* residual, const RmsNormArgs& a, float* out) {
  const float inverse = inverse_root_mean_square(x, a.eps, a.x.size);
  for (int64_t i = 0; i < a.x.size; ++i) out[i] = x[i] * inverse * (a.weight[i] + a.offset) + residual[i];
}

inline void rms_norm(Team&, int, std::atomic<int64_t>& next, const RmsNormArgs& a, float*) {
  share(next, a.rows, [&](int64_t row) {
    for (int64_t head = 0; head < a.x.heads; ++head)
      if (a.residual.data)
        rms_norm_and_add(a.x.at(row, head), a.residual.at(row, head), a, a.out.at(row, head));
      else
        rms_norm_row(a.x.at(row, head), a.weight, a.eps, a.offset, a.x.size, a.out.at(row, head));
  });
}

}  // namespace graft
