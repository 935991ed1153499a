"""Fusions around the matrix-vector products of a decode step."""
