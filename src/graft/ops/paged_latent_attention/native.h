// Latent attention over a paged cache that holds the new rows: prompts expand keys and values, other tokens are absorbed.
#pragma once

#include "native_absorbed.h"
#include "native_expanded.h"

namespace graft {

inline int64_t latent_scratch(int64_t tokens, int64_t heads, int64_t rank, int64_t size, int64_t nope, int64_t wide) {
  return std::max(heads * (rank + 2), expanded_scratch(tokens, rank, size, nope, wide));
}

inline int64_t latent_shared(int64_t tokens, int64_t heads, int64_t rank, int64_t rope) {
  return round_floats(tokens, heads, rank + rope) + std::min(tokens, kMostDivided) * heads * kMostParts * (rank + 2);
}

template <class C, class W>
void latent_attention(Team& team, int, std::atomic<int64_t>& next, const LatentArgs& a, float* scratch) {
  int64_t taken = expand_chunks(a), absorbed = 0;
  share_until(next, taken, [&](int64_t chunk) { attend_expanded<C, W>(a, expand_chunk(a, chunk), scratch); });
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) absorbed += absorbs(a, sequence) ? a.brought(sequence) : 0;
  for (int64_t first = 0; first < absorbed; first += kRound) {
    LatentRound round;
    find_round(a, first, team.threads, round);
    taken = attend_round<C, W>(team, next, a, round, taken, scratch);
  }
}

}  // namespace graft
