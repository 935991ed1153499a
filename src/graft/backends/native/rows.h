// Rows between torch's tensors and the arena: embeddings, chosen rows, values handed in and out.
#pragma once

#include "backends/native/plain.h"
#include "ops/view.h"

namespace graft {

inline float widen(int64_t x) { return static_cast<float>(x); }
template <> inline int64_t narrow<int64_t>(float x) { return static_cast<int64_t>(x); }  // ids of experts

struct EmbeddingArgs {
  const void* table; int64_t entries; const int64_t* ids; int64_t rows; View out;
  std::atomic<int64_t>* problem; int64_t step;
};

// out[row] = table[ids[row]]; an id that the table does not have gives NaN and is told to the caller.
template <class T>
void embedding(Team&, int, std::atomic<int64_t>& next, const EmbeddingArgs& a, float*) {
  const T* table = static_cast<const T*>(a.table);
  share(next, a.rows, [&](int64_t row) {
    const int64_t id = a.ids[row];
    float* out = a.out.row(row);
    if (id < 0 || id >= a.entries) {
      a.problem->store(a.step + 1, std::memory_order_relaxed);
      for (int64_t i = 0; i < a.out.size; ++i) out[i] = NAN;
      return;
    }
    for (int64_t i = 0; i < a.out.size; ++i) out[i] = widen(table[id * a.out.size + i]);
  });
}

struct SelectArgs {
  View x; int64_t from; const int64_t* index; int64_t rows; View out; std::atomic<int64_t>* problem; int64_t step;
};

// out[row] = x[index[row]]
inline void select_rows(Team&, int, std::atomic<int64_t>& next, const SelectArgs& a, float*) {
  share(next, a.rows, [&](int64_t row) {
    const int64_t source = a.index[row];
    const bool inside = source >= 0 && source < a.from;
    if (!inside) a.problem->store(a.step + 1, std::memory_order_relaxed);
    for (int64_t head = 0; head < a.out.heads; ++head)
      for (int64_t i = 0; i < a.out.size; ++i) a.out.at(row, head)[i] = inside ? a.x.at(source, head)[i] : NAN;
  });
}

// `memory` is a torch tensor: element (row, head, i) at memory[row * row_stride + head * head_stride + i].
struct TransferArgs { void* memory; int64_t row_stride; int64_t head_stride; int64_t rows; View x; };

template <class T>
void take(Team&, int, std::atomic<int64_t>& next, const TransferArgs& a, float*) {
  const T* memory = static_cast<const T*>(a.memory);
  share(next, a.rows, [&](int64_t row) {
    for (int64_t head = 0; head < a.x.heads; ++head)
      for (int64_t i = 0; i < a.x.size; ++i)
        a.x.at(row, head)[i] = widen(memory[row * a.row_stride + head * a.head_stride + i]);
  });
}

template <class T>
void give(Team&, int, std::atomic<int64_t>& next, const TransferArgs& a, float*) {
  T* memory = static_cast<T*>(a.memory);
  share(next, a.rows, [&](int64_t row) {
    for (int64_t head = 0; head < a.x.heads; ++head)
      for (int64_t i = 0; i < a.x.size; ++i)
        memory[row * a.row_stride + head * a.head_stride + i] = narrow<T>(a.x.at(row, head)[i]);
  });
}

}  // namespace graft
