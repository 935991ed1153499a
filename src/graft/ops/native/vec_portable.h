// vec.h in plain C++: arrays of 16, which the compiler may vectorise.
#pragma once

namespace graft {

constexpr const char* kIsa = "portable";
constexpr int kMostTokens = 4;   // tokens whose sums one pass over a tile keeps, float weights
constexpr int kChains = 2;  // sums side by side for one token, so that an addition does not wait for the last
constexpr int kMostQuantised = 4;
constexpr int kByteOffset = 0;   // dot_bytes adds this much times the sum of the activations

struct F {
  float v[kLanes];
};
struct I {
  int32_t v[kLanes];
};
struct Bytes {
  uint8_t v[4 * kLanes];
};
struct Four {
  const float* x;
};
struct Sixteen {
  const int8_t* x;
};

template <class Each>
inline F lanes(Each each) {
  F r;
  for (int i = 0; i < kLanes; i++) r.v[i] = each(i);
  return r;
}


inline F set(float x) {
  return lanes([&](int) { return x; });
}
template <class T>
inline F load(const T* p) {
  return lanes([&](int i) { return to_float(p[i]); });
}
template <class T>
inline void store(T* p, const F& a) {
  for (int i = 0; i < kLanes; i++) p[i] = from_float<T>(a.v[i]);
}
inline F operator+(const F& a, const F& b) {
  return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline F operator-(const F& a, const F& b) {
  return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline F operator*(const F& a, const F& b) {
  return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline F operator/(const F& a, const F& b) {
  return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline F fma(const F& a, const F& b, const F& c) {
  return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F max(const F& a, const F& b) {
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F min(const F& a, const F& b) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F round(const F& a) {  // to nearest: what adding 1.5 * 2^23 leaves; |a| < 2^22
  return lanes([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
inline F scale(const F& a, const F& n) {  // a * 2^n in two steps, each of which is a normal number
  return lanes([&](int i) {
    const int e = a.v[i] != a.v[i] ? 0 : int(n.v[i]), half = e >> 1;
    return a.v[i] * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(e - half + 127) << 23);
  });
}
inline float sum(const F& a) {
  float s[4] = {};
  for (int i = 0; i < kLanes; i++) s[i % 4] += a.v[i];
  return (s[0] + s[1]) + (s[2] + s[3]);
}
inline float largest(const F& a) {
  float m = a.v[0];
  for (int i = 1; i < kLanes; i++) m = m > a.v[i] ? m : a.v[i];
  return m;
}

// The even and the odd of 32 bf16, as float32.
inline void load_pairs(const bf16* p, F& even, F& odd) {
  for (int i = 0; i < kLanes; i++) even.v[i] = to_float(p[2 * i]), odd.v[i] = to_float(p[2 * i + 1]);
}
inline Four four(const float* x) { return {x}; }
template <int at>
inline F fma_at(const F& w, Four x, const F& total) {
  return fma(w, set(x.x[at]), total);
}

inline I ints(int32_t x) {
  I r;
  for (int i = 0; i < kLanes; i++) r.v[i] = x;
  return r;
}
inline I operator+(const I& a, const I& b) {
  I r;
  for (int i = 0; i < kLanes; i++) r.v[i] = a.v[i] + b.v[i];
  return r;
}
inline F to_float(const I& a) {
  return lanes([&](int i) { return float(a.v[i]); });
}
// 16 lanes, rounded to nearest, as int8; returns their sum.
inline int store_bytes(int8_t* p, const F& a) {
  int total = 0;
  for (int i = 0; i < kLanes; i++) {
    const float limited = a.v[i] > 127.0f ? 127.0f : a.v[i] > -127.0f ? a.v[i] : -127.0f;  // a NaN becomes -127
    total += p[i] = int8_t(std::nearbyint(limited));
  }
  return total;
}
inline Bytes load_bytes(const void* p) {
  Bytes r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline Bytes low_nibbles(const Bytes& a) {
  Bytes r;
  for (int i = 0; i < 4 * kLanes; i++) r.v[i] = a.v[i] & 15;
  return r;
}
inline Bytes high_nibbles(const Bytes& a) {
  Bytes r;
  for (int i = 0; i < 4 * kLanes; i++) r.v[i] = a.v[i] >> 4;
  return r;
}
inline Sixteen sixteen(const int8_t* x) { return {x}; }

// Lane i gains the product of bytes 4 i .. 4 i + 3 of w and activations 4 at .. 4 at + 3.
template <int at>
inline I dot_bytes(const I& total, const Bytes& w, Sixteen x) {  // w signed
  I r = total;
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < 4; j++) r.v[i] += int8_t(w.v[4 * i + j]) * x.x[4 * at + j];
  return r;
}
template <int at>
inline I dot_nibbles(const I& total, const Bytes& w, Sixteen x) {  // w in 0 .. 15
  return dot_bytes<at>(total, w, x);
}

}  // namespace graft
