// graft::packed_embedding for the native backend: rows out of the tiles that the output head multiplies with.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../fused_linear/native_f16.h"
#include "../fused_linear/native_weights.h"
#include "../native/team.h"
#include "../view.h"

namespace graft {

struct PackedEmbeddingArgs {
  const void* table; int64_t entries; int64_t columns; const int64_t* ids; int64_t rows; View out;
  std::atomic<int64_t>* problem; int64_t step;
};

// One row of a tile of floats. `columns` of the row, `padded` of the tile.
template <class W>
void unpack_floats(const uint8_t* tile, int64_t lane, int64_t columns, int64_t padded, float* out) {
  for (int64_t i = 0; i < columns; i++) {
    if constexpr (std::is_same_v<W, WeightF32>) out[i] = reinterpret_cast<const float*>(tile)[i * kLanes + lane];
    if constexpr (std::is_same_v<W, WeightBF16>)
      out[i] = to_float(reinterpret_cast<const bf16*>(tile)[(i / 2 * kLanes + lane) * 2 + i % 2]);
    if constexpr (std::is_same_v<W, WeightF16> || std::is_same_v<W, WeightHalves>)
      out[i] = to_float(reinterpret_cast<const f16*>(tile)[i * kLanes + lane]) * f16_tile_scale(tile, padded);
  }
}

// One row of a tile, block by block: the numbers of lane `lane` lie 4 to a group, 16 groups apart.
template <class W>
void unpack_blocks(const uint8_t* tile, int64_t lane, int64_t columns, float* out) {
  for (int64_t start = 0; start < columns; start += kBlock, tile += W::kBytes) {
    const f16* scales = reinterpret_cast<const f16*>(tile);
    const float scale = to_float(scales[lane]);
    const int64_t count = columns - start < kBlock ? columns - start : kBlock;
    for (int64_t i = 0; i < count; i++) {
      if constexpr (W::kNibbles) {
        const uint8_t both = tile[64 + (i % 16) / 4 * 64 + lane * 4 + i % 4];
        out[start + i] = scale * float(i < 16 ? both & 15 : both >> 4) + to_float(scales[kLanes + lane]);
      } else {
        out[start + i] = scale * float(int8_t(tile[32 + i / 4 * 64 + lane * 4 + i % 4]));
      }
    }
  }
}

// out[row] = table[ids[row]]; an id that the table does not have gives NaN and is told to the caller.
template <class W>
void packed_embedding(Team&, int, std::atomic<int64_t>& next, const PackedEmbeddingArgs& a, float*) {
  const uint8_t* tiles = static_cast<const uint8_t*>(a.table);
  constexpr bool blocks = std::is_same_v<W, WeightQ8> || std::is_same_v<W, WeightQ4>;
  const int64_t padded = (a.columns + W::kColumns - 1) / W::kColumns * W::kColumns, bytes = W::tile_bytes(padded);
  share(next, a.rows, [&](int64_t row) {
    const int64_t id = a.ids[row];
    float* out = a.out.row(row);
    if (id < 0 || id >= a.entries) {
      a.problem->store(a.step + 1, std::memory_order_relaxed);
      for (int64_t i = 0; i < a.columns; ++i) out[i] = NAN;
      return;
    }
    const uint8_t* const tile = tiles + id / kLanes * bytes;
    if constexpr (blocks) unpack_blocks<W>(tile, id % kLanes, a.columns, out);
    else unpack_floats<W>(tile, id % kLanes, a.columns, padded, out);
  });
}

}  // namespace graft
