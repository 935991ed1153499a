// Which experts a token goes to and how much each counts. Ids are kept as floats, which are exact below 2^24.
#pragma once

#include "backends/native/plain.h"
#include "ops/view.h"

namespace graft {

struct MoeRouteArgs {
  View logits; int64_t top_k; bool normalize; bool select_first; int64_t rows; View weights; View ids;
};

// The k largest in falling order; of equal ones the first.
inline void largest(const float* x, int64_t n, int64_t k, float* values, float* ids) {
  for (int64_t taken = 0; taken < k; ++taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i) {
      bool used = false;
      for (int64_t j = 0; j < taken; ++j) used = used || static_cast<int64_t>(ids[j]) == i;
      if (!used && (best < 0 || x[i] > x[best])) best = i;
    }
    values[taken] = x[best];
    ids[taken] = static_cast<float>(best);
  }
}

inline void moe_route(Team&, int, std::atomic<int64_t>& next, const MoeRouteArgs& a, float*) {
  const int64_t n = a.logits.size, k = a.top_k;
  share(next, a.rows, [&](int64_t row) {
    const float* x = a.logits.row(row);
    float *weights = a.weights.row(row), *ids = a.ids.row(row);
    largest(x, n, k, weights, ids);  // of the logits: softmax keeps their order
    const float most = weights[0];
    float total = 0.0f;
    for (int64_t i = 0; i < (a.select_first ? k : n); ++i) total += std::exp((a.select_first ? weights[i] : x[i]) - most);
    float chosen = 0.0f;
    for (int64_t i = 0; i < k; ++i) chosen += weights[i] = std::exp(weights[i] - most) / total;
    if (a.normalize && !a.select_first)
      for (int64_t i = 0; i < k; ++i) weights[i] /= chosen;
  });
}

}  // namespace graft
