"""Verbs that take times: bench, tune."""
