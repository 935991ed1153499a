// Functions that generated pointwise loops call.
#pragma once

#include "backends/native/plain.h"
#include "ops/view.h"

namespace graft {

inline float relu(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays NaN
inline float power2(float x) { return x * x; }
inline float power3(float x) { return x * x * x; }

}  // namespace graft
