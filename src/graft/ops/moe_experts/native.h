// The experts of a mixture, token by token: a chunk is a tile of rows of one expert's matrix for one token.
#pragma once

#include "backends/native/plain.h"
#include "ops/view.h"

namespace graft {

// gate_up: [experts, 2 f, d], gate first; down: [experts, d, f]; hidden: [rows, k f].
struct ExpertsArgs {
  View x; View weights; View ids; const void* matrix; Act act; int64_t f; int64_t d; int64_t rows; View hidden; View out;
};

constexpr int64_t kExpertTile = 16;

// hidden[row, slot] = act(gate · x) * (up · x) for each of the token's experts.
template <class W>
void experts_up(Team&, int, std::atomic<int64_t>& next, const ExpertsArgs& a, float*) {
  const int64_t slots = a.ids.size, tiles = (a.f + kExpertTile - 1) / kExpertTile;
  share(next, a.rows * slots * tiles, [&](int64_t chunk) {
    const int64_t row = chunk / (slots * tiles), slot = chunk / tiles % slots, first = chunk % tiles * kExpertTile;
    const int64_t expert = static_cast<int64_t>(a.ids.row(row)[slot]);
    const W* gate = static_cast<const W*>(a.matrix) + expert * 2 * a.f * a.d;
    const W* up = gate + a.f * a.d;
    float* hidden = a.hidden.row(row) + slot * a.f;
    for (int64_t i = first; i < std::min(first + kExpertTile, a.f); ++i)
      hidden[i] = activate(a.act, dot(a.x.row(row), gate + i * a.d, a.d)) * dot(a.x.row(row), up + i * a.d, a.d);
  });
}

// out[row] = the sum over the token's experts, in their order, of weight * (down · hidden).
template <class W>
void experts_down(Team&, int, std::atomic<int64_t>& next, const ExpertsArgs& a, float*) {
  const int64_t slots = a.ids.size, tiles = (a.d + kExpertTile - 1) / kExpertTile;
  share(next, a.rows * tiles, [&](int64_t chunk) {
    const int64_t row = chunk / tiles, first = chunk % tiles * kExpertTile;
    for (int64_t i = first; i < std::min(first + kExpertTile, a.d); ++i) {
      float sum = 0.0f;
      for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t expert = static_cast<int64_t>(a.ids.row(row)[slot]);
        const W* down = static_cast<const W*>(a.matrix) + (expert * a.d + i) * a.f;
        sum += a.weights.row(row)[slot] * dot(a.hidden.row(row) + slot * a.f, down, a.f);
      }
      a.out.row(row)[i] = sum;
    }
  });
}

}  // namespace graft
