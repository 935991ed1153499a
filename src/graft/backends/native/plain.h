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

// e^x = 2^n (1 + tail) as vec.h has it, of single numbers and without a branch: a loop over a row becomes one of vectors,
// which a call of std::exp keeps it from.
struct PlainPower { float tail; int32_t n; };

inline PlainPower plain_power(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: what is added to it is rounded, and stands in its last bits
  const float shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const float r = n * 2.12194440e-4f + (n * -0.693359375f + x);
  float p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return {p * (r * r) + r, bits - 0x4b400000};
}

// 2^n for n from -126 to 127; any other bits where a NaN is multiplied with it.
inline float plain_scale(int32_t n) {
  const uint32_t bits = uint32_t(n + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float clamped(float x, float low, float high) {  // NaN stays NaN
  x = x < low ? low : x;
  return x > high ? high : x;
}

// At most 2 units in the last place off; NaN stays NaN, -inf gives 0, above 88.73 gives inf.
inline float plain_exp(float x) {
  const PlainPower e = plain_power(clamped(x, -104.0f, 89.0f));
  const int32_t half = e.n >> 1;
  return (e.tail + 1.0f) * plain_scale(half) * plain_scale(e.n - half);
}

// As m / (m + 2) with m = e^2x - 1; nothing cancels near 0.
inline float plain_tanh(float x) {
  const PlainPower e = plain_power(clamped(2.0f * x, -40.0f, 40.0f));
  const float m = e.tail * plain_scale(e.n) + (plain_scale(e.n) - 1.0f);
  return m / (m + 2.0f);
}

inline float activate(Act act, float x) {
  switch (act) {
    case Act::silu: return x / (1.0f + plain_exp(-x));
    case Act::gelu_tanh: return 0.5f * x * (1.0f + plain_tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case Act::gelu: return 0.5f * x * (1.0f + std::erf(x * 0.7071067811865476f));
    default: return x;
  }
}

}  // namespace graft
