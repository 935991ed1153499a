// The experts of a mixture. A chunk is a few rows of all experts' matrices, for all tokens: a row of a matrix is read from
// memory once, however many tokens went to its expert.
#pragma once

#include "backends/native/plain.h"
#include "ops/view.h"

namespace graft {

// gate_up: [experts, 2 f, d], gate first; down: [experts, d, f]; hidden: [rows, k f].
struct ExpertsArgs {
  View x; View weights; View ids; const void* matrix; Act act; int64_t f; int64_t d; int64_t rows; View hidden; View out;
};

constexpr int64_t kExpertRows = 4;  // of a chunk

// go(i, row, slot, expert) for every row i of the matrices, token and chosen expert.
template <class Do>
inline void share_experts(std::atomic<int64_t>& next, const ExpertsArgs& a, int64_t n, Do go) {
  share(next, (n + kExpertRows - 1) / kExpertRows, [&](int64_t chunk) {
    for (int64_t i = chunk * kExpertRows; i < std::min(n, (chunk + 1) * kExpertRows); ++i)
      for (int64_t row = 0; row < a.rows; ++row)
        for (int64_t slot = 0; slot < a.ids.size; ++slot) go(i, row, slot, static_cast<int64_t>(a.ids.row(row)[slot]));
  });
}

// hidden[row, slot] = act(gate · x) * (up · x) for each of the token's experts.
template <class W>
void experts_up(Team&, int, std::atomic<int64_t>& next, const ExpertsArgs& a, float*) {
  share_experts(next, a, a.f, [&](int64_t i, int64_t row, int64_t slot, int64_t expert) {
    const W* gate = static_cast<const W*>(a.matrix) + (expert * 2 * a.f + i) * a.d;
    const float* x = a.x.row(row);
    a.hidden.row(row)[slot * a.f + i] = activate(a.act, dot(x, gate, a.d)) * dot(x, gate + a.f * a.d, a.d);
  });
}

// out[row] = the sum over the token's experts, in their order, of weight * (down · hidden).
template <class W>
void experts_down(Team&, int, std::atomic<int64_t>& next, const ExpertsArgs& a, float*) {
  share_experts(next, a, a.d, [&](int64_t i, int64_t row, int64_t slot, int64_t expert) {
    const W* down = static_cast<const W*>(a.matrix) + (expert * a.d + i) * a.f;
    const float part = a.weights.row(row)[slot] * dot(a.hidden.row(row) + slot * a.f, down, a.f);
    float& out = a.out.row(row)[i];
    out = slot == 0 ? part : out + part;
  });
}

}  // namespace graft
