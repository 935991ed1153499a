// Runs an AOTInductor package without Python, several calls in a row, so that what it writes to its buffers is seen.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

int main(int argc, char** argv) {
  try {
    c10::InferenceMode guard;
    torch::inductor::AOTIModelPackageLoader loader(argv[1]);
    for (int call = 0; call < std::atoi(argv[2]); ++call) {
      auto results = loader.run({at::ones({4, 8})});
      std::printf("%.6f\n", results.at(0).square().sum().item<double>());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
