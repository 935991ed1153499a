"""Norms, in every spelling, as one op each."""
