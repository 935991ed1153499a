"""Weights: files, lazy reading, packing, tiles, quantization."""
