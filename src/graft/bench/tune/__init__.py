"""Which kernel is fastest for the linear layers of a model on the GPU at hand."""
