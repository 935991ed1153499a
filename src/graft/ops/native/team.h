// A team of threads that runs one function together: persistent threads, a barrier, chunks handed out dynamically.
//
// Waiting spins for a bounded while and then sleeps: with fewer free cores than threads the one that is waited for gets
// the core. A team has one caller at a time: run() lets a second one wait until the first is done.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace graft {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");  // `yield` does nothing on most cores; this waits about as long as x86's pause
#endif
}

// A number that grows by one each time everyone may go on.
class Gate {
 public:
  int64_t now() const { return turn_.load(std::memory_order_acquire); }

  void open() {
    turn_.fetch_add(1);  // seq_cst, as are the next line and sleep()'s: either the sleeper sees the turn or we see it
    if (sleepers_.load() > 0) {
      { std::lock_guard<std::mutex> held(mutex_); }
      woken_.notify_all();
    }
  }

  // Until the turn is another than `old`: at most about `spin` of it awake.
  void wait(int64_t old, std::chrono::nanoseconds spin) {
    const auto start = std::chrono::steady_clock::now();
    do {
      for (int i = 0; i < 32; i++) {
        if (now() != old) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() - start < spin);
    std::unique_lock<std::mutex> held(mutex_);
    sleepers_.fetch_add(1);
    woken_.wait(held, [&] { return turn_.load() != old; });
    sleepers_.fetch_sub(1);
  }

 private:
  alignas(64) std::atomic<int64_t> turn_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
};

class Team {
 public:
  using Work = void (*)(void* arg, Team& team, int thread);
  static constexpr std::chrono::nanoseconds kSpin{20000};

  const int threads;

  explicit Team(int count) : threads(count < 1 ? 1 : count) {
    for (int i = 1; i < threads; i++) others_.emplace_back([this, i] { serve(i); });
  }

  ~Team() {
    work_ = nullptr;
    start_.open();
    for (auto& thread : others_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // work(arg, team, thread) in every thread; the caller is thread 0. Returns when all are done.
  void run(Work work, void* arg) {
    std::lock_guard<std::mutex> one(callers_);
    work_ = work;
    arg_ = arg;
    if (threads > 1) start_.open();
    work(arg, *this, 0);
    barrier();
  }

  // Returns when every thread of the team has called it; what they wrote before can then be read.
  void barrier() {
    if (threads == 1) return;
    const int64_t turn = passed_.now();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      passed_.open();
    } else {
      passed_.wait(turn, kSpin);
    }
  }

 private:
  void serve(int thread) {
    for (int64_t turn = 0;; turn++) {  // the team's first run is turn 0: no run can pass unseen, each ends in a barrier
      start_.wait(turn, kSpin);
      if (work_ == nullptr) return;
      work_(arg_, *this, thread);
      barrier();
    }
  }

  std::mutex callers_;
  Work work_ = nullptr;
  void* arg_ = nullptr;
  Gate start_, passed_;
  alignas(64) std::atomic<int> arrived_{0};
  std::vector<std::thread> others_;
};

// f(chunk) for those of `chunks` that this thread gets. Every chunk goes to one thread; `next` starts at 0.
template <class F>
inline void share(std::atomic<int64_t>& next, int64_t chunks, F f) {
  for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) f(chunk);
}

}  // namespace graft
