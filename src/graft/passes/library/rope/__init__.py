"""Rotary embeddings: fused, tabulated, written to the KV cache."""
