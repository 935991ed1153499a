"""Where a pattern occurs, exactly or nearly, and which kernels compute it."""

from graft.workbench.search.kernels import kernels_for
from graft.workbench.search.occurrences import GraphHits, search_graph
from graft.workbench.search.pattern import SearchPattern, read_pattern
from graft.workbench.search.search import Found, search

__all__ = ["Found", "GraphHits", "SearchPattern", "kernels_for", "read_pattern", "search", "search_graph"]
