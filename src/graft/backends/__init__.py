"""Backends: from a transformed graph to something that runs."""

from graft.backends.lowered import Lowered
from graft.backends.select import BACKENDS, lower

__all__ = ["BACKENDS", "Lowered", "lower"]
