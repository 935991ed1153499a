"""The paged key-value cache: blocks, and the tensors they live in."""
