// vec.h for AVX-512: one zmm register. vpdpbusd for int8.
#pragma once
#include <immintrin.h>

namespace graft {

constexpr const char* kIsa = "avx512";
constexpr int kMostTokens = 8;
constexpr int kChains = 4;  // sums side by side for one token, so that an addition does not wait for the last
constexpr int kMostQuantised = 8;
constexpr int kByteOffset = 128;  // vpdpbusd takes unsigned weights: 128 is added to each, so 128 sum(x) to each product

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct Bytes {
  __m512i v;
};
struct Four {
  const float* x;
};
struct Sixteen {
  const int8_t* x;
};


inline F set(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline void store(bf16* p, F x) {
  const __m512i u = _mm512_castps_si512(x.v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  const __m512i kept = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
inline void store(f16* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F operator+(F x, F y) { return {_mm512_add_ps(x.v, y.v)}; }
inline F operator-(F x, F y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline F operator*(F x, F y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline F operator/(F x, F y) { return {_mm512_div_ps(x.v, y.v)}; }
inline F max(F x, F y) { return {_mm512_max_ps(x.v, y.v)}; }
inline F min(F x, F y) { return {_mm512_min_ps(x.v, y.v)}; }
inline F fma(F x, F y, F z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline F round(F x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F scale(F x, F n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline float sum(F x) { return _mm512_reduce_add_ps(x.v); }
inline float largest(F x) { return _mm512_reduce_max_ps(x.v); }

inline void load_pairs(const bf16* p, F& even, F& odd) {
  const __m512i v = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000))));
}
inline Four four(const float* x) { return {x}; }
template <int at>
inline F fma_at(F w, Four x, F total) {
  return {_mm512_fmadd_ps(w.v, _mm512_set1_ps(x.x[at]), total.v)};
}

inline I ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I operator+(I x, I y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline int store_bytes(int8_t* p, F x) {
  const __m512i all = _mm512_cvtps_epi32(_mm512_min_ps(x.v, _mm512_set1_ps(127.0f)));  // a NaN becomes 127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(all));
  return _mm512_reduce_add_epi32(all);
}
inline Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes low_nibbles(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
inline Sixteen sixteen(const int8_t* x) { return {x}; }

template <int at>
inline I dot_nibbles(I total, Bytes w, Sixteen x) {
  int32_t four;
  std::memcpy(&four, x.x + 4 * at, 4);
  return {_mm512_dpbusd_epi32(total.v, w.v, _mm512_set1_epi32(four))};
}
template <int at>
inline I dot_bytes(I total, Bytes w, Sixteen x) {
  return dot_nibbles<at>(total, {_mm512_xor_si512(w.v, _mm512_set1_epi8(int8_t(-128)))}, x);
}

}  // namespace graft
