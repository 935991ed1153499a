"""graft's graph beside the Hugging Face module at every module boundary, both against float64."""

from graft.workbench.compare.compare import Boundary, Comparison, compare_modules

__all__ = ["Boundary", "Comparison", "compare_modules"]
