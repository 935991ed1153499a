// What the tests of the native product call: one product with a team of its own, scratch poisoned and watched.
#include <vector>

#include "native.h"

using namespace graft;

constexpr uint32_t kPoison = 0x7fc0dead;  // NaN

struct Call {
  LinearArgs args;
  std::atomic<int64_t> next{0};
  std::vector<uint32_t> scratch;
  int64_t room;  // floats of scratch of a thread; 64 more stand behind them
};

// 0, or 1 when something behind the scratch was written.
template <class W>
static int64_t product(Call& call, int threads, bool share) {
  LinearArgs& a = call.args;
  call.room = linear_scratch<W>(a.tokens, a.k, share);
  call.scratch.assign((call.room + 64) * threads, kPoison);
  const int64_t common = linear_shared<W>(a.tokens, a.k);
  std::vector<uint32_t> shared(common + 64, kPoison);
  if (share) a.shared = reinterpret_cast<float*>(shared.data());
  Team team(threads);
  team.run([](void* arg, Team& all, int thread) {
    Call& c = *static_cast<Call*>(arg);
    float* scratch = reinterpret_cast<float*>(c.scratch.data() + thread * (c.room + 64));
    linear<W>(all, thread, c.next, c.args, scratch);
  }, &call);
  for (int64_t i = 0; i < 64; i++) {
    if (shared[common + i] != kPoison) return 1;
    for (int t = 0; t < threads; t++)
      if (call.scratch[t * (call.room + 64) + call.room + i] != kPoison) return 1;
  }
  return 0;
}

// arrays: x, w, bias, norm, residual, out, [eps, offset], status. numbers: kind, threads, tokens, k, n, ldx, ldr, ldo,
// has bias, has norm, normed, activation, has residual (2: the residual is `out`), has a shared place
extern "C" void run_linear(void** arrays, const int64_t* number) {
  Call call;
  LinearArgs& a = call.args;
  const auto floats = [&](int i) { return static_cast<float*>(arrays[i]); };
  a.x = floats(0), a.w = arrays[1], a.out = floats(5), a.eps = floats(6)[0], a.offset = floats(6)[1];
  a.tokens = number[2], a.k = number[3], a.n = number[4];
  a.ldx = number[5], a.ldr = number[6], a.ldo = number[7];
  if (number[8]) a.bias = floats(2);
  if (number[9]) a.norm = floats(3);
  a.normed = number[10] != 0;
  a.act = Act(number[11]);
  if (number[12]) a.residual = number[12] == 2 ? a.out : floats(4);
  const int threads = int(number[1]);
  int64_t& status = *static_cast<int64_t*>(arrays[7]);
  switch (number[0]) {
    case 1: status = product<WeightBF16>(call, threads, number[13] != 0); break;
#if !defined(ONLY_BF16)
    case 0: status = product<WeightF32>(call, threads, number[13] != 0); break;
    case 2: status = product<WeightQ8>(call, threads, number[13] != 0); break;
    case 3: status = product<WeightQ4>(call, threads, number[13] != 0); break;
    case 4: status = product<WeightF16>(call, threads, number[13] != 0); break;
    case 5: status = product<WeightHalves>(call, threads, number[13] != 0); break;
#endif
  }
}
