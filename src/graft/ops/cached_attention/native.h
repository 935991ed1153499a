// Attention over a paged cache that holds the new keys and values: grouped heads, window, soft cap, sinks.
//
// A chunk is one sequence, one or all query heads of a key-value head, and up to kTile of its new tokens. It walks
// over the sequence's blocks once; the softmax is kept running: largest score, sum of weights, weighted values.
#pragma once

#include "ops/rope/native.h"

namespace graft {

struct AttentionArgs {
  View q; Turn turn; const void* k_cache; const void* v_cache; int64_t kv; int64_t block;  // block: its tokens
  const int64_t* tables; int64_t table_width; const int64_t* starts; const int64_t* lengths; int64_t sequences;
  float scale; int64_t window; float softcap; const float* sinks;  // 0, 0 and nullptr: none
  View out;
};

constexpr int64_t kTile = 8;

// queries [rows, size], results [rows, wide], largest score and sum of each, a block of keys and one of values, scores
inline int64_t attention_scratch(int64_t group, int64_t size, int64_t wide, int64_t block) {
  const int64_t rows = kTile * group;
  return rows * (size + wide + 2) + block * (size + wide + 1);
}

struct Running { float* q; float* sums; float* most; float* total; float* keys; float* values; float* scores; };

inline Running lay_out(float* scratch, int64_t rows, int64_t size, int64_t wide, int64_t block) {
  Running r{};
  r.q = scratch;
  r.sums = r.q + rows * size;
  r.most = r.sums + rows * wide;
  r.total = r.most + rows;
  r.keys = r.total + rows;
  r.values = r.keys + block * size;
  r.scores = r.values + block * wide;
  return r;
}

// One query over `places` keys: scores, then the running softmax.
inline void absorb(const AttentionArgs& a, const Running& r, int64_t row, int64_t begin, int64_t end) {
  const int64_t size = a.q.size, wide = a.out.size;
  float* sums = r.sums + row * wide;
  float most = r.most[row];
  for (int64_t j = begin; j < end; ++j) {
    float score = dot(r.q + row * size, r.keys + j * size, size) * a.scale;
    if (a.softcap > 0.0f) score = a.softcap * std::tanh(score / a.softcap);
    r.scores[j] = score;
    most = score > most || std::isnan(score) ? score : most;  // NaN stays NaN
  }
  if (most != r.most[row]) {
    const float shrink = std::exp(r.most[row] - most);  // 0 the first time
    for (int64_t i = 0; i < wide; ++i) sums[i] *= shrink;
    r.total[row] *= shrink;
    r.most[row] = most;
  }
  for (int64_t j = begin; j < end; ++j) {
    const float weight = std::exp(r.scores[j] - most);
    const float* value = r.values + j * wide;
    r.total[row] += weight;
    for (int64_t i = 0; i < wide; ++i) sums[i] += weight * value[i];
  }
}

struct Tile { int64_t sequence; int64_t first; int64_t count; };  // tokens `first`… of all packed ones

inline int64_t tiles_of(const AttentionArgs& a, int64_t sequence) {
  return (a.starts[sequence + 1] - a.starts[sequence] + kTile - 1) / kTile;
}

inline Tile tile_at(const AttentionArgs& a, int64_t index) {
  int64_t sequence = 0;
  for (; index >= tiles_of(a, sequence); ++sequence) index -= tiles_of(a, sequence);
  const int64_t first = a.starts[sequence] + index * kTile;
  return {sequence, first, std::min(kTile, a.starts[sequence + 1] - first)};
}

// Query heads head … head + heads of one key-value head.
template <class C>
void attend(const AttentionArgs& a, const Tile& tile, int64_t head, int64_t heads, const Running& r) {
  const int64_t size = a.q.size, wide = a.out.size, kv_head = head / (a.q.heads / a.kv);
  const int64_t position = a.lengths[tile.sequence] - (a.starts[tile.sequence + 1] - tile.first);  // of the first token
  for (int64_t row = 0; row < tile.count * heads; ++row) {
    turn_head(a.turn, tile.first + row / heads, a.q.at(tile.first + row / heads, head + row % heads), size,
              r.q + row * size);
    const bool sink = a.sinks != nullptr;  // one more score in the sum, without a value
    r.most[row] = sink ? a.sinks[head + row % heads] : -INFINITY;
    r.total[row] = sink ? 1.0f : 0.0f;
    for (int64_t i = 0; i < wide; ++i) r.sums[row * wide + i] = 0.0f;
  }
  const int64_t seen = position + tile.count;
  const int64_t start = a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0;
  for (int64_t b = start / a.block; b * a.block < seen; ++b) {
    const int64_t slot = a.tables[tile.sequence * a.table_width + b] * a.block, base = b * a.block;
    const int64_t from = std::max<int64_t>(0, start - base), to = std::min(a.block, seen - base);
    for (int64_t j = from; j < to; ++j) {
      const C* key = static_cast<const C*>(a.k_cache) + ((slot + j) * a.kv + kv_head) * size;
      const C* value = static_cast<const C*>(a.v_cache) + ((slot + j) * a.kv + kv_head) * wide;
      for (int64_t i = 0; i < size; ++i) r.keys[j * size + i] = widen(key[i]);
      for (int64_t i = 0; i < wide; ++i) r.values[j * wide + i] = widen(value[i]);
    }
    for (int64_t row = 0; row < tile.count * heads; ++row) {
      const int64_t own = position + row / heads;
      const int64_t begin = a.window > 0 ? std::max(from, own + 1 - a.window - base) : from;
      const int64_t end = std::min(to, own + 1 - base);
      if (begin < end) absorb(a, r, row, begin, end);
    }
  }
  for (int64_t row = 0; row < tile.count * heads; ++row) {
    float* out = a.out.at(tile.first + row / heads, head + row % heads);
    for (int64_t i = 0; i < wide; ++i) out[i] = r.sums[row * wide + i] / r.total[row];
  }
}

template <class C>
void attention(Team& team, int, std::atomic<int64_t>& next, const AttentionArgs& a, float* scratch) {
  int64_t tiles = 0;
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) tiles += tiles_of(a, sequence);
  const int64_t group = a.q.heads / a.kv;
  // few chunks would leave threads idle: then every query head reads the keys for itself
  const int64_t heads = tiles * a.kv >= 4 * team.threads ? group : 1, parts = a.q.heads / heads;
  const Running running = lay_out(scratch, kTile * group, a.q.size, a.out.size, a.block);
  share(next, tiles * parts, [&](int64_t chunk) {
    attend<C>(a, tile_at(a, chunk / parts), chunk % parts * heads, heads, running);
  });
}

}  // namespace graft
