// What a native kernel reads and writes: rows of tokens in an arena, whole or a part of their columns, in heads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

// A step fills in arguments and calls kernels, once each: optimising it would take longer than compiling the kernels.
#if defined(__clang__)
#define GRAFT_STEP __attribute__((optnone, noinline))
#else
#define GRAFT_STEP __attribute__((optimize("O0"), noinline))
#endif

namespace graft {

struct View {  // element (row, head, i) lies at data[row * stride + head * head_stride + i]
  float* data;
  int64_t stride;
  int64_t heads;
  int64_t head_stride;
  int64_t size;

  float* row(int64_t row) const { return data + row * stride; }
  float* at(int64_t row, int64_t head) const { return data + row * stride + head * head_stride; }
};

// One call of a step, as backends/native/call.py fills it.
struct alignas(64) Counter { std::atomic<int64_t> value; };

struct Call {
  void* const* inputs;
  const int64_t* sizes;
  void* const* outputs;
  const void* const* weights;
  float* arena;
  float* scratch;  // `scratch_floats` for each thread
  int64_t scratch_floats;
  float* shared;  // one for all threads
  int64_t tokens;
  int64_t selected;
  std::atomic<int64_t>* problem;  // 0, or 1 + the number of the step that met an index it cannot follow
  int64_t* stamps;  // where thread 0 notes when it began each step, in nanoseconds; nullptr: nobody asks
  Counter* next;    // chunks that were taken, one a step; the region's function sets it

  void mark(int thread, int64_t step) const {
    if (stamps != nullptr && thread == 0)
      stamps[step] = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
};

}  // namespace graft
