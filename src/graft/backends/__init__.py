"""Backends: from a transformed graph to something that runs."""

from graft.backends.select import BACKENDS, Lowered, lower

__all__ = ["BACKENDS", "Lowered", "lower"]
