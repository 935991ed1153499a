// activation(gate) * up, row by row.
#pragma once

#include "backends/native/plain.h"
#include "ops/view.h"

namespace graft {

struct SwigluArgs { View gate; View up; Act act; int64_t rows; View out; };

inline void swiglu(Team&, int, std::atomic<int64_t>& next, const SwigluArgs& a, float*) {
  share(next, a.rows, [&](int64_t row) {
    const float *gate = a.gate.row(row), *up = a.up.row(row);
    float* out = a.out.row(row);
    for (int64_t i = 0; i < a.out.size; ++i) out[i] = activate(a.act, gate[i]) * up[i];
  });
}

}  // namespace graft
