// The kinds of packed weight but one (native_f16.h), and the matmul of one tile of 16 rows with up to kMostTokens rows of x.
//
// Columns are padded with zeros to a multiple of kColumns, rows to 16. One tile after another:
//   WeightF32    [columns][16] float32
//   WeightBF16   [columns / 2][16][2] bfloat16
//   WeightQ8     a block of 32 columns: 16 scales (float16), [8][16][4] int8
//                w = scale * q
//   WeightQ4     a block of 32 columns: 16 scales, 16 minimums (float16), [4][16][4] bytes: byte [j][r][c] has column
//                4 j + c in its low four bits, column 16 + 4 j + c in its high four.   w = scale * q + minimum
// The quantised kinds multiply int8 with int8: rows of x are quantised in blocks of 32 with a float32 scale.
#pragma once
#include <cstdint>

#include "../native/vec.h"

namespace graft {

constexpr int kColumnStep = 4;  // columns of one step of the float kinds
constexpr int kAhead = 1024;    // bytes that are fetched early: 4 to 8 % for bf16 and q4, whose loops compute much a byte
constexpr int kBlock = 32;      // columns that share a scale

struct Rows {
  const float* data;  // one row after another, as W::store_row wrote them (or x itself)
  int64_t stride;     // floats
  int64_t columns;    // padded

  const float* row(int64_t token) const { return data + token * stride; }
};

// Sums of one token: several, so that an addition does not wait for the one before it.
template <int T>
constexpr int kSplit = T < kChains ? kChains / T : 1;

template <int T>
inline void add_up(const F (&parts)[T][kSplit<T>], F* sums) {
  for (int t = 0; t < T; t++) {
    if constexpr (kSplit<T> == 4) sums[t] = (parts[t][0] + parts[t][1]) + (parts[t][2] + parts[t][3]);
    if constexpr (kSplit<T> == 2) sums[t] = parts[t][0] + parts[t][1];
    if constexpr (kSplit<T> == 1) sums[t] = parts[t][0];
  }
}

template <int bytes>
inline void fetch_early(const void* w) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(w) + kAhead + line);
}

struct FloatRows {
  static constexpr bool kQuantised = false;
  static constexpr int kColumns = kColumnStep;
  static constexpr int kMostTokens = graft::kMostTokens;
  static int64_t row_floats(int64_t columns) { return (columns + kLanes - 1) / kLanes * kLanes; }

  template <class Value>
  static void store_row(float* to, int64_t columns, Value value) {  // writes whole vectors: row_floats has the room
    for (int64_t c = 0; c < columns; c += kLanes) store(to + c, value(c));
  }
};

// Two columns of a tile, widened: one behind the other, or in bfloat16 side by side.
template <class E>
inline void two_columns(const E* w, F& even, F& odd) {
  even = load(w), odd = load(w + kLanes);
}
inline void two_columns(const bf16* w, F& even, F& odd) { load_pairs(w, even, odd); }

// T rows of x times a tile of E, float, f16 or bf16, that is widened as it is read; sums are float32.
template <int T, class E>
inline void float_sums(const E* w, const Rows& rows, int64_t first, F* sums) {
  F parts[T][kSplit<T>];
  for (auto& token : parts)
    for (F& part : token) part = set(0.0f);
  const int64_t columns = rows.columns, stride = rows.stride;
  const float* const from = rows.row(first);
  for (int64_t c = 0; c < columns; c += kColumnStep, w += kColumnStep * kLanes) {
    Four x[T];
    for (int t = 0; t < T; t++) x[t] = four(from + t * stride + c);
    if constexpr (sizeof(E) == 2 && T <= 4) fetch_early<kColumnStep * kLanes * 2>(w);
    unroll<kColumnStep / 2>([&](auto pair) {
      F even, odd;
      two_columns(w + pair * 2 * kLanes, even, odd);
      for (int t = 0; t < T; t++) {
        F& part = parts[t][2 * pair % kSplit<T>];
        part = fma_at<2 * pair>(even, x[t], part);
        F& next = parts[t][(2 * pair + 1) % kSplit<T>];
        next = fma_at<2 * pair + 1>(odd, x[t], next);
      }
    });
  }
  add_up<T>(parts, sums);
}

struct WeightF32 : FloatRows {
  static int64_t tile_bytes(int64_t columns) { return columns * kLanes * 4; }

  template <int T>
  static void tile(const uint8_t* tile, const Rows& rows, int64_t first, F* sums) {
    float_sums<T>(reinterpret_cast<const float*>(tile), rows, first, sums);
  }
};

struct WeightBF16 : FloatRows {
  static int64_t tile_bytes(int64_t columns) { return columns * kLanes * 2; }

  static void widen(const uint8_t* tile, int64_t columns, float* to) {
    const bf16* w = reinterpret_cast<const bf16*>(tile);
    for (int64_t c = 0; c < columns; c += 2, w += 2 * kLanes, to += 2 * kLanes) {
      F even, odd;
      load_pairs(w, even, odd);
      store(to, even), store(to + kLanes, odd);
    }
  }

  template <int T>
  static void tile(const uint8_t* tile, const Rows& rows, int64_t first, F* sums) {
    float_sums<T>(reinterpret_cast<const bf16*>(tile), rows, first, sums);
  }
};

// A quantised row: `columns` int8, then for each block its scale, and scale * sum and sum (int32) of its int8.
struct QuantisedRows {
  static constexpr float kLargest = 3.4028235e38f;
  static constexpr bool kQuantised = true;
  static constexpr int kColumns = kBlock;
  static constexpr int kMostTokens = graft::kMostQuantised;
  static int64_t row_floats(int64_t columns) {
    return (columns / 4 + columns / kBlock * 3 + kLanes - 1) / kLanes * kLanes;
  }

  struct Row {
    const int8_t* q;
    const float *scale, *share;
    const int32_t* total;
  };
  static Row view(const float* row, int64_t columns) {
    const float* scale = row + columns / 4;
    const int64_t blocks = columns / kBlock;
    return {reinterpret_cast<const int8_t*>(row), scale, scale + blocks, reinterpret_cast<const int32_t*>(scale + 2 * blocks)};
  }

  template <class Value>
  static void store_row(float* to, int64_t columns, Value value) {
    int8_t* const q = reinterpret_cast<int8_t*>(to);
    const int64_t blocks = columns / kBlock;
    float *const scale = to + columns / 4, *const share = scale + blocks;
    int32_t* const total = reinterpret_cast<int32_t*>(share + blocks);
    F bad = set(0.0f);  // x - x: 0, or NaN where x is inf or NaN
    for (int64_t b = 0; b < blocks; b++) {
      const F low = value(b * kBlock), high = value(b * kBlock + kLanes);
      bad = bad + ((low - low) + (high - high));
      const float most = largest(max(abs(low), abs(high))), by = most > 0 && most <= kLargest ? 127.0f / most : 0.0f;
      total[b] = store_bytes(q + b * kBlock, low * set(by)) + store_bytes(q + b * kBlock + kLanes, high * set(by));
      scale[b] = most * (1.0f / 127);
      share[b] = scale[b] * float(total[b]);
    }
    const float nan = sum(bad);  // in a scale: such a row gives NaN, as it must
    if (nan != nan) scale[0] = share[0] = nan;
  }
};

struct WeightQ8 : QuantisedRows {
  static constexpr int kBytes = kLanes * (2 + kBlock);  // of a block
  static constexpr bool kNibbles = false;
  static int64_t tile_bytes(int64_t columns) { return columns / kBlock * kBytes; }

  template <int T>
  static void tile(const uint8_t* w, const Rows& rows, int64_t first, F* sums) {
    Row row[T];
    F parts[T];  // not `sums`: stores there would have to be made in every step
    for (int t = 0; t < T; t++) row[t] = view(rows.row(first + t), rows.columns), parts[t] = set(0.0f);
    const int64_t blocks = rows.columns / kBlock;
    for (int64_t b = 0; b < blocks; b++, w += kBytes) {
      I total[T];
      for (int t = 0; t < T; t++) total[t] = ints(-kByteOffset * row[t].total[b]);
      for (int half = 0; half < 2; half++) {
        Sixteen x[T];
        for (int t = 0; t < T; t++) x[t] = sixteen(row[t].q + b * kBlock + half * 16);
        unroll<4>([&](auto at) {
          const Bytes column = load_bytes(w + 32 + (half * 4 + at) * 64);
          for (int t = 0; t < T; t++) total[t] = dot_bytes<at>(total[t], column, x[t]);
        });
      }
      const F scale = load(reinterpret_cast<const f16*>(w));
      for (int t = 0; t < T; t++) parts[t] = fma(scale * set(row[t].scale[b]), to_float(total[t]), parts[t]);
    }
    for (int t = 0; t < T; t++) sums[t] = parts[t];
  }
};

struct WeightQ4 : QuantisedRows {
  static constexpr int kBytes = kLanes * (4 + kBlock / 2);
  static constexpr bool kNibbles = true;
  static int64_t tile_bytes(int64_t columns) { return columns / kBlock * kBytes; }

  template <int T>
  static void tile(const uint8_t* w, const Rows& rows, int64_t first, F* sums) {
    Row row[T];
    F parts[T];
    for (int t = 0; t < T; t++) row[t] = view(rows.row(first + t), rows.columns), parts[t] = set(0.0f);
    const int64_t blocks = rows.columns / kBlock;
    for (int64_t b = 0; b < blocks; b++, w += kBytes) {
      I total[T];
      for (int t = 0; t < T; t++) total[t] = ints(0);
      if constexpr (T == 1) fetch_early<kBytes>(w);
      unroll<4>([&](auto at) {
        const Bytes both = load_bytes(w + 64 + at * 64), low = low_nibbles(both), high = high_nibbles(both);
        for (int t = 0; t < T; t++) total[t] = dot_nibbles<at>(total[t], low, sixteen(row[t].q + b * kBlock));
        for (int t = 0; t < T; t++) total[t] = dot_nibbles<at>(total[t], high, sixteen(row[t].q + b * kBlock + 16));
      });
      const F scale = load(reinterpret_cast<const f16*>(w)), least = load(reinterpret_cast<const f16*>(w) + kLanes);
      for (int t = 0; t < T; t++) {
        parts[t] = fma(least, set(row[t].share[b]), parts[t]);
        parts[t] = fma(scale * set(row[t].scale[b]), to_float(total[t]), parts[t]);
      }
    }
    for (int t = 0; t < T; t++) sums[t] = parts[t];
  }
};

}  // namespace graft
