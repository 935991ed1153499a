// Attention over a paged cache that holds the new keys and values: grouped heads, window, soft cap, sinks.
//
// One new token of every sequence: native_decode.h. Otherwise a chunk is one sequence, one or all query heads of a
// key-value head, and up to kTile of its new tokens. It walks over the sequence's blocks once, 16 keys and values laid out
// as tiles of the GEMM at a time.
#pragma once

#include "native_decode.h"

namespace graft {

constexpr int64_t kTile = 16;
constexpr int64_t kFewQueries = 4;

// queries [rows, size], results [rows, wide], largest score and sum of weights of each, weights [rows, 16],
// tiles of keys [size, 16] and of values [wide / 16, 16, 16]
inline int64_t attention_scratch(int64_t group, int64_t size, int64_t wide) {
  return kTile * group * (size + wide + 2 + kLanes) + (size + whole(wide, kLanes)) * kLanes;
}

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
    F scores[1] = {only(scaled(a, made[t]), begin, end)};
    if (any) shrink[t] = weigh(r, first + t, scores);
    store(r.weights + (first + t) * kLanes, any ? scores[0] : set(0.0f));
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
  return (a.cu_seqlens[sequence + 1] - a.cu_seqlens[sequence] + kTile - 1) / kTile;
}

inline Tile tile_at(const AttentionArgs& a, int64_t index) {
  int64_t sequence = 0;
  for (; index >= tiles_of(a, sequence); ++sequence) index -= tiles_of(a, sequence);
  const int64_t first = a.cu_seqlens[sequence] + index * kTile;
  return {sequence, first, std::min(kTile, a.cu_seqlens[sequence + 1] - first)};
}

// Rows of a tile whose queries see positions up to their own: 16 keys and values at a time, laid out for all of them.
template <class C>
inline void attend_blocks(const AttentionArgs& a, const Running& r, const Tile& tile, int64_t heads, int64_t kv_head,
                          int64_t position) {
  const int64_t size = a.q.size, wide = a.out.size, seen = position + tile.count;
  const int64_t start = a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0;
  for (int64_t b = start / a.block; b * a.block < seen; ++b) {
    const int64_t slot = a.block_tables[tile.sequence * a.table_width + b] * a.block, base = b * a.block;
    const int64_t from = std::max<int64_t>(0, start - base), to = std::min(a.block, seen - base);
    const auto key_at = [&](int64_t j) { return static_cast<const C*>(a.k_cache) + ((slot + j) * a.kv + kv_head) * size; };
    const auto value_at = [&](int64_t j) { return static_cast<const C*>(a.v_cache) + ((slot + j) * a.kv + kv_head) * wide; };
    for (int64_t j = from; j < to; j += kLanes)
      absorb_many(a, r, tile.count * heads, key_at(j), value_at(j),
                  {position, heads, base + j, std::min<int64_t>(kLanes, to - j)});
  }
}

// Query heads head … head + heads of one key-value head.
template <class C>
void attend(const AttentionArgs& a, const Tile& tile, int64_t head, int64_t heads, const Running& r) {
  const int64_t size = a.q.size, rows = tile.count * heads, kv_head = head / (a.q.heads / a.kv);
  const int64_t position = a.seq_lens[tile.sequence] - (a.cu_seqlens[tile.sequence + 1] - tile.first);  // of the first token
  for (int64_t row = 0; row < rows; ++row) {
    rotate_head(a.rotation, tile.first + row / heads, a.q.at(tile.first + row / heads, head + row % heads), size,
              r.q + row * size);
    begin_row(a, r, row, a.sinks != nullptr ? a.sinks + head + row % heads : nullptr);
  }
  if (rows > kFewQueries && size % kColumnStep == 0) {
    attend_blocks<C>(a, r, tile, heads, kv_head, position);
  } else {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t end = position + row / heads + 1, begin = a.window > 0 ? std::max<int64_t>(0, end - a.window) : 0;
      attend_heads<C, 1>(a, r, row, tile.sequence, kv_head, begin, end);
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    end_row(r, row, a.out.size, a.out.at(tile.first + row / heads, head + row % heads));
}

template <class C>
void attention(Team& team, int, std::atomic<int64_t>& next, const AttentionArgs& a, float* scratch) {
  int64_t tiles = 0;
  bool one_each = true;
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
    tiles += tiles_of(a, sequence);
    one_each = one_each && a.cu_seqlens[sequence + 1] - a.cu_seqlens[sequence] == 1;
  }
  const int64_t group = a.q.heads / a.kv;
  // few chunks would leave threads idle: then every query head reads the keys for itself
  const int64_t heads = tiles * a.kv >= 4 * team.threads ? group : 1, parts = a.q.heads / heads;
  const Running running = lay_out(scratch, kTile * group, a.q.size, a.out.size);
  if (one_each) return decode<C>(team, next, a, running);
  share(next, tiles * parts, [&](int64_t chunk) {
    attend<C>(a, tile_at(a, chunk / parts), chunk % parts * heads, heads, running);
  });
}

}  // namespace graft
