"""Tool calls: what a model writes, as the calls that it means."""
