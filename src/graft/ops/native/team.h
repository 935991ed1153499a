// A team of threads that runs one function together: persistent threads, chunks handed out dynamically, a barrier.
//
// All work stands in share(); a barrier waits for the work that was taken, not for the threads. A thread that has lost its
// core, and comes when the others are past a barrier, finds every chunk before it taken and goes on; nobody waited for it.
// Waiting spins for a bounded while and then sleeps, so that with fewer free cores than threads the one that is waited for
// gets the core. A team has one caller at a time: run() lets a second one wait until the first is done.
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

// Where threads wait for something that others change: they spin for at most about `spin`, and then sleep.
class Bench {
 public:
  template <class Ready>
  void wait(Ready ready, std::chrono::nanoseconds spin) {
    const auto start = std::chrono::steady_clock::now();
    do {
      for (int i = 0; i < 32; i++) {
        if (ready()) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() - start < spin);
    std::unique_lock<std::mutex> held(mutex_);
    sleepers_.fetch_add(1);
    woken_.wait(held, ready);
    sleepers_.fetch_sub(1);
  }

  // After the change. It, sleepers_ and ready() are sequentially consistent: the sleeper sees it, or we see the sleeper.
  void wake() {
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> held(mutex_); }
    woken_.notify_all();
  }

 private:
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
};

// Phases, one after another. One that has been joined ends when all who joined it have left; who comes later is not let in.
class Phases {
 public:
  static constexpr std::chrono::nanoseconds kSpin{20000};

  void start(uint32_t phase, uint64_t joined) { word_.store(uint64_t(phase) << 32 | joined << 16); }  // nobody is in

  bool join(uint32_t phase) {
    uint64_t now = word_.load();
    while (now >> 32 == phase)
      if (word_.compare_exchange_weak(now, now + (1 << 16))) return true;
    return false;
  }

  // True for the one who ended the phase.
  bool leave(uint32_t phase) {
    uint64_t now = word_.load(), next;
    do {
      const uint64_t joined = now >> 16 & 0xffff, left = (now & 0xffff) + 1;
      next = left == joined ? uint64_t(phase + 1) << 32 : now + 1;
    } while (!word_.compare_exchange_weak(now, next));
    const bool ended = next >> 32 != phase;
    if (ended) bench_.wake();
    return ended;
  }

  void wait(uint32_t phase) {  // until it has ended
    bench_.wait([&] { return word_.load() >> 32 != phase; }, kSpin);
  }

 private:
  alignas(64) std::atomic<uint64_t> word_{0};  // phase: 32 bits; joined: 16; left: 16
  Bench bench_;
};

class Team {
 public:
  using Work = void (*)(void* arg, Team& team, int thread);

  const int threads;

  explicit Team(int count) : threads(count < 1 ? 1 : count) {
    for (int i = 1; i < threads; i++) others_.emplace_back([this, i] { serve(i); });
  }

  ~Team() {
    stop_.store(true);
    idle_.wake();
    for (auto& thread : others_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // work(arg, team, thread) in every thread that comes in time; the caller is thread 0. Returns when all work is done.
  void run(Work work, void* arg) {
    std::lock_guard<std::mutex> one(callers_);
    if (threads == 1) return work(arg, *this, 0);
    const uint32_t run = run_.load() + 1;
    work_ = work;
    arg_ = arg;
    inside_.start(0, 0);
    runs_.start(run, 1);
    run_.store(run);
    idle_.wake();
    take_part(0);
    if (!runs_.leave(run)) runs_.wait(run);
  }

  // Returns when all chunks that share() has handed out are done; what they wrote can then be read.
  void barrier() {
    if (threads == 1) return;
    Rank& my = rank();
    if (my.joined && !inside_.leave(my.phase)) inside_.wait(my.phase);
    my.joined = inside_.join(++my.phase);
  }

 private:
  struct Rank {  // of this thread in the work
    uint32_t phase;
    bool joined;
  };
  static Rank& rank() {
    static thread_local Rank my{0, false};
    return my;
  }

  void take_part(int thread) {
    Rank& my = rank();
    const Rank outer = my;  // the caller may be at work for another team
    my = {0, inside_.join(0)};
    work_(arg_, *this, thread);
    if (my.joined) inside_.leave(my.phase);
    my = outer;
  }

  void serve(int thread) {
    for (uint32_t last = 0;;) {
      idle_.wait([&] { return run_.load() != last || stop_.load(); }, Phases::kSpin);
      if (stop_.load()) return;
      last = run_.load();
      if (!runs_.join(last)) continue;  // it is over
      take_part(thread);
      runs_.leave(last);
    }
  }

  std::mutex callers_;
  Work work_ = nullptr;
  void* arg_ = nullptr;
  std::atomic<uint32_t> run_{0};
  std::atomic<bool> stop_{false};
  Bench idle_;
  Phases runs_, inside_;
  std::vector<std::thread> others_;
};

// f(chunk) for those of `chunks` that this thread gets. Every chunk goes to one thread; `next` starts at 0.
template <class F>
inline void share(std::atomic<int64_t>& next, int64_t chunks, F f) {
  for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) f(chunk);
}

// The same for the first of two kinds of chunks of one step: those of the second, which a barrier stands before, are left.
template <class F>
inline void share_until(std::atomic<int64_t>& next, int64_t chunks, F f) {
  for (int64_t chunk = next.load(); chunk < chunks;)
    if (next.compare_exchange_weak(chunk, chunk + 1)) {
      f(chunk);
      chunk = next.load();
    }
}

}  // namespace graft
