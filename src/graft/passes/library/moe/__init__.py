"""Mixtures of experts as one op."""
