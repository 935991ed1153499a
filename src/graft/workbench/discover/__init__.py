"""Fusion candidates: what a graph repeats without a kernel of its own, what that costs, and what is there already."""

from graft.workbench.discover.candidates import Candidate, Discovery
from graft.workbench.discover.find import discover
from graft.workbench.discover.savings import Machine
from graft.workbench.discover.sources import discover_model, discover_run

__all__ = ["Candidate", "Discovery", "Machine", "discover", "discover_model", "discover_run"]
