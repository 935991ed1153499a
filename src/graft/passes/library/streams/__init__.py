"""Independent branches on CUDA streams of their own."""
