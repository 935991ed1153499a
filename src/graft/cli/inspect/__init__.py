"""Verbs that show what there is, and what was done to a model."""
