// Rotary embedding of every head of a row, perhaps normed first (QK-norm).
#pragma once

#include "ops/rms_norm/native.h"

namespace graft {

// What rotates a head: [rows, r] cosines and sines (r values of a head rotate, the rest pass), and the norm before it.
struct Rotation {
  View cos; View sin; bool rotates; bool interleaved;
  const float* norm; float eps; float offset;  // norm == nullptr: none
};

// out = x, normed and rotated; they must not overlap.
inline void rotate_head(const Rotation& rotation, int64_t row, const float* x, int64_t n, float* out) {
  if (rotation.norm) {
    rms_norm_row(x, rotation.norm, rotation.eps, rotation.offset, n, out);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i];
  }
  if (!rotation.rotates) return;
  const float *cos = rotation.cos.row(row), *sin = rotation.sin.row(row);
  const int64_t half = rotation.cos.size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = rotation.interleaved ? 2 * i : i, second = rotation.interleaved ? 2 * i + 1 : i + half;
    const float a = out[first], b = out[second];
    out[first] = a * cos[first] - b * sin[first];
    out[second] = b * cos[second] + a * sin[second];
  }
}

struct RopeArgs { View x; Rotation rotation; int64_t rows; View out; };

inline void rope(Team&, int, std::atomic<int64_t>& next, const RopeArgs& a, float*) {
  share(next, a.rows, [&](int64_t row) {
    for (int64_t head = 0; head < a.x.heads; ++head)
      rotate_head(a.rotation, row, a.x.at(row, head), a.x.size, a.out.at(row, head));
  });
}

}  // namespace graft
