// What attention is given, and the running softmax of its queries: largest score, sum of weights, weighted values.
#pragma once

#include "ops/rope/native.h"

namespace graft {

struct AttentionArgs {
  View q; Rotation rotation; const void* k_cache; const void* v_cache; int64_t kv; int64_t block;  // block: its tokens
  const int64_t* block_tables; int64_t table_width; const int64_t* cu_seqlens; const int64_t* seq_lens; int64_t sequences;
  float scale; int64_t window; float softcap; const float* sinks;  // 0, 0 and nullptr: none
  View out;
  float* shared;  // attention_shared floats, one place for all threads
};

struct Running { float* q; float* sums; float* most; float* total; float* weights; float* keys; float* values; };

inline void begin_row(const AttentionArgs& a, const Running& r, int64_t row, const float* sink) {
  r.most[row] = sink != nullptr ? *sink : -INFINITY;  // a sink: one more score in the sum, without a value
  r.total[row] = sink != nullptr ? 1.0f : 0.0f;
  for (int64_t i = 0; i < a.out.size; ++i) r.sums[row * a.out.size + i] = 0.0f;
}

inline void end_row(const Running& r, int64_t row, int64_t wide, float* out) {
  for (int64_t i = 0; i < wide; ++i) out[i] = r.sums[row * wide + i] / r.total[row];
}

inline F scaled(const AttentionArgs& a, F scores) {
  scores = scores * set(a.scale);
  return a.softcap > 0.0f ? set(a.softcap) * tanh(scores * set(1.0f / a.softcap)) : scores;
}

// Lanes outside of begin .. end weigh nothing.
inline F only(F scores, int64_t begin, int64_t end) {
  if (begin <= 0 && end >= kLanes) return scores;
  float lanes[kLanes];
  store(lanes, scores);
  for (int64_t j = 0; j < kLanes; ++j)
    if (j < begin || j >= end) lanes[j] = -INFINITY;
  return load(lanes);
}

// The running softmax of one query takes 16 N scores. Gives their weights, and what the sums so far shrink by.
template <int N>
inline float weigh(const Running& r, int64_t row, F (&scores)[N]) {
  F high = scores[0];
  for (int i = 1; i < N; ++i) high = max(high, scores[i]);
  const float most = std::fmax(r.most[row], largest(high));  // of a NaN the weight is NaN, and so is the sum
  const float shrink = most == r.most[row] ? 1.0f : std::exp(r.most[row] - most);  // 0 the first time
  F total = set(0.0f);
  for (F& one : scores) one = exp(one - set(most)), total = total + one;
  r.total[row] = r.total[row] * shrink + sum(total);
  r.most[row] = most;
  return shrink;
}

}  // namespace graft
