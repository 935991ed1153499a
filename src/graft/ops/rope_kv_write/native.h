// Keys, normed and rotated, and values of new tokens, into their slots of the paged cache.
#pragma once

#include "ops/rope/native.h"

namespace graft {

// caches: [blocks * block_size, kv, size]; a slot is block * block_size + the position in the block.
struct KvWriteArgs {
  View k; View v; Rotation rotation; void* k_cache; void* v_cache; const int64_t* slot_mapping; int64_t rows;
};

// Positions that no token was written to keep what they held: attention reads none of them.
template <class C>
void kv_write(Team&, int, std::atomic<int64_t>& next, const KvWriteArgs& a, float* scratch) {
  const int64_t heads = a.k.heads, size = a.k.size, wide = a.v.size;
  share(next, a.rows * heads, [&](int64_t chunk) {
    const int64_t row = chunk / heads, head = chunk % heads, position = a.slot_mapping[row] * heads + head;
    rotate_head(a.rotation, row, a.k.at(row, head), size, scratch);
    C* keys = static_cast<C*>(a.k_cache) + position * size;
    C* values = static_cast<C*>(a.v_cache) + position * wide;
    for (int64_t i = 0; i < size; ++i) keys[i] = narrow<C>(scratch[i]);
    for (int64_t i = 0; i < wide; ++i) values[i] = narrow<C>(a.v.at(row, head)[i]);
  });
}

}  // namespace graft
