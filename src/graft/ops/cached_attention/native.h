// Attention over a paged cache that holds the new keys and values: grouped heads, window, soft cap, sinks.
//
// A chunk is one sequence, one or all query heads of a key-value head, and up to kTile of its new tokens. It walks
// over the sequence's blocks once; the softmax is kept running: largest score, sum of weights, weighted values.
// Few queries read the cache as it lies. For many, 16 keys and values are laid out as tiles of the product.
#pragma once

#include "ops/rope/native.h"

namespace graft {

struct AttentionArgs {
  View q; Turn turn; const void* k_cache; const void* v_cache; int64_t kv; int64_t block;  // block: its tokens
  const int64_t* tables; int64_t table_width; const int64_t* starts; const int64_t* lengths; int64_t sequences;
  float scale; int64_t window; float softcap; const float* sinks;  // 0, 0 and nullptr: none
  View out;
};

constexpr int64_t kTile = 16;
constexpr int64_t kFewQueries = 4;

// queries [rows, size], results [rows, wide], largest score and sum of weights of each, weights [rows, 16],
// tiles of keys [size, 16] and of values [wide / 16, 16, 16]
inline int64_t attention_scratch(int64_t group, int64_t size, int64_t wide) {
  return kTile * group * (size + wide + 2 + kLanes) + (size + whole(wide, kLanes)) * kLanes;
}

struct Running { float* q; float* sums; float* most; float* total; float* weights; float* keys; float* values; };

inline Running lay_out(float* scratch, int64_t rows, int64_t size, int64_t wide) {
  Running r{};
  r.q = scratch;
  r.sums = r.q + rows * size;
  r.most = r.sums + rows * wide;
  r.total = r.most + rows;
  r.weights = r.total + rows;
  r.keys = r.weights + rows * kLanes;
  r.values = r.keys + size * kLanes;
  return r;
}

// The last vector of n numbers may be a part of one.
template <class T>
inline F part(const T* from, int64_t n) { return n >= kLanes ? load(from) : load(from, int(n)); }

template <class C>
inline float key_dot(const float* q, const C* key, int64_t size) {
  F low = set(0.0f), high = low;
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    low = fma(load(q + i), load(key + i), low);
    high = fma(load(q + i + kLanes), load(key + i + kLanes), high);
  }
  for (; i < size; i += kLanes) low = fma(part(q + i, size - i), part(key + i, size - i), low);
  return sum(low + high);
}

// sums[0 .. 16 V) = sums * shrink + the values of `keys` tokens, each times its weight; `width` of them are there.
template <int V, class C>
inline void add_values(float* sums, int64_t width, float shrink, const float* weights, const C* values, int64_t stride,
                       int64_t keys) {
  F total[V];
  for (int v = 0; v < V; ++v) total[v] = part(sums + v * kLanes, width - v * kLanes) * set(shrink);
  for (int64_t j = 0; j < keys; ++j) {
    const F weight = set(weights[j]);
    for (int v = 0; v < V; ++v)
      total[v] = fma(weight, part(values + j * stride + v * kLanes, width - v * kLanes), total[v]);
  }
  for (int v = 0; v < V; ++v) {
    const int64_t lanes = width - v * kLanes;
    lanes >= kLanes ? store(sums + v * kLanes, total[v]) : store(sums + v * kLanes, total[v], int(lanes));
  }
}

inline F soft_capped(F x, float cap) {  // cap tanh(x / cap), tanh u = 1 - 2 / (1 + e^2u); NaN stays NaN
  return set(cap) - set(2.0f * cap) / (set(1.0f) + exp(x * set(2.0f / cap)));
}

// The running softmax of one query takes 16 scores, of which the lanes begin .. end count. Gives their weights, and what
// the sums so far shrink by.
inline F weights_of(const AttentionArgs& a, const Running& r, int64_t row, F scores, int64_t begin, int64_t end, float& shrink) {
  scores = scores * set(a.scale);
  if (a.softcap > 0.0f) scores = soft_capped(scores, a.softcap);
  if (begin > 0 || end < kLanes) {
    float lanes[kLanes];
    store(lanes, scores);
    for (int64_t j = 0; j < kLanes; ++j)
      if (j < begin || j >= end) lanes[j] = -INFINITY;
    scores = load(lanes);
  }
  const float most = std::fmax(r.most[row], largest(scores));  // of a NaN the weight is NaN, and so is the sum
  shrink = most == r.most[row] ? 1.0f : std::exp(r.most[row] - most);  // 0 the first time
  const F weights = exp(scores - set(most));
  r.total[row] = r.total[row] * shrink + sum(weights);
  r.most[row] = most;
  return weights;
}

// One query over up to 16 keys: scores, then the running softmax.
template <class C>
inline void absorb(const AttentionArgs& a, const Running& r, int64_t row, const C* keys, const C* values, int64_t count) {
  const int64_t size = a.q.size, wide = a.out.size;
  float lanes[kLanes];
  for (int64_t j = 0; j < count; ++j) lanes[j] = key_dot(r.q + row * size, keys + j * a.kv * size, size);
  for (int64_t j = count; j < kLanes; ++j) lanes[j] = 0.0f;
  float shrink;
  store(lanes, weights_of(a, r, row, load(lanes), 0, count, shrink));
  float* sums = r.sums + row * wide;
  int64_t i = 0;
  for (; i + 4 * kLanes <= wide; i += 4 * kLanes)
    add_values<4>(sums + i, 4 * kLanes, shrink, lanes, values + i, a.kv * wide, count);
  for (; i < wide; i += kLanes) add_values<1>(sums + i, wide - i, shrink, lanes, values + i, a.kv * wide, count);
}

// `count` keys and values as tiles; lanes after them are 0, whatever lies in the cache.
template <class C>
inline void lay_tiles(const AttentionArgs& a, const Running& r, const C* keys, const C* values, int64_t count) {
  const int64_t size = a.q.size, wide = a.out.size;
  for (int64_t j = 0; j < kLanes; ++j) {
    const bool there = j < count;
    const C *key = keys + j * a.kv * size, *value = values + j * a.kv * wide;
    for (int64_t i = 0; i < size; ++i) r.keys[i * kLanes + j] = there ? widen(key[i]) : 0.0f;
    for (int64_t i = 0; i < wide; i += kLanes)
      store(r.values + (i + j) * kLanes, there ? part(value + i, wide - i) : set(0.0f));
  }
}

struct Span { int64_t position; int64_t heads; int64_t base; int64_t count; };  // of the first query, and of the tile's keys

// Queries first .. first + T over the tiles.
template <int T>
inline void absorb_tiles(const AttentionArgs& a, const Running& r, int64_t first, const Span& span) {
  const int64_t size = a.q.size, wide = a.out.size;
  F made[T];
  float shrink[T];
  WeightF32::tile<T>(reinterpret_cast<const uint8_t*>(r.keys), Rows{r.q, size, size}, first, made);
  for (int t = 0; t < T; ++t) {
    const int64_t own = span.position + (first + t) / span.heads - span.base, end = std::min(span.count, own + 1);
    const int64_t begin = a.window > 0 ? std::max<int64_t>(0, own + 1 - a.window) : 0;
    shrink[t] = 1.0f;
    const bool any = begin < end;
    store(r.weights + (first + t) * kLanes,
          any ? weights_of(a, r, first + t, made[t], begin, end, shrink[t]) : set(0.0f));
  }
  for (int64_t i = 0; i < wide; i += kLanes) {
    WeightF32::tile<T>(reinterpret_cast<const uint8_t*>(r.values + i * kLanes), Rows{r.weights, kLanes, kLanes}, first, made);
    for (int t = 0; t < T; ++t) {
      float* to = r.sums + (first + t) * wide + i;
      const F total = fma(part(to, wide - i), set(shrink[t]), made[t]);
      wide - i >= kLanes ? store(to, total) : store(to, total, int(wide - i));
    }
  }
}

template <int T = kMostTokens>
inline void absorb_some(int64_t rows, const AttentionArgs& a, const Running& r, int64_t first, const Span& span) {
  if constexpr (T > 1) {
    if (rows < T) return absorb_some<T - 1>(rows, a, r, first, span);
  }
  absorb_tiles<T>(a, r, first, span);
}

template <class C>
inline void absorb_many(const AttentionArgs& a, const Running& r, int64_t rows, const C* keys, const C* values,
                        const Span& span) {
  lay_tiles(a, r, keys, values, span.count);
  for (int64_t first = 0; first < rows; first += kMostTokens)
    absorb_some(std::min<int64_t>(kMostTokens, rows - first), a, r, first, span);
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
    const auto key_at = [&](int64_t j) { return static_cast<const C*>(a.k_cache) + ((slot + j) * a.kv + kv_head) * size; };
    const auto value_at = [&](int64_t j) { return static_cast<const C*>(a.v_cache) + ((slot + j) * a.kv + kv_head) * wide; };
    if (tile.count * heads > kFewQueries && size % kColumnStep == 0) {
      for (int64_t j = from; j < to; j += kLanes)
        absorb_many(a, r, tile.count * heads, key_at(j), value_at(j),
                    {position, heads, base + j, std::min<int64_t>(kLanes, to - j)});
      continue;
    }
    for (int64_t row = 0; row < tile.count * heads; ++row) {
      const int64_t own = position + row / heads;
      const int64_t begin = a.window > 0 ? std::max(from, own + 1 - a.window - base) : from;
      const int64_t end = std::min(to, own + 1 - base);
      for (int64_t j = begin; j < end; j += kLanes)
        absorb(a, r, row, key_at(j), value_at(j), std::min<int64_t>(kLanes, end - j));
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
  const Running running = lay_out(scratch, kTile * group, a.q.size, a.out.size);
  share(next, tiles * parts, [&](int64_t chunk) {
    attend<C>(a, tile_at(a, chunk / parts), chunk % parts * heads, heads, running);
  });
}

}  // namespace graft
