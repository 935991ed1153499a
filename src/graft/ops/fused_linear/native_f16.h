// A tile of [columns][16] float16, then one float32 in 64 bytes, which they are multiplied with: a power of two. The largest
// weight of a tile lies between 1/2 and 1, so that a bfloat16's 8 bits stay as they are (below 2^-17 of the tile's largest
// some are lost).
//
//   WeightF16      weights are widened as they are read; sums are float32
//   WeightHalves   where the CPU multiplies float16 (GRAFT_HALVES), else the same: rows of x are scaled and narrowed too, and
//                  one instruction does eight products. Sums of up to kDeep products are float16, the rest is float32: off by
//                  4e-4 of the result's root mean square for few tokens and 1.2e-3 for many. For models in bfloat16: rounding
//                  a result to that costs 1.7e-3.
#pragma once
#include <algorithm>
#include <cstdint>

#include "native_weights.h"

namespace graft {

inline int64_t f16_tile_bytes(int64_t columns) { return columns * kLanes * 2 + 64; }

inline float f16_tile_scale(const uint8_t* tile, int64_t columns) {
  return *reinterpret_cast<const float*>(tile + columns * kLanes * 2);
}

struct WeightF16 : FloatRows {
  static constexpr int kColumns = 8;
  static int64_t tile_bytes(int64_t columns) { return f16_tile_bytes(columns); }

  static void widen(const uint8_t* tile, int64_t columns, float* to) {
    const f16* w = reinterpret_cast<const f16*>(tile);
    const F by = set(f16_tile_scale(tile, columns));
    for (int64_t c = 0; c < columns; c++, w += kLanes, to += kLanes) store(to, load(w) * by);
  }

  template <int T>
  static void tile(const uint8_t* tile, const Rows& rows, int64_t first, F* sums) {
    float_sums<T>(reinterpret_cast<const f16*>(tile), rows, first, sums);
    const F by = set(f16_tile_scale(tile, rows.columns));
    for (int t = 0; t < T; t++) sums[t] = sums[t] * by;
  }
};

#if defined(GRAFT_HALVES)

// `columns` float16, then one float32 that they are multiplied with.
struct HalfRows {
  static constexpr bool kQuantised = true;  // the GEMM cannot read x as it lies
  static constexpr int kMostTokens = 8;     // 16 registers of sums, 8 of x, 2 of the tile
  static int64_t row_floats(int64_t columns) { return (columns / 2 + 1 + kLanes - 1) / kLanes * kLanes; }

  // A power of two that brings numbers of up to `most` to at most 1; its inverse is one, too.
  static float to_one(float most) {
    return from_bits(uint32_t(std::max(1, 253 - int(to_bits(most) >> 23 & 255))) << 23);
  }

  template <class Value>
  static void store_row(float* to, int64_t columns, Value value) {
    F most = set(0.0f), bad = most;  // bad: x - x, 0, or NaN where x is inf or NaN
    for (int64_t c = 0; c < columns; c += kLanes) {
      const F x = value(c);
      most = max(most, abs(x)), bad = bad + (x - x);
    }
    const float by = to_one(largest(most)), nan = sum(bad);
    f16* const halves = reinterpret_cast<f16*>(to);
    for (int64_t c = 0; c < columns; c += kLanes) {
      const F x = value(c) * set(by);
      columns - c >= kLanes ? store(halves + c, x) : store(halves + c, x, int(columns - c));
    }
    to[columns / 2] = nan != nan ? nan : 1.0f / by;
  }
};

struct WeightHalves : HalfRows {
  static constexpr int kColumns = 8;
  static int64_t tile_bytes(int64_t columns) { return f16_tile_bytes(columns); }

  template <int T>
  static void tile(const uint8_t* tile, const Rows& rows, int64_t first, F* sums) {
    constexpr int kSets = T == 1 ? 4 : T <= 3 ? 2 : 1;  // of sums, so that an addition does not wait for the last
    constexpr int64_t kDeep = T <= 4 ? 16 : 64, kRun = kDeep * kSets;
    const f16* w = reinterpret_cast<const f16*>(tile);
    const f16* x[T];
    F total[T];
    for (int t = 0; t < T; t++) x[t] = reinterpret_cast<const f16*>(rows.row(first + t)), total[t] = set(0.0f);
    for (int64_t c = 0; c < rows.columns;) {
      const int64_t end = std::min(rows.columns, c + kRun);
      Halves part[T][kSets];
      for (auto& token : part)
        for (Halves& one : token) one = no_halves();
      for (; c < end; c += kColumns, w += kColumns * kLanes) {
        Eight own[T];
        for (int t = 0; t < T; t++) own[t] = eight(x[t] + c);
        if constexpr (T <= 4) fetch_early<kColumns * kLanes * 2>(w);
        unroll<kColumns>([&](auto at) {
          const Halves column = load_halves(w + at * kLanes);
          for (int t = 0; t < T; t++) part[t][at % kSets] = fma_at<at>(column, own[t], part[t][at % kSets]);
        });
      }
      for (int t = 0; t < T; t++)
        for (const Halves& one : part[t]) total[t] = total[t] + to_float(one);
    }
    // first the smaller scale: the product of both may fit where that with the larger alone does not
    const float own = f16_tile_scale(tile, rows.columns);
    for (int t = 0; t < T; t++) {
      const float row = rows.row(first + t)[rows.columns / 2];
      sums[t] = total[t] * set(std::fmin(own, row)) * set(std::fmax(own, row));
      if (row != row) sums[t] = set(row);
    }
  }
};

#else
struct WeightHalves : WeightF16 {};
#endif

}  // namespace graft
