"""Tools for pass authors."""
