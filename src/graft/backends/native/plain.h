// What the small kernels share beside the vectors, the team and the GEMM: single numbers, dot products.
#pragma once

#include "ops/fused_linear/native.h"

namespace graft {

#if defined(__aarch64__)
using half_t = __fp16;  // g++ 12 has no _Float16 in C++ here
#else
using half_t = _Float16;
#endif

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return to_float(x); }
inline float widen(f16 x) {  // one instruction, where to_float is many
  half_t value;
  std::memcpy(&value, &x, 2);
  return static_cast<float>(value);
}

template <class T> inline T narrow(float x) { return from_float<T>(x); }

// Sixteen sums side by side: the order is fixed, whatever the vector width.
template <class W> inline float dot(const float* x, const W* w, int64_t n) {
  float sums[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int lane = 0; lane < 16; ++lane) sums[lane] += x[i + lane] * widen(w[i + lane]);
  for (; i < n; ++i) sums[i % 16] += x[i] * widen(w[i]);
  for (int step = 8; step; step /= 2)
    for (int lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  return sums[0];
}

inline float activate(Act act, float x) {
  switch (act) {
    case Act::silu: return x / (1.0f + std::exp(-x));
    case Act::gelu_tanh: return 0.5f * x * (1.0f + std::tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case Act::gelu: return 0.5f * x * (1.0f + std::erf(x * 0.7071067811865476f));
    default: return x;
  }
}

}  // namespace graft
