"""Backends: from a transformed graph to something that runs."""

from graft.backends.lowered import InductorSettings, Lowered
from graft.backends.select import BACKENDS, lower

__all__ = ["BACKENDS", "InductorSettings", "Lowered", "lower"]
