// Which experts a token goes to and how much each counts. Ids are kept as floats, which are exact below 2^24.
#pragma once

#include <limits>

#include "backends/native/plain.h"
#include "ops/view.h"

namespace graft {

struct MoeRouteArgs {
  View logits; int64_t top_k; bool normalize; bool select_first; bool sigmoid; const float* bias; int64_t groups;
  int64_t top_groups; int64_t group_best; float eps; float scale; int64_t rows; View weights; View ids;
};

constexpr float kNever = -std::numeric_limits<float>::infinity();

inline int64_t best_of(const float* x, int64_t n) {  // of equal ones the first
  int64_t best = 0;
  for (int64_t i = 1; i < n; ++i)
    if (x[i] > x[best]) best = i;
  return best;
}

// What experts are weighed by: a softmax over `n` logits, or the sigmoid of each.
inline void score(const float* x, int64_t n, bool sigmoid, float* scores) {
  if (sigmoid) {
    for (int64_t i = 0; i < n; ++i) scores[i] = 1.0f / (1.0f + std::exp(-x[i]));
    return;
  }
  const float most = x[best_of(x, n)];
  float total = 0.0f;
  for (int64_t i = 0; i < n; ++i) total += scores[i] = std::exp(x[i] - most);
  for (int64_t i = 0; i < n; ++i) scores[i] /= total;
}

// -inf for experts outside of the groups with the largest sum of their one or two largest. sums: one for each group.
inline void keep_best_groups(const MoeRouteArgs& a, int64_t n, float* choice, float* sums) {
  const int64_t size = n / a.groups;
  for (int64_t g = 0; g < a.groups; ++g) {
    const float* own = choice + g * size;
    const int64_t best = best_of(own, size);
    float second = kNever;
    for (int64_t i = 0; i < size; ++i)
      if (i != best) second = std::max(second, own[i]);
    sums[g] = a.group_best == 2 ? own[best] + second : own[best];
  }
  for (int64_t left = a.groups - a.top_groups; left > 0; --left) {  // the worst goes; of equal ones the last
    int64_t worst = -1;
    for (int64_t g = 0; g < a.groups; ++g)
      if (!std::isinf(sums[g]) && (worst < 0 || sums[g] <= sums[worst])) worst = g;
    if (worst < 0) return;
    sums[worst] = kNever;
    for (int64_t i = 0; i < size; ++i) choice[worst * size + i] = kNever;
  }
}

// scratch: 2 * logits.size + groups floats.
inline void moe_route(Team&, int, std::atomic<int64_t>& next, const MoeRouteArgs& a, float* scratch) {
  const int64_t n = a.logits.size, k = a.top_k;
  float *scores = scratch, *choice = scratch + n, *sums = scratch + 2 * n;
  share(next, a.rows, [&](int64_t row) {
    const float* x = a.logits.row(row);
    float *weights = a.weights.row(row), *ids = a.ids.row(row);
    if (a.select_first) std::copy(x, x + n, scores); else score(x, n, a.sigmoid, scores);
    for (int64_t i = 0; i < n; ++i) choice[i] = a.bias ? scores[i] + a.bias[i] : scores[i];
    if (a.top_groups < a.groups) keep_best_groups(a, n, choice, sums);
    for (int64_t i = 0; i < k; ++i) {
      const int64_t best = best_of(choice, n);
      ids[i] = static_cast<float>(best);
      weights[i] = scores[best];
      choice[best] = kNever;
    }
    if (a.select_first) score(weights, k, false, weights);
    float total = a.eps;
    for (int64_t i = 0; i < k; ++i) total += weights[i];
    for (int64_t i = 0; i < k; ++i) weights[i] = (a.normalize ? weights[i] / total : weights[i]) * a.scale;
  });
}

}  // namespace graft
