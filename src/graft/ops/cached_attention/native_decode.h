// Attention of few queries that see the same places of a sequence: the heads of a key-value head, for one new token.
//
// Keys and values are read as they lie, and widened once for up to four heads. The context of a sequence may be divided
// into parts, which threads take and one of them puts together: a small model has fewer key-value heads than a CPU cores.
#pragma once

#include "native_softmax.h"

namespace graft {

constexpr int64_t kSpan = 64;      // keys at once: an exponential takes long, four vectors of them not longer
constexpr int kMostHeads = 4;      // at once: their sums fill half of the registers
constexpr int64_t kMostParts = 8, kMostDivided = 8;  // parts of a context, and sequences whose contexts are divided

// Where the keys and values of up to kSpan positions begin.
struct Positions { int64_t keys[kSpan]; int64_t values[kSpan]; int64_t count; };

inline void find_positions(const AttentionArgs& a, int64_t sequence, int64_t begin, int64_t end, Positions& found) {
  const int64_t* const table = a.block_tables + sequence * a.table_width;
  found.count = std::min<int64_t>(kSpan, end - begin);
  for (int64_t j = 0, block = begin / a.block, position = begin % a.block; j < found.count; ++block, position = 0) {
    int64_t slot = (table[block] * a.block + position) * a.kv;
    for (const int64_t last = std::min(found.count, j + a.block - position); j < last; ++j, slot += a.kv)
      found.keys[j] = slot * a.q.size, found.values[j] = slot * a.out.size;
  }
}

// scores[h * kSpan + j] = query h · key j
template <class C, int G>
inline void score(const float* q, int64_t size, const C* keys, const Positions& at, float* scores) {
  const int64_t whole_vectors = size / kLanes * kLanes;
  for (int64_t j = 0; j < at.count; ++j) {
    const C* const key = keys + at.keys[j];
    F sums[G];
    unroll<G>([&](auto h) { sums[h] = set(0.0f); });
    for (int64_t i = 0; i < whole_vectors; i += kLanes) {
      const F k = load(key + i);
      unroll<G>([&](auto h) { sums[h] = fma(load(q + h * size + i), k, sums[h]); });
    }
    unroll<G>([&](auto h) { scores[h * kSpan + j] = sum(sums[h]); });
  }
  for (int64_t i = whole_vectors; i < size; ++i)
    for (int64_t j = 0; j < at.count; ++j)
      for (int h = 0; h < G; ++h) scores[h * kSpan + j] += q[h * size + i] * widen(keys[at.keys[j] + i]);
}

// sums[h, i] = sums[h, i] * shrink[h] + the values, each times its weight
template <class C, int G>
inline void gather(float* sums, int64_t wide, const float* shrink, const float* weights, const C* values, const Positions& at) {
  const int64_t whole_vectors = wide / kLanes * kLanes;
  for (int64_t i = 0; i < whole_vectors; i += kLanes) {
    F total[G];
    unroll<G>([&](auto h) { total[h] = load(sums + h * wide + i) * set(shrink[h]); });
    for (int64_t j = 0; j < at.count; ++j) {
      const F value = load(values + at.values[j] + i);
      unroll<G>([&](auto h) { total[h] = fma(set(weights[h * kSpan + j]), value, total[h]); });
    }
    unroll<G>([&](auto h) { store(sums + h * wide + i, total[h]); });
  }
  for (int64_t i = whole_vectors; i < wide; ++i)
    for (int h = 0; h < G; ++h) {
      float total = sums[h * wide + i] * shrink[h];
      for (int64_t j = 0; j < at.count; ++j) total += weights[h * kSpan + j] * widen(values[at.values[j] + i]);
      sums[h * wide + i] = total;
    }
}

// Rows first … first + G of the running softmax over positions begin … end.
template <class C, int G>
inline void attend_heads(const AttentionArgs& a, const Running& r, int64_t first, int64_t sequence, int64_t kv_head,
                         int64_t begin, int64_t end) {
  constexpr int kVectors = kSpan / kLanes;
  const int64_t size = a.q.size, wide = a.out.size;
  const C* const keys = static_cast<const C*>(a.k_cache) + kv_head * size;
  const C* const values = static_cast<const C*>(a.v_cache) + kv_head * wide;
  Positions at;
  alignas(64) float weights[G * kSpan];
  float shrink[G];
  for (; begin < end; begin += kSpan) {
    find_positions(a, sequence, begin, end, at);
    score<C, G>(r.q + first * size, size, keys, at, weights);
    for (int h = 0; h < G; ++h) {
      F scores[kVectors];
      for (int i = 0; i < kVectors; ++i) {
        const int64_t there = at.count - i * kLanes;
        scores[i] = there > 0 ? only(scaled(a, load(weights + h * kSpan + i * kLanes)), 0, there) : set(-INFINITY);
      }
      shrink[h] = weigh(r, first + h, scores);
      for (int i = 0; i < kVectors; ++i) store(weights + h * kSpan + i * kLanes, scores[i]);
    }
    gather<C, G>(r.sums + first * wide, wide, shrink, weights, values, at);
  }
}

// `heads` rows, up to kMostHeads at once.
template <class C>
inline void attend_some(const AttentionArgs& a, const Running& r, int64_t heads, int64_t sequence, int64_t kv_head,
                        int64_t begin, int64_t end) {
  int64_t row = 0;
  for (; row + kMostHeads <= heads; row += kMostHeads)
    attend_heads<C, kMostHeads>(a, r, row, sequence, kv_head, begin, end);
  if (heads - row == 3) attend_heads<C, 3>(a, r, row, sequence, kv_head, begin, end);
  if (heads - row == 2) attend_heads<C, 2>(a, r, row, sequence, kv_head, begin, end);
  if (heads - row == 1) attend_heads<C, 1>(a, r, row, sequence, kv_head, begin, end);
}

inline int64_t attention_shared(int64_t heads, int64_t wide) { return kMostDivided * kMostParts * heads * (wide + 2); }

// Parts that each context is divided into: as many as keep the threads busy, and none without a span of its own.
inline int64_t parts_of(const AttentionArgs& a, int threads) {
  if (a.sequences > kMostDivided) return 1;
  int64_t longest = 0;
  for (int64_t i = 0; i < a.sequences; ++i) longest = std::max(longest, a.seq_lens[i]);
  if (a.window > 0) longest = std::min(longest, a.window);
  const int64_t wanted = (4 * threads + a.sequences * a.kv - 1) / std::max<int64_t>(1, a.sequences * a.kv);
  return std::max<int64_t>(1, std::min({wanted, kMostParts, longest / kSpan}));
}

struct Part { int64_t sequence; int64_t kv_head; int64_t index; int64_t count; };  // of a context: one of so many

inline float* own_part(const AttentionArgs& a, int64_t sequence, int64_t head, int64_t part) {
  return a.shared + ((sequence * a.q.heads + head) * kMostParts + part) * (a.out.size + 2);
}

// The heads of a key-value head over one part of a context: to the result, or if there are several to a.shared.
template <class C>
void attend_part(const AttentionArgs& a, const Part& part, const Running& r) {
  const int64_t group = a.q.heads / a.kv, size = a.q.size, wide = a.out.size;
  const int64_t token = a.cu_seqlens[part.sequence], head = part.kv_head * group, end = a.seq_lens[part.sequence];
  const int64_t first = a.window > 0 ? std::max<int64_t>(0, end - a.window) : 0;
  const int64_t each = whole((end - first + part.count - 1) / part.count, kLanes), begin = first + part.index * each;
  for (int64_t row = 0; row < group; ++row) {
    rotate_head(a.rotation, token, a.q.at(token, head + row), size, r.q + row * size);
    begin_row(a, r, row, part.index == 0 && a.sinks != nullptr ? a.sinks + head + row : nullptr);
  }
  attend_some<C>(a, r, group, part.sequence, part.kv_head, begin, std::min(end, begin + each));
  for (int64_t row = 0; row < group; ++row) {
    if (part.count == 1) {
      end_row(r, row, wide, a.out.at(token, head + row));
      continue;
    }
    float* const to = own_part(a, part.sequence, head + row, part.index);
    for (int64_t i = 0; i < wide; ++i) to[i] = r.sums[row * wide + i];
    to[wide] = r.most[row], to[wide + 1] = r.total[row];
  }
}

// One head's result from its parts.
inline void put_together(const AttentionArgs& a, int64_t sequence, int64_t head, int64_t parts) {
  const int64_t wide = a.out.size;
  float most = -INFINITY, total = 0.0f, by[kMostParts];
  for (int64_t part = 0; part < parts; ++part) most = std::fmax(most, own_part(a, sequence, head, part)[wide]);
  for (int64_t part = 0; part < parts; ++part) {
    const float* const from = own_part(a, sequence, head, part);
    by[part] = from[wide] == -INFINITY ? 0.0f : std::exp(from[wide] - most);  // -inf: a part without positions
    total += by[part] * from[wide + 1];
  }
  float* const out = a.out.at(a.cu_seqlens[sequence], head);
  for (int64_t i = 0; i < wide; ++i) {
    float value = 0.0f;
    for (int64_t part = 0; part < parts; ++part) value += by[part] * own_part(a, sequence, head, part)[i];
    out[i] = value / total;
  }
}

// One new token of every sequence.
template <class C>
void decode(Team& team, std::atomic<int64_t>& next, const AttentionArgs& a, const Running& r) {
  const int64_t parts = parts_of(a, team.threads), chunks = a.sequences * a.kv * parts;
  const auto attend = [&](int64_t chunk) {
    attend_part<C>(a, {chunk / parts / a.kv, chunk / parts % a.kv, chunk % parts, parts}, r);
  };
  if (parts == 1) return share(next, chunks, attend);
  share_until(next, chunks, attend);
  team.barrier();
  share(next, chunks + a.sequences * a.q.heads, [&](int64_t chunk) {
    put_together(a, (chunk - chunks) / a.q.heads, (chunk - chunks) % a.q.heads, parts);
  });
}

}  // namespace graft
