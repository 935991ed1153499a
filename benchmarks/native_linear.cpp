// What benchmarks/native_linear.py calls: products one after another over many copies of a weight, and a plain sum.
#include <memory>
#include <vector>

#include "native.h"

using namespace graft;

struct Job {
  const LinearArgs* args;
  int64_t count;
  int kind;
  std::vector<std::atomic<int64_t>>* next;
  float* scratch;
  int64_t room;  // floats of a thread
};

template <class W>
static void products(Job& job, Team& team, int thread) {
  for (int64_t i = 0; i < job.count; i++) {
    linear<W>(team, thread, (*job.next)[i], job.args[i], job.scratch + thread * job.room);
    team.barrier();
  }
}

static Team& team_of(int threads) {
  static std::vector<std::unique_ptr<Team>> teams(65);
  if (!teams[threads]) teams[threads] = std::make_unique<Team>(threads);
  return *teams[threads];
}

// arrays: x, weights, norm, residual, out, scratch, shared. numbers: kind, threads, tokens, k, n, act, norm, residual, copies,
// bytes of a copy, floats of scratch of a thread
extern "C" void run_products(void** arrays, const int64_t* number) {
  const int64_t copies = number[8];
  const int64_t tokens = number[2], k = number[3], n = number[4];
  std::vector<LinearArgs> args(copies);
  std::vector<std::atomic<int64_t>> next(copies);
  for (int64_t i = 0; i < copies; i++) {
    LinearArgs& a = args[i];
    a.x = static_cast<float*>(arrays[0]), a.ldx = k, a.tokens = tokens, a.k = k, a.n = n;
    a.w = static_cast<uint8_t*>(arrays[1]) + i * number[9];
    a.act = Act(number[5]), a.eps = 1e-5f;
    if (number[6]) a.norm = static_cast<float*>(arrays[2]);
    if (number[7]) a.residual = static_cast<float*>(arrays[3]), a.ldr = n;
    a.out = static_cast<float*>(arrays[4]), a.ldo = n, a.shared = static_cast<float*>(arrays[6]);
  }
  Job job{args.data(), copies, int(number[0]), &next, static_cast<float*>(arrays[5]), number[10]};
  team_of(int(number[1])).run([](void* arg, Team& team, int thread) {
    Job& job = *static_cast<Job*>(arg);
    switch (job.kind) {
      case 0: return products<WeightF32>(job, team, thread);
      case 1: return products<WeightBF16>(job, team, thread);
      case 2: return products<WeightQ8>(job, team, thread);
      case 3: return products<WeightQ4>(job, team, thread);
      case 4: return products<WeightF16>(job, team, thread);
      case 5: return products<WeightHalves>(job, team, thread);
    }
  }, &job);
}

struct Sum {
  const float* from;
  int64_t count;
  std::atomic<int64_t> next{0};
  float total[64 * 16];
};

// The plain read that the products are measured against. arrays: float32, [1] out; numbers: threads, floats (of 32768)
extern "C" void run_sum(void** arrays, const int64_t* number) {
  static Sum sum;
  sum.from = static_cast<float*>(arrays[0]), sum.count = number[1], sum.next = 0;
  team_of(int(number[0])).run([](void* arg, Team&, int thread) {
    Sum& s = *static_cast<Sum*>(arg);
    F a = set(0.0f), b = a, c = a, d = a;
    share(s.next, s.count / 32768, [&](int64_t chunk) {
      const float* p = s.from + chunk * 32768;
      for (int i = 0; i < 32768; i += 64)
        a = a + load(p + i), b = b + load(p + i + 16), c = c + load(p + i + 32), d = d + load(p + i + 48);
    });
    s.total[16 * thread] = graft::sum((a + b) + (c + d));
  }, &sum);
  *static_cast<float*>(arrays[1]) = sum.total[0];
}
