// The residual sum of a row and its RMSNorm, in one pass.
#pragma once

#include "ops/rms_norm/native.h"

namespace graft {

struct AddRmsNormArgs {
  View x; View residual; const float* weight; float eps; float offset; int64_t rows; View out; View sum;
};

inline void add_rms_norm(Team&, int, std::atomic<int64_t>& next, const AddRmsNormArgs& a, float*) {
  share(next, a.rows, [&](int64_t row) {
    const float *x = a.x.row(row), *residual = a.residual.row(row);
    float* sum = a.sum.row(row);
    for (int64_t i = 0; i < a.x.size; ++i) sum[i] = x[i] + residual[i];
    rms_norm_row(sum, a.weight, a.eps, a.offset, a.x.size, a.out.row(row));
  });
}

}  // namespace graft
