// Vectors of 16 float32 lanes, and what the kernels do with them, once for each instruction set.
//
//   F      16 float32          load, store (float, bf16, f16; all lanes or the first n), + - * /, fma, max, min, exp, tanh, sum
//   I      16 int32            sums of int8 products
//   Bytes  64 int8 or uint8    four columns of 16 rows of a quantised weight
//   Four, Sixteen              4 float32 or 16 int8 activations of one token, of which an instruction takes one or four
//
// The widest instruction set that the compiler may use is taken; GRAFT_ISA_AVX512, _AVX2, _NEON or _PORTABLE forces one.
// AVX-512 means F, BW, VL, DQ and VNNI together; a machine with fewer of them is an AVX2 machine.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if !defined(GRAFT_ISA_AVX512) && !defined(GRAFT_ISA_AVX2) && !defined(GRAFT_ISA_NEON) && !defined(GRAFT_ISA_PORTABLE)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define GRAFT_ISA_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define GRAFT_ISA_AVX2
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define GRAFT_ISA_NEON
#else
#define GRAFT_ISA_PORTABLE
#endif
#endif

namespace graft {

constexpr int kLanes = 16;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) { return from_bits(uint32_t(value.bits) << 16); }

inline float to_float(f16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);             // inf, NaN
  if (rest < 0x400) return from_bits(sign | to_bits(float(rest) * 5.9604644775390625e-8f));   // 0 or subnormal: * 2^-24
  return from_bits(sign | ((rest << 13) + (uint32_t(127 - 15) << 23)));
}

template <class T>
inline T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline bf16 from_float<bf16>(float value) {  // to nearest, ties to even; a NaN stays one
  const uint32_t u = to_bits(value);
  if ((u & 0x7fffffff) > 0x7f800000) return {uint16_t(u >> 16 | 0x40)};
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

template <>
inline f16 from_float<f16>(float value) {  // to nearest, ties to even; a NaN stays one, large values are inf
  const uint32_t u = to_bits(value), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return {uint16_t(sign | 0x7e00 | (a >> 13 & 0x3ff))};
  if (a >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // 65520 and more
  if (a < 0x38800000) {                                   // below 2^-14: adding 0.5 lets the FPU round at 2^-24
    return {uint16_t(sign | (to_bits(from_bits(a) + 0.5f) - to_bits(0.5f)))};
  }
  const uint32_t r = a - (uint32_t(127 - 15) << 23);
  return {uint16_t(sign | (r + 0xfff + (r >> 13 & 1)) >> 13)};
}

}  // namespace graft

#if defined(GRAFT_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(GRAFT_ISA_AVX2)
#include "vec_avx2.h"
#elif defined(GRAFT_ISA_NEON)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif

namespace graft {

// The first n lanes; the others are 0 when loaded and left alone when stored. 0 <= n <= 16.
template <class T>
inline F load(const T* from, int n) {
  T all[kLanes] = {};
  std::memcpy(all, from, sizeof(T) * n);
  return load(all);
}

template <class T>
inline void store(T* to, F v, int n) {
  T all[kLanes];
  store(all, v);
  std::memcpy(to, all, sizeof(T) * n);
}

// e^x = 2^n (1 + tail), for x that 2^n is a number for.
struct Power {
  F n, tail;
};

inline Power power(F x) {
  const F n = round(x * set(1.44269504f));
  const F r = fma(n, set(2.12194440e-4f), fma(n, set(-0.693359375f), x));  // ln 2 in two parts, the first exact times n
  F p = fma(set(1.9875691500e-4f), r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  return {n, fma(p, r * r, r)};
}

// e^x, at most 2 units in the last place off; NaN stays NaN, -inf gives 0, above 88.73 gives inf.
// max(limit, x) and min(limit, x) return x when x is NaN: the order of the arguments matters.
inline F exp(F x) {
  const Power e = power(min(set(89.0f), max(set(-104.0f), x)));
  return scale(e.tail + set(1.0f), e.n);
}

// As m / (m + 2) with m = e^2x - 1 = 2^n tail + (2^n - 1): nothing cancels near 0. NaN stays NaN.
inline F tanh(F x) {
  const Power e = power(min(set(40.0f), max(set(-40.0f), x * set(2.0f))));
  const F m = scale(e.tail, e.n) + (scale(set(1.0f), e.n) - set(1.0f));
  return m / (m + set(2.0f));
}

template <class Do, int... at>
inline void unrolled(Do go, std::integer_sequence<int, at...>) {
  (go(std::integral_constant<int, at>{}), ...);
}

// go(0), go(1) .. go(n - 1), with numbers that can be template arguments.
template <int n, class Do>
inline void unroll(Do go) {
  unrolled(go, std::make_integer_sequence<int, n>{});
}

inline F abs(F x) { return max(x, set(0.0f) - x); }

}  // namespace graft
