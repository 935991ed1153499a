"""A run as one HTML file that needs no network: pipeline, layers, changes, candidates, kernel times."""

from graft.workbench.report.data import ReportData, collect
from graft.workbench.report.page import render, write_report

__all__ = ["ReportData", "collect", "render", "write_report"]
