// Plain pieces of a native step: 16-bit numbers, a thread team, and a linear layer over row-major weights.
// Correct on every CPU; the compiler's own vectorizer does what it can.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace graft {

// ── numbers ────────────────────────────────────────────────────────────────────────────────────────────────────

#if defined(__aarch64__)
using half_t = __fp16;  // g++ 12 has no _Float16 in C++ here
#else
using half_t = _Float16;
#endif
struct bf16 { uint16_t bits; };
struct f16 { half_t value; };

inline float widen(float x) { return x; }
inline float widen(f16 x) { return static_cast<float>(x.value); }
inline float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

template <class T> T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline f16 narrow<f16>(float x) { return {static_cast<half_t>(x)}; }
template <> inline bf16 narrow<bf16>(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// Sixteen sums side by side: the order is fixed, whatever the vector width.
template <class W> inline float dot(const float* x, const W* w, int64_t n) {
  float sums[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int lane = 0; lane < 16; ++lane) sums[lane] += x[i + lane] * widen(w[i + lane]);
  for (; i < n; ++i) sums[i % 16] += x[i] * widen(w[i]);
  for (int step = 8; step; step /= 2)
    for (int lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  return sums[0];
}

// ── team ───────────────────────────────────────────────────────────────────────────────────────────────────────

// One for the process and thread count; the caller is thread 0. Waiting spins for about 20 µs, then sleeps.
class Team {
 public:
  using Work = void (*)(void* argument, Team& team, int thread);
  const int threads;

  explicit Team(int count) : threads(count) {
    for (int thread = 1; thread < threads; ++thread) std::thread(&Team::serve, this, thread).detach();
  }

  void run(Work work, void* argument) {  // wakes the others, runs, returns when all are done
    work_ = work;
    argument_ = argument;
    advance(round_);
    work(argument, *this, 0);
    barrier();
  }

  void barrier() {
    const int64_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      advance(phase_);
    } else {
      wait(phase_, phase);
    }
  }

 private:
  void serve(int thread) {
    for (int64_t round = 0;; ++round) {
      wait(round_, round);
      work_(argument_, *this, thread);
      barrier();
    }
  }

  void advance(std::atomic<int64_t>& counter) {
    counter.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      awake_.notify_all();
    }
  }

  void wait(std::atomic<int64_t>& counter, int64_t seen) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
    do {
      for (int turn = 0; turn < 64; ++turn) {
        if (counter.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < end);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    awake_.wait(lock, [&] { return counter.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  Work work_ = nullptr;
  void* argument_ = nullptr;
  alignas(64) std::atomic<int64_t> round_{0};
  alignas(64) std::atomic<int64_t> phase_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable awake_;
};

// f(chunk) for the chunks that this thread takes; every op has a counter of its own.
template <class F> inline void share(std::atomic<int64_t>& next, int64_t chunks, F f) {
  for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) f(chunk);
}

// ── linear layer ───────────────────────────────────────────────────────────────────────────────────────────────

enum class Act { none, silu, gelu_tanh, gelu };

inline float activate(Act act, float x) {
  switch (act) {
    case Act::silu: return x / (1.0f + std::exp(-x));
    case Act::gelu_tanh: return 0.5f * x * (1.0f + std::tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case Act::gelu: return 0.5f * x * (1.0f + std::erf(x * 0.7071067811865476f));
    default: return x;
  }
}

struct LinearArgs {
  const float* x; int64_t ldx; int64_t tokens; int64_t k; int64_t n;  // n: rows of the result
  const void* w; const float* bias; const float* norm; float eps; float offset;
  bool normed; Act act; const float* residual; int64_t ldr; float* out; int64_t ldo;
};

// The weight as torch has it, [n, k] row by row; gated: n rows of the gate, then n of up.
template <class T> struct WeightPlain { using type = T; };

constexpr int64_t kTokenBlock = 8, kRowTile = 16;

template <class W> int64_t linear_scratch(int64_t tokens, int64_t k) {
  return (std::min(tokens, kTokenBlock) + 1) * k;
}

// The block's rows as the product reads them: normed, in scratch, or where they lie.
inline void prepare(const LinearArgs& a, int64_t first, int64_t count, float* rows) {
  for (int64_t t = 0; t < count; ++t) {
    const float* x = a.x + (first + t) * a.ldx;
    const float inverse = 1.0f / std::sqrt(dot(x, x, a.k) / static_cast<float>(a.k) + a.eps);
    float* row = rows + t * a.k;
    for (int64_t i = 0; i < a.k; ++i) row[i] = x[i] * inverse * (a.norm ? a.norm[i] + a.offset : 1.0f);
  }
}

template <class W>
void linear(Team&, int, std::atomic<int64_t>& next, const LinearArgs& a, float* scratch) {
  using T = typename W::type;
  const T* weight = static_cast<const T*>(a.w);
  const bool norms = a.norm || a.normed, gated = a.act != Act::none;
  const int64_t tiles = (a.n + kRowTile - 1) / kRowTile, blocks = (a.tokens + kTokenBlock - 1) / kTokenBlock;
  float* wide = scratch;  // one row of the weight
  float* rows = scratch + a.k;
  int64_t prepared = -1;
  const bool one = a.tokens == 1;  // a row that is read once is not worth a copy
  auto product = [&](int64_t row, const float* x) {
    return (one ? dot(x, weight + row * a.k, a.k) : dot(x, wide, a.k)) + (a.bias ? a.bias[row] : 0.0f);
  };
  auto load = [&](int64_t row) {
    for (int64_t i = 0; !one && i < a.k; ++i) wide[i] = widen(weight[row * a.k + i]);
  };
  share(next, blocks * tiles, [&](int64_t chunk) {
    const int64_t first = chunk / tiles * kTokenBlock, count = std::min(kTokenBlock, a.tokens - first);
    if (norms && prepared != first) prepare(a, prepared = first, count, rows);
    const float* x = norms ? rows : a.x + first * a.ldx;
    const int64_t ldx = norms ? a.k : a.ldx, begin = chunk % tiles * kRowTile;
    for (int64_t row = begin; row < std::min(begin + kRowTile, a.n); ++row) {
      float values[kTokenBlock];
      load(row);
      for (int64_t t = 0; t < count; ++t) values[t] = product(row, x + t * ldx);
      if (gated) {
        load(a.n + row);
        for (int64_t t = 0; t < count; ++t) values[t] = activate(a.act, values[t]) * product(a.n + row, x + t * ldx);
      }
      for (int64_t t = 0; t < count; ++t) {
        const float other = a.residual ? a.residual[(first + t) * a.ldr + row] : 0.0f;
        a.out[(first + t) * a.ldo + row] = values[t] + other;
      }
    }
  });
}

}  // namespace graft
