// vec.h for AVX2 with FMA and F16C: two ymm registers. maddubs for int8, or vpdpbusd where the machine has AVX-VNNI.
#pragma once
#include <immintrin.h>

namespace graft {

constexpr const char* kIsa = "avx2";
constexpr int kMostTokens = 4;  // 8 of the 16 registers hold sums
constexpr int kChains = 4;  // sums side by side for one token, so that an addition does not wait for the last
constexpr int kMostQuantised = 4;
constexpr int kByteOffset = 0;

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};
struct Four {
  const float* x;
};
struct Sixteen {
  const int8_t* x;
};


inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F load(const bf16* p) {
  const auto wide = [](const bf16* q) {
    const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  };
  return {wide(p), wide(p + 8)};
}
inline F load(const f16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline void store(bf16* p, F x) {
  const auto narrow = [](__m256 f) {
    const __m256i u = _mm256_castps_si256(f), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  };
  const __m256i both = _mm256_packus_epi32(narrow(x.a), narrow(x.b));  // quarters 0 2 1 3
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
inline void store(f16* p, F x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F round(F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline F scale(F x, F n) {  // x * 2^n in two steps, each of which is a normal number
  const auto one = [](__m256 v, __m256 m) {
    const __m256i e = _mm256_cvtps_epi32(m), half = _mm256_srai_epi32(e, 1), bias = _mm256_set1_epi32(127);
    const auto power = [&](__m256i i) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(i, bias), 23)); };
    return _mm256_mul_ps(_mm256_mul_ps(v, power(half)), power(_mm256_sub_epi32(e, half)));
  };
  return {one(x.a, n.a), one(x.b, n.b)};
}
inline float sum(F x) {
  const __m256 v = _mm256_add_ps(x.a, x.b);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(F x) {
  const __m256 v = _mm256_max_ps(x.a, x.b);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline void load_pairs(const bf16* from, F& even, F& odd) {
  const __m256i* p = reinterpret_cast<const __m256i*>(from);
  const __m256i a = _mm256_loadu_si256(p), b = _mm256_loadu_si256(p + 1), high = _mm256_set1_epi32(int(0xffff0000));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
inline Four four(const float* x) { return {x}; }
template <int at>
inline F fma_at(F w, Four x, F total) {
  const __m256 one = _mm256_broadcast_ss(x.x + at);
  return {_mm256_fmadd_ps(w.a, one, total.a), _mm256_fmadd_ps(w.b, one, total.b)};
}

inline I ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline int store_bytes(int8_t* p, F x) {
  const auto whole = [](__m256 v) { return _mm256_cvtps_epi32(_mm256_min_ps(v, _mm256_set1_ps(127.0f))); };  // NaN: 127
  const __m256i words = _mm256_packs_epi32(whole(x.a), whole(x.b));  // quarters 0 2 1 3
  const __m256i order = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i low = _mm256_castsi256_si128(order), high = _mm256_extracti128_si256(order, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(low, high));
  __m128i s = _mm_madd_epi16(_mm_add_epi16(low, high), _mm_set1_epi16(1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline Bytes load_bytes(const void* from) {
  const __m256i* p = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)};
}
inline Bytes low_nibbles(Bytes x) {
  const __m256i low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
}
inline Bytes high_nibbles(Bytes x) {
  return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
inline Sixteen sixteen(const int8_t* x) { return {x}; }

inline __m256i dot_unsigned(__m256i total, __m256i w, __m256i x) {  // products of pairs stay below 2^15
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(total, w, x);
#else
  return _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
#endif
}
template <int at>
inline I dot_nibbles(I total, Bytes w, Sixteen x) {
  int32_t four;
  std::memcpy(&four, x.x + 4 * at, 4);
  const __m256i all = _mm256_set1_epi32(four);
  return {dot_unsigned(total.a, w.a, all), dot_unsigned(total.b, w.b, all)};
}
template <int at>
inline I dot_bytes(I total, Bytes w, Sixteen x) {  // |w| times x with w's sign: 128 * 127 * 2 still fits
  int32_t four;
  std::memcpy(&four, x.x + 4 * at, 4);
  const __m256i all = _mm256_set1_epi32(four);
  return {dot_unsigned(total.a, _mm256_abs_epi8(w.a), _mm256_sign_epi8(all, w.a)),
          dot_unsigned(total.b, _mm256_abs_epi8(w.b), _mm256_sign_epi8(all, w.b))};
}

}  // namespace graft
