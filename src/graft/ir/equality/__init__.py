"""Proofs that two pieces of a graph compute the same bits."""
