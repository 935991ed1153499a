// Reads memory and does almost nothing else: the most that this machine gives a thread team.
#pragma once
#include "team.h"

namespace graft {

constexpr int64_t kReadChunk = 1 << 15;  // words of 8 bytes: 256 KiB, some dozens a thread in any buffer worth reading

// The sum of all words, in 16 sums: eight or two vector registers, enough to cover the additions' latency.
inline uint64_t read_words(const uint64_t* at, int64_t words) {
  uint64_t sums[16] = {};
  int64_t i = 0;
  for (; i + 16 <= words; i += 16)
    for (int lane = 0; lane < 16; lane++) sums[lane] += at[i + lane];
  for (; i < words; i++) sums[0] += at[i];
  uint64_t sum = 0;
  for (uint64_t part : sums) sum += part;
  return sum;
}

struct Reading {
  const uint64_t* at;
  int64_t words;
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> sum{0};
};

inline uint64_t read_all(Team& team, const uint64_t* at, int64_t words) {
  Reading reading{at, words};
  team.run([](void* arg, Team&, int) {
    Reading& r = *static_cast<Reading*>(arg);
    share(r.next, (r.words + kReadChunk - 1) / kReadChunk, [&](int64_t chunk) {
      const int64_t first = chunk * kReadChunk, left = r.words - first;
      r.sum += read_words(r.at + first, left < kReadChunk ? left : kReadChunk);
    });
  }, &reading);
  return reading.sum;
}

}  // namespace graft
