// What the tests of the native product call: one product with a team of its own, scratch poisoned and watched.
#include <vector>

#include "native.h"

using namespace graft;

struct Call {
  LinearArgs args;
  std::atomic<int64_t> next{0};
  float* scratch;
};

template <class W>
static int64_t product(Call& call, int threads) {
  const int64_t room = linear_scratch<W>(call.args.tokens, call.args.k, threads);
  std::vector<uint32_t> scratch(room + 64, 0x7fc0dead);  // NaN
  call.scratch = reinterpret_cast<float*>(scratch.data());
  Team team(threads);
  team.run([](void* arg, Team& all, int thread) {
    Call& c = *static_cast<Call*>(arg);
    linear<W>(all, thread, c.next, c.args, c.scratch);
  }, &call);
  for (int64_t i = room; i < room + 64; i++)
    if (scratch[i] != 0x7fc0dead) return 1;
  return 0;
}

// arrays: x, w, bias, norm, residual, out, [eps, offset], status. numbers: kind, threads, tokens, k, n, ldx, ldr, ldo,
// has bias, has norm, normed, activation, has residual (2: the residual is `out`)
extern "C" void run_linear(void** arrays, const int64_t* number) {
  Call call;
  LinearArgs& a = call.args;
  const auto floats = [&](int i) { return static_cast<float*>(arrays[i]); };
  a.x = floats(0), a.w = arrays[1], a.out = floats(5), a.eps = floats(6)[0], a.offset = floats(6)[1];
  a.tokens = int(number[2]), a.k = int(number[3]), a.n = int(number[4]);
  a.ldx = number[5], a.ldr = number[6], a.ldo = number[7];
  if (number[8]) a.bias = floats(2);
  if (number[9]) a.norm = floats(3);
  a.normed = number[10] != 0;
  a.act = Act(number[11]);
  if (number[12]) a.residual = number[12] == 2 ? a.out : floats(4);
  const int threads = int(number[1]);
  int64_t& status = *static_cast<int64_t*>(arrays[7]);
  switch (number[0]) {
    case 0: status = product<WeightF32>(call, threads); break;
    case 1: status = product<WeightBF16>(call, threads); break;
    case 2: status = product<WeightQ8>(call, threads); break;
    case 3: status = product<WeightQ4>(call, threads); break;
  }
}
