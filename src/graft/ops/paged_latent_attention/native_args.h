// What latent attention is given: queries, latent rows in a paged cache, and the weight of their keys and values.
//
// The weight is [heads * (nope + wide), rank]: of each head `nope` rows for keys, then `wide` rows for values. A row of
// the cache has `rank` numbers, which keys and values are made of, and the rotated part of the keys.
#pragma once

#include "ops/cached_attention/native.h"

namespace graft {

struct LatentArgs {
  View q; const void* weight; const void* latent_cache; int64_t rank; int64_t rope; int64_t block;  // block: its tokens
  const int64_t* block_tables; int64_t table_width; const int64_t* cu_seqlens; const int64_t* seq_lens; int64_t sequences;
  float scale;
  View out;
  float* shared;  // latent_shared floats, one place for all threads

  int64_t row() const { return rank + rope; }
  int64_t nope() const { return q.size - rope; }
  int64_t wide() const { return out.size; }
  int64_t brought(int64_t sequence) const { return cu_seqlens[sequence + 1] - cu_seqlens[sequence]; }
  int64_t slot(int64_t sequence, int64_t position) const {
    return block_tables[sequence * table_width + position / block] * block + position % block;
  }
};

template <class W>
inline const W* head_weight(const LatentArgs& a, int64_t head) {
  return static_cast<const W*>(a.weight) + head * (a.nope() + a.wide()) * a.rank;
}

// Whether the queries of a sequence go into the latent space; paged_latent_attention/reference.py has the same rule.
inline bool absorbs(const LatentArgs& a, int64_t sequence) {
  const int64_t brought = a.brought(sequence), seen = a.seq_lens[sequence];
  const int64_t each = a.rank * (a.nope() + a.wide()), pairs = brought * seen;
  return brought * each + pairs * (2 * a.rank + a.rope) <= seen * each + pairs * (a.q.size + a.wide());
}

struct LatentWriteArgs { View latent; View rope; void* latent_cache; const int64_t* slot_mapping; int64_t rows; };

// Positions that no token was written to keep what they held: attention reads none of them.
template <class C>
void latent_write(Team&, int, std::atomic<int64_t>& next, const LatentWriteArgs& a, float*) {
  const int64_t rank = a.latent.size, rope = a.rope.size;
  share(next, a.rows, [&](int64_t row) {
    C* to = static_cast<C*>(a.latent_cache) + a.slot_mapping[row] * (rank + rope);
    const float *latent = a.latent.row(row), *rotated = a.rope.row(row);
    for (int64_t i = 0; i < rank; ++i) to[i] = narrow<C>(latent[i]);
    for (int64_t i = 0; i < rope; ++i) to[rank + i] = narrow<C>(rotated[i]);
  });
}

}  // namespace graft
