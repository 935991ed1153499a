// Prompts: keys and values of one head are made from latent rows, kTiles tiles of 16 positions at a time, for all its queries.
#pragma once

#include "native_args.h"

namespace graft {

constexpr int64_t kQueries = 1024;  // of a chunk: positions are expanded once for so many
constexpr int64_t kTiles = 4;

struct ExpandPlaces {
  float* weight;  // [nope + wide, columns], as float32, columns padded with zeros
  float* latent;  // [columns, 16]: 16 positions
  float* made;    // [wide, 16]: their values, before they are laid out
  Running running;
};

struct ExpandSizes {
  int64_t columns, size, wide;  // rank and heads of keys as whole steps of the GEMM; values as whole vectors
};

inline ExpandSizes expand_sizes(int64_t rank, int64_t size, int64_t wide) {
  return {whole(rank, kColumnStep), whole(size, kColumnStep), whole(wide, kLanes)};
}

inline int64_t expanded_scratch(int64_t tokens, int64_t rank, int64_t size, int64_t nope, int64_t wide) {
  const ExpandSizes s = expand_sizes(rank, size, wide);
  const int64_t rows = std::min(tokens, kQueries);
  return (nope + wide) * s.columns + s.columns * kLanes + s.wide * kLanes + rows * (s.size + wide + 2 + kLanes) +
         kTiles * (s.size + s.wide) * kLanes;
}

inline ExpandPlaces expand_places(const LatentArgs& a, const ExpandSizes& s, int64_t rows, float* scratch) {
  ExpandPlaces p{};
  p.weight = scratch;
  p.latent = p.weight + (a.nope() + a.wide()) * s.columns;
  p.made = p.latent + s.columns * kLanes;
  Running& r = p.running;
  r.q = p.made + s.wide * kLanes;
  r.sums = r.q + rows * s.size;
  r.most = r.sums + rows * a.wide();
  r.total = r.most + rows;
  r.weights = r.total + rows;
  r.keys = r.weights + rows * kLanes;
  r.values = r.keys + kTiles * s.size * kLanes;
  return p;
}

struct ExpandChunk { int64_t sequence; int64_t head; int64_t first; int64_t count; };  // queries first … of the sequence

inline int64_t query_groups(const LatentArgs& a, int64_t sequence) {
  return absorbs(a, sequence) ? 0 : (a.brought(sequence) + kQueries - 1) / kQueries;
}

inline int64_t expand_chunks(const LatentArgs& a) {
  int64_t groups = 0;
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) groups += query_groups(a, sequence);
  return groups * a.q.heads;
}

inline ExpandChunk expand_chunk(const LatentArgs& a, int64_t index) {
  int64_t sequence = 0;
  for (; index >= query_groups(a, sequence) * a.q.heads; ++sequence) index -= query_groups(a, sequence) * a.q.heads;
  const int64_t groups = query_groups(a, sequence), first = index % groups * kQueries;
  return {sequence, index / groups, first, std::min(kQueries, a.brought(sequence) - first)};
}

// T rows of the weight times 16 positions: keys as they are read, values to be laid out.
template <int T = kMostTokens>
inline void expand_rows(const LatentArgs& a, const ExpandPlaces& p, const ExpandSizes& s, int64_t first, float* keys) {
  const int64_t rows = a.nope() + a.wide();
  if constexpr (T > 1) {
    if (rows - first < T) return expand_rows<T - 1>(a, p, s, first, keys);
  }
  F made[T];
  WeightF32::tile<T>(reinterpret_cast<const uint8_t*>(p.latent), Rows{p.weight, s.columns, s.columns}, first, made);
  for (int t = 0; t < T; ++t) {
    const int64_t row = first + t;
    store(row < a.nope() ? keys + row * kLanes : p.made + (row - a.nope()) * kLanes, made[t]);
  }
}

// Positions base … base + count, up to 16, as a tile of keys and one of values; lanes after them are 0.
template <class C>
inline void expand_tile(const LatentArgs& a, const ExpandPlaces& p, const ExpandSizes& s, int64_t sequence, int64_t base,
                        int64_t count, float* keys, float* values) {
  for (int64_t i = a.rank * kLanes; i < s.columns * kLanes; ++i) p.latent[i] = 0.0f;
  for (int64_t i = a.q.size * kLanes; i < s.size * kLanes; ++i) keys[i] = 0.0f;
  for (int64_t j = 0; j < kLanes; ++j) {
    const bool there = j < count;
    const C* const row = static_cast<const C*>(a.latent_cache) + (there ? a.slot(sequence, base + j) * a.row() : 0);
    for (int64_t i = 0; i < a.rank; ++i) p.latent[i * kLanes + j] = there ? widen(row[i]) : 0.0f;
    for (int64_t i = 0; i < a.rope; ++i) keys[(a.nope() + i) * kLanes + j] = there ? widen(row[a.rank + i]) : 0.0f;
  }
  for (int64_t first = 0; first < a.nope() + a.wide(); first += kMostTokens) expand_rows(a, p, s, first, keys);
  for (int64_t i = 0; i < a.wide(); i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j)
      for (int64_t lane = 0; lane < kLanes; ++lane)
        values[(i + j) * kLanes + lane] = i + lane < a.wide() ? p.made[(i + lane) * kLanes + j] : 0.0f;
}

// One head's queries of a part of a prompt, over all positions that they see.
template <class C, class W>
void attend_expanded(const LatentArgs& a, const ExpandChunk& chunk, float* scratch) {
  const ExpandSizes s = expand_sizes(a.rank, a.q.size, a.wide());
  const ExpandPlaces p = expand_places(a, s, chunk.count, scratch);
  const W* const weight = head_weight<W>(a, chunk.head);
  for (int64_t row = 0; row < a.nope() + a.wide(); ++row)
    for (int64_t i = 0; i < s.columns; ++i) p.weight[row * s.columns + i] = i < a.rank ? widen(weight[row * a.rank + i]) : 0.0f;
  AttentionArgs inner{};
  inner.q.size = s.size, inner.out.size = a.wide(), inner.scale = a.scale;
  const int64_t token = a.cu_seqlens[chunk.sequence] + chunk.first;
  for (int64_t row = 0; row < chunk.count; ++row) {
    const float* const q = a.q.at(token + row, chunk.head);
    for (int64_t i = 0; i < s.size; ++i) p.running.q[row * s.size + i] = i < a.q.size ? q[i] : 0.0f;
    begin_row(inner, p.running, row, nullptr);
  }
  const int64_t position = a.seq_lens[chunk.sequence] - a.brought(chunk.sequence) + chunk.first, seen = position + chunk.count;
  for (int64_t base = 0; base < seen; base += kTiles * kLanes) {
    const int64_t tiles = std::min<int64_t>(kTiles, (seen - base + kLanes - 1) / kLanes);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t from = base + tile * kLanes, count = std::min<int64_t>(kLanes, seen - from);
      expand_tile<C>(a, p, s, chunk.sequence, from, count, p.running.keys + tile * s.size * kLanes, p.running.values + tile * s.wide * kLanes);
    }
    const int64_t above = std::max<int64_t>(0, base - position) / kMostTokens * kMostTokens;  // rows that see none of them
    for (int64_t first = above; first < chunk.count; first += kMostTokens)
      for (int64_t tile = 0; tile < tiles; ++tile) {
        Running r = p.running;
        r.keys += tile * s.size * kLanes, r.values += tile * s.wide * kLanes;
        const int64_t from = base + tile * kLanes;
        absorb_some(std::min<int64_t>(kMostTokens, chunk.count - first), inner, r, first,
                    {position, 1, from, std::min<int64_t>(kLanes, seen - from)});
      }
  }
  for (int64_t row = 0; row < chunk.count; ++row) end_row(p.running, row, a.wide(), a.out.at(token + row, chunk.head));
}

}  // namespace graft
