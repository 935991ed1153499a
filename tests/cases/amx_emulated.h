// The instructions of AMX that native_amx.h uses, in plain C++ and by their own names: for machines without them.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#endif

namespace emulated {

inline thread_local bool configured = false;
inline thread_local uint8_t tiles[8][16][64];

inline void require(bool held) {
  if (!held) __builtin_trap();
}
inline void configure(const void* shapes) {  // palette 1, all registers of 16 rows of 64 bytes
  const uint8_t* s = static_cast<const uint8_t*>(shapes);
  require(reinterpret_cast<uintptr_t>(s) % 64 == 0 && s[0] == 1 && !configured);
  for (int i = 0; i < 8; i++) require(s[16 + 2 * i] == 64 && s[17 + 2 * i] == 0 && s[48 + i] == 16);
  configured = true;
}
inline void release() { require(configured), configured = false; }
inline void zero(int tile) { require(configured), std::memset(tiles[tile], 0, sizeof tiles[tile]); }
inline void load(int tile, const void* from, int64_t stride) {
  require(configured);
  for (int r = 0; r < 16; r++) std::memcpy(tiles[tile][r], static_cast<const char*>(from) + r * stride, 64);
}
inline void store(int tile, void* to, int64_t stride) {
  require(configured);
  for (int r = 0; r < 16; r++) std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile][r], 64);
}
inline float value(const uint8_t* row, int at) {
  uint16_t half;
  std::memcpy(&half, row + 2 * at, 2);
  const uint32_t bits = uint32_t(half) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
inline void multiply(int to, int left, int right) {  // to[m][n] += left[m][2 k + i] * right[k][2 n + i]
  require(configured);
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float total;
      std::memcpy(&total, tiles[to][m] + 4 * n, 4);
      for (int k = 0; k < 16; k++)
        for (int i = 0; i < 2; i++) total += value(tiles[left][m], 2 * k + i) * value(tiles[right][k], 2 * n + i);
      std::memcpy(tiles[to][m] + 4 * n, &total, 4);
    }
}

}  // namespace emulated

#define GRAFT_AMX_EMULATED
#define _tile_loadconfig emulated::configure
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply
