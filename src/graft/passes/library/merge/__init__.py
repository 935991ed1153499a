"""Linear layers that read one input, as one GEMM."""
