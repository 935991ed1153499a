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
    int64_t i = 0;
    for (; i + kLanes <= a.out.size; i += kLanes) store(out + i, activate(a.act, load(gate + i)) * load(up + i));
    const int rest = int(a.out.size - i);
    if (rest > 0) store(out + i, activate(a.act, load(gate + i, rest)) * load(up + i, rest), rest);
  });
}

}  // namespace graft
