// graft::fused_linear for the native backend: norm, GEMM with a packed weight, bias, gated activation, residual.
//
// A weight lies in tiles of 16 rows (native_packing.py): the lanes of a vector are rows, so no sum goes across lanes.
// All threads of the team call linear() with the same arguments; tiles are handed out in chunks. What the GEMM reads
// (normed, and for q8 and q4 quantised rows of x) every thread makes for itself when the tokens are few; when they are
// many and there is a place for it, the team makes it once, with a barrier after it. A tile is read from memory once for
// all tokens.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "../native/act.h"
#include "../native/team.h"
#include "../native/vec.h"
#include "native_amx.h"
#include "native_f16.h"
#include "native_weights.h"

namespace graft {

struct LinearArgs {
  const float* x = nullptr;  // [tokens, k], rows ldx apart
  int64_t ldx = 0;
  int64_t tokens = 0, k = 0, n = 0;  // n: columns of the result; the weight has n rows, or 2 n when gated
  const void* w = nullptr;           // packed; gated: gate tile and up tile side by side
  const float* bias = nullptr;       // [n], or [2 n] when gated: the gate's, then up's
  const float* norm = nullptr;       // [k]: x is normed and multiplied by norm + offset
  float eps = 0, offset = 0;
  bool normed = false;              // x is normed, the norm's weight is in w
  Act act = Act::none;              // not none: act(gate) * up, or without glu act(x)
  bool glu = true;
  const float* residual = nullptr;  // [tokens, n], rows ldr apart; may be `out` itself
  int64_t ldr = 0;
  float alpha = 1;       // before the residual is added
  float* out = nullptr;  // [tokens, n], rows ldo apart; not `x`
  int64_t ldo = 0;
  float* shared = nullptr;  // linear_shared<W> floats, one place for all threads; without it each prepares all rows

  bool gated() const { return act != Act::none && glu; }
};

// A kernel with another prologue or epilogue has arguments of its own, derived from these, and overloads for them of
// prepares(), row_values() and finish(). `A` below is LinearArgs or one of those.

constexpr int64_t kFewTokens = 8;  // up to here every thread prepares the rows for itself

inline int64_t whole(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

inline bool prepares(const LinearArgs& a) { return a.norm != nullptr || a.normed; }  // it multiplies with other rows

template <class W, class A>
inline bool reads_x(const A& a) {  // the GEMM can read x as it lies
  return !W::kQuantised && !prepares(a) && a.k % W::kColumns == 0;
}

constexpr int64_t kWidePasses = 3;  // above so many passes over a tile of 16 bits, it is widened once for all tokens

template <class W, class = void>
constexpr bool kWidens = false;
template <class W>
constexpr bool kWidens<W, std::void_t<decltype(&W::widen)>> = true;

template <class W>
inline bool widens(int64_t tokens) {
  return kWidens<W> && tokens > kWidePasses * W::kMostTokens;
}

template <class W>
constexpr bool kHasAmx = kAmx && std::is_same_v<W, WeightBF16>;

template <class W>
inline bool on_amx(const LinearArgs& a) {
  return kHasAmx<W> && a.shared != nullptr && a.tokens > kFewTokens && amx_ready();
}

// Floats of scratch that every thread needs, for any number of tokens up to this; `shared`: linear() is given that too.
template <class W>
inline int64_t linear_scratch(int64_t tokens, int64_t k, bool shared = false) {
  const int64_t rows = shared ? std::min<int64_t>(tokens, kFewTokens) : tokens, columns = whole(k, W::kColumns);
  return W::row_floats(columns) * rows + kLanes + (widens<W>(tokens) ? 2 * columns * kLanes : 0);
}

template <class W>
inline int64_t linear_shared(int64_t tokens, int64_t k) {
  if (tokens <= kFewTokens) return 0;
  int64_t floats = W::row_floats(whole(k, W::kColumns)) * tokens;
  if (kHasAmx<W>) floats = std::max(floats, amx_floats(tokens, whole(k, W::kColumns)));
  return floats + kLanes;
}

// 1 / root mean square of a row, or 1 when there is no norm.
inline float row_scale(const LinearArgs& a, const float* x) {
  if (a.norm == nullptr && !a.normed) return 1.0f;
  F low = set(0.0f), high = low;
  int64_t c = 0;
  for (; c + 2 * kLanes <= a.k; c += 2 * kLanes) {
    const F u = load(x + c), v = load(x + c + kLanes);
    low = fma(u, u, low), high = fma(v, v, high);
  }
  for (; c < a.k; c += kLanes) {
    const F u = load(x + c, int(std::min<int64_t>(kLanes, a.k - c)));
    low = fma(u, u, low);
  }
  return 1.0f / std::sqrt(sum(low + high) / float(a.k) + a.eps);
}

// Of row `token`: the vector from column c on, as the GEMM takes it. Columns after k are 0.
inline auto row_values(const LinearArgs& a, int64_t token) {
  const float* x = a.x + token * a.ldx;
  return [&a, x, by = set(row_scale(a, x)), offset = set(a.offset)](int64_t c) {
    const int lanes = int(std::min<int64_t>(kLanes, a.k - c));
    if (lanes <= 0) return set(0.0f);
    const F v = (lanes == kLanes ? load(x + c) : load(x + c, lanes)) * by;
    return a.norm == nullptr ? v : v * ((lanes == kLanes ? load(a.norm + c) : load(a.norm + c, lanes)) + offset);
  };
}

// Row `token` as the GEMM takes it, to its place in `ready`.
template <class W, class A>
inline void prepare_row(const A& a, int64_t columns, int64_t token, float* ready, [[maybe_unused]] bool amx) {
  const auto value = row_values(a, token);
  if constexpr (kHasAmx<W>) {
    if (amx) return amx_store_row(ready, columns, token, value);
  }
  W::store_row(ready + token * W::row_floats(columns), columns, value);
}

// What follows the sums of one tile, for one token: rows `row` .. of the result. Not inlined: it would be, 20 times.
__attribute__((noinline)) inline void finish(const LinearArgs& a, int64_t token, int64_t row, F sums, F up) {
  const int lanes = int(std::min<int64_t>(kLanes, a.n - row));
  const auto part = [&](const float* p) { return lanes == kLanes ? load(p) : load(p, lanes); };
  if (a.bias != nullptr) sums = sums + part(a.bias + row);
  if (a.gated()) {
    if (a.bias != nullptr) up = up + part(a.bias + a.n + row);
    sums = activate(a.act, sums) * up;
  } else if (a.act != Act::none) {
    sums = activate(a.act, sums);
  }
  if (a.residual != nullptr) sums = fma(set(a.alpha), sums, part(a.residual + token * a.ldr + row));
  float* to = a.out + token * a.ldo + row;
  lanes == kLanes ? store(to, sums) : store(to, sums, lanes);
}

// T tokens from `first` with one tile, or one pair of tiles.
template <class W, int T, class A>
inline void tile_tokens(const A& a, const Rows& rows, const uint8_t* w, int64_t row, int64_t first) {
  F sums[T], up[T];
  W::template tile<T>(w, rows, first, sums);
  if (a.gated()) W::template tile<T>(w + W::tile_bytes(rows.columns), rows, first, up);
  for (int t = 0; t < T; t++) finish(a, first + t, row, sums[t], a.gated() ? up[t] : sums[t]);
}

template <class W, int T = W::kMostTokens, class A>
inline void tile_some(int64_t tokens, const A& a, const Rows& rows, const uint8_t* w, int64_t row, int64_t first) {
  if constexpr (T > 1) {
    if (tokens < T) return tile_some<W, T - 1>(tokens, a, rows, w, row, first);
  }
  tile_tokens<W, T>(a, rows, w, row, first);
}

// One tile of the result for all tokens, in passes of nearly the same size. wide: room for it and its pair as float32.
template <class W, class A>
inline void tile_all(const A& a, const Rows& rows, const uint8_t* w, int64_t row, float* wide) {
  if constexpr (kWidens<W>) {
    if (widens<W>(a.tokens)) {
      for (int pair = 0; pair < (a.gated() ? 2 : 1); pair++)
        W::widen(w + pair * W::tile_bytes(rows.columns), rows.columns, wide + pair * rows.columns * kLanes);
      return tile_all<WeightF32>(a, rows, reinterpret_cast<const uint8_t*>(wide), row, nullptr);
    }
  }
  const int64_t passes = (a.tokens + W::kMostTokens - 1) / W::kMostTokens;
  for (int64_t pass = 0; pass < passes; pass++) {
    const int64_t first = a.tokens * pass / passes, last = a.tokens * (pass + 1) / passes;
    tile_some<W>(last - first, a, rows, w, row, first);
  }
}

// Tiles first .. last - 1 of the result for a span of tokens, two by two: gate and up, or two neighbours.
template <class W, class A>
inline void tiles_on_amx(const A& a, const Rows& rows, int64_t first, int64_t last, int64_t span) {
  const int64_t bytes = W::tile_bytes(rows.columns), from = span * kSpanTokens, to = std::min(a.tokens, from + kSpanTokens);
  const bool gated = a.gated();
  for (int64_t tile = first; tile < last; tile += gated ? 1 : 2) {
    const uint8_t* const w = static_cast<const uint8_t*>(a.w) + tile * bytes * (gated ? 2 : 1);
    const bool alone = !gated && tile + 1 == last;  // goes with itself
    amx_tiles(w, alone ? w : w + bytes, rows.columns, rows.data, from, to, [&](int64_t token, F sums, F other) {
      finish(a, token, tile * kLanes, sums, other);
      if (!gated && !alone) finish(a, token, (tile + 1) * kLanes, other, other);
    });
  }
}

// Tiles in one chunk: at least 8 chunks a thread where there are so many tiles, and no chunk above about 128 KB.
inline int64_t chunk_tiles(int64_t tiles, int64_t bytes, int threads) {
  const int64_t even = tiles / (8 * threads), fit = (int64_t(128) << 10) / std::max<int64_t>(bytes, 1);
  return std::max<int64_t>(1, std::min(even, fit));
}

inline float* at_line(float* p) { return p + (-(reinterpret_cast<uintptr_t>(p) / 4) & (kLanes - 1)); }

// scratch: linear_scratch<W> floats of this thread's own. next: 0 when the first thread comes.
template <class W, class A>
void linear(Team& team, int, std::atomic<int64_t>& next, const A& a, float* scratch) {
  if (a.tokens == 0 || a.n == 0) return;
  const int64_t columns = whole(a.k, W::kColumns), row = W::row_floats(columns);
  const bool amx = on_amx<W>(a), direct = !amx && reads_x<W>(a), shared = !direct && a.shared != nullptr && a.tokens > kFewTokens;
  float* const ready = at_line(shared ? a.shared : scratch);
  float* const wide = at_line(scratch) + (direct || shared ? 0 : a.tokens * row);
  const Rows rows = direct ? Rows{a.x, a.ldx, columns} : Rows{ready, row, columns};

  const int64_t bytes = W::tile_bytes(columns) * (a.gated() ? 2 : 1), tiles = (a.n + kLanes - 1) / kLanes;
  const int64_t spans = amx ? (a.tokens + kSpanTokens - 1) / kSpanTokens : 1, pairs = amx && !a.gated() ? 2 : 1;
  const int64_t each = whole(chunk_tiles(tiles * spans, bytes, team.threads), pairs), chunks = (tiles + each - 1) / each;
  const int64_t parts = shared ? (a.tokens + 3) / 4 : 0;  // chunks 0 .. parts - 1 prepare four rows each
  const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
  const auto prepare = [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) prepare_row<W>(a, columns, t, ready, amx);
  };
  if (shared) {
    share_until(next, parts, [&](int64_t part) { prepare(4 * part, std::min(a.tokens, 4 * part + 4)); });
    team.barrier();
  }
  const Tiles registers(amx);
  int64_t chunk = take();
  if (!shared && !direct && chunk < chunks) prepare(0, a.tokens);
  for (; chunk < parts + chunks * spans; chunk = take()) {
    const int64_t first = (chunk - parts) % chunks * each, last = std::min(tiles, first + each);
    if constexpr (kHasAmx<W>) {
      if (amx) {
        tiles_on_amx<W>(a, rows, first, last, (chunk - parts) / chunks);
        continue;
      }
    }
    for (int64_t tile = first; tile < last; tile++)
      tile_all<W>(a, rows, static_cast<const uint8_t*>(a.w) + tile * bytes, tile * kLanes, wide);
  }
}

}  // namespace graft
