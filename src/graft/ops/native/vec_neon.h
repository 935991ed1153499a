// vec.h for NEON (aarch64): four vectors of four lanes. sdot where the machine has it.
#pragma once
#include <arm_neon.h>

namespace graft {

constexpr const char* kIsa = "neon";
constexpr int kMostTokens = 6;     // 24 of the 32 registers hold sums, 4 a step of the tile
constexpr int kChains = 2;  // sums side by side for one token, so that an addition does not wait for the last
constexpr int kMostQuantised = 4;  // 16 hold the sums of a block
constexpr int kByteOffset = 0;

struct F {
  float32x4_t a, b, c, d;
};
struct I {
  int32x4_t a, b, c, d;
};
struct Bytes {
  int8x16_t a, b, c, d;
};

using Four = float32x4_t;
using Sixteen = int8x16_t;

inline F set(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {v, v, v, v};
}
inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline F load(const bf16* from) {
  const uint16x8_t low = vld1q_u16(&from->bits), high = vld1q_u16(&from->bits + 8);
  const auto first = [](uint16x8_t v) { return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)); };
  const auto last = [](uint16x8_t v) { return vreinterpretq_f32_u32(vshll_high_n_u16(v, 16)); };
  return {first(low), last(low), first(high), last(high)};
}
inline F load(const f16* from) {
  const uint16_t* p = &from->bits;
  const auto wide = [](uint16x4_t v) { return vcvt_f32_f16(vreinterpret_f16_u16(v)); };
  return {wide(vld1_u16(p)), wide(vld1_u16(p + 4)), wide(vld1_u16(p + 8)), wide(vld1_u16(p + 12))};
}
inline void store(float* p, F v) {
  vst1q_f32(p, v.a), vst1q_f32(p + 4, v.b), vst1q_f32(p + 8, v.c), vst1q_f32(p + 12, v.d);
}
inline void store(bf16* to, F v) {
  const auto narrow = [](float32x4_t f) {
    const uint32x4_t u = vreinterpretq_u32_f32(f), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(f, f), rounded, vorrq_u32(u, vdupq_n_u32(0x400000))), 16);
  };
  uint16_t* p = &to->bits;
  vst1_u16(p, narrow(v.a)), vst1_u16(p + 4, narrow(v.b)), vst1_u16(p + 8, narrow(v.c)), vst1_u16(p + 12, narrow(v.d));
}
inline void store(f16* to, F v) {
  const auto narrow = [](float32x4_t f, float32x4_t g) { return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(f), g)); };
  vst1q_u16(&to->bits, narrow(v.a, v.b)), vst1q_u16(&to->bits + 8, narrow(v.c, v.d));
}

#define GRAFT_EACH(name, one) \
  inline F name(F x, F y) { return {one(x.a, y.a), one(x.b, y.b), one(x.c, y.c), one(x.d, y.d)}; }
GRAFT_EACH(operator+, vaddq_f32)
GRAFT_EACH(operator-, vsubq_f32)
GRAFT_EACH(operator*, vmulq_f32)
GRAFT_EACH(operator/, vdivq_f32)
GRAFT_EACH(max, vmaxq_f32)
GRAFT_EACH(min, vminq_f32)
#undef GRAFT_EACH

inline F fma(F x, F y, F z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
inline F round(F x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)}; }
inline F scale(F x, F n) {  // x * 2^n in two steps, each of which is a normal number
  const auto one = [](float32x4_t v, float32x4_t m) {
    const int32x4_t e = vcvtq_s32_f32(m), half = vshrq_n_s32(e, 1), bias = vdupq_n_s32(127);
    const auto power = [&](int32x4_t i) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(i, bias), 23)); };
    return vmulq_f32(vmulq_f32(v, power(half)), power(vsubq_s32(e, half)));
  };
  return {one(x.a, n.a), one(x.b, n.b), one(x.c, n.c), one(x.d, n.d)};
}
inline float sum(F x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(x.c, x.d))); }
inline float largest(F x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d))); }

inline void load_pairs(const bf16* from, F& even, F& odd) {
  const uint32_t* p = reinterpret_cast<const uint32_t*>(from);
  const uint32x4_t high = vdupq_n_u32(0xffff0000);
  const auto low = [](uint32x4_t v) { return vreinterpretq_f32_u32(vshlq_n_u32(v, 16)); };
  const auto up = [&](uint32x4_t v) { return vreinterpretq_f32_u32(vandq_u32(v, high)); };
  const uint32x4_t a = vld1q_u32(p), b = vld1q_u32(p + 4), c = vld1q_u32(p + 8), d = vld1q_u32(p + 12);
  even = {low(a), low(b), low(c), low(d)};
  odd = {up(a), up(b), up(c), up(d)};
}
inline Four four(const float* x) { return vld1q_f32(x); }
template <int at>
inline F fma_at(F w, Four x, F t) {
  return {vfmaq_laneq_f32(t.a, w.a, x, at), vfmaq_laneq_f32(t.b, w.b, x, at), vfmaq_laneq_f32(t.c, w.c, x, at),
          vfmaq_laneq_f32(t.d, w.d, x, at)};
}

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define GRAFT_HALVES
struct Halves {  // 16 float16
  float16x8_t a, b;
};
using Eight = float16x8_t;  // of one token

inline Halves no_halves() { return {vdupq_n_f16(0), vdupq_n_f16(0)}; }
inline Eight eight(const f16* p) { return vreinterpretq_f16_u16(vld1q_u16(&p->bits)); }
inline Halves load_halves(const f16* p) { return {eight(p), eight(p + 8)}; }
template <int at>
inline Halves fma_at(Halves w, Eight x, Halves t) {  // x: of the first 16 registers, so GCC copies the lane instead
  asm("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(t.a) : "w"(w.a), "x"(x), "i"(at));
  asm("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(t.b) : "w"(w.b), "x"(x), "i"(at));
  return t;
}
inline F to_float(Halves x) {
  return {vcvt_f32_f16(vget_low_f16(x.a)), vcvt_high_f32_f16(x.a), vcvt_f32_f16(vget_low_f16(x.b)), vcvt_high_f32_f16(x.b)};
}
#endif

inline I ints(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {v, v, v, v};
}
inline I operator+(I x, I y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)}; }
inline F to_float(I x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)}; }
inline int store_bytes(int8_t* p, F x) {
  const auto narrow = [](float32x4_t v) { return vqmovn_s32(vcvtnq_s32_f32(v)); };
  const int16x8_t low = vcombine_s16(narrow(x.a), narrow(x.b)), high = vcombine_s16(narrow(x.c), narrow(x.d));
  const int8x16_t all = vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
  vst1q_s8(p, all);
  return vaddlvq_s8(all);
}
inline Bytes load_bytes(const void* from) {
  const int8_t* p = static_cast<const int8_t*>(from);
  return {vld1q_s8(p), vld1q_s8(p + 16), vld1q_s8(p + 32), vld1q_s8(p + 48)};
}
inline Bytes low_nibbles(Bytes x) {
  const int8x16_t low = vdupq_n_s8(15);
  return {vandq_s8(x.a, low), vandq_s8(x.b, low), vandq_s8(x.c, low), vandq_s8(x.d, low)};
}
inline Bytes high_nibbles(Bytes x) {
  const auto up = [](int8x16_t v) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(v), 4)); };
  return {up(x.a), up(x.b), up(x.c), up(x.d)};
}
inline Sixteen sixteen(const int8_t* x) { return vld1q_s8(x); }

template <int at>
inline int32x4_t dot_quarter(int32x4_t total, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_laneq_s32(total, w, x, at);
#else
  const int8x8_t four = vreinterpret_s8_s32(vdup_laneq_s32(vreinterpretq_s32_s8(x), at));
  const int16x8_t low = vmull_s8(vget_low_s8(w), four), high = vmull_s8(vget_high_s8(w), four);
  return vaddq_s32(total, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
template <int at>
inline I dot_bytes(I t, Bytes w, Sixteen x) {
  return {dot_quarter<at>(t.a, w.a, x), dot_quarter<at>(t.b, w.b, x), dot_quarter<at>(t.c, w.c, x),
          dot_quarter<at>(t.d, w.d, x)};
}
template <int at>
inline I dot_nibbles(I t, Bytes w, Sixteen x) {
  return dot_bytes<at>(t, w, x);
}

}  // namespace graft
