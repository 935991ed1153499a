"""Ranks that are started: by rank 0 on this machine, or by torchrun."""
