// Packed experts: tiles of q8 or q4 (weights/stacked.py), rows of the tokens sorted by expert.
//
// Every thread sorts the (token, expert) pairs for itself, in some hundred nanoseconds a token. The rows that the GEMM reads
// lie in that order, so that an expert's tokens are neighbours and a tile is read once for all of them. up: chunks are some
// tiles of one expert. down: chunks are some tiles of all experts, so that one thread has a token's sum to itself.
#pragma once

#include "ops/fused_linear/native.h"
#include "ops/view.h"

namespace graft {

// gate_up: [experts, 2 f / 16 tiles], gate and up tiles in turn; down: [experts, d / 16 tiles]; hidden: pairs of f, sorted.
struct PackedExpertsArgs {
  View x; View weights; View ids; const void* matrix; const float* bias; Act act; bool clamped; bool weigh_input;
  int64_t f; int64_t d; int64_t experts; int64_t rows; View hidden; View out; float* shared;
};

constexpr int64_t kFewPairs = 16;  // up to here every thread prepares the rows for itself

inline int64_t sort_floats(int64_t pairs, int64_t experts) { return pairs + 2 * experts + 1; }

template <class W>
inline int64_t experts_scratch(int64_t pairs, int64_t k, int64_t experts) {
  return W::row_floats(whole(k, W::kColumns)) * std::min(pairs, kFewPairs) + sort_floats(pairs, experts) + 2 * kLanes;
}

template <class W>
inline int64_t experts_shared(int64_t pairs, int64_t k) {
  return pairs <= kFewPairs ? 0 : W::row_floats(whole(k, W::kColumns)) * pairs + kLanes;
}

// Pairs by expert: pair[at] is token * top_k + slot, for at from start[expert] to start[expert + 1]; within an expert in order
// of tokens. Of the experts that have some, `active` are listed. Sorted by a thread that has taken a chunk, and no sooner: one
// that comes late finds the step over, and other numbers where the ids were.
struct SortedPairs {
  int32_t *pair, *start, *list;
  int64_t active = -1;

  SortedPairs(const PackedExpertsArgs& a, float* room)
      : pair(reinterpret_cast<int32_t*>(room)), start(pair + a.rows * a.ids.size), list(start + a.experts + 1) {}

  void sort(const PackedExpertsArgs& a) {
    if (active >= 0) return;
    active = 0;
    const int64_t k = a.ids.size;
    std::fill(start, start + a.experts + 1, 0);
    const auto expert = [&](int64_t row, int64_t slot) { return static_cast<int64_t>(a.ids.row(row)[slot]); };
    for (int64_t row = 0; row < a.rows; row++)
      for (int64_t slot = 0; slot < k; slot++) start[expert(row, slot) + 1]++;
    for (int64_t e = 0; e < a.experts; e++) {
      if (start[e + 1] > 0) list[active++] = int32_t(e);
      start[e + 1] += start[e];
    }
    for (int64_t row = a.rows - 1; row >= 0; row--)  // from behind: start[e + 1] goes down to where e begins
      for (int64_t slot = k - 1; slot >= 0; slot--) pair[--start[expert(row, slot) + 1]] = int32_t(row * k + slot);
    std::copy(start + 1, start + a.experts + 1, start);
    start[a.experts] = int32_t(a.rows * k);
  }

  int64_t count(int64_t expert) const { return start[expert + 1] - start[expert]; }
};

// A row as the GEMM takes it, times `by`; columns after k are 0.
template <class W>
inline void prepare_pair(const float* x, int64_t k, int64_t columns, float by, float* to) {
  W::store_row(to, columns, [&](int64_t c) {
    const int lanes = int(std::min<int64_t>(kLanes, k - c));
    if (lanes <= 0) return set(0.0f);
    return (lanes == kLanes ? load(x + c) : load(x + c, lanes)) * set(by);
  });
}

// finish(at, sums, up) for T sorted rows from `first` with one tile, or one pair of tiles.
template <class W, bool two, int T = W::kMostTokens, class Finish>
inline void expert_tile(int64_t count, const Rows& rows, const uint8_t* w, int64_t first, const Finish& finish) {
  if constexpr (T > 1) {
    if (count < T) return expert_tile<W, two, T - 1>(count, rows, w, first, finish);
  }
  F sums[T], up[T];
  W::template tile<T>(w, rows, first, sums);
  if constexpr (two) W::template tile<T>(w + W::tile_bytes(rows.columns), rows, first, up);
  for (int t = 0; t < T; t++) finish(first + t, sums[t], two ? up[t] : sums[t]);
}

// All rows of an expert with one tile, in passes of nearly the same size.
template <class W, bool two, class Finish>
inline void expert_rows(const Rows& rows, const uint8_t* w, int64_t first, int64_t count, const Finish& finish) {
  const int64_t passes = (count + W::kMostTokens - 1) / W::kMostTokens;
  for (int64_t pass = 0; pass < passes; pass++) {
    const int64_t from = count * pass / passes, to = count * (pass + 1) / passes;
    expert_tile<W, two>(to - from, rows, w, first + from, finish);
  }
}

// go(rows, chunk) for this thread's chunks, with all rows ready: prepared by each thread, or shared with a barrier behind.
template <class W, class Prepare, class Do>
inline void with_rows(
    Team& team, std::atomic<int64_t>& next, const PackedExpertsArgs& a, SortedPairs& sorted, int64_t columns, int64_t chunks,
    float* scratch, const Prepare& prepare, const Do& go) {
  const int64_t pairs = a.rows * a.ids.size;
  const int64_t stride = W::row_floats(columns), parts = pairs > kFewPairs ? (pairs + 3) / 4 : 0;
  float* const ready = at_line(parts ? a.shared : scratch);
  if (parts) {
    share_until(next, parts, [&](int64_t part) {
      sorted.sort(a);
      for (int64_t at = 4 * part; at < std::min(pairs, 4 * part + 4); at++) prepare(at, ready + at * stride);
    });
    team.barrier();
  }
  bool made = parts > 0;
  for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < parts + chunks;) {
    sorted.sort(a);
    if (!made)
      for (int64_t at = 0; at < pairs; at++) prepare(at, ready + at * stride);
    made = true;
    go(Rows{ready, stride, columns}, chunk - parts);
  }
}

inline F part_of(const float* from, int lanes) { return lanes == kLanes ? load(from) : load(from, lanes); }

inline void store_part(float* to, F value, int lanes) { lanes == kLanes ? store(to, value) : store(to, value, lanes); }

// act(gate) * up; clamped: gpt-oss, both are bounded, up counts from 1, and a sigmoid of 1.702 gate.
inline F activated(const PackedExpertsArgs& a, F gate, F up) {
  if (!a.clamped) return activate(a.act, gate) * up;
  gate = min(set(7.0f), gate), up = min(set(7.0f), max(set(-7.0f), up));
  return (up + set(1.0f)) * sigmoid_of(gate, gate * set(1.702f));
}

// hidden[at] = act(gate · x) * (up · x) for each pair.
template <class W>
void packed_up(Team& team, int, std::atomic<int64_t>& next, const PackedExpertsArgs& a, float* scratch) {
  const int64_t k = a.ids.size, pairs = a.rows * k, columns = whole(a.d, W::kColumns);
  if (pairs == 0) return;
  SortedPairs sorted(a, scratch);
  const int64_t bytes = 2 * W::tile_bytes(columns), tiles = (a.f + kLanes - 1) / kLanes;
  const int64_t most = std::min(pairs, a.experts);  // that may have tokens: how many do is not known before a chunk is taken
  const int64_t each = chunk_tiles(tiles * most, bytes, team.threads), parts = (tiles + each - 1) / each;
  const auto prepare = [&](int64_t at, float* to) {
    const int64_t row = sorted.pair[at] / k, slot = sorted.pair[at] % k;
    prepare_pair<W>(a.x.row(row), a.d, columns, a.weigh_input ? a.weights.row(row)[slot] : 1.0f, to);
  };
  with_rows<W>(team, next, a, sorted, columns, most * parts, scratch + sort_floats(pairs, a.experts), prepare,
               [&](const Rows& rows, int64_t chunk) {
    if (chunk / parts >= sorted.active) return;
    const int64_t expert = sorted.list[chunk / parts], first = chunk % parts * each, last = std::min(tiles, first + each);
    const uint8_t* const w = static_cast<const uint8_t*>(a.matrix) + expert * tiles * bytes;
    const float* const bias = a.bias == nullptr ? nullptr : a.bias + expert * 2 * a.f;
    for (int64_t tile = first; tile < last; tile++) {
      const int64_t row = tile * kLanes;
      const int lanes = int(std::min<int64_t>(kLanes, a.f - row));
      expert_rows<W, true>(rows, w + tile * bytes, sorted.start[expert], sorted.count(expert), [&](int64_t at, F gate, F up) {
        if (bias != nullptr) gate = gate + part_of(bias + row, lanes), up = up + part_of(bias + a.f + row, lanes);
        store_part(a.hidden.data + at * a.f + row, activated(a, gate, up), lanes);
      });
    }
  });
}

// out[row] = the sum over the token's experts, in the order of their numbers, of weight * (down · hidden).
template <class W>
void packed_down(Team& team, int, std::atomic<int64_t>& next, const PackedExpertsArgs& a, float* scratch) {
  const int64_t k = a.ids.size, pairs = a.rows * k, columns = whole(a.f, W::kColumns);
  if (pairs == 0) return;
  SortedPairs sorted(a, scratch);
  const int64_t bytes = W::tile_bytes(columns), tiles = (a.d + kLanes - 1) / kLanes;
  const int64_t each = chunk_tiles(tiles, bytes * std::min(pairs, a.experts), team.threads), parts = (tiles + each - 1) / each;
  const auto prepare = [&](int64_t at, float* to) { prepare_pair<W>(a.hidden.data + at * a.f, a.f, columns, 1.0f, to); };
  with_rows<W>(team, next, a, sorted, columns, parts, scratch + sort_floats(pairs, a.experts), prepare,
               [&](const Rows& rows, int64_t chunk) {
    const int64_t first = chunk * each, last = std::min(tiles, first + each), width = std::min(a.d, last * kLanes) - first * kLanes;
    for (int64_t row = 0; row < a.rows; row++) std::fill_n(a.out.row(row) + first * kLanes, width, 0.0f);
    for (int64_t i = 0; i < sorted.active; i++) {
      const int64_t expert = sorted.list[i];
      const uint8_t* const w = static_cast<const uint8_t*>(a.matrix) + expert * tiles * bytes;
      const float* const bias = a.bias == nullptr ? nullptr : a.bias + expert * a.d;
      for (int64_t tile = first; tile < last; tile++) {
        const int64_t row = tile * kLanes;
        const int lanes = int(std::min<int64_t>(kLanes, a.d - row));
        expert_rows<W, false>(rows, w + tile * bytes, sorted.start[expert], sorted.count(expert), [&](int64_t at, F sums, F) {
          const int64_t token = sorted.pair[at] / k, slot = sorted.pair[at] % k;
          if (bias != nullptr) sums = sums + part_of(bias + row, lanes);
          float* const to = a.out.row(token) + row;
          const F share = set(a.weigh_input ? 1.0f : a.weights.row(token)[slot]);
          store_part(to, fma(share, sums, part_of(to, lanes)), lanes);
        });
      }
    }
  });
}

}  // namespace graft
