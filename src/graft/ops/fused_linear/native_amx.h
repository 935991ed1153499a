// GEMMs of many tokens with bfloat16 weights on AMX: 16 tokens times 16 rows over 32 columns in one instruction.
//
// A tile of WeightBF16, [columns / 2][16][2], is the right operand as it lies in memory. The left one is bfloat16 too, so
// a value of x goes in as the sum of two, hi + lo, 16 of its 24 bits, in two instructions. Rows of x lie as
//   [tokens / 16][columns / 32][hi, lo][16 tokens][32 columns]
// The system must allow a process the registers; where it does not, or the CPU has none, the float32 GEMM runs.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../native/vec.h"

#if defined(GRAFT_AMX_EMULATED)  // by a header of the tests, on any machine
#define GRAFT_AMX
#elif defined(GRAFT_ISA_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && !defined(GRAFT_NO_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#define GRAFT_AMX
#endif

namespace graft {

constexpr int64_t kTileTokens = 16, kTileColumns = 32;
constexpr int64_t kOperand = kTileTokens * kTileColumns;  // values of an operand
constexpr int64_t kSpanTokens = 128;  // tokens that all tiles go over before the next ones: their rows stay in a core's second cache

#if defined(GRAFT_AMX)

constexpr bool kAmx = true;

inline bool amx_ready() {
#if defined(GRAFT_AMX_EMULATED)
  return true;
#else
  constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool ready = syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
  return ready;
#endif
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  // of a row
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler's intrinsics do not say what they read: it is in memory behind this.
inline void read_by_tiles(const void* from) { asm volatile("" : : "r"(from) : "memory"); }

// The registers of a thread, given back behind its work: a system that saves them for every thread is slower.
struct Tiles {
  const bool used;
  explicit Tiles(bool use) : used(use) {
    const TileShapes shapes;
    read_by_tiles(&shapes);
    if (used) _tile_loadconfig(&shapes);
  }
  ~Tiles() {
    if (used) _tile_release();
  }
};

inline int64_t amx_steps(int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }

// Floats for the rows of x.
inline int64_t amx_floats(int64_t tokens, int64_t columns) {
  return (tokens + kTileTokens - 1) / kTileTokens * amx_steps(columns) * kOperand;
}

template <class Value>
inline void amx_store_row(float* rows, int64_t columns, int64_t token, Value value) {
  const int64_t steps = amx_steps(columns);
  bf16* to = reinterpret_cast<bf16*>(rows) + token / kTileTokens * steps * 2 * kOperand + token % kTileTokens * kTileColumns;
  F bad = set(0.0f);  // NaN where a value is not finite: it has no rest
  for (int64_t step = 0; step < steps; step++)
    for (int half = 0; half < kTileColumns; half += kLanes) {
      const F v = value(step * kTileColumns + half);
      bf16* const high = to + step * 2 * kOperand + half;
      store(high, v);
      const F near = load(high);
      store(high + kOperand, v - near);
      bad = bad + ((v - v) + (near - near));
    }
  if (const float nan = sum(bad); nan != nan)
    for (int64_t step = 0; step < steps; step++) std::memset(to + step * 2 * kOperand + kOperand, 0, kTileColumns * sizeof(bf16));
}

struct TileSums {  // of two tiles of weights, for 32 tokens
  alignas(64) float of[2][2 * kTileTokens][kLanes];
};

// 16 tokens, or 32, times two tiles of the weight, w and pair. x: their hi and lo, `block` values a 16 tokens. A product
// takes 16 cycles and its result another 36: four sums in turn.
template <bool two>
inline void amx_gemm(const uint8_t* w, const uint8_t* pair, int64_t columns, const bf16* x, int64_t block, TileSums& sums) {
  alignas(64) bf16 last[2][kOperand];
  alignas(64) float rest[2][kTileTokens][kLanes];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t c = 0; c < columns; c += kTileColumns, x += 2 * kOperand) {
    const void *one = w + c * kLanes * sizeof(bf16), *other = pair + c * kLanes * sizeof(bf16);
    if (columns - c < kTileColumns) {  // what lies behind belongs to another tile, and may be no number
      std::memset(last, 0, sizeof last);
      one = std::memcpy(last[0], one, (columns - c) * kLanes * sizeof(bf16));
      other = std::memcpy(last[1], other, (columns - c) * kLanes * sizeof(bf16));
      read_by_tiles(last);
    }
    _tile_loadd(4, one, 64);
    _tile_loadd(5, other, 64);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    if constexpr (two) {
      _tile_loadd(7, x + block, 64);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
      _tile_loadd(6, x + kOperand, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      _tile_loadd(7, x + block + kOperand, 64);
    } else {
      _tile_loadd(7, x + kOperand, 64);
    }
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
  }
  _tile_stored(0, sums.of[0], 64);
  _tile_stored(1, sums.of[1], 64);
  if constexpr (two) {
    _tile_stored(2, sums.of[0] + kTileTokens, 64);
    _tile_stored(3, sums.of[1] + kTileTokens, 64);
  } else {  // there lo had sums of its own
    _tile_stored(2, rest[0], 64);
    _tile_stored(3, rest[1], 64);
    for (int tile = 0; tile < 2; tile++)
      for (int t = 0; t < kTileTokens; t++) store(sums.of[tile][t], load(sums.of[tile][t]) + load(rest[tile][t]));
  }
}

// Two tiles of 16 rows for the tokens first .. last - 1, the first one a multiple of 16: done(token, sums, the pair's).
template <class Done>
inline void amx_tiles(const uint8_t* w, const uint8_t* pair, int64_t columns, const float* rows, int64_t first, int64_t last, Done done) {
  const int64_t block = amx_steps(columns) * 2 * kOperand;
  TileSums sums;
  for (; first < last; first += 2 * kTileTokens) {
    const bf16* x = reinterpret_cast<const bf16*>(rows) + first / kTileTokens * block;
    const int64_t count = std::min(2 * kTileTokens, last - first);
    (count > kTileTokens ? amx_gemm<true> : amx_gemm<false>)(w, pair, columns, x, block, sums);
    for (int64_t t = 0; t < count; t++) done(first + t, load(sums.of[0][t]), load(sums.of[1][t]));
  }
}

#else

constexpr bool kAmx = false;
struct Tiles {
  explicit Tiles(bool) {}
};
inline bool amx_ready() { return false; }
inline int64_t amx_floats(int64_t, int64_t) { return 0; }
template <class Value>
void amx_store_row(float*, int64_t, int64_t, Value);  // of these two only the names are needed
template <class Done>
void amx_tiles(const uint8_t*, const uint8_t*, int64_t, const float*, int64_t, int64_t, Done);

#endif

// What GEMMs run on, for the report.
inline const char* instructions() {
#if defined(GRAFT_AMX)
  return amx_ready() ? "avx512 with AMX for bfloat16" : "avx512; the system refuses AMX";
#else
  return kIsa;
#endif
}

}  // namespace graft
