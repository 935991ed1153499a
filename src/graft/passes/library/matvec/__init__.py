"""Fusions around the GEMVs of a decode step."""
