// Tokens whose queries go into the latent space: all heads attend over one row a position, as it lies in the cache.
//
// Three phases of up to kRound tokens at a time, with a barrier after each: queries times the weight's part for keys,
// attention over rows, what came out times the part for values. Weights and rows are read once for several tokens or heads.
#pragma once

#include "native_args.h"

namespace graft {

constexpr int64_t kRound = 64;
constexpr int64_t kColumnBlock = 64;  // columns of a chunk that makes queries
constexpr int64_t kValueRows = 16;    // rows of the weight of a chunk that makes results
constexpr int kTogether = 4;          // tokens that a weight is read for at once

struct LatentToken { int64_t token; int64_t sequence; int64_t seen; };

// The tokens of one round, and how their contexts and heads are divided among chunks.
struct LatentRound {
  LatentToken tokens[kRound];
  int64_t count = 0, parts = 1, heads = 1;  // heads: of a chunk
};

inline int64_t round_floats(int64_t tokens, int64_t heads, int64_t row) { return std::min(tokens, kRound) * heads * row; }

inline float* query_at(const LatentArgs& a, int64_t index, int64_t head) { return a.shared + (index * a.q.heads + head) * a.row(); }

// Of one part of a context: sums, largest score, sum of weights.
inline float* latent_part(const LatentArgs& a, const LatentRound& r, int64_t index, int64_t head, int64_t part) {
  return query_at(a, r.count, 0) + ((index * a.q.heads + head) * kMostParts + part) * (a.rank + 2);
}

// Tokens first … first + kRound of those that are absorbed.
inline void find_round(const LatentArgs& a, int64_t first, int threads, LatentRound& r) {
  r.count = 0;
  int64_t longest = 0;
  for (int64_t sequence = 0; sequence < a.sequences && r.count < kRound; ++sequence) {
    const int64_t brought = a.brought(sequence);
    if (!absorbs(a, sequence)) continue;
    for (int64_t i = std::min(first, brought); i < brought && r.count < kRound; ++i) {
      const int64_t seen = a.seq_lens[sequence] - brought + i + 1;
      r.tokens[r.count++] = {a.cu_seqlens[sequence] + i, sequence, seen};
      longest = std::max(longest, seen);
    }
    first -= std::min(first, brought);
  }
  const int64_t wanted = 4 * threads, count = std::max<int64_t>(1, r.count);
  r.parts = count > kMostDivided ? 1 : std::max<int64_t>(1, std::min({(wanted + count - 1) / count, kMostParts, longest / kSpan}));
  const int64_t groups = std::max<int64_t>(1, wanted / (count * r.parts));
  r.heads = std::min(a.q.heads, whole((a.q.heads + groups - 1) / groups, kMostHeads));
}

// out[t][c] = sum over i of q[t][i] * w[i][c], for V vectors of columns; `lanes` of the last one.
template <class W, int T, int V>
inline void mix_rows(const W* w, int64_t rows, int64_t stride, const float* const* q, float scale, float* const* out, int lanes) {
  F sums[T][V];
  for (auto& token : sums)
    for (F& one : token) one = set(0.0f);
  for (int64_t i = 0; i < rows; ++i, w += stride)
    unroll<V>([&](auto v) {
      const F column = lanes == kLanes ? load(w + v * kLanes) : load(w + v * kLanes, lanes);
      unroll<T>([&](auto t) { sums[t][v] = fma(set(q[t][i]), column, sums[t][v]); });
    });
  for (int t = 0; t < T; ++t)
    for (int v = 0; v < V; ++v) {
      const F made = sums[t][v] * set(scale);
      lanes == kLanes ? store(out[t] + v * kLanes, made) : store(out[t] + v * kLanes, made, lanes);
    }
}

// Columns begin … end of one head's queries in the latent space, for T tokens.
template <class W, int T>
inline void make_queries(const LatentArgs& a, const LatentRound& r, int64_t first, int64_t head, int64_t begin, int64_t end) {
  const float* q[T];
  float* out[T];
  const W* const weight = head_weight<W>(a, head);
  int64_t c = begin;
  const auto point = [&] {
    for (int t = 0; t < T; ++t) q[t] = a.q.at(r.tokens[first + t].token, head), out[t] = query_at(a, first + t, head) + c;
  };
  for (; c + kColumnBlock <= end; c += kColumnBlock)
    point(), mix_rows<W, T, kColumnBlock / kLanes>(weight + c, a.nope(), a.rank, q, a.scale, out, kLanes);
  for (; c < end; c += kLanes)
    point(), mix_rows<W, T, 1>(weight + c, a.nope(), a.rank, q, a.scale, out, int(std::min<int64_t>(kLanes, end - c)));
}

// T rows of results: out[t][i] = w[i] · mixed[t], for R rows of the weight.
template <class W, int T, int R>
inline void weigh_rows(const W* w, int64_t columns, const float* const* mixed, float* const* out) {
  F sums[R][T];
  for (auto& row : sums)
    for (F& one : row) one = set(0.0f);
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int lanes = int(std::min<int64_t>(kLanes, columns - c));
    F from[T];
    unroll<T>([&](auto t) { from[t] = lanes == kLanes ? load(mixed[t] + c) : load(mixed[t] + c, lanes); });
    unroll<R>([&](auto i) {
      const F row = lanes == kLanes ? load(w + i * columns + c) : load(w + i * columns + c, lanes);
      unroll<T>([&](auto t) { sums[i][t] = fma(row, from[t], sums[i][t]); });
    });
  }
  for (int i = 0; i < R; ++i)
    for (int t = 0; t < T; ++t) out[t][i] = sum(sums[i][t]);
}

template <class W, int T>
inline void make_results(const LatentArgs& a, const LatentRound& r, int64_t first, int64_t head, int64_t begin, int64_t end) {
  constexpr int kRows = 4;
  const float* mixed[T];
  float* out[T];
  for (int t = 0; t < T; ++t) mixed[t] = query_at(a, first + t, head), out[t] = a.out.at(r.tokens[first + t].token, head) + begin;
  const W* w = head_weight<W>(a, head) + (a.nope() + begin) * a.rank;
  const auto go_on = [&](int64_t rows) {
    w += rows * a.rank, begin += rows;
    for (float*& to : out) to += rows;
  };
  for (; begin + kRows <= end; go_on(kRows)) weigh_rows<W, T, kRows>(w, a.rank, mixed, out);
  for (; begin < end; go_on(1)) weigh_rows<W, T, 1>(w, a.rank, mixed, out);
}

// f<T>(first) for all tokens of the round, up to kTogether at once.
template <class Do>
inline void for_tokens(const LatentRound& r, Do go) {
  int64_t first = 0;
  for (; first + kTogether <= r.count; first += kTogether) go(std::integral_constant<int, kTogether>{}, first);
  for (; first + 2 <= r.count; first += 2) go(std::integral_constant<int, 2>{}, first);
  if (first < r.count) go(std::integral_constant<int, 1>{}, first);
}

// G heads of a token over up to kSpan rows, into the running softmax of theirs.
template <class C, int G>
inline void attend_rows(const LatentArgs& a, const Running& r, int64_t first, const float* q, const C* rows, const Positions& at) {
  constexpr int kVectors = kSpan / kLanes;
  alignas(64) float weights[G * kSpan];
  float shrink[G];
  score<C, G>(q, a.row(), rows, at, weights);
  for (int h = 0; h < G; ++h) {
    F scores[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      const int64_t there = at.count - i * kLanes;
      scores[i] = there > 0 ? only(load(weights + h * kSpan + i * kLanes), 0, there) : set(-INFINITY);
    }
    shrink[h] = weigh(r, first + h, scores);
    for (int i = 0; i < kVectors; ++i) store(weights + h * kSpan + i * kLanes, scores[i]);
  }
  gather<C, G>(r.sums + first * a.rank, a.rank, shrink, weights, rows, at);
}

// Heads `head` … of one token over one part of its context; the rows of a span stay at hand for all of them.
template <class C>
void attend_token(const LatentArgs& a, const LatentRound& round, int64_t index, int64_t head, int64_t part, float* scratch) {
  const LatentToken& token = round.tokens[index];
  const int64_t heads = std::min(round.heads, a.q.heads - head), each = whole((token.seen + round.parts - 1) / round.parts, kLanes);
  const C* const rows = static_cast<const C*>(a.latent_cache);
  Running r{};
  r.sums = scratch, r.most = r.sums + heads * a.rank, r.total = r.most + heads;
  for (int64_t i = 0; i < heads * a.rank; ++i) r.sums[i] = 0.0f;
  for (int64_t h = 0; h < heads; ++h) r.most[h] = -INFINITY, r.total[h] = 0.0f;
  const int64_t end = std::min(token.seen, (part + 1) * each);
  for (int64_t begin = part * each; begin < end; begin += kSpan) {
    Positions at;
    at.count = std::min<int64_t>(kSpan, end - begin);
    for (int64_t j = 0; j < at.count; ++j) at.keys[j] = at.values[j] = a.slot(token.sequence, begin + j) * a.row();
    int64_t h = 0;
    for (; h + kMostHeads <= heads; h += kMostHeads) attend_rows<C, kMostHeads>(a, r, h, query_at(a, index, head + h), rows, at);
    for (; h < heads; ++h) attend_rows<C, 1>(a, r, h, query_at(a, index, head + h), rows, at);
  }
  for (int64_t h = 0; h < heads; ++h) {
    if (round.parts == 1) {
      end_row(r, h, a.rank, query_at(a, index, head + h));
      continue;
    }
    float* const to = latent_part(a, round, index, head + h, part);
    for (int64_t i = 0; i < a.rank; ++i) to[i] = r.sums[h * a.rank + i];
    to[a.rank] = r.most[h], to[a.rank + 1] = r.total[h];
  }
}

// One head's mixed row from its parts, in the place of its query.
inline void join_parts(const LatentArgs& a, const LatentRound& round, int64_t index, int64_t head) {
  float most = -INFINITY, total = 0.0f, by[kMostParts];
  for (int64_t part = 0; part < round.parts; ++part) most = std::fmax(most, latent_part(a, round, index, head, part)[a.rank]);
  for (int64_t part = 0; part < round.parts; ++part) {
    const float* const from = latent_part(a, round, index, head, part);
    by[part] = from[a.rank] == -INFINITY ? 0.0f : std::exp(from[a.rank] - most);  // -inf: a part without positions
    total += by[part] * from[a.rank + 1];
  }
  float* const to = query_at(a, index, head);
  for (int64_t i = 0; i < a.rank; ++i) {
    float value = 0.0f;
    for (int64_t part = 0; part < round.parts; ++part) value += by[part] * latent_part(a, round, index, head, part)[i];
    to[i] = value / total;
  }
}

// All phases of one round; `taken`: chunks of the step before it. Gives those after it.
template <class C, class W>
int64_t attend_round(Team& team, std::atomic<int64_t>& next, const LatentArgs& a, const LatentRound& r, int64_t taken, float* scratch) {
  const auto phase = [&](int64_t chunks, auto go) {
    share_until(next, taken + chunks, [&](int64_t chunk) { go(chunk - taken); });
    team.barrier();
    taken += chunks;
  };
  const int64_t heads = a.q.heads, blocks = (a.rank + kColumnBlock - 1) / kColumnBlock;
  phase(heads * blocks, [&](int64_t chunk) {
    const int64_t head = chunk / blocks, begin = chunk % blocks * kColumnBlock, end = std::min(a.rank, begin + kColumnBlock);
    for_tokens(r, [&](auto tokens, int64_t first) { make_queries<W, tokens>(a, r, first, head, begin, end); });
    if (begin == 0)
      for (int64_t t = 0; t < r.count; ++t)
        for (int64_t i = 0; i < a.rope; ++i)
          query_at(a, t, head)[a.rank + i] = a.q.at(r.tokens[t].token, head)[a.nope() + i] * a.scale;
  });
  const int64_t groups = (heads + r.heads - 1) / r.heads;
  phase(r.count * groups * r.parts, [&](int64_t chunk) {
    attend_token<C>(a, r, chunk / r.parts / groups, chunk / r.parts % groups * r.heads, chunk % r.parts, scratch);
  });
  if (r.parts > 1) phase(r.count * heads, [&](int64_t chunk) { join_parts(a, r, chunk / heads, chunk % heads); });
  const int64_t rows = (a.wide() + kValueRows - 1) / kValueRows;
  phase(heads * rows, [&](int64_t chunk) {
    const int64_t head = chunk / rows, begin = chunk % rows * kValueRows, end = std::min(a.wide(), begin + kValueRows);
    for_tokens(r, [&](auto tokens, int64_t first) { make_results<W, tokens>(a, r, first, head, begin, end); });
  });
  return taken;
}

}  // namespace graft
