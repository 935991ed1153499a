"""What graft's pass did inside of Inductor, in tests."""

from __future__ import annotations

import graft
from graft.passes.report import Report


def compilations() -> list[Report]:
    """Reports of graphs that were compiled here; the last of all may be of hits in Inductor's caches."""
    return [report for report in graft.inductor_reports() if report.model != "cache"]
