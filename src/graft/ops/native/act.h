// Activations of MLPs, on vectors.
#pragma once
#include <cmath>

#include "vec.h"

namespace graft {

enum class Act { none, silu, gelu_tanh, gelu, relu, relu_squared };

inline F sigmoid_of(F x, F g) { return x / (set(1.0f) + exp(set(0.0f) - g)); }  // x * sigmoid(g)

inline F activate(Act act, F g) {
  switch (act) {
    case Act::silu:
      return sigmoid_of(g, g);
    case Act::gelu_tanh:  // 0.5 g (1 + tanh u) = g sigmoid(2 u)
      return sigmoid_of(g, set(1.5957691216f) * fma(set(0.044715f) * g * g, g, g));
    case Act::gelu: {
      float lane[kLanes];
      store(lane, g);
      for (float& v : lane) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
      return load(lane);
    }
    case Act::relu:
      return max(set(0.0f), g);  // in this order NaN stays
    case Act::relu_squared:
      return max(set(0.0f), g) * max(set(0.0f), g);
    default:
      return g;
  }
}

}  // namespace graft
