"""Patterns: plain functions, matched against a graph."""
